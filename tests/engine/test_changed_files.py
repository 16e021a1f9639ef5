"""An engine computes with the files that it opened when it started, or it does not compute."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineFailedError, InvalidRequestError, ModelChangedError, ModelLoadError
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.file_content import MappedFiles, check_content, content_of
from tests.conftest import QUIET, some_in_fast
from tests.file_changes import (
    CHANGES,
    FILE_KINDS,
    NO_CHANGES,
    file_of,
    overwrite,
    overwrite_unseen,
    replace,
)
from tests.lora_files import make_lora

PROMPT = "count:1..40"
ASKED: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 24}
Change = Callable[[Path], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of our own."""
    return Path(shutil.copyfile(EMBEDDED_MODEL, tmp_path / "model.gguf"))


def process_engine(model: Path, **options: Any) -> Engine:
    given = {"n_ctx": 512, "deterministic": True, **QUIET, **options}
    return Engine(model, process=True, **given)


def kill(engine: Engine) -> None:
    """End the engine's process as the kernel would."""
    pid = engine._parts.thread.pid  # type: ignore[attr-defined]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def using(kind: str, model: Path) -> AsyncIterator[tuple[Engine, Path, tuple[int, ...]]]:
    """An engine that uses a file of this kind, the file, and the tokens of an answer."""
    file, options = file_of(kind, model)
    async with process_engine(model, **options) as engine:
        yield engine, file, (await engine.generate(PROMPT, **ASKED)).token_ids


async def tokens_of(engine: Engine, strike: Callable[[], object]) -> list[int]:
    """The tokens of a stream, as long as it lives; something happens after the third."""
    got: list[int] = []
    has_struck = False
    with suppress(EngineFailedError):
        async with engine.stream(PROMPT, **ASKED) as stream:
            async for delta in stream:
                got += delta.token_ids
                if len(got) >= 3 and not has_struck:
                    has_struck = True
                    strike()
    return got


# --- In a process -------------------------------------------------------------------------------
@pytest.mark.sampled(3)
@pytest.mark.anyio
@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", FILE_KINDS)
async def test_no_later_process_computes_with_other_files(
    kind: str, change: str, model: Path
) -> None:
    async with using(kind, model) as (engine, file, whole):

        def strike() -> None:
            CHANGES[change](file)
            kill(engine)

        got = await tokens_of(engine, strike)
        assert tuple(got) == whole[: len(got)]
        with pytest.raises(EngineFailedError) as caught:
            await engine.generate(PROMPT, **ASKED)
        cause = caught.value.__cause__
        assert isinstance(cause, ModelChangedError)
        assert cause.path == str(file)


@pytest.mark.anyio
async def test_a_replaced_model_ends_the_engine_and_its_error_names_the_file(model: Path) -> None:
    async with process_engine(model) as engine:
        await engine.generate(PROMPT, **ASKED)
        replace(model)
        kill(engine)
        with pytest.raises(EngineFailedError, match=r"model\.gguf.*are others than when"):
            await engine.generate(PROMPT, **ASKED)


@pytest.mark.sampled(3)
@pytest.mark.anyio
@pytest.mark.full
@pytest.mark.parametrize("change", NO_CHANGES)
@pytest.mark.parametrize("kind", FILE_KINDS)
async def test_files_with_the_same_content_are_the_same(
    kind: str, change: str, model: Path
) -> None:
    async with using(kind, model) as (engine, file, whole):
        NO_CHANGES[change](file)
        kill(engine)
        assert (await engine.generate(PROMPT, **ASKED)).token_ids == whole
        assert engine.statistics().n_restarts == 1


