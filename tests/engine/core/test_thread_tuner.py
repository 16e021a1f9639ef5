"""ThreadTuner computes with fewer threads only while that makes ticks faster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.thread_tuner import (
    FIRST_HOLD_S,
    MAX_HOLD_S,
    N_TICKS,
    PAUSE_S,
    WINDOW_S,
    ProcessorLoad,
    ThreadTuner,
)
from cllm.engine.core.tick_cost import TickCost

QUIET = ProcessorLoad(waiting=0.02, others=0.05, idle=0.0, own=1.95)
ALONE_WITH_ROOM = ProcessorLoad(waiting=0.0, others=0.0, idle=0.9, own=1.1)
CONTENDED = ProcessorLoad(waiting=0.8, others=0.7, idle=0.0, own=1.3)
SHARED = ProcessorLoad(waiting=0.05, others=1.0, idle=0.0, own=1.0)


class Machine:
    """A tuner, the load that it reads, and ticks that take as long as the machine lets them.

    Parameters
    ----------
    n_max : int
    tick_s : callable
        Seconds of a tick with so many threads.
    load : callable
        The load while so many threads compute.
    """

    def __init__(
        self,
        n_max: int,
        tick_s: Callable[[int], float],
        load: Callable[[int], ProcessorLoad | None],
    ) -> None:
        self.cost = TickCost()
        self.tick_s, self.load = tick_s, load
        self.now = 0.0
        self.n_looks = 0
        self.n_runnable = 1
        self.tuner = ThreadTuner(n_max, [self.cost], self._read, lambda: self.n_runnable)

    def _read(self) -> ProcessorLoad | None:
        self.n_looks += 1
        return self.load(self.tuner.n_threads)

    def run(self, seconds: float) -> list[int]:
        """Run ticks for `seconds`; return the number of threads of each tick."""
        used, end = [], self.now + seconds
        while self.now < end:
            n_threads = self.tuner.n_threads
            used.append(n_threads)
            took = self.tick_s(n_threads)
            self.now += took
            self.cost.observe(4, 400, took)
            self.tuner.update(self.now)
        return used

    def pause(self, seconds: float) -> int:
        """Do nothing for `seconds`; return the number of threads of the next tick."""
        self.now += seconds
        return self.tuner.resume(self.now)


def at(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Ticks that take as long as a table says."""
    return seconds.__getitem__


def two(one_thread_s: float, two_threads_s: float) -> Callable[[int], float]:
    """Ticks on two processors."""
    return at({1: one_thread_s, 2: two_threads_s})


def test_a_quiet_machine_computes_with_all_threads_and_tries_nothing() -> None:
    machine = Machine(2, two(0.02, 0.01), lambda n: QUIET)
    assert set(machine.run(60.0)) == {2}


def test_a_busy_neighbour_is_left_a_processor_after_one_window() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: CONTENDED if n == 2 else SHARED)
    used = machine.run(20.0)
    assert used[:2] == [2, 1]
    assert set(used[1:]) == {1}


def test_all_threads_compute_again_when_the_neighbour_has_gone() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: CONTENDED if n == 2 else SHARED)
    machine.run(5.0)
    machine.tick_s, machine.load = two(0.02, 0.01), lambda n: ALONE_WITH_ROOM if n == 1 else QUIET
    machine.run(2 * WINDOW_S)
    assert set(machine.run(60.0)) == {2}


def test_a_change_that_does_not_help_is_undone_and_tried_less_and_less() -> None:
    machine = Machine(2, two(0.02, 0.012), lambda n: CONTENDED)
    used = machine.run(10 * MAX_HOLD_S)
    n_trials = sum(a == 2 and b == 1 for a, b in itertools.pairwise(used))
    # After 10, 20, 40 and then every 80 seconds.
    assert 12 <= n_trials <= 16
    assert used.count(1) < 0.01 * len(used)
    assert machine.tuner.n_threads == 2 or machine.tuner._before is not None


