"""GapBudget: nearly all gaps between tokens stay within the target's tolerance, however they scatter."""

from __future__ import annotations

import math
import random

import pytest

from cllm.engine.core.gap_budget import FIRST_AIM, MIN_SHARE, TOLERANCE, GapBudget

TARGET_S = 0.1
TICK_S = 0.04


def test_without_a_target_texts_get_half_of_the_time() -> None:
    assert GapBudget(None).seconds(0.0, 0.03, 0.05) == 0.03


def test_with_one_they_get_what_the_next_tick_leaves_of_it() -> None:
    budget = GapBudget(TARGET_S)
    assert budget.seconds(0.0, TICK_S, TICK_S) == pytest.approx(FIRST_AIM * TARGET_S - TICK_S)


def test_they_do_not_starve_where_the_streams_alone_exceed_it() -> None:
    assert GapBudget(TARGET_S).seconds(0.0, 0.2, 0.2) == pytest.approx(MIN_SHARE * TARGET_S)


def test_gaps_that_the_streams_alone_make_too_long_say_nothing_of_the_texts() -> None:
    budget = GapBudget(TARGET_S)
    for i in range(100):
        budget.seconds(i * 0.3, 0.3, 0.3)
    budget.pause()
    assert budget.seconds(40.0, TICK_S, TICK_S) == pytest.approx(FIRST_AIM * TARGET_S - TICK_S)


def test_a_pause_is_no_gap() -> None:
    budget = GapBudget(TARGET_S)
    first = budget.seconds(0.0, TICK_S, TICK_S)
    budget.pause()
    assert budget.seconds(100.0, TICK_S, TICK_S) == first


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.2])
def test_one_gap_in_a_hundred_is_late_at_most_and_the_time_is_used(sigma: float) -> None:
    rng, budget, now, gaps = random.Random(1), GapBudget(TARGET_S), 0.0, list[float]()
    for _ in range(20_000):
        batch_s = budget.seconds(now, TICK_S, TICK_S)
        gaps.append((TICK_S + batch_s) * math.exp(rng.gauss(0.0, sigma)))
        now += gaps[-1]
    settled = sorted(gaps[2_000:])
    assert sum(gap > TOLERANCE * TARGET_S for gap in settled) < 0.01 * len(settled)
    assert settled[int(0.995 * len(settled))] > 0.9 * TARGET_S