@pytest.mark.anyio
@pytest.mark.full
async def test_paths_are_those_of_the_directory_in_which_the_engine_started(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = model.with_name("template.jinja")
    template.write_text("{{ messages[0].content }}")
    make_lora(model.with_name("lora.gguf"), model, seed=1)
    monkeypatch.chdir(model.parent)
    relative = Path(model.name)
    options = {
        "chat_template": template.name,
        "lora": [("lora.gguf", 1.0)],
        "speculation": relative,
    }
    async with process_engine(relative, **options) as engine:
        whole = (await engine.generate(PROMPT, **ASKED)).token_ids
        monkeypatch.chdir("/")
        template.unlink()
        kill(engine)
        assert (await engine.generate(PROMPT, **ASKED)).token_ids == whole
        assert engine.statistics().n_restarts == 1


@pytest.mark.anyio
async def test_an_adapter_is_loaded_from_the_directory_of_the_caller_not_that_of_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_lora(model.with_name("lora.gguf"), model, seed=1)
    async with process_engine(model, deterministic=False) as engine:
        monkeypatch.chdir(model.parent)
        info = await engine.load_lora("late", "lora.gguf")
        assert info.path == str(model.with_name("lora.gguf"))


@pytest.mark.anyio
@pytest.mark.full
async def test_an_adapter_that_was_loaded_later_is_held_to_what_it_was(model: Path) -> None:
    file = make_lora(model.with_name("lora.gguf"), model, seed=1)
    async with process_engine(model, deterministic=False) as engine:
        await engine.load_lora("a", file)
        await engine.unload_lora("a")
        make_lora(file, model, seed=2)
        await engine.load_lora("a", file)
        ask = {**ASKED, "temperature": 0.0, "lora": {"a": 1.0}}
        whole = (await engine.generate(PROMPT, **ask)).token_ids
        kill(engine)
        assert (await engine.generate(PROMPT, **ask)).token_ids == whole
        make_lora(file, model, seed=3)
        kill(engine)
        with pytest.raises(EngineFailedError, match=r"lora\.gguf"):
            await engine.generate(PROMPT, **ask)


# --- Without a crash ----------------------------------------------------------------------------
@pytest.mark.anyio
@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("write", some_in_fast([overwrite_unseen, overwrite]))
async def test_weights_that_are_written_to_compute_no_token(
    model: Path, process: bool, write: Change
) -> None:
    async with Engine(model, process=process, n_ctx=512, deterministic=True, **QUIET) as engine:
        whole = (await engine.generate(PROMPT, **ASKED)).token_ids
        got = await tokens_of(engine, lambda: write(model))
        assert tuple(got) == whole[: len(got)]
        with pytest.raises(EngineFailedError, match=r"model\.gguf"):
            await engine.generate(PROMPT, **ASKED)


@pytest.mark.anyio
@pytest.mark.parametrize("change", NO_CHANGES)
async def test_weights_that_are_touched_or_replaced_compute_on(model: Path, change: str) -> None:
    async with Engine(model, n_ctx=512, deterministic=True, **QUIET) as engine:
        whole = (await engine.generate(PROMPT, **ASKED)).token_ids
        NO_CHANGES[change](model)
        assert (await engine.generate(PROMPT, **ASKED)).token_ids == whole


def test_a_write_that_has_only_begun_is_seen_when_it_gets_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the file changes first, then the content."""
    files = MappedFiles()
    files.hold(content_of(model))
    os.utime(model, ns=(0, 0))
    files.check()
    begun = model.stat()
    overwrite(model)
    monkeypatch.setattr(os, "fstat", lambda fd: begun)
    with pytest.raises(ModelChangedError):
        files.check()
    monkeypatch.undo()
    files.close()


@pytest.mark.anyio
async def test_weights_in_memory_do_not_change_with_their_file(model: Path) -> None:
    async with Engine(model, n_ctx=512, use_mmap=False, deterministic=True, **QUIET) as engine:
        whole = (await engine.generate(PROMPT, **ASKED)).token_ids
        overwrite(model)
        assert (await engine.generate(PROMPT, **ASKED)).token_ids == whole


@pytest.mark.anyio
async def test_constraints_are_not_tried_with_another_vocabulary(model: Path) -> None:
    async with Engine(model, n_ctx=512, **QUIET) as engine:
        replace(model)
        with pytest.raises(InvalidRequestError, match=r"model\.gguf"):
            await engine.generate("x", grammar='root ::= "a"')
        await engine.generate(PROMPT, **ASKED)


# --- What a file contains -----------------------------------------------------------------------
def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    seen = set()
    for at in (0, 1, 5000, 99_999):
        data = bytearray(100_000)
        data[at] = 1
        file.write_bytes(data)
        seen.add(content_of(file).sha256)
    assert len(seen) == 4


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found_and_named(model: Path, change: str) -> None:
    content = content_of(model)
    check_content(content)
    CHANGES[change](model)
    with pytest.raises(ModelChangedError, match=r"model\.gguf"):
        check_content(content)


def test_what_is_not_a_file_has_no_content(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "none"):
        with pytest.raises(ModelLoadError):
            content_of(path)
