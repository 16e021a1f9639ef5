"""`cllm doctor`: check this installation, and measure if latency grows over identical requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cllm import EngineConfig
from cllm.cli.options import ModelOption, model_file, output_file
from cllm.cli.texts import visible
from cllm.doctor import (
    N_TURNS,
    PLOT_FORMATS,
    QUICK_N_TURNS,
    Check,
    Conclusion,
    Experiment,
    Finding,
    Measurement,
    Plan,
    Report,
    RowCosts,
    Status,
    examine,
    growth,
    has_matplotlib,
    measure_rows,
    preflight_check,
    save_plot,
    save_rows_plot,
)

N_FIRST, N_LAST = 6, 2  # requests that a table shows; those between follow the same pattern
_STYLE = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def _check_plot(path: Path | None) -> Path | None:
    """Return the path of the plot; reject one that cannot be saved before the experiments."""
    if path is not None and path.suffix.lower() not in PLOT_FORMATS:
        raise typer.BadParameter(f"{path} must end with one of {', '.join(PLOT_FORMATS)}")
    return output_file(path)


PlotOption = Annotated[
    Path | None,
    typer.Option(callback=_check_plot, metavar="FILE", help="Save a picture (extra `plot`)."),
]


def drawable(plot: Path | None) -> Path | None:
    """Return the path of the plot; None, and a message, without matplotlib."""
    if plot is not None and not has_matplotlib():
        print("cllm: no picture without the extra plot: pip install 'cllm[plot]'", file=sys.stderr)
        return None
    return plot


def _show_check(console: Console, check: Check) -> None:
    line = Text.assemble(
        (f"{check.status:8}", _STYLE[check.status]),
        (f"{check.name:14}", "bold"),
        visible(check.text),
    )
    console.print(line, soft_wrap=not console.is_terminal)


def _show_plan(console: Console, plan: Plan) -> None:
    shape = plan.shape
    console.print(
        f"\n{plan.n_requests} identical requests for each experiment: {shape.n_prompt} prompt tokens "
        f"and {shape.n_output} output tokens, {shape.n_rows} rows; about {max(1, plan.estimated_s):.0f} s",
        soft_wrap=not console.is_terminal,
    )


def _row(number: int, request: Measurement) -> list[str]:
    ends = [-1 if pos is None else pos for pos in (request.pos_max, request.pos_left)]
    return [
        str(number),
        str(request.seq_id),
        str(request.n_rows),
        str(ends[0]),
        str(ends[1]),
        str(request.n_cells),
        str(request.n_cells_left),
        f"{request.decode_s * 1000:.1f}",
        f"{request.latency_s * 1000:.1f}",
    ]


def _show_experiment(console: Console, experiment: Experiment, *, has_table: bool) -> None:
    console.print()
    console.print(
        Text.assemble((experiment.name, "bold"), f": {experiment.question}"),
        soft_wrap=not console.is_terminal,
    )
    if has_table:
        _show_table(console, experiment)
    style = "green" if experiment.is_expected else "bold red"
    verdict = f"→ {experiment.diagnosis.cause}: {experiment.diagnosis.text}"
    console.print(verdict, markup=False, soft_wrap=not console.is_terminal, style=style)


def _show_table(console: Console, experiment: Experiment) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in (
        "#", "seq_id", "rows", "pos_max", "left", "cells", "left", "decode ms", "latency ms",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    rows = [_row(number, request) for number, request in enumerate(experiment.requests, start=1)]
    if len(rows) > N_FIRST + N_LAST + 1:
        rows = [*rows[:N_FIRST], ["…"] * len(rows[0]), *rows[-N_LAST:]]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if experiment.refusal is not None:
        console.print(
            f"cllm: {experiment.refusal.error}", markup=False, soft_wrap=not console.is_terminal
        )
        for line in experiment.refusal.message.splitlines():
            console.print(
                f"llama.cpp: {visible(line.strip())}",
                markup=False,
                soft_wrap=not console.is_terminal,
                style="dim",
            )


def _summary(experiments: list[Experiment]) -> Table:
    """Return a row for each experiment: values of the first and last request, and the growth of the times."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("experiment", no_wrap=True)
    for column in ("rows", "pos_max", "cells", "decode ×", "latency ×"):
        table.add_column(column, justify="right")
    for experiment in experiments:
        requests = experiment.requests
        first, last = requests[0], requests[-1]
        table.add_row(
            experiment.name,
            f"{first.n_rows} → {last.n_rows}",
            f"{first.pos_max} → {last.pos_max}",
            f"{first.n_cells} → {last.n_cells}",
            f"{growth([request.decode_s for request in requests]):.2f}",
            f"{growth([request.latency_s for request in requests]):.2f}",
        )
    return table


