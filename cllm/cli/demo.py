"""`cllm demo`: the embedded model answers eight prompts, or questions about six pictures, side by side.

The answers are known, so the demonstration is a check as well: a wrong one, or a cell left in the
KV cache, makes it fail.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cllm import Audio, Completion, Engine, EngineStatistics, Image
from cllm.cli.demo_pictures import N_COLUMNS, PICTURES, Drawn, questions_of


@dataclass
class Answer:
    """Prompt (after an optional picture), expected output, and the output shown so far."""

    prompt: str
    expected: str
    picture: Drawn | None = None
    text: str = ""
    completion: Completion | None = None

    @property
    def is_right(self) -> bool:
        """True if the output equals the expected one."""
        return self.completion is not None and self.completion.text == self.expected


def _counting(first: int, last: int) -> Answer:
    numbers = " ".join(str(number) for number in range(first, last + 1))
    return Answer(f"count:{first}..{last}", numbers)


def _repeating(text: str) -> Answer:
    return Answer(f"repeat:{text}", text)


def questions() -> list[Answer]:
    """Return the eight prompts.  Most answers are about equally long, so that they share their ticks."""
    return [
        Answer("37+58=", "95"),
        _counting(1, 18),
        _repeating("你好，世界！cllm 🦙 speaks UTF-8 🚀"),
        _counting(86, 100),
        _repeating("The quick brown fox jumps over the lazy dog."),
        _counting(940, 950),
        _repeating("Привет, мир! Ça va? Ναι — да."),
        _counting(205, 215),
    ]


def questions_about_pictures() -> list[Answer]:
    """Return the questions about pictures, in the order of the pictures."""
    return [
        Answer(question, expected, picture)
        for picture in PICTURES
        for question, expected in questions_of(picture)
    ]


async def _read(engine: Engine, answer: Answer, pace_s: float) -> None:
    """Read one stream, pausing `pace_s` seconds after each delta; this delays no other stream."""
    prompt: str | list[int | str | Image | Audio] = answer.prompt
    if answer.picture is not None:
        prompt = [Image(answer.picture.pixels()), answer.prompt]
    async with engine.stream(prompt, temperature=0, max_tokens=200) as stream:
        async for delta in stream:
            answer.text += delta.text
            if pace_s:
                await anyio.sleep(pace_s)
        answer.completion = await stream.completion()


async def _read_all(engine: Engine, answers: list[Answer], pace_s: float) -> None:
    async with anyio.create_task_group() as tasks:
        for answer in answers:
            tasks.start_soon(_read, engine, answer, pace_s)


def _style(answer: Answer) -> str:
    return "dim" if answer.completion is None else "green" if answer.is_right else "red"


def _pictured(picture: Drawn, answers: list[Answer]) -> Panel:
    cells = Table.grid(padding=(0, 2), expand=True)
    cells.add_column(width=N_COLUMNS)
    cells.add_column(ratio=1)
    said = Text()
    for answer in answers:
        said.append(f"{answer.prompt}\n").append(f"{answer.text or ' '}\n\n", _style(answer))
    cells.add_row(picture.shown(), said)
    return Panel(cells, border_style="dim")


def _view(answers: list[Answer]) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    panels = []
    about = dict[Drawn, list[Answer]]()
    for answer in answers:
        if answer.picture is not None:
            about.setdefault(answer.picture, []).append(answer)
            continue
        panels.append(
            Panel(
                Text(answer.text or " "),
                title=Text(answer.prompt),
                border_style=_style(answer),
                height=4,
            )
        )
    panels += [_pictured(*one) for one in about.items()]
    for left, right in zip(panels[0::2], panels[1::2], strict=True):
        grid.add_row(left, right)
    return grid


async def _show(console: Console, engine: Engine, answers: list[Answer], pace_s: float) -> None:
    """Read all streams under a live view."""
    with Live(console=console, refresh_per_second=30, get_renderable=lambda: _view(answers)):
        await _read_all(engine, answers, pace_s)


def _summary(answers: list[Answer], statistics: EngineStatistics) -> list[str]:
    # The engine measures this time: the demonstration may have read the streams slowly.
    elapsed_s = max(a.completion.timings.total_s for a in answers if a.completion)
    rows_per_tick = statistics.n_decoding_rows / max(1, statistics.n_decoding_ticks)
    return [
        f"{statistics.n_output_tokens} tokens in {elapsed_s * 1000:.0f} ms: "
        f"{statistics.n_output_tokens / elapsed_s:,.0f} tokens/s",
        f"{statistics.n_ticks} ticks, {rows_per_tick:.1f} output rows per decoding tick",
        f"{statistics.n_kv_cells_used} KV cells in use at the end",
    ]


async def _run(pace_s: float, has_pictures: bool) -> bool:
    console = Console(highlight=False)
    answers = questions_about_pictures() if has_pictures else questions()
    # The embedded model is too small to share between threads.
    mmproj = "auto" if has_pictures else None
    async with Engine(
        n_ctx=2048, n_seq_max=8, n_threads=1, n_threads_batch=1, mmproj=mmproj
    ) as engine:
        if console.is_terminal:
            await _show(console, engine, answers, pace_s)
        else:
            await _read_all(engine, answers, pace_s=0.0)
        discrepancies = await engine.audit()
        statistics = engine.statistics()
    if not console.is_terminal:
        for answer in answers:
            what = f"[{answer.picture}] " if answer.picture else ""
            console.print(f"{what}{answer.prompt} → {answer.text}", soft_wrap=True, markup=False)
    for line in _summary(answers, statistics):
        console.print(line)
    wrong = [answer for answer in answers if not answer.is_right]
    for answer in wrong:
        print(
            f"wrong: {answer.prompt!r} gave {answer.text!r}, not {answer.expected!r}",
            file=sys.stderr,
        )
    for discrepancy in discrepancies:
        print(f"audit: {discrepancy}", file=sys.stderr)
    return not wrong and not discrepancies and statistics.n_kv_cells_used == 0


def demo(
    pace: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Seconds between tokens on a terminal.")
    ] = 0.04,
    image: Annotated[
        bool, typer.Option("--image", help="Ask questions about generated pictures instead.")
    ] = False,
) -> int:
    """Answer eight prompts, or questions about pictures, at once with the embedded model."""
    return 0 if anyio.run(_run, pace, image) else 1
