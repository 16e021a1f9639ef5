"""Checkpoints: few, where others will want to go on, and never where that gains nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.checkpoints import (
    INTERVAL,
    MIN_GAIN,
    N_REGULAR,
    NEVER,
    OUTPUT_INTERVAL,
    TAIL,
    next_checkpoint,
)


def places(n_prompt: int, n_shared: int = 0, branch_points: tuple[int, ...] = ()) -> list[int]:
    found, at = list[int](), n_shared
    while (at := next_checkpoint(at, n_prompt, branch_points)) != NEVER:
        found.append(at)
    return found


@pytest.mark.parametrize(
    ("n_prompt", "found"),
    [
        (1, []),
        (MIN_GAIN + TAIL - 1, []),  # computed again as fast as looked for
        (MIN_GAIN + TAIL, [MIN_GAIN]),
        (400, [400 - TAIL]),
        (1000, [512, 1000 - TAIL]),
        (8 * 512 + 1, [1024, 2048, 3072, 8 * 512 + 1 - TAIL]),
    ],
)
def test_a_prompt_is_kept_every_so_often_and_near_its_end(n_prompt: int, found: list[int]) -> None:
    assert places(n_prompt) == found


def test_it_is_kept_where_another_has_parted_from_it() -> None:
    assert places(1000, branch_points=(300, 700)) == [300, 512, 700, 1000 - TAIL]
    assert places(1000, n_shared=600, branch_points=(300, 700)) == [700, 1000 - TAIL]


def test_an_output_that_may_go_back_is_kept_every_so_often() -> None:
    def places_of(n_prompt: int, n_tokens: int) -> list[int]:
        found, at = list[int](), 0
        while (at := next_checkpoint(at, n_prompt, n_output_from=n_prompt)) <= n_tokens:
            found.append(at)
        return found

    assert places_of(5, 200) == [OUTPUT_INTERVAL, 2 * OUTPUT_INTERVAL, 3 * OUTPUT_INTERVAL]
    assert places_of(400, 500) == [400 - TAIL, 7 * OUTPUT_INTERVAL]


@given(st.integers(1, 1 << 18), st.integers(0, 1 << 18))
def test_places_are_few_and_nobody_computes_much_that_was_computed(
    n_prompt: int, n_shared: int
) -> None:
    found = places(n_prompt, n_shared)
    assert found == sorted(set(found))
    assert len(found) <= N_REGULAR + 1
    gaps = [
        b - a for a, b in zip([n_shared, *found], [*found, max(n_shared, n_prompt)], strict=True)
    ]
    assert max(gaps) <= max(INTERVAL, 2 * n_prompt / N_REGULAR) + MIN_GAIN + TAIL
