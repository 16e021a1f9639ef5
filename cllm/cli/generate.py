"""`cllm generate`: the outputs of many prompts, computed at once, printed in order.

Each prompt has a reader that collects its output.  One printer prints the outputs in order, each while
it grows.  The number of outputs that wait for the printer is limited, and prompts are read from standard
input only as there is room.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import anyio
import typer
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from rich.cells import set_cell_size

from cllm import (
    Audio,
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    GenerationError,
    Image,
    RequestError,
    SamplingParams,
    TokenStream,
)
from cllm.cli.history import parts_of
from cllm.cli.options import EngineFlags, SamplingFlags, with_flags
from cllm.cli.terminal import (
    BOLD,
    InputLine,
    StandardOutput,
    complain,
    input_lines,
    is_terminal,
    loaded,
    note,
    progress_bar,
    read_input,
    run,
)

# Outputs that may wait for the printer.  With more behind a slow output, no prompt is submitted.
MAX_AHEAD = 1024

STANDARD_INPUT = "-"
REMARK_AFTER_S = 3.0  # of waiting for standard input


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are read and outputs printed; the media stand before each prompt."""

    as_chat: bool
    as_json: bool
    has_headings: bool
    has_progress_bar: bool
    media: tuple[Image | Audio, ...] = ()


class Submitted:
    """Prompt and its output so far.  The reader adds text, the printer removes it.

    Attributes
    ----------
    completion : Completion or None
        Completion of an output that has ended; None before that, or if the request was rejected.
    error : RequestError or None
        Error that ended the request.
    """

    def __init__(self, index: int, line: InputLine) -> None:
        self.index = index
        self.line = line
        self.prompt: str = line.text
        self.completion: Completion | None = None
        self.error: RequestError | None = None
        self._texts: list[str] = []
        self._has_ended = False
        self._changed = anyio.Event()

    def push(self, text: str) -> None:
        """Add text."""
        self._texts.append(text)
        self._changed.set()

    def end(self) -> None:
        """End the text."""
        self._has_ended = True
        self._changed.set()

    async def texts(self) -> AsyncIterator[str]:
        """Yield the text as it arrives, and drop it."""
        while self._texts or not self._has_ended:
            if not self._texts:
                self._changed = anyio.Event()
                await self._changed.wait()
            text, self._texts = "".join(self._texts), []
            if text:
                yield text

    def as_json(self) -> str:
        """Return the prompt, the output and its statistics as a line of JSON."""
        completion = self.completion
        values: dict[str, object] = {
            "index": self.index,
            "prompt": self.prompt,
            "text": "" if completion is None else completion.text,
            "finish_reason": FinishReason.ERROR if completion is None else completion.finish_reason,
            "stop_reason": None if completion is None else completion.stop_reason,
            "usage": None if completion is None else asdict(completion.usage),
            "timings": None if completion is None else asdict(completion.timings),
        }
        if self.error is not None:
            values["error"] = str(self.error)
        return json.dumps(values, ensure_ascii=False) + "\n"


