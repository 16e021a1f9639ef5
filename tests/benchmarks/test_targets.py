"""Targets: judged by the median of ratios that were each taken within a turn."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.side_by_side.plots import COLOURS
from benchmarks.side_by_side.records import CLLM
from benchmarks.side_by_side.tables import FAMILIES, METRICS
from benchmarks.side_by_side.targets import TARGETS, judge
from tests.benchmarks.conftest import TARGET, beside, turns


def test_the_ratio_is_taken_within_a_turn_and_not_between_medians() -> None:
    # The machine was five times faster in the second turn, as shared machines are.
    verdict = judge(TARGET["a8"], beside(TARGET["a8"], [10, 100, 10], [20, 50, 5]))

    assert verdict.measured
    assert (verdict.measured.median, verdict.measured.n_turns) == (2.0, 3)
    assert verdict.is_reached


@pytest.mark.parametrize(
    ("key", "value", "is_reached"),
    [("a1", 0.98, False), ("a1", 0.99, True), ("c8", 0.25, True), ("c8", 0.26, False)],
)
def test_a_bound_is_the_last_value_that_reaches_it(
    key: str, value: float, is_reached: bool
) -> None:
    assert judge(TARGET[key], beside(TARGET[key], [value], [1.0])).is_reached is is_reached


def test_without_a_rival_the_metric_itself_is_judged() -> None:
    verdict = judge(TARGET["im"], turns(TARGET["im"], CLLM, 70, 40, 50))

    assert verdict.measured
    assert verdict.measured.median == 50
    assert verdict.is_reached


def test_what_only_one_of_two_was_measured_for_is_not_judged() -> None:
    verdict = judge(TARGET["a8"], turns(TARGET["a8"], CLLM, 10.0))

    assert (verdict.measured, verdict.is_reached) == (None, None)


def test_records_of_another_model_or_case_do_not_count() -> None:
    wide, narrow = TARGET["a32"], TARGET["a16"]

    assert judge(wide, beside(narrow, [1.0], [1.0])).measured is None
    assert judge(TARGET["g32"], beside(wide, [1.0], [1.0])).measured is None


def test_every_peer_has_a_colour() -> None:
    assert {peer for family in FAMILIES for peer in family} == COLOURS.keys()


def test_keys_are_unique_and_peers_are_comparable() -> None:
    assert max(Counter(target.key for target in TARGETS).values()) == 1
    for target in TARGETS:
        assert target.metric in METRICS
        assert any({target.peer, target.against or target.peer} <= {*f} for f in FAMILIES)
