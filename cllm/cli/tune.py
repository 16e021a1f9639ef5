"""`cllm tune`: measure which settings are fastest on this machine, for engines to use."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cllm import EngineConfig, InvalidArgumentError, ModelLoadError
from cllm.cli.doctor import PlotOption, drawable
from cllm.cli.options import EngineFlags, with_flags
from cllm.cli.terminal import complain, note
from cllm.doctor import save_ratios_plot
from cllm.engine.core.tick_shares import SHAPES
from cllm.engine.llama.tuner import Tuner
from cllm.engine.llama.tuning import LEAST_GAIN, Candidate, NotTunedError, Settings, Tuning
from cllm.system import can_pass_descriptors

LIMIT_S = 600.0
N_COLUMNS = 120  # least width of the table


@with_flags(process=True)
def tune(
    engine: EngineFlags,
    file: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A GGUF file or hf:…, as -m.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=86400.0, help="Time for all measurements.")
    ] = LIMIT_S,
    plot: PlotOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Measure settings that change speed; engines on this machine then use the fastest ones."""
    plot = drawable(plot)
    if file is not None:
        if "model" in engine.given or "hf" in engine.given:
            raise typer.BadParameter("give the model once", param_hint="MODEL")
        engine.given["model"] = [file]
    process = bool(engine.given.get("process", can_pass_descriptors()))
    config = engine.config(process=process)
    console = Console(highlight=False, quiet=as_json)
    console.width = max(N_COLUMNS, console.width)
    deadline = time.monotonic() + seconds
    tuning = _measured(config, seconds, console)
    is_kept = _report(console, config, tuning)
    ratios = {told(each.changes): each.ratios for each in tuning.comparisons}
    found = tuning.as_dict()
    if "tiled_matmul" in tuning.chosen and "process" not in engine.given:
        # Engines without a process of their own need another result.
        config = replace(config, process=False)
        try:
            tuning = _measured(config, max(0.0, deadline - time.monotonic()), console)
        except NotTunedError as error:
            note(f"Not tuned without a process: {error}")
        else:
            is_kept &= _report(console, config, tuning)
            ratios |= {f"{told(e.changes)}, no process": e.ratios for e in tuning.comparisons}
            found["without_process"] = tuning.as_dict()
    if as_json:
        typer.echo(json.dumps(found))
    if plot is not None:
        save_ratios_plot(ratios, SHAPES, plot, title=f"Settings of {config.model_path.name}")
        print(f"picture: {plot}", file=sys.stderr)
    return 0 if is_kept else 1


def _measured(config: EngineConfig, seconds: float, console: Console) -> Tuning:
    """Measure, and report the candidates that could not be compared."""
    tried: list[Candidate] = []
    with console.status("measuring") as status:

        def show(stage: Sequence[Candidate]) -> None:
            tried.extend(stage)
            status.update(f"measuring {', '.join(told(each.changes) for each in stage)}")

        try:
            tuning = Tuner(config).measure(seconds, show)
        except InvalidArgumentError as error:
            raise typer.BadParameter(str(error)) from None
        except OSError as error:
            raise ModelLoadError(str(config.model_path), error.strerror or str(error)) from None
    compared = [each.changes for each in tuning.comparisons]
    if left := [told(each.changes) for each in tried if each.changes not in compared]:
        reason = "too little time, or other programs used the processors"
        print(f"cllm: not compared ({reason}): {', '.join(left)}", file=sys.stderr)
    return tuning


def told(settings: Settings) -> str:
    """Return settings as text."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "the defaults"


def _report(console: Console, config: EngineConfig, tuning: Tuning) -> bool:
    """Print a result, and store it; return False, and print the reason, if it cannot be stored."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("settings", no_wrap=True)
    for shape in SHAPES:
        table.add_column(shape, justify="right")
    table.add_column("all", justify="right")
    table.add_column("noise", justify="right")
    for number, each in enumerate(tuning.comparisons):
        if not number or each.base != tuning.comparisons[number - 1].base:
            times = [f"{each.base_ms[s]:.4g}" if s in each.base_ms else "" for s in SHAPES]
            table.add_row(told(each.base), *times, "", "")
        ratios = [f"×{each.ratios[s]:.2f}" if s in each.ratios else "" for s in SHAPES]
        mark = "faster: " if each.is_gain else "  "
        table.add_row(
            mark + told(each.changes), *ratios, f"×{each.score:.3f}", f"±{each.noise:.3f}"
        )
    shares = [f"{tuning.shares[shape]:.0%}" for shape in SHAPES]
    table.add_row("weight", *shares, "", "")
    console.print(table)
    console.print(
        "Columns: decodes of 1 to 16 rows, prompts of 64 and 256 tokens; milliseconds, then ratios."
    )
    try:
        Tuner(config).save(tuning)
    except (OSError, RuntimeError) as error:
        complain(f"no engine will use the result, which cannot be stored: {error}")
        return False
    if tuning.chosen:
        kind = "in processes of their own" if config.process else "without a process of their own"
        everywhere = config.process and "tiled_matmul" not in tuning.chosen
        which = "Engines" if everywhere else f"Engines {kind}"
        console.print(f"{which} use {told(tuning.chosen)} with this model from now on.")
    else:
        console.print(
            f"The defaults stay: no setting is faster by {LEAST_GAIN:.0%} beyond the noise."
        )
    return True
