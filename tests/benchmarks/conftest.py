"""Records as short as a test can say them."""

from __future__ import annotations

from benchmarks.side_by_side.records import Record
from benchmarks.side_by_side.targets import TARGETS, Target

TARGET = {target.key: target for target in TARGETS}


def turns(target: Target, peer: str, *values: float) -> list[Record]:
    """One peer in the place of a target, by turns."""
    return [
        Record(target.measurement, target.model, target.case, peer, turn, {target.metric: value})
        for turn, value in enumerate(values)
    ]


def beside(target: Target, over: list[float], under: list[float]) -> list[Record]:
    """Both peers of a target."""
    assert target.against
    return turns(target, target.peer, *over) + turns(target, target.against, *under)
