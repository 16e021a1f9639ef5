"""Pictures of measurements: growth of a request, cost of rows.  Needs matplotlib."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cllm.doctor.findings import Experiment, Measurement, Report
from cllm.doctor.row_costs import RowCosts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FORMATS = (".png", ".pdf", ".svg")
N_MIN = 3  # experiments with fewer requests are not drawn
# Okabe and Ito's colours, which color-blind readers can distinguish.  Markers and dashes differ
# too, because equal lines cover each other.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "marker": "o", "linewidth": 2.4},
    {"color": "#d55e00", "marker": "s"},
    {"color": "#e69f00", "marker": "x", "linestyle": "--"},
    {"color": "#0072b2", "marker": "^"},
    {"color": "#009e73", "marker": "D"},
    {"color": "#cc79a7", "marker": "v", "linestyle": ":"},
)
_PANELS: tuple[tuple[str, Callable[[Measurement], float]], ...] = (
    ("rows decoded", lambda request: request.n_rows),
    ("seq_pos_max", lambda request: -1 if request.pos_max is None else request.pos_max),
    ("cells in use", lambda request: request.n_cells),
    ("decode time, ms", lambda request: request.decode_s * 1000),
    ("latency of the client, ms", lambda request: request.latency_s * 1000),
)


def has_matplotlib() -> bool:
    """Return True if matplotlib is installed, which `save_plot` and `save_rows_plot` need."""
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(report: Report, path: Path, *, title: str) -> None:
    """Draw rows, positions, cells and times over the requests of each experiment of at least three.

    Parameters
    ----------
    report : Report
    path : Path
        A file name that ends with one of `PLOT_FORMATS`.
    title : str

    Raises
    ------
    ImportError
        There is no matplotlib.
    OSError
        The file cannot be written.
    """
    # An extra, and slow to import: only a picture needs it.
    from matplotlib.figure import Figure

    experiments = [e for e in report.experiments if len(e.requests) >= N_MIN]
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    *panels, key = figure.subplots(2, 3).flat
    for axes, (label, value) in zip(panels, _PANELS, strict=True):
        _draw(axes, experiments, label, value)
    key.axis("off")
    handles, names = panels[0].get_legend_handles_labels()
    key.legend(handles, names, loc="upper left", frameon=False, fontsize=11)
    if report.conclusion is not None:
        answer = textwrap.fill(report.conclusion.text, 58)
        key.text(0.02, 0.0, answer, va="bottom", fontsize=9, transform=key.transAxes)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def save_rows_plot(costs: RowCosts, path: Path, *, title: str) -> None:
    """Draw milliseconds and tokens a second over the number of rows; see `save_plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    rows = list(costs.seconds)
    curves = {
        "decode time, ms": [1000 * seconds for seconds in costs.seconds.values()],
        "tokens a second, all sequences": [costs.tokens_per_s(n) for n in rows],
    }
    for axes, (label, values) in zip(figure.subplots(1, 2).flat, curves.items(), strict=True):
        axes.plot(rows, values, markersize=4, **_STYLES[0])
        _label(axes, label, "rows")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def save_ratios_plot(
    ratios: Mapping[str, Mapping[str, float]], shapes: Sequence[str], path: Path, *, title: str
) -> None:
    """Draw ratios to 1 as bars; see `save_plot`.

    Parameters
    ----------
    ratios : mapping
        Ratios by shape, of each name in the legend.
    shapes : sequence of str
        Order of the shapes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes, width = figure.subplots(), 0.8 / max(1, len(ratios))
    for number, (name, of_shapes) in enumerate(ratios.items()):
        places = [shapes.index(shape) + (number + 0.5) * width for shape in of_shapes]
        axes.bar(places, list(of_shapes.values()), width, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks([i + 0.4 for i in range(len(shapes))], shapes)
    axes.set_ylabel("time, as a ratio")
    if ratios:
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw(
    axes: Axes, experiments: list[Experiment], label: str, value: Callable[[Measurement], float]
) -> None:
    for experiment, style in zip(experiments, _STYLES, strict=False):
        numbers = range(1, len(experiment.requests) + 1)
        values = [value(request) for request in experiment.requests]
        axes.plot(numbers, values, label=experiment.name, markersize=4, alpha=0.85, **style)
    _label(axes, label, "request")


def _label(axes: Axes, title: str, over: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(over)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
