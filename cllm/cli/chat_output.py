"""Output of `cllm chat` on a terminal: Markdown while it grows, and how far the prompt is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, takewhile

import anyio
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from cllm import CllmError, Engine, RequestError, SlotState, TokenDelta, TokenStream
from cllm.cli.texts import visible

REDRAW_S = 0.08  # between two drawings of a block that grows
PROGRESS_S = 0.1

# Tags are text in an answer, and a terminal has no other use for them.
# Definitions of links stay text: what refers to them may have been printed.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable("reference")


class MarkdownOutput:
    """Shows an answer as Markdown on a terminal, while it arrives.  Event loop only.

    Complete blocks are printed.  The last block is drawn again as it grows.  Of a block that is higher than
    the terminal, the last lines are drawn.
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
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # thoughts are printed between two answers
                redirect_stderr=False,
            )
            self._live.start()
        complete, self._text = complete_blocks(self._text)
        self._print(complete)
        n_max = max(1, self._console.height - 3)
        gap = 1 if self._has_printed else 0
        self._live.update(_Lines(_end_of(self._text, 2 * n_max), n_max, gap), refresh=True)
        drawn_at = time.monotonic()
        self._redraw_at = drawn_at + max(REDRAW_S, 4 * (drawn_at - started_at))

    def _print(self, text: str) -> None:
        for block in blocks_of(text):
            if block.strip():
                self._console.print(_Lines(block, n_before=1 if self._has_printed else 0), end="")
                self._has_printed = True


class _AnswerMarkdown(Markdown):
    """Markdown with the line breaks of the text, and with tags as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)  # addresses are shown
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class _Lines:
    """The lines of a Markdown text, without blank lines around it and spaces at their ends.

    Parameters
    ----------
    n_max : int, optional
        Lines to show, the last ones; None: all.
    n_before : int
        Blank lines before the text.
    """

    def __init__(self, text: str, n_max: int | None = None, n_before: int = 0) -> None:
        self._text = text
        self._n_max = n_max
        self._n_before = n_before

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_AnswerMarkdown(self._text), options, pad=False)
        rows = [list(_without_end(line)) for line in lines]
        while rows and not rows[0]:
            del rows[0]
        while rows and not rows[-1]:
            del rows[-1]
        yield from [Segment.line()] * self._n_before
        for row in rows[-(self._n_max or len(rows)) :]:
            yield from row
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


def blocks_of(text: str) -> list[str]:
    """Return the blocks of a Markdown text; together they are the text."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    edges = [0, *sorted({start for start in starts if start}), len(lines)]
    blocks = ["\n".join(lines[a:b]) for a, b in pairwise(edges)]
    return [f"{block}\n" for block in blocks[:-1]] + blocks[-1:]


def complete_blocks(text: str) -> tuple[str, str]:
    """Return the blocks of a Markdown text that cannot change any more, and its last block.

    The last line counts to the last block until it has ended: it may belong to the block before it.
    """
    lines, newline, rest = text.rpartition("\n")
    *complete, last = blocks_of(lines + newline)
    return "".join(complete), last + rest


def _end_of(text: str, n_lines: int) -> str:
    """Return the last lines of a block, with the first line of a fence; drawing all of a long block is slow."""
    lines = text.split("\n")
    if len(lines) <= n_lines:
        return text
    is_fence = lines[0].lstrip().startswith(("```", "~~~"))
    return "\n".join(lines[:is_fence] + lines[-n_lines:])


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
