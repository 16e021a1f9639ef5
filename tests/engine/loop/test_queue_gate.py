"""The gate: how many requests there are, and when there is room again."""

from __future__ import annotations

import pytest

from cllm import QueueFullError
from cllm.engine.loop.queue_gate import QueueGate


class Gate(QueueGate):
    """A gate with a clock that only the test moves."""

    def __init__(self, *, n_seq_max: int, max_queue: int) -> None:
        self.now = 100.0
        super().__init__(n_seq_max=n_seq_max, max_queue=max_queue, clock=lambda: self.now)

    def retry_after_s(self) -> float:
        with pytest.raises(QueueFullError) as caught:
            self.enter()
        return caught.value.retry_after_s


def test_a_full_queue_says_how_many_wait_and_takes_nobody() -> None:
    gate = Gate(n_seq_max=2, max_queue=3)
    for _ in range(5):
        gate.enter()
    with pytest.raises(QueueFullError, match="3 requests are waiting") as caught:
        gate.enter()
    assert caught.value.n_waiting == 3
    assert gate.n_open == 5
    gate.leave()
    gate.enter()


def test_the_delay_is_the_mean_time_between_two_that_left_lately() -> None:
    gate = Gate(n_seq_max=1, max_queue=1)
    gate.enter()
    gate.enter()
    for seconds in (2.0, 4.0, 6.0):
        gate.now += seconds
        gate.leave()
        gate.enter()
    assert gate.retry_after_s() == pytest.approx(4.0)


def test_idle_time_is_not_service_time() -> None:
    gate = Gate(n_seq_max=1, max_queue=0)
    for _ in range(3):
        gate.now += 3600.0
        gate.enter()
        gate.now += 0.5
        gate.leave()
    gate.enter()
    assert gate.retry_after_s() == pytest.approx(0.5)


def test_a_refused_request_says_nothing_about_service_time() -> None:
    gate = Gate(n_seq_max=2, max_queue=0)
    gate.enter()
    gate.now += 2.0
    gate.enter()
    gate.leave(is_served=False)
    gate.leave()
    gate.enter()
    gate.enter()
    assert gate.retry_after_s() == pytest.approx(2.0)


def test_before_anybody_left_the_delay_is_as_long_as_it_has_taken_so_far() -> None:
    gate = Gate(n_seq_max=1, max_queue=0)
    gate.enter()
    assert gate.retry_after_s() == 1.0
    gate.now += 30.0
    assert gate.retry_after_s() == pytest.approx(30.0)


def test_it_is_empty_without_requests_and_visits() -> None:
    gate, told = QueueGate(n_seq_max=1, max_queue=1), list[str]()
    gate.enter()
    with gate.visit():
        gate.when_empty(lambda: told.append("empty"))
        gate.leave()
        assert told == []
    assert told == ["empty"]