def test_a_trial_that_failed_is_not_repeated_at_once() -> None:
    machine = Machine(2, two(0.02, 0.012), lambda n: CONTENDED)
    machine.run(3 * WINDOW_S)
    assert set(machine.run(FIRST_HOLD_S - 4 * WINDOW_S)) == {2}


def test_threads_that_hinder_each_other_become_fewer_without_another_program() -> None:
    crowded = ProcessorLoad(waiting=0.6, others=0.0, idle=0.0, own=2.0)
    machine = Machine(2, two(0.0005, 0.004), lambda n: crowded if n == 2 else QUIET)
    machine.run(1.0)
    assert set(machine.run(5.0)) == {1}


@pytest.mark.parametrize(("two_threads_s", "n_threads"), [(0.015, 2), (0.4, 1)])
def test_where_every_processor_is_shared_more_threads_are_tried(
    two_threads_s: float, n_threads: int
) -> None:
    shared = ProcessorLoad(waiting=0.6, others=1.5, idle=0.0, own=0.5)
    machine = Machine(2, two(0.03, two_threads_s), lambda n: shared)
    machine.tuner.n_threads = 1
    used = machine.run(60.0)
    assert used.count(n_threads) > 0.8 * len(used)


def test_several_neighbours_take_several_threads_at_once() -> None:
    def load(n: int) -> ProcessorLoad:
        is_crowded = n > 8
        return ProcessorLoad(0.9 if is_crowded else 0.0, 8.0, 0.0, 8.0)

    machine = Machine(16, lambda n: 0.05 if n > 8 else 0.08 / n, load)
    machine.run(3 * WINDOW_S)
    assert machine.tuner.n_threads == 8


def test_never_less_than_one_thread_and_never_more_than_configured() -> None:
    busy = ProcessorLoad(waiting=3.0, others=7.0, idle=0.0, own=1.0)
    machine = Machine(4, lambda n: 0.01 * n, lambda n: busy)
    assert set(machine.run(60.0)) == {4, 2, 1}
    assert machine.tuner.n_threads == 1
    machine.tick_s = lambda n: 0.04 / n
    machine.load = lambda n: ProcessorLoad(0.0, 0.0, 60.0, 4.0)
    machine.run(30.0)
    assert machine.tuner.n_threads == 4


def test_after_a_pause_the_first_tick_leaves_busy_processors_to_others() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: QUIET)
    machine.run(1.0)
    machine.load = lambda n: ProcessorLoad(waiting=0.0, others=1.0, idle=1.0, own=0.0)
    assert machine.pause(PAUSE_S) == 1
    for idle, own in ((2.0, 0.0), (1.0, 1.0), (0.1, 1.8)):
        machine.load = lambda n, idle=idle, own=own: ProcessorLoad(0.0, 0.0, idle, own)  # type: ignore[misc]
        assert machine.pause(PAUSE_S) == 2


def test_a_program_that_has_just_ended_takes_no_thread() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: QUIET)
    machine.run(1.0)
    machine.load = lambda n: ProcessorLoad(0.0, others=1.0, idle=1.0, own=0.0)
    machine.n_runnable = 0
    assert machine.pause(PAUSE_S) == 2


def test_looks_from_outside_do_not_hide_a_pause() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: QUIET)
    machine.run(1.0)
    machine.cost.latest.clear()
    machine.load = lambda n: ProcessorLoad(waiting=0.0, others=1.0, idle=1.0, own=0.0)
    for _ in range(20):  # commands that make no tick
        machine.now += 0.1
        assert machine.tuner.update(machine.now) == 2
    assert machine.pause(0.0) == 1


def test_a_thread_comes_back_however_little_one_of_many_adds() -> None:
    alone = ProcessorLoad(waiting=0.0, others=0.0, idle=1.0, own=15.0)
    machine = Machine(16, lambda n: 0.16 / n, lambda n: alone if n < 16 else QUIET)
    machine.tuner.n_threads = 15
    machine.run(2.0)
    assert machine.tuner.n_threads == 16


