"""Records: what was measured, one for each peer, case and turn.  Ratios are taken within a turn.

Absolute times on a small shared machine mean nothing: the machine itself is another one from minute
to minute.  Peers therefore take turns (A B A B …), and a figure is the median of what one was
beside the other in the same turn, with the smallest and the largest next to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

CLLM = "cllm"
CLLM_PROCESS = "cllm, process=True"
CLLM_EMBEDDED = "cllm in a program"
CLLM_SERVE = "cllm serve"
CLLM_SERVE_THREAD = "cllm serve --no-process"
BATCHED_BENCH = "llama-batched-bench"
LLAMA_SERVER = "llama-server"
PYTHON_SERVER = "llama-cpp-python server"
LLAMA_CPP_PYTHON = "llama-cpp-python Llama"
XLLAMACPP = "xllamacpp"


@dataclass(frozen=True)
class Record:
    """One peer, measured once.

    Attributes
    ----------
    measurement : str
        The letter of its part: "a" to "i", "n", "r", "v", "w".
    model : str
        `name/file type`.
    case : str
        What was asked, the same words for every peer: "8 sequences".
    peer : str
    turn : int
        Records of one turn were measured one right after the other.
    metrics : mapping
        Name (with its unit: `tokens_per_s`, `ttft_p50_ms`) to value.
    busy : float or None
        How many times as long as at its fastest a fixed loop took before or after: see `quiet`.
        Records of before there was such a loop do not know.
    where : str
        Date, commit and machine: measurements of several hours are not all made in one run.
    """

    measurement: str
    model: str
    case: str
    peer: str
    turn: int
    metrics: Mapping[str, float]
    busy: float | None = None
    where: str = ""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the turns."""

    median: float
    smallest: float
    largest: float
    n_turns: int


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of some values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(median(ordered), ordered[0], ordered[-1], len(ordered))


def values_of(
    records: Iterable[Record], measurement: str, model: str, case: str, peer: str, metric: str
) -> dict[int, float]:
    """One metric of one peer, by turn."""
    return {
        r.turn: r.metrics[metric]
        for r in records
        if (r.measurement, r.model, r.case, r.peer) == (measurement, model, case, peer)
        and metric in r.metrics
    }


def ratios(over: Mapping[int, float], under: Mapping[int, float]) -> list[float]:
    """One by the other, for every turn that both have."""
    return [over[turn] / under[turn] for turn in sorted(over) if under.get(turn)]


def save(records: Iterable[Record], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))


def load(path: Path) -> list[Record]:
    """Return the records that `save` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
