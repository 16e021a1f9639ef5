"""Draw the tables of a measurement as one picture.  No other module here needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from benchmarks.side_by_side.records import (
    ALONE,
    BARE_SERVER,
    BATCHED_BENCH,
    CLLM,
    CLLM_EMBEDDED,
    CLLM_PROCESS,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    PYTHON_SERVER,
    XLLAMACPP,
    Spread,
)
from benchmarks.side_by_side.tables import COUNTS, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which are distinct for colour-blind readers.  Peers of one table differ.
COLOURS = {
    CLLM: "#0072b2",
    CLLM_PROCESS: "#56b4e9",
    CLLM_SERVE: "#0072b2",
    CLLM_SERVE_THREAD: "#56b4e9",
    CLLM_EMBEDDED: "#009e73",
    BATCHED_BENCH: "#000000",
    LLAMA_SERVER: "#d55e00",
    PYTHON_SERVER: "#e69f00",
    LLAMA_CPP_PYTHON: "#009e73",
    XLLAMACPP: "#cc79a7",
    ALONE: "#000000",
    BARE_SERVER: "#cc79a7",
}
# Larger markers for peers with a single point, which would be hidden below others.
MARKERS = {LLAMA_CPP_PYTHON: ("D", 8), XLLAMACPP: ("s", 8)}
AGAINST_WIDTH = {"tokens_per_s", "outside_us"}
N_COLUMNS = 3  # of panels, and of names in the legend
PANEL_INCHES = (3.8, 3.0)
DPI = 80


def draw(tables: Sequence[Table], path: Path) -> bool:
    """Write a PNG with a panel for each table; False, and no file, if there is nothing to compare."""
    drawn = [t for t in tables if t.metric not in COUNTS and len(t.peers) * len(t.cases) > 1]
    if not drawn:
        return False
    n_columns = min(N_COLUMNS, len(drawn))
    n_rows = -(-len(drawn) // n_columns)
    width, height = PANEL_INCHES
    # One panel alone would be narrower than its legend.
    size = (max(2, n_columns) * width, n_rows * height + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    has_models = len({t.model for t in drawn}) > 1
    for axes, table in zip(panels, drawn, strict=False):
        title = f"{table.title} ({table.model})" if has_models else table.title
        axes.set_title(title, fontsize="medium")
        if _is_against_width(table):
            _draw_lines(axes, table)
        else:
            _draw_bars(axes, table)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(drawn) :]:
        axes.remove()
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=N_COLUMNS)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return True


def _is_against_width(table: Table) -> bool:
    return table.metric in AGAINST_WIDTH and len(table.cases) > 2 and _are_widths(table.cases)


def _are_widths(cases: Sequence[str]) -> bool:
    """True if the cases are numbers of one thing, such as "8 clients"."""
    words = [case.split() for case in cases]
    return all(len(case) == 2 and case[0].isdecimal() for case in words)


def _reach(values: Spread) -> tuple[float, float]:
    return values.median - values.smallest, values.largest - values.median


def _draw_lines(axes: Axes, table: Table) -> None:
    for index, peer in enumerate(table.peers):
        marker, size = MARKERS.get(peer, ("o", 4))
        points = [
            (int(case.split()[0]), values)
            for case in table.cases
            if (values := table.spread(case, peer)) is not None
        ]
        axes.errorbar(
            [n for n, _ in points],
            [values.median for _, values in points],
            yerr=list(zip(*(_reach(values) for _, values in points), strict=True)),
            color=COLOURS[peer], marker=marker, markersize=size, capsize=2, label=peer,
            # cllm's line is on top and thinner, so that a line below it stays visible.
            linewidth=1.4 + 0.8 * bool(index), zorder=3 - 0.1 * index,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    widths = [int(case.split()[0]) for case in table.cases]
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xlabel(table.cases[-1].split()[1])


def _draw_bars(axes: Axes, table: Table) -> None:
    thickness = 0.8 / len(table.peers)
    for index, peer in enumerate(table.peers):
        bars = [
            (place, values)
            for place, case in enumerate(table.cases)
            if (values := table.spread(case, peer)) is not None
        ]
        offset = (index - (len(table.peers) - 1) / 2) * thickness
        axes.bar(
            [place + offset for place, _ in bars],
            [values.median for _, values in bars],
            thickness,
            yerr=list(zip(*(_reach(values) for _, values in bars), strict=True)),
            color=COLOURS[peer], capsize=2, label=peer,
        )  # fmt: skip
    places = range(len(table.cases))
    if len(table.cases) > 1 and _are_widths(table.cases):
        axes.set_xticks(places, [case.split()[0] for case in table.cases])
        axes.set_xlabel(table.cases[-1].split()[1])
    else:
        axes.set_xticks(places, [textwrap.fill(c, 16) for c in table.cases], fontsize="small")
