"""`cllm embed`: the vectors of many texts, as JSON lines or as one NumPy array."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import numpy as np
import typer
from numpy.typing import NDArray

from cllm import CllmError, Embedder, EngineConfig, InvalidRequestError
from cllm.cli.options import EngineFlags, output_file, with_flags
from cllm.cli.terminal import (
    StandardOutput,
    input_lines,
    is_terminal,
    loaded,
    note,
    progress_bar,
    run,
)
from cllm.engine.cache_directory import replacing

N_AT_ONCE = 512  # texts that are read, computed and written together
STANDARD_INPUT = "-"


@dataclass(slots=True)
class VectorWriter:
    """Destination of vectors: lines of JSON as they come, or one array at the end."""

    path: Path | None
    out: StandardOutput
    _arrays: list[NDArray[np.float32]] = field(default_factory=list)
    n_written: int = 0

    async def write(self, texts: list[str], vectors: NDArray[np.float32]) -> None:
        """Write the vectors as JSON lines; with a path, keep them for `close`."""
        if self.path is not None:
            self._arrays.append(vectors)
        else:
            lines = [
                json.dumps(
                    {"index": i, "text": text, "embedding": _shortest(vector)}, ensure_ascii=False
                )
                for i, (text, vector) in enumerate(zip(texts, vectors, strict=True), self.n_written)
            ]
            await self.out.write("\n".join(lines) + "\n")
        self.n_written += len(texts)

    async def close(self) -> None:
        """Write the array to the path, if there is one; raise `CllmError` if that fails."""
        if self.path is None:
            return
        whole = np.concatenate(self._arrays) if self._arrays else np.empty((0, 0), np.float32)
        try:
            await anyio.to_thread.run_sync(_save, self.path, whole)
        except OSError as error:
            raise CllmError(f"cannot write {self.path}: {error.strerror or error}") from error


def _save(path: Path, whole: NDArray[np.float32]) -> None:
    # `np.save` would put .npy behind a name.
    with replacing(path) as written, written.open("wb") as file:
        np.save(file, whole)


def _shortest(vector: NDArray[np.float32]) -> list[float]:
    """Return the values as floats with the fewest digits that identify each float32."""
    return [float(str(value)) for value in vector]


async def _embed(
    given: list[str], config: EngineConfig, options: dict[str, Any], output: Path | None
) -> int:
    written = VectorWriter(output, StandardOutput())
    has_progress_bar = (STANDARD_INPUT in given or len(given) > 1) and (
        output is not None or not is_terminal(sys.stdout)
    )
    async with loaded(Embedder(config=config)) as embedder:
        with progress_bar(has_progress_bar) as show:
            await _embed_all(embedder, given, options, written, show)
    await written.close()
    if output is not None:
        note(f"{written.n_written:,} vectors in {output}")
    return 0


async def _embed_all(
    embedder: Embedder,
    given: Iterable[str],
    options: dict[str, Any],
    written: VectorWriter,
    show: Callable[[int, int | None, str], None],
) -> None:
    n_tokens = 0
    async for texts in _parts(given):
        try:
            found = await embedder.embeddings(texts, **options)
        except InvalidRequestError as error:
            raise _of_line(error, written.n_written) from error
        await written.write(texts, found.vectors)
        n_tokens += sum(found.n_tokens)
        show(written.n_written, None, f"{n_tokens:,} tokens")


def _of_line(error: InvalidRequestError, n_before: int) -> InvalidRequestError:
    """Return the error with the number of its text in the whole input; the first text has number 1."""
    name, _, rest = error.field.partition("[")
    if name != "texts" or not rest:
        return error
    return InvalidRequestError(f"text {n_before + int(rest[:-1]) + 1}", error.value, error.limit)


async def _parts(given: Iterable[str]) -> AsyncIterator[list[str]]:
    """Yield the texts in lists; lines of standard input (`-`) are read `N_AT_ONCE` at a time."""
    part: list[str] = []
    for argument in given:
        if argument != STANDARD_INPUT:
            part.append(argument)
            continue
        async for line in input_lines():
            part.append(line.checked())
            if len(part) >= N_AT_ONCE:
                yield part
                part = []
    if part:
        yield part


@with_flags()
def embed(
    texts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT", help="Text; - is standard input, one text a line."),
    ],
    engine: EngineFlags,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=output_file,
            help="Write one float32 array as .npy; memory holds all vectors.",
        ),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale every vector to length 1.")
    ] = True,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep only the first numbers of each vector, this many.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long, instead of refusing.")
    ] = False,
) -> int:
    """Print the vectors of texts: one JSON object a line."""
    options = {"normalize": normalize, "dimensions": dimensions, "truncate": truncate}
    return run(_embed, texts, engine.config(), options, output)
