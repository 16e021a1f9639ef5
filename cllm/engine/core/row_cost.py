"""RowCost: what a decode of r rows costs on this machine, learned from the ticks that decode only.

Kernels take rows in steps (4, 8, 16 at a time), each machine and each weight type its own: the cost
is a table, not a line.  It says how many rows of drafts are worth their time.  Pure: times come in
as numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

# The median of so many ticks: one that the machine disturbed says nothing.
N_KEPT = 7
# The table is made again when a median has moved by this much.
TOLERANCE = 0.01
# What nobody has measured beyond the ends of the table: hopeful, so that it is tried once, and
# then measured.
UNKNOWN_GROWTH = 0.5
N_ROWS_MAX = 4096


class RowCost:
    """Seconds of a decode of so many rows, one for each sequence or several of one.

    Parameters
    ----------
    known : mapping, optional
        Seconds by rows, as `table` has said before: the first tick of as many rows replaces them.
    """

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self._medians = dict(known or {})
        self._recent: dict[int, deque[float]] = {}
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._is_stale = True

    @property
    def table(self) -> dict[int, float]:
        """Seconds by rows, of the numbers that were met: no row more makes a decode shorter."""
        self._fit()
        return dict(zip(self._rows, self._seconds, strict=True))

    def observe(self, n_rows: int, seconds: float) -> None:
        """A decode of so many rows, no prompt's among them, took `seconds`."""
        if seconds <= 0.0 or n_rows > N_ROWS_MAX:
            return
        recent = self._recent.setdefault(n_rows, deque(maxlen=N_KEPT))
        recent.append(seconds)
        median = sorted(recent)[(len(recent) - 1) // 2]
        if abs(median - self._medians.get(n_rows, 0.0)) > TOLERANCE * median:
            self._medians[n_rows] = median
            self._is_stale = True

    def seconds(self, n_rows: int) -> float:
        """What a decode of so many rows is expected to take; of no use before one was measured."""
        self._fit()
        rows, seconds = self._rows, self._seconds
        if not rows:
            return float(n_rows**UNKNOWN_GROWTH)
        i = bisect_left(rows, n_rows)
        if i < len(rows) and rows[i] == n_rows:
            return seconds[i]
        if 0 < i < len(rows):
            share = (n_rows - rows[i - 1]) / (rows[i] - rows[i - 1])
            return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
        end = min(i, len(rows) - 1)
        return float(seconds[end] * (n_rows / rows[end]) ** UNKNOWN_GROWTH)

    def _fit(self) -> None:
        """The nearest table that never falls: neighbours that do are given their mean."""
        if not self._is_stale:
            return
        self._is_stale = False
        blocks: list[tuple[float, int]] = []  # mean, and how many it is the mean of
        self._rows = sorted(self._medians)
        for n_rows in self._rows:
            mean, n = self._medians[n_rows], 1
            while blocks and blocks[-1][0] > mean:
                earlier, n_earlier = blocks.pop()
                mean, n = (mean * n + earlier * n_earlier) / (n + n_earlier), n + n_earlier
            blocks.append((mean, n))
        self._seconds = [mean for mean, n in blocks for _ in range(n)]
