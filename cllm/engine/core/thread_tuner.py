"""ThreadTuner: chooses the number of compute threads, fewer while other programs use the processors.

llama.cpp's threads wait for each other after every node of a graph.  One thread that has to share its
processor makes all of them wait, often for milliseconds, some hundred times a token.  A processor that
another program uses is therefore better left to it.  Each change is a trial: it is kept only if it helps.
Pure: the module reads no clock and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median

from cllm.engine.core.tick_cost import TickCost

WINDOW_S = 0.25  # between two looks at the processors
PAUSE_S = 1.0  # without work, after which the processors are looked at before the next tick
N_TICKS = 4  # that say whether a change has helped
# Seconds of a second that all compute threads together waited for a processor.  Above this they hinder
# each other, or compete with other programs.
WAITING = 0.25
IDLE = 0.25  # processors; no other program uses all of one
FIRST_HOLD_S, MAX_HOLD_S = 10.0, 80.0  # after a trial that did not help: until the next of its kind
CHANGED = (
    0.5  # processors: other programs use so many more or less, and a failed trial is no evidence
)
SETTLE_S = 3.0  # after a change that helped: until its opposite


class Reason(Enum):
    """A reason to try another number of threads."""

    HINDERED = auto()  # compute threads wait for a processor: try fewer
    IDLE = auto()  # processors are idle: try more
    SHARED = auto()  # every processor is shared: try more, as each thread gets a share of its own


# A change is kept if ticks take at most this part of what they took before.  Where processors are idle, more
# threads need not be faster, for they disturb no other program.
GAINS = {Reason.HINDERED: 0.95, Reason.IDLE: 1.02, Reason.SHARED: 0.9}


@dataclass(frozen=True, slots=True)
class ProcessorLoad:
    """Load of the processors of this process in a period.

    Attributes
    ----------
    waiting : float
        Seconds that compute threads waited for a processor, per second; of all threads together.
    others : float
        Processors that other programs used; 1.0 is all of one.
    idle : float
        Processors that no program used.
    own : float
        Processors that this program used.
    """

    waiting: float
    others: float
    idle: float
    own: float

    @property
    def n_available(self) -> int:
        """Number of processors that other programs did not use, at least 1."""
        return max(1, round(self.idle + self.own))


class ThreadTuner:
    """Chooses the number of compute threads of the next tick.

    Parameters
    ----------
    n_max : int
        The configured number, used on a quiet machine.
    costs : sequence of TickCost
        What ticks of each kind take; their latest observations are compared.
    read_load : callable
        Return the load since its last call; None where the system does not report it.
    count_runnable : callable
        Return the number of other threads of the system that run or are ready to run; it takes up to 2 ms.

    Attributes
    ----------
    n_max : int
    n_threads : int
        Number of compute threads for the next tick.
    """

    def __init__(
        self,
        n_max: int,
        costs: Sequence[TickCost],
        read_load: Callable[[], ProcessorLoad | None],
        count_runnable: Callable[[], int],
    ) -> None:
        self.n_max: int = n_max
        self.n_threads: int = n_max
        self._costs = costs
        self._read_load = read_load
        self._count_runnable = count_runnable
        self._looked_at = float("-inf")
        self._before: tuple[Reason, int, float] | None = (
            None  # of a trial: threads and pace before it
        )
        # What ticks usually took when the trial began.
        self._fits: list[tuple[float, float, float]] = []
        self._hold_s = dict.fromkeys(Reason, FIRST_HOLD_S)
        self._held_until = dict.fromkeys(Reason, float("-inf"))
        self._others_then = dict.fromkeys(Reason, 0.0)  # used by other programs when a trial began

    def resume(self, now: float) -> int:
        """Return the number of threads for the first tick after a time without work."""
        if self.n_max > 1 and now - self._looked_at >= PAUSE_S:
            load = self._look(now)
            if load is not None:
                self._before = None
                self._held_until = dict.fromkeys(Reason, float("-inf"))
                self.n_threads = self.n_max
                # The average is of the past: a program that has just ended is not in the way.
                if load.n_available < self.n_max and self._count_runnable():
                    self.n_threads = load.n_available
            self._forget_ticks()
        return self.n_threads

    def update(self, now: float) -> int:
        """Return the number of threads for the next tick.  Call it after every tick."""
        if self.n_max > 1 and self._n_latest and now - self._looked_at >= WINDOW_S:
            load = self._look(now)
            if self._before is not None:
                self._judge(now)
            else:
                if load is not None:
                    self._consider(load, now)
                self._forget_ticks()
        return self.n_threads

    def _look(self, now: float) -> ProcessorLoad | None:
        self._looked_at = now
        return self._read_load()

    def _consider(self, load: ProcessorLoad, now: float) -> None:
        """Try another number of threads, if the processors suggest one."""
        reason, n_threads = self._suggestion(load)
        n_threads = max(1, min(self.n_max, n_threads))
        is_held = (
            now < self._held_until[reason]
            and abs(load.others - self._others_then[reason]) < CHANGED
        )
        if n_threads != self.n_threads and not is_held:
            self._others_then[reason] = load.others
            self._fits = [cost.coefficients for cost in self._costs]
            self._before = reason, self.n_threads, self._pace()
            self.n_threads = n_threads

    def _suggestion(self, load: ProcessorLoad) -> tuple[Reason, int]:
        n = self.n_threads
        if n > 1 and load.waiting >= WAITING:
            return Reason.HINDERED, min(n - 1, load.n_available)
        if load.idle >= IDLE:
            return Reason.IDLE, n + max(1, int(load.idle))
        return Reason.SHARED, n + (load.waiting >= WAITING)

    def _judge(self, now: float) -> None:
        """Keep the number of threads that is tried, or go back to the one before."""
        if self._before is None or self._n_latest < N_TICKS:
            return
        reason, n_before, pace_before = self._before
        self._before = None
        if self._pace() <= pace_before * GAINS[reason]:
            self._hold_s[reason] = FIRST_HOLD_S
            # Ticks scatter: without this, a change and its opposite may both seem to help.
            opposite = Reason.SHARED if reason is Reason.HINDERED else Reason.HINDERED
            self._held_until[opposite] = now + SETTLE_S
        else:
            self.n_threads = n_before
            self._held_until[reason] = now + self._hold_s[reason]
            self._hold_s[reason] = min(MAX_HOLD_S, 2 * self._hold_s[reason])
        self._forget_ticks()

    def _forget_ticks(self) -> None:
        """Drop the observed ticks, so that only later ones are compared."""
        for cost in self._costs:
            cost.latest.clear()

    @property
    def _n_latest(self) -> int:
        return sum(len(cost.latest) for cost in self._costs)

    def _pace(self) -> float:
        """Return the median time of the latest ticks, relative to the expected time of their shape."""
        return median(
            seconds / max(1e-9, fixed + per_row * n_rows + per_cell * n_cells)
            for cost, (fixed, per_row, per_cell) in zip(self._costs, self._fits, strict=True)
            for n_rows, n_cells, seconds in cost.latest
        )
