"""RowScan: the largest values of a long row, found in one reading of it.

A row is folded into buckets, token `t` into bucket `t mod n_buckets`, and only the maximum of each
bucket is kept.  The k-th largest of these maxima is a cut: at least k tokens reach it, and few others.
Only buckets whose maximum reaches the cut are read again.  Pure.  Usually no array as long as the row
is allocated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Least number of tokens in a bucket; the number of buckets is a power of two.  Smaller buckets mean
# more maxima to sort, larger ones more tokens to read again.  Measured on 152k tokens: 0.16 ms for
# 16 rows, beside the 0.34 ms of reading them.
DEPTH = 32


class RowScan:
    """Scanner of one row after another; each thread needs its own.

    Parameters
    ----------
    n_vocab : int
        Length of every row.

    Attributes
    ----------
    row : ndarray
        float32, shape `(n_vocab,)`, the one that was read last.
    largest : float
        Largest value of `row`; NaN if it contains NaN.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._n_buckets = 1 << max(0, (n_vocab // DEPTH).bit_length() - 1)
        self._depth = n_vocab // self._n_buckets
        self._n_folded = self._depth * self._n_buckets
        self._maxima: NDArray[np.float32] = np.empty(self._n_buckets, np.float32)
        self.row: NDArray[np.float32] = np.empty(0, np.float32)
        self.largest: float = -np.inf

    def read(self, row: NDArray[np.float32]) -> float:
        """Read a row, and return its largest value; NaN if it contains NaN."""
        self.row = row
        np.maximum.reduce(self._folded, axis=0, out=self._maxima)
        self.largest = float(np.maximum.reduce(self._maxima))
        if self._n_folded < self.n_vocab:
            rest = np.maximum.reduce(row[self._n_folded :])
            self.largest = float(np.maximum(self.largest, rest))  # a NaN on either side stays
        return self.largest

    @property
    def _folded(self) -> NDArray[np.float32]:
        return self.row[: self._n_folded].reshape(self._depth, self._n_buckets)

    def at_least(self, k: int) -> NDArray[np.intp] | None:
        """Return the ids, ascending, of at least `k` tokens with the largest values of the row.

        None if `k` is more than half the number of buckets, or fewer than `k` buckets have a value above -inf.
        """
        if k > self._n_buckets // 2:
            return None
        place, maxima = self._n_buckets - k, self._maxima.copy()
        maxima.partition(place)
        cut = float(maxima[place])
        return None if cut == -np.inf else self.above(cut)

    def above(self, cut: float) -> NDArray[np.intp]:
        """Ids, ascending, of the tokens with at least the value `cut`."""
        limit = np.float32(cut)
        # Array methods: numpy's functions of the same names take longer than the work on such small arrays.
        (buckets,) = (self._maxima >= limit).nonzero()
        turns, places = (self._folded.take(buckets, axis=1) >= limit).nonzero()
        ids = turns * self._n_buckets + buckets.take(places)
        if self._n_folded == self.n_vocab:
            return ids
        (rest,) = (self.row[self._n_folded :] >= limit).nonzero()
        return np.concatenate([ids, rest + self._n_folded]) if len(rest) else ids
