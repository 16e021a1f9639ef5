"""Output of `cllm chat` on a terminal: Markdown while it grows, and how far the prompt is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile

import anyio
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from cllm import CllmError, Engine, RequestError, SlotState, TokenDelta, TokenStream
from cllm.cli.terminal import visible

REDRAW_S = 0.08  # between two drawings of a block that grows
PROGRESS_S = 0.1

# Tags are text in an answer, and a terminal has no other use for them.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class MarkdownOutput:
    """Shows an answer as Markdown on a terminal, while it arrives.  Event loop only.

    Blocks that are complete are printed.  Only the last block is drawn again as it grows: its last lines, if
    it is higher than the terminal.
    """

    is_terminal = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._text = ""
        self._has_printed = False
        self._redraw_at = 0.0

    async def write(self, text: str) -> None:
        """Add a text to the answer."""
        self._text += visible(text)
        if time.monotonic() >= self._redraw_at:
            self._draw()

    async def finish(self) -> None:
        """Print what is left of the answer, and end it."""
        if self._live is not None:
            self._live.stop()
        self._print(self._text)
        self._live, self._text, self._has_printed = None, "", False

    def _draw(self) -> None:
        started_at = time.monotonic()
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        complete, self._text = complete_blocks(self._text)
        self._print(complete)
        tail = _Lines(self._text, n_max=self._console.height - 2)
        self._live.update(tail, refresh=True)
        drawn_at = time.monotonic()
        self._redraw_at = drawn_at + max(REDRAW_S, 4 * (drawn_at - started_at))

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._console.print(_Lines(text), end="")
            self._has_printed = True


class _AnswerMarkdown(Markdown):
    """Markdown with the line breaks of the text, and with tags as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark")
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class _Lines:
    """The lines of a Markdown text without spaces at their ends; the last `n_max`, or all."""

    def __init__(self, text: str, n_max: int | None = None) -> None:
        self._text = text
        self._n_max = n_max

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_AnswerMarkdown(self._text), options, pad=False)
        for line in lines[-(self._n_max or len(lines)) :]:
            yield from _without_end(line)
            yield Segment.line()


def _without_end(line: list[Segment]) -> Iterator[Segment]:
    """Yield the segments of a line without the spaces at its end that show nothing."""

    def is_blank(segment: Segment) -> bool:
        has_color = segment.style is not None and segment.style.bgcolor is not None
        return not has_color and not segment.text.strip()

    n_blank = len(list(takewhile(is_blank, reversed(line))))
    kept = line[: len(line) - n_blank]
    for segment in kept[:-1]:
        yield segment
    for segment in kept[-1:]:
        has_color = segment.style is not None and segment.style.bgcolor is not None
        yield segment if has_color else Segment(segment.text.rstrip(), segment.style)


def complete_blocks(text: str) -> tuple[str, str]:
    """Return the blocks of a Markdown text that cannot change any more, and its last block."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    n_complete = starts[-1] if starts else 0
    end = "\n" * (n_complete > 0)
    return "\n".join(lines[:n_complete]) + end, "\n".join(lines[n_complete:])


async def first_delta(stream: TokenStream, engine: Engine, console: Console) -> TokenDelta | None:
    """Return the first delta of the only request, or None; until then, show how far its prompt is.

    Raises
    ------
    RequestError
    """
    error: RequestError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_show_progress, engine, console)
        try:
            first = await anext(stream, None)
        except RequestError as raised:  # not in a group with the other task
            error = raised
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    return first


async def _show_progress(engine: Engine, console: Console) -> None:
    started_at = time.monotonic()
    with suppress(CllmError), console.status("reading the prompt") as status:
        while True:
            await anyio.sleep(PROGRESS_S)
            for slot in await engine.slots():
                if slot.state is SlotState.PREFILL:
                    n_computed = slot.n_computed - slot.n_cached
                    speed = n_computed / (time.monotonic() - started_at)
                    told = f"{slot.n_computed:,} of {slot.n_prompt:,} tokens, {speed:,.0f} tokens/s"
                    status.update(f"reading the prompt: {told}")
