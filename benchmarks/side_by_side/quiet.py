"""How busy the machine is besides: a loop that always does the same, timed around what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

N_STEPS, N_LOOPS = 300_000, 5
DISTURBED = 1.25


def spin_s() -> float:
    """Seconds of the loop, the median of some."""
    taken = []
    for _ in range(N_LOOPS):
        started = time.perf_counter()
        for _ in range(N_STEPS):
            pass
        taken.append(time.perf_counter() - started)
    return median(taken)


class Quiet:
    """Compares every loop to the fastest of this run."""

    def __init__(self, spin: Callable[[], float] = spin_s) -> None:
        self._spin = spin
        self._least_s = float("inf")

    def busy(self) -> float:
        """How many times as long as at its fastest the loop takes now; above `DISTURBED`, too long."""
        seconds = self._spin()
        self._least_s = min(self._least_s, seconds)
        return seconds / self._least_s
