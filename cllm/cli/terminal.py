"""The standard streams as the commands use them, and the event loop around a command.

Standard output has only the results of a command; notes and errors go to standard error.  Reading and
writing do not block the event loop, so that Ctrl-C works while a pager reads nothing.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import NamedTuple, TextIO, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cllm
from cllm.cli.texts import decoded, visible, without_bom

BOLD, DIM, RED = "1", "2", "31"

# Bytes of a line that are kept.  The engine accepts fewer, and so rejects a line that was cut.
MAX_LINE_BYTES = 2 << 20

Arguments = TypeVarTuple("Arguments")
AnyEngine = TypeVar("AnyEngine", cllm.Engine, cllm.Embedder)


def is_terminal(stream: TextIO | None) -> bool:
    """True if the stream is a terminal; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def has_styles(stream: TextIO | None) -> bool:
    """True if the stream is a terminal that shows styles, and the user wants them."""
    return is_terminal(stream) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """Return the text in `BOLD`, `DIM` or `RED` if the stream is a terminal with styles, else as it is."""
    return f"\x1b[{style}m{text}\x1b[0m" if has_styles(stream) else text


def note(text: str) -> None:
    """Print a note on standard error: dim on a terminal."""
    if sys.stderr is not None:
        print(styled(visible(text), DIM, sys.stderr), file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Print an error on standard error."""
    if sys.stderr is not None:
        line = " ".join(visible(text).split("\n"))
        print(styled(f"cllm: {line}", RED, sys.stderr), file=sys.stderr, flush=True)


class StandardOutput:
    """Standard output in UTF-8, unbuffered.  Event loop only.

    Raises
    ------
    BrokenPipeError
        When writing: the reader has gone, or the stream was closed before the start.
    """

    def __init__(self) -> None:
        self.is_terminal: bool = is_terminal(sys.stdout)
        # `sys.stdout` is None if descriptor 1 was closed at the start; another file may have it now.
        self._descriptor = None if sys.stdout is None else _Descriptor(1)

    async def write(self, text: str) -> None:
        """Write the whole text, waiting for room; a terminal gets it as `visible`."""
        if self._descriptor is None:
            raise BrokenPipeError
        # A lone surrogate comes from an argument that is not UTF-8; in JSON this is its escape.
        data = (visible(text) if self.is_terminal else text).encode("utf-8", "backslashreplace")
        while data:
            await self._descriptor.wait(anyio.wait_writable)
            try:
                # A pipe that can be written to takes at least so many bytes without blocking.
                data = data[os.write(1, data[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another program has made the pipe non-blocking
                continue

    async def write_styled(self, text: str, style: str) -> None:
        """Write a short text of the command itself, in a style of `styled`."""
        if self._descriptor is None:
            raise BrokenPipeError
        await self._descriptor.wait(anyio.wait_writable)
        os.write(1, styled(visible(text), style, sys.stdout).encode("utf-8", "backslashreplace"))

    async def finish(self) -> None:
        """End an answer: nothing is left to print."""


class _Descriptor:
    """Waits until a descriptor is ready."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._is_file = False

    async def wait(self, ready: Callable[[int], Awaitable[None]]) -> None:
        """Wait with `anyio.wait_readable` or `wait_writable`."""
        if not self._is_file:
            try:
                await ready(self._number)
            except PermissionError:  # from epoll: files are always ready
                self._is_file = True
        if self._is_file:
            await anyio.lowlevel.checkpoint()


class InputLine(NamedTuple):
    """A line of standard input, or an argument.

    Attributes
    ----------
    number : int
        1 for the first line; 0 for an argument.
    text : str
        Without its line end.  Bytes that are not UTF-8 are lone surrogates, as in arguments.
    n_given : int
        Characters of standard input before an argument.
    """

    number: int
    text: str
    n_given: int = 0

    @property
    def own(self) -> str:
        """Text without the standard input before it."""
        return self.text[self.n_given :]

    def checked(self) -> str:
        """Return the text; raise `InvalidRequestError`, which names the line, if it is not UTF-8."""
        source = f"line {self.number} of standard input" if self.number else "prompt"
        return decoded(self.text.encode("utf-8", "surrogateescape"), lambda _: source)


async def read_input() -> str:
    """Return all of standard input.

    Raises
    ------
    InvalidRequestError
        Names the first line that is not UTF-8.
    """
    return "\n".join([line.checked() async for line in input_lines()])


async def input_lines() -> AsyncIterator[InputLine]:
    """Yield the lines of standard input; input is read only as lines are needed."""
    if sys.stdin is None:
        return
    descriptor, rest, number = _Descriptor(0), b"", 0
    while True:
        await descriptor.wait(anyio.wait_readable)
        chunk = os.read(0, 1 << 16)
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            lines, rest = [rest], b""
        for line in lines:
            number += 1
            line = without_bom(line) if number == 1 else line
            yield InputLine(number, line.removesuffix(b"\r").decode("utf-8", "surrogateescape"))
        if not chunk:
            return
        rest = rest[:MAX_LINE_BYTES]


@contextmanager
def progress_bar(is_wanted: bool) -> Iterator[Callable[[int, int | None, str], None]]:
    """Yield a function of `(n_done, n_total or None, remark)` that shows them if stderr is a terminal."""
    if not (is_wanted and is_terminal(sys.stderr)):
        yield lambda n_done, n_total, remark: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=None, remark="")
        yield lambda n_done, n_total, remark: progress.update(
            task, completed=n_done, total=n_total, remark=remark
        )


@asynccontextmanager
async def loaded(engine: AnyEngine) -> AsyncIterator[AnyEngine]:
    """Yield the engine while it serves; a terminal shows that the model is being loaded."""
    config = engine.config
    is_shown = config.model is not None and is_terminal(sys.stderr)
    console = Console(file=sys.stderr)
    loading = console.status(f"loading {config.model_path.name}") if is_shown else nullcontext()
    async with AsyncExitStack() as stack:
        with loading:
            await stack.enter_async_context(engine)
        yield engine


def run(command: Callable[[*Arguments], Awaitable[int]], *arguments: *Arguments) -> int:
    """Run a command on an event loop and return its exit code.

    An exception group is replaced by its first error.  A broken pipe gives exit code 0: the reader of the
    output has gone.
    """
    try:
        return anyio.run(command, *arguments)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        if is_terminal(sys.stdout):
            print(file=sys.stderr)  # so that the shell's prompt begins a new line
        raise
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, BrokenPipeError):
            return 0
        raise error from None
