"""Measure how busy the machine is: a fixed loop is timed around each measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median

# Half a second in loops of about a millisecond: the load of other users of a rented processor
# changes within tenths of a second, so that a shorter measurement is not representative.
N_STEPS, N_LOOPS = 60_000, 500
DISTURBED = 1.25


def spin() -> list[float]:
    """Return the seconds of each of `N_LOOPS` loops."""
    ends = [time.perf_counter()]
    for _ in range(N_LOOPS):
        for _ in range(N_STEPS):
            pass
        ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)]


class Quiet:
    """Compares the duration of loops with the fastest one and with the median of this run."""

    def __init__(self, spin: Callable[[], Sequence[float]] = spin) -> None:
        self._spin = spin
        self._least_s = float("inf")
        self._usual_s: list[float] = []

    def busy(self) -> float:
        """Return the loop's average duration as a multiple of its fastest."""
        loops = self._spin()
        self._least_s = min(self._least_s, *loops)
        self._usual_s.append(fmean(loops))
        return self._usual_s[-1] / self._least_s

    def is_disturbed(self, busy: float) -> bool:
        """True if `busy` is over 1.25 times the median of this run, because some machines are never idle."""
        return busy * self._least_s > DISTURBED * median(self._usual_s)
