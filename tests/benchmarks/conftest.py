"""Short functions that make benchmark records for tests."""

from __future__ import annotations

from benchmarks.side_by_side.records import Record
from benchmarks.side_by_side.targets import TARGETS, Target

TARGET = {target.key: target for target in TARGETS}


def turns(target: Target, peer: str, *values: float) -> list[Record]:
    """Return the records of one peer for a target, one for each value."""
    return [
        Record(target.measurement, target.model, target.case, peer, turn, {target.metric: value})
        for turn, value in enumerate(values)
    ]


def beside(target: Target, over: list[float], under: list[float]) -> list[Record]:
    """Return the records of both peers of a target."""
    assert target.against
    return turns(target, target.peer, *over) + turns(target, target.against, *under)