def _show(
    console: Console, finding: Finding, experiments: list[Experiment], *, has_tables: bool
) -> None:
    match finding:
        case Check():
            _show_check(console, finding)
        case Plan():
            _show_plan(console, finding)
        case Experiment():
            _show_experiment(console, finding, has_table=has_tables)
            experiments.append(finding)
        case Conclusion():
            console.print()
            console.print(_summary(experiments))
            question = ("Does latency grow over identical requests here? ", "bold")
            console.print(Text.assemble(question, finding.text), soft_wrap=not console.is_terminal)


def _examine(config: EngineConfig, *, is_quick: bool, has_tables: bool, as_json: bool) -> Report:
    findings: list[Finding] = []
    console = Console(highlight=False, quiet=as_json)
    experiments: list[Experiment] = []
    n_threads = config.compute_threads[0]
    with console.status("examining") as status:
        for finding in examine(config.model_path, n_threads=n_threads, is_quick=is_quick):
            if isinstance(finding, Plan):
                status.stop()  # its thread takes the GIL now and then, which the times would show
            findings.append(finding)
            _show(console, finding, experiments, has_tables=has_tables)
    return Report(tuple(findings))


def _show_rows(console: Console, costs: RowCosts) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in ("rows", "decode ms", "× of one row", "tokens/s"):
        table.add_column(column, justify="right")
    for rows, seconds in costs.seconds.items():
        table.add_row(
            str(rows),
            f"{1000 * seconds:.2f}",
            f"{seconds / costs.seconds[1]:.2f}",
            f"{costs.tokens_per_s(rows):.0f}",
        )
    console.print(table)
    best = costs.best
    console.print(f"most tokens/s with {best} rows: {costs.tokens_per_s(best):.0f}")
    for rows, more in costs.cheaper_with_more.items():
        console.print(f"{rows} rows take longer than {more}")
    for rows, factor in costs.steps.items():
        console.print(f"{rows} rows take {factor:.2f} times as long as {rows - 1}")


def _measure_rows(config: EngineConfig, *, is_quick: bool, as_json: bool) -> RowCosts | None:
    """Measure the costs of rows, and print them unless `as_json`.

    None if the model cannot be used; standard error then has the reason.
    """
    console = Console(highlight=False, quiet=as_json)
    check = preflight_check(config.model_path)
    if check.status is Status.FAILED:
        _show_check(Console(highlight=False, stderr=True), check)
        return None
    n_turns = QUICK_N_TURNS if is_quick else N_TURNS
    with console.status("measuring") as status:
        costs = measure_rows(
            config.model_path,
            n_threads=config.compute_threads[0],
            n_turns=n_turns,
            on_turn=lambda turn: status.update(f"measuring, turn {turn + 1} of {n_turns}"),
        )
    _show_rows(console, costs)
    return costs


def doctor(
    model: ModelOption = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Send fewer requests: this takes seconds with a small model."),
    ] = False,
    tables: Annotated[
        bool | None,
        typer.Option(help="Show first and last requests of experiments; default: unless --quick."),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows", help="Measure what a decode of 1 to 64 rows takes, and nothing else."
        ),
    ] = False,
    plot: PlotOption = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", "-t", min=1, max=512, help="Compute threads; by default as in an engine."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Check library, build, CPU, model and KV cache, and find out whether latency grows."""
    plot = drawable(plot)
    config = EngineConfig(model=model_file(model), n_threads=threads)
    if rows:
        costs = _measure_rows(config, is_quick=quick, as_json=as_json)
        if costs is None:
            return 1
        if as_json:
            typer.echo(json.dumps(costs.as_dict()))
        if plot is not None:
            save_rows_plot(costs, plot, title=f"Rows of a decode of {config.model_path.name}")
            print(f"picture: {plot}", file=sys.stderr)
        return 0
    has_tables = not quick if tables is None else tables
    report = _examine(config, is_quick=quick, has_tables=has_tables, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    if plot is not None and report.experiments:
        save_plot(report, plot, title=f"Identical requests on {config.model_path.name}")
        print(f"picture: {plot}", file=sys.stderr)
    return 0 if report.is_healthy else 1
