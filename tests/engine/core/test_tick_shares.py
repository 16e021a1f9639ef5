"""TickShares: the time of an engine by the shapes of its ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.tick_shares import SHAPES, TickShares, shares_of


@pytest.mark.parametrize(
    ("n_rows", "shape"),
    [(1, "1"), (2, "2"), (3, "4"), (5, "4"), (6, "8"), (11, "8"), (12, "16"), (200, "16")],
)
def test_a_decode_counts_for_the_nearest_number_of_rows(n_rows: int, shape: str) -> None:
    shares = TickShares()
    shares.observe(n_rows, 2.0, has_prompts=False)
    assert shares.seconds == dict.fromkeys(SHAPES, 0.0) | {shape: 2.0}


@pytest.mark.parametrize(("n_rows", "shape"), [(2, "p64"), (127, "p64"), (128, "p256")])
def test_a_tick_with_prompts_counts_as_a_prompt(n_rows: int, shape: str) -> None:
    shares = TickShares()
    shares.observe(n_rows, 0.5, has_prompts=True)
    assert shares.seconds[shape] == 0.5


def test_all_shapes_weigh_the_same_while_nothing_is_known() -> None:
    assert set(shares_of({}).values()) == {1 / len(SHAPES)}


@given(st.dictionaries(st.sampled_from(SHAPES), st.floats(-1e3, 1e6)))
def test_shares_are_a_division_of_the_whole(seconds: dict[str, float]) -> None:
    shares = shares_of(seconds)
    assert tuple(shares) == SHAPES
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0.0
