"""Linger: waits for clients that come straight back, for hardly any of the time; for no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.closed_loop import ClosedLoop
from cllm.engine.core.linger import BUDGET_SHARE, HORIZON_S, MARGIN, Linger


def after(turnarounds: list[float], *, busy_s: float = 1000.0) -> Linger:
    """Knows these, one end a second, and has all the budget there is."""
    linger = Linger()
    linger.on_tick(busy_s)
    for second, turnaround in enumerate(turnarounds):
        linger.on_ends(1, float(second))
        if turnaround < 1.0:
            linger.on_arrival(second + turnaround)
    linger.settle(float(len(turnarounds)))
    return linger


def test_it_waits_as_long_as_most_have_taken_to_come_back() -> None:
    linger = after([0.004, 0.005, 0.006] * 5)
    assert linger.seconds(2, 6, 0.1) == pytest.approx(MARGIN * 0.006)


@pytest.mark.parametrize(
    ("linger", "n_ended", "n_running", "next_tick_s"),
    [
        pytest.param(Linger(), 2, 6, 0.1, id="nothing is known"),
        pytest.param(after([2.0] * 10), 2, 6, 0.1, id="nobody came back"),
        pytest.param(after([0.006, 2.0, 2.0, 2.0] * 5), 2, 6, 0.1, id="few came back"),
        pytest.param(after([0.006] * 9), 0, 6, 0.1, id="nobody has ended"),
        pytest.param(after([0.006] * 9), 2, 6, 0.014, id="the next tick is short"),
        pytest.param(after([0.006] * 9), 1, 60, 0.1, id="many would wait for one"),
        pytest.param(after([0.006] * 9, busy_s=0.7), 2, 6, 0.1, id="the budget is spent"),
    ],
)
def test_it_does_not_wait_where(
    linger: Linger, n_ended: int, n_running: int, next_tick_s: float
) -> None:
    assert linger.seconds(n_ended, n_running, next_tick_s) == 0.0


def test_who_comes_when_nothing_has_ended_has_not_come_back() -> None:
    linger = after([])
    linger.on_ends(1, 1.0)
    for at in (0.5, 1.1, 1.2):
        linger.on_arrival(at)
    linger.settle(2.0)
    assert linger.seconds(1, 1, 1.0) == 0.0


@given(
    ticks=st.lists(
        st.tuples(
            st.floats(0.001, 2.0),
            st.integers(0, 4),
            st.lists(st.floats(0.0, 2 * HORIZON_S), max_size=5),
        ),
        max_size=60,
    )
)
def test_all_waits_together_take_a_hundredth_of_the_time(
    ticks: list[tuple[float, int, list[float]]],
) -> None:
    linger, now, busy_s, waited_s = Linger(), 0.0, 0.0, 0.0
    for seconds, n_ended, turnarounds in ticks:
        now, busy_s = now + seconds, busy_s + seconds
        linger.on_tick(seconds)
        linger.on_ends(n_ended, now)
        wait_s = linger.seconds(n_ended, 4, seconds)
        assert 0.0 <= wait_s <= HORIZON_S
        waited_s += wait_s
        linger.on_wait(wait_s)
        for turnaround in sorted(turnarounds):
            linger.on_arrival(now + turnaround)
        now += max(turnarounds, default=0.0)
        linger.settle(now)
    assert waited_s <= BUDGET_SHARE * busy_s + 1e-9


@pytest.mark.full
def test_clients_in_a_closed_loop_get_their_first_token_sooner_and_no_fewer_tokens() -> None:
    """With the costs of a 0.6B model on two cores, in the real core and a virtual clock."""
    for n_clients in (8, 32):
        at_once, lingering = (
            ClosedLoop(n_clients, 16, turnaround_s=0.008, lingers=lingers).run()
            for lingers in (False, True)
        )
        assert lingering.ttft_p50 < 0.7 * at_once.ttft_p50
        assert lingering.tokens_per_s > 0.99 * at_once.tokens_per_s


def test_clients_who_think_first_lose_nothing() -> None:
    at_once, lingering = (
        ClosedLoop(16, 4, turnaround_s=1.0, lingers=lingers).run() for lingers in (False, True)
    )
    assert lingering == at_once
