"""Embeddings of a fake encoder: the numbers of the rows of an image, as `FakeDecoder` reads them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.engine.media_rows import Spans

N_EMBD = 3


class FakeChunk:
    """An encoded media chunk whose embeddings spell its rows.

    Parameters
    ----------
    row_ids : sequence of int
        Numbers of its rows, of `media_rows.row_ids`.

    Attributes
    ----------
    rows : ndarray
        float32, shape `(n_rows, 3)`: two halves of a row's number, and the number of rows.
    """

    def __init__(self, row_ids: Sequence[int]) -> None:
        words = -1 - np.asarray(row_ids, np.int64)
        n_rows = np.full(len(words), len(words))
        self.rows: NDArray[np.float32] = np.stack(
            [words >> 16, words & 0xFFFF, n_rows], axis=1
        ).astype(np.float32)
        (span,) = Spans.of(row_ids)
        self._is_shifted = span.is_shifted

    def positions(self, p0: int) -> NDArray[np.int32]:
        """Return the positions of its rows after `p0` positions."""
        at = np.arange(p0, p0 + len(self.rows), dtype=np.int32)
        return np.stack([np.full_like(at, p0), at, at, at]) if self._is_shifted else at


def row_ids_of(rows: NDArray[np.float32]) -> tuple[int, ...]:
    """Return the numbers of rows from their embeddings."""
    halves = rows[:, :2].astype(np.int64)
    return tuple((-1 - (halves[:, 0] << 16 | halves[:, 1])).tolist())
