"""RowCost: what a decode of r rows costs on this machine, learned from the ticks that decode only.

Kernels compute rows in steps of 4, 8 or 16, which depend on the machine and on the type of the
weights: the cost is a table, not a line.  `BudgetedSpeculation` uses it to choose the number of
drafts.  Pure: times come in as numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

# A cost is the median of the last so many ticks: one disturbed tick does not count.
N_KEPT = 7
# A number of rows that was measured less often, and seems slow, is assumed to be faster, so that it
# is tried again.
N_TRUSTED = 3
# A median that has changed by less than this part is not updated.
TOLERANCE = 0.01
# Exponent of the assumed cost outside the measured range: less than linear, so that more rows are
# tried once and then measured.
UNKNOWN_GROWTH = 0.5
N_ROWS_MAX = 4096


class RowCost:
    """Learned seconds of a decode by its number of rows.

    Parameters
    ----------
    known : mapping, optional
        Seconds by number of rows, from an earlier `table`.  The first measurement replaces a value.

    Attributes
    ----------
    is_paused : bool
        True while nothing is learned: fewer threads compute than usual.
    """

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self.is_paused = False
        self._medians = dict(known or {})
        self._trusted = set(self._medians)
        self._recent: dict[int, deque[float]] = {}
        self._believed: dict[int, float] | None = None
        self._envelope: dict[int, float] | None = None

    @property
    def table(self) -> dict[int, float]:
        """Seconds by number of rows, for numbers known at the start or measured `N_TRUSTED` times."""
        return {rows: self._medians[rows] for rows in sorted(self._trusted)}

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from the duration of a decode without prompts."""
        if self.is_paused or seconds <= 0.0 or n_rows > N_ROWS_MAX:
            return
        recent = self._recent.setdefault(n_rows, deque(maxlen=N_KEPT))
        recent.append(seconds)
        median = sorted(recent)[(len(recent) - 1) // 2]
        is_new = len(recent) >= N_TRUSTED and n_rows not in self._trusted
        if is_new:
            self._trusted.add(n_rows)
        if is_new or abs(median - self._medians.get(n_rows, 0.0)) > TOLERANCE * median:
            self._medians[n_rows] = median
            self._believed = self._envelope = None

    def measured(self, n_rows: int) -> float:
        """Return the expected seconds of a decode of exactly so many rows.

        A decode of more rows may take less: 15 rows are computed 4 by 4 and one by one, 16 at once.
        """
        return self._at(n_rows, self._belief())

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a decode, at most those of any larger number of rows."""
        if self._envelope is None:
            self._envelope, least = {}, math.inf
            believed = self._belief()
            for rows in sorted(believed, reverse=True):
                least = min(least, believed[rows])
                self._envelope[rows] = least
        return self._at(n_rows, self._envelope)

    def _belief(self) -> dict[int, float]:
        """Return the medians, or lower values where few measurements may have been disturbed."""
        if self._believed is None:
            trusted = self.table
            self._believed = {
                rows: median
                if rows in trusted or not trusted
                else min(median, self._at(rows, trusted))
                for rows, median in self._medians.items()
            }
        return self._believed

    def _at(self, n_rows: int, seconds: Mapping[int, float]) -> float:
        """Return a value of the table, interpolated if needed; not in seconds while the table is empty."""
        if n_rows in seconds:
            return seconds[n_rows]
        if not seconds:
            return float(n_rows**UNKNOWN_GROWTH)
        rows = sorted(seconds)
        i = bisect_left(rows, n_rows)
        if 0 < i < len(rows):
            low, high = rows[i - 1], rows[i]
            share = (n_rows - low) / (high - low)
            return seconds[low] + share * (seconds[high] - seconds[low])
        end = rows[min(i, len(rows) - 1)]
        return float(seconds[end] * (n_rows / end) ** UNKNOWN_GROWTH)
