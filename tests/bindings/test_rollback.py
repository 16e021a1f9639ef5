"""Memory with states gives up a row only where llama.cpp has kept the state before it."""

from __future__ import annotations

import pytest

from cllm.bindings._rollback import Rollback
from cllm.bindings.batch import Run


def after(*runs: tuple[int, int], n_ubatch: int = 64, any_order: bool = True) -> Rollback:
    """After a decode of so many rows of each sequence."""
    rollback = Rollback(4, n_ubatch, any_order=any_order)
    rollback.decoded([Run(seq_id, 10, n_tokens) for seq_id, n_tokens in runs])
    return rollback


@pytest.mark.parametrize(
    ("n_rows", "n_positions", "expected"),
    [(1, 1, False), (3, 2, True), (3, 3, False), (9, 4, True), (9, 5, False), (3, 0, False)],
)
def test_rows_of_the_last_decode_but_the_first_can_be_given_up(
    n_rows: int, n_positions: int, expected: bool
) -> None:
    assert after((0, n_rows)).take(0, n_positions) is expected


def test_a_second_time_nothing_can() -> None:
    rollback = after((0, 5))
    assert rollback.take(0, 1)
    assert not rollback.take(0, 1)
    rollback.decoded([Run(0, 14, 2)])
    assert rollback.take(0, 1)


def test_rows_of_a_decode_before_the_last_cannot() -> None:
    rollback = after((0, 5), (1, 5))
    rollback.decoded([Run(0, 15, 1)])
    assert not rollback.take(0, 1)
    # Its cell may have been moved without the states of these rows.
    assert not rollback.take(1, 1)


def test_nothing_can_be_given_up_after_a_decode_that_failed() -> None:
    rollback = after((0, 5))
    rollback.begin()
    assert not rollback.take(0, 1)


@pytest.mark.parametrize(
    ("runs", "options", "expected"),
    [
        ([(0, 3), (2, 3)], {}, True),
        ([(0, 3), (1, 2)], {}, False),
        ([(0, 33), (1, 33)], {}, False),
        ([(0, 3), (1, 3)], {"any_order": False}, True),
        ([(0, 3), (2, 3)], {"any_order": False}, False),
        ([(1, 3), (0, 3)], {"any_order": False}, False),
    ],
)
def test_only_rows_of_one_physical_batch_can(
    runs: list[tuple[int, int]], options: dict[str, bool], expected: bool
) -> None:
    assert after(*runs, **options).take(runs[0][0], 1) is expected


def test_a_sequence_is_cut_until_it_is_decoded_or_forgotten() -> None:
    rollback = after((0, 3), (1, 3))
    assert rollback.take(0, 1)
    assert rollback.take(1, 1)
    assert rollback.cut == {0, 1}
    rollback.decoded([Run(0, 12, 1)])
    assert rollback.cut == {1}
    rollback.forget(1)
    assert rollback.cut == set()
    assert not rollback.take(1, 1)
