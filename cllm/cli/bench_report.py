"""The results of `cllm bench` as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.table import Table

from cllm import EngineConfig, ModelInfo
from cllm.processors import cpu_name, usable_processors


@dataclass(frozen=True, slots=True)
class Level:
    """Results at one concurrency.

    Attributes
    ----------
    output_tokens_per_s, prompt_tokens_per_s : float
        Tokens per second of all clients together.
    ttft_p50_ms, ttft_p99_ms : float
        Milliseconds from the submission of a request to its first token.
    itl_p50_ms, itl_p99_ms : float or None
        Milliseconds between two deltas of one request; None if each request had only one.
    """

    concurrency: int
    n_requests: int
    elapsed_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the percentile of values (nearest rank)."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def machine() -> str:
    """Return the name of the processor, and the number of CPUs that this process may use."""
    name = cpu_name() or platform.processor() or platform.machine()
    return f"{name}, {usable_processors().n_allowed} CPUs"


def about(config: EngineConfig, model: ModelInfo) -> list[str]:
    """Return lines that describe the model, the machine, the number of threads and the version of cllm."""
    n_threads = config.compute_threads[0]
    threads = f"{n_threads} compute thread" + ("s" if n_threads > 1 else "")
    name = model.name or config.model_path.name
    return [
        f"{name}: {model.description}, {model.n_params / 1e6:,.1f}M parameters, "
        f"{model.size_bytes / 2**20:,.0f} MiB",
        f"{machine()}; {threads}; cllm {version('cllm')}",
    ]


def table(levels: Sequence[Level]) -> Table:
    """Return a table with one row for each concurrency."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "at once", "requests", "output\ntokens/s", "prompt\ntokens/s",
        "TTFT ms\np50", "\np99", "ITL ms\np50", "\np99",
    ):  # fmt: skip
        shown.add_column(column, justify="right")
    for level in levels:
        times = (level.ttft_p50_ms, level.ttft_p99_ms, level.itl_p50_ms, level.itl_p99_ms)
        shown.add_row(
            str(level.concurrency),
            str(level.n_requests),
            f"{level.output_tokens_per_s:,.0f}",
            f"{level.prompt_tokens_per_s:,.0f}",
            *("–" if time is None else f"{time:,.2f}" for time in times),
        )
    return shown


def as_json(
    config: EngineConfig, model: ModelInfo, settings: Mapping[str, int], levels: Sequence[Level]
) -> str:
    """Return the results as a line of JSON.

    Parameters
    ----------
    config : EngineConfig
        With the settings that tuning changed.
    settings : mapping
        Settings of the measurement.
    """
    report = {
        "cllm": version("cllm"),
        "machine": machine(),
        "model": {
            "path": model.path,
            "name": model.name,
            "description": model.description,
            "n_params": model.n_params,
            "size_bytes": model.size_bytes,
        },
        "tuned": dict(model.tuned),
        "n_threads": config.compute_threads[0],
        "n_ctx": model.n_ctx,
        "n_seq_max": config.n_seq_max,
        **settings,
        "levels": [asdict(level) for level in levels],
    }
    return json.dumps(report, ensure_ascii=False) + "\n"


def save_plot(path: Path, levels: Sequence[Level], title: str) -> None:
    """Save a plot of throughput and latency against concurrency.  Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title, fontsize="small")
    throughput, latency = figure.subplots(1, 2)
    concurrencies = [level.concurrency for level in levels]
    throughput.plot(concurrencies, [level.output_tokens_per_s for level in levels], "o-")
    throughput.set_ylabel("output tokens/s")
    throughput.set_ylim(bottom=0)
    for name, label, style in (
        ("ttft_p50_ms", "TTFT p50", "C0o-"), ("ttft_p99_ms", "TTFT p99", "C0o--"),
        ("itl_p50_ms", "ITL p50", "C1s-"), ("itl_p99_ms", "ITL p99", "C1s--"),
    ):  # fmt: skip
        values = [getattr(level, name) for level in levels]
        if None not in values:
            latency.plot(concurrencies, values, style, label=label)
    latency.legend()
    latency.set_ylabel("ms")
    latency.set_yscale("log")
    for axes in (throughput, latency):
        axes.set_xlabel("requests at once")
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, labels=[str(number) for number in concurrencies])
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path)