class PromptRun:
    """Computation of all prompts at once, with outputs printed in order."""

    def __init__(
        self, engine: Engine, params: SamplingParams, form: Form, out: StandardOutput
    ) -> None:
        self._engine = engine
        self._params = params
        self._form = form
        self._out = out
        # More prompts than run at once, so that one can start as another ends; the queue has room for all.
        n_seq_max = engine.config.n_seq_max
        self._room = anyio.Semaphore(n_seq_max + min(n_seq_max, engine.config.max_queue))
        self._n_submitted = self._n_ended = self._n_tokens = 0
        self._is_all_submitted = False

    async def run(self, prompts: AsyncIterator[InputLine]) -> bool:
        """Print the outputs; return True if none failed, and none with a constraint was cut off."""
        is_right = True
        send, receive = anyio.create_memory_object_stream[Submitted](MAX_AHEAD)
        with send, receive, progress_bar(self._form.has_progress_bar) as self._show:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._submit_all, prompts, send, tasks)
                is_right = await self._print_all(receive)
        return is_right

    async def _submit_all(
        self,
        prompts: AsyncIterator[InputLine],
        send: MemoryObjectSendStream[Submitted],
        tasks: TaskGroup,
    ) -> None:
        async for line in prompts:
            submitted = Submitted(self._n_submitted, line)
            self._n_submitted += 1
            await self._room.acquire()
            tasks.start_soon(self._read, submitted)
            await send.send(submitted)
        self._is_all_submitted = True
        send.close()
        self._show_progress()

    async def _read(self, submitted: Submitted) -> None:
        """Read the output as fast as it is computed, even if it is printed later."""
        try:
            async with self._stream(submitted.line.checked()) as stream:
                async for delta in stream:
                    submitted.push(delta.text)
                submitted.completion = await stream.completion()
        except RequestError as error:
            submitted.error = error
            if isinstance(error, GenerationError):
                submitted.completion = error.completion
        submitted.end()
        self._room.release()
        self._n_ended += 1
        if submitted.completion is not None:
            self._n_tokens += submitted.completion.usage.n_output
        self._show_progress()

    def _stream(self, prompt: str) -> TokenStream:
        media = self._form.media
        if self._form.as_chat:
            parts = parts_of(media)
            content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
            return self._engine.stream_chat([{"role": "user", "content": content}], self._params)
        return self._engine.stream([*media, prompt] if media else prompt, self._params)

    async def _print_all(self, receive: MemoryObjectReceiveStream[Submitted]) -> bool:
        is_right = True
        async for submitted in receive:
            if self._form.as_json:
                async for _ in submitted.texts():
                    pass
                await self._out.write(submitted.as_json())
            else:
                await self._print(submitted)
            if (problem := self._problem(submitted)) is not None:
                is_right = False
                complain(f"prompt {submitted.index + 1}: {problem}")
        return is_right

    def _problem(self, submitted: Submitted) -> str | None:
        """Return why an output failed, or ended before its constraint was met; None if neither."""
        completion, params = submitted.completion, self._params
        if submitted.error is not None:
            return str(submitted.error)
        if completion is None or completion.finish_reason is not FinishReason.LENGTH:
            return None
        for name in ("json_schema", "regex", "grammar", "lark"):
            if getattr(params, name) is not None:
                n_tokens = completion.usage.n_output
                why = (
                    "--max-tokens"
                    if completion.stop_reason == "max_tokens"
                    else "the context is full"
                )
                return f"the output ends after {n_tokens} tokens ({why}) and is no whole {name}"
        return None

    async def _print(self, submitted: Submitted) -> None:
        """Print one output as it comes, and end its last line."""
        if self._form.has_headings:
            await self._out.write_styled(_heading(submitted), BOLD)
        last = ""
        async for last in submitted.texts():
            await self._out.write(last)
        if not last.endswith("\n") and (last or submitted.error is None):
            await self._out.write("\n")

    def _show_progress(self) -> None:
        n_total = self._n_submitted if self._is_all_submitted else None
        self._show(self._n_ended, n_total, f"{self._n_tokens:,} tokens")


def _heading(submitted: Submitted) -> str:
    """Return a line that identifies the prompt."""
    width = shutil.get_terminal_size().columns
    line = f"{submitted.index + 1} ▸ " + " ".join(submitted.line.own.split())
    fitting = set_cell_size(line, width - 1).rstrip()
    return ("\n" if submitted.index else "") + fitting + "\n"


async def _prompts(arguments: Sequence[str]) -> AsyncIterator[InputLine]:
    """Yield the prompts.

    A `-` is replaced by the lines of standard input that are not empty.  Without a `-`, all of standard input
    comes before each prompt, if a program or a file provides it.
    """
    given = "" if STANDARD_INPUT in arguments else await _given_input()
    for argument in arguments:
        if argument != STANDARD_INPUT:
            yield InputLine(0, given + argument, len(given))
            continue
        async for line in input_lines():
            if line.text:
                yield line


async def _given_input() -> str:
    """Return all of standard input and an empty line; "" without a file or a program that provides it."""
    if sys.stdin is None:
        return ""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_remark_on_input)
        text = await read_input()
        tasks.cancel_scope.cancel()
    text = text.rstrip()
    return text and f"{text}\n\n"


async def _remark_on_input() -> None:
    await anyio.sleep(REMARK_AFTER_S)
    note("reading standard input, which comes before the prompt; `< /dev/null` gives none")


async def _generate(
    arguments: list[str], config: EngineConfig, params: SamplingParams, form: Form
) -> int:
    async with loaded(Engine(config=config)) as engine:
        is_right = await PromptRun(engine, params, form, StandardOutput()).run(_prompts(arguments))
    return 0 if is_right else 1


@with_flags()
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT",
            help="Text; - is standard input, one prompt a line.  Without -, all of it comes before each prompt.",
        ),
    ],
    engine: EngineFlags,
    sampling: SamplingFlags,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the chat template: each prompt is a user message.")
    ] = False,
    image: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Image before each prompt, in order; needs --mmproj."),
    ] = [],  # noqa: B006  # typer copies it
    audio: Annotated[
        list[str],
        typer.Option(
            metavar="FILE", help="Recording before each prompt, after the images; needs --mmproj."
        ),
    ] = [],  # noqa: B006
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with usage and timings.")
    ] = False,
) -> int:
    """Print the outputs of one or more prompts: computed at once, printed in order."""
    are_several = len(prompts) > 1 or STANDARD_INPUT in prompts
    is_screen = is_terminal(sys.stdout)
    form = Form(
        as_chat=chat,
        as_json=as_json,
        has_headings=are_several and is_screen and not as_json,
        # Growing outputs show progress too, and a bar on the same screen would overwrite them.
        has_progress_bar=are_several and not is_screen,
        media=(*map(Image, image), *map(Audio, audio)),
    )
    return run(_generate, prompts, engine.config(), sampling.params(), form)
