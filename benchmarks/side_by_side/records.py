"""Records of measurements: one for each peer, case and turn.  Ratios are taken within a turn.

Absolute times on a small shared machine are not comparable, because its speed changes from minute to
minute.  Peers therefore take turns (A B A B …).  The page shows the median of the ratios of two peers in the
same turn, with the smallest and the largest next to it.
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
# No server: only the computation that the same requests need (`bare_loop`).
ALONE = "llama.cpp alone"
# A server in Python that does the least (`bare_server`).
BARE_SERVER = "bare Python server"
LIMITS = (ALONE, BARE_SERVER)


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
        Name of the load, the same for every peer, such as "8 sequences".
    peer : str
    turn : int
        Records of one turn were measured one right after the other.
    metrics : mapping
        Name (with its unit: `tokens_per_s`, `ttft_p50_ms`) to value.
    busy : float or None
        Average duration of a fixed loop before or after, as a multiple of its fastest one: see `quiet`.
        None in records that are older than the loop.
    where : str
        Date, commit and machine, because the records of one page may come from several runs.
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
    """Return `over` divided by `under`, for every turn that both have and where `under` is not 0."""
    return [over[turn] / under[turn] for turn in sorted(over) if under.get(turn)]


def save(records: Iterable[Record], path: Path) -> None:
    """Write the records to a file, one JSON object per line."""
    path.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))


def load(path: Path) -> list[Record]:
    """Return the records that `save` wrote."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]
