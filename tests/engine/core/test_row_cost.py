"""RowCost: a table that never falls, learned from ticks that are sometimes disturbed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.row_cost import N_KEPT, N_TRUSTED, RowCost

TICKS = st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 10.0)), max_size=60)


@given(TICKS)
def test_more_rows_never_cost_less(ticks: list[tuple[int, float]]) -> None:
    row_cost = RowCost()
    for n_rows, seconds in ticks:
        for _ in range(N_TRUSTED):
            row_cost.observe(n_rows, seconds)
    costs = [row_cost.seconds(n_rows) for n_rows in range(1, 60)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(costs))
    assert set(row_cost.table) == {n_rows for n_rows, _ in ticks}
    # Nothing is hoped for that was not measured: of those rows, or of more.
    assert all(
        row_cost.seconds(n_rows) in row_cost.table.values()
        and row_cost.seconds(n_rows) <= row_cost.measured(n_rows) == seconds
        for n_rows, seconds in row_cost.table.items()
    )


@given(TICKS)
def test_a_table_that_was_kept_says_the_same(ticks: list[tuple[int, float]]) -> None:
    row_cost = RowCost()
    for n_rows, seconds in ticks:
        for _ in range(N_TRUSTED):
            row_cost.observe(n_rows, seconds)
    again = RowCost(row_cost.table)
    assert [again.seconds(n) for n in range(1, 60)] == pytest.approx(
        [row_cost.seconds(n) for n in range(1, 60)]
    )


def test_rows_that_cost_more_than_some_more_are_known_to() -> None:
    # Q4_0 on a CPU: 15 rows are three times four and three times one, 16 are computed at once.
    row_cost = RowCost({14: 0.034, 15: 0.038, 16: 0.028, 17: 0.032})
    assert row_cost.measured(15) == 0.038
    assert row_cost.seconds(15) == row_cost.seconds(16) == 0.028


def test_what_was_measured_is_said_and_what_lies_between_is_between() -> None:
    row_cost = RowCost()
    for n_rows, seconds in ((1, 0.030), (4, 0.060), (16, 0.150)):
        for _ in range(N_TRUSTED):
            row_cost.observe(n_rows, seconds)
    assert [row_cost.seconds(n) for n in (1, 4, 16)] == [0.030, 0.060, 0.150]
    assert row_cost.seconds(10) == pytest.approx(0.105)


def test_what_nobody_has_measured_is_hoped_to_be_cheap_and_never_free() -> None:
    row_cost = RowCost({4: 0.1})
    assert 0.1 < row_cost.seconds(16) < 4 * 0.1
    assert 0.1 / 4 < row_cost.seconds(1) < 0.1
    nothing = RowCost()
    assert nothing.seconds(1) < nothing.seconds(2) < 2 * nothing.seconds(1)


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=N_KEPT // 2))
def test_ticks_that_were_disturbed_do_not_count_while_they_are_the_fewer(
    disturbed: list[float],
) -> None:
    row_cost = RowCost()
    for seconds in [*[0.01] * N_KEPT, *disturbed]:
        row_cost.observe(8, seconds)
    assert row_cost.seconds(8) == 0.01


def test_a_machine_that_has_become_slower_is_believed_after_some_ticks() -> None:
    row_cost = RowCost({8: 0.01})
    for _ in range(N_KEPT):
        row_cost.observe(8, 0.05)
    assert row_cost.seconds(8) == 0.05


def test_a_clock_that_stood_still_says_nothing() -> None:
    row_cost = RowCost()
    row_cost.observe(3, 0.0)
    assert row_cost.table == {}


def test_one_slow_decode_of_rows_that_were_never_met_is_not_believed() -> None:
    row_cost = RowCost({1: 0.010})
    hoped = row_cost.seconds(32)
    row_cost.observe(32, 0.500)
    assert row_cost.seconds(32) == pytest.approx(hoped)
    assert 32 not in row_cost.table  # nor left to the next engine
    for _ in range(N_TRUSTED):
        row_cost.observe(32, 0.500)
    assert row_cost.seconds(32) == row_cost.table[32] == 0.500