def test_a_failed_trial_is_no_evidence_when_other_programs_have_gone() -> None:
    half = ProcessorLoad(waiting=0.0, others=0.7, idle=0.3, own=1.0)
    machine = Machine(2, two(0.014, 0.03), lambda n: half)
    machine.tuner.n_threads = 1
    used = machine.run(200.0)
    assert 2 in used
    machine.tuner.n_threads, machine.tuner._before = 1, None
    machine.tick_s, machine.load = two(0.014, 0.008), lambda n: ALONE_WITH_ROOM
    machine.run(1.0)
    assert machine.tuner.n_threads == 2


def test_a_short_pause_changes_nothing() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: QUIET)
    machine.run(1.0)
    n_looks = machine.n_looks
    machine.load = lambda n: ProcessorLoad(waiting=0.0, others=1.0, idle=1.0, own=0.0)
    assert machine.pause(0.9 * PAUSE_S) == 2
    assert machine.n_looks == n_looks


def test_a_system_that_reports_no_load_keeps_all_threads() -> None:
    machine = Machine(2, two(0.014, 0.4), lambda n: None)
    assert set(machine.run(20.0)) == {2}
    assert machine.pause(PAUSE_S) == 2


def test_one_thread_never_looks() -> None:
    machine = Machine(1, at({1: 0.01}), lambda n: CONTENDED)
    machine.run(5.0)
    machine.pause(PAUSE_S)
    assert machine.n_looks == 0


def test_ticks_of_another_shape_do_not_decide_a_trial() -> None:
    """A prompt takes longer than a row of each stream, whatever the number of threads."""
    machine = Machine(2, two(0.02, 0.012), lambda n: QUIET)
    for n_rows in (4, 64, 4, 64, 8, 256) * 4:
        machine.cost.observe(n_rows, 100 * n_rows, 0.003 * n_rows)
    machine.run(1.0)
    machine.load = lambda n: CONTENDED
    machine.cost.latest.clear()
    machine.cost.observe(4, 400, 0.05)
    machine.now += WINDOW_S
    assert machine.tuner.update(machine.now) == 1
    for _ in range(N_TICKS):  # half as long for each row as the tick before
        machine.cost.observe(256, 25_600, 0.4)
    machine.now += WINDOW_S
    assert machine.tuner.update(machine.now) == 1
    assert machine.tuner._before is None


LOADS = st.builds(ProcessorLoad, *[st.floats(0.0, 8.0)] * 4) | st.none()


@given(
    n_max=st.integers(1, 8),
    steps=st.lists(
        st.tuples(LOADS, st.floats(1e-4, 2.0), st.booleans(), st.integers(0, 9)), max_size=80
    ),
)
def test_the_number_of_threads_is_always_one_that_is_configured(
    n_max: int, steps: list[tuple[ProcessorLoad | None, float, bool, int]]
) -> None:
    machine = Machine(n_max, lambda n: 0.01, lambda n: None)
    for load, seconds, is_pause, n_runnable in steps:
        machine.n_runnable = n_runnable
        machine.load = lambda n, load=load: load  # type: ignore[misc]
        machine.tick_s = lambda n, seconds=seconds: seconds  # type: ignore[misc]
        if is_pause:
            machine.pause(seconds)
        else:
            machine.run(seconds)
        assert 1 <= machine.tuner.n_threads <= n_max


@pytest.mark.parametrize("n_rows", [1, 16])
def test_the_latest_ticks_are_those_since_the_last_look(n_rows: int) -> None:
    machine = Machine(2, two(0.02, 0.01), lambda n: QUIET)
    machine.run(WINDOW_S / 2)
    assert machine.cost.latest
    machine.run(WINDOW_S)
    machine.cost.observe(n_rows, 100, 0.5)
    assert (n_rows, 100, 0.5) in machine.cost.latest
    machine.now += WINDOW_S
    machine.tuner.update(machine.now)
    assert not machine.cost.latest
