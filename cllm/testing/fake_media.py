"""FakeMediaEncoder: images and audio without a projector.

The embeddings are the numbers of its rows, as `FakeDecoder` reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.commands import MediaEncoded, MediaMeasured
from cllm.engine.media import MIN_ROWS, MediaInput, MediaPiece, Shape, kind_of
from cllm.engine.media_rows import Spans, chunk_content, row_ids
from cllm.engine.thread.backend import Work

PATCH = 32  # pixels of a side of the square that becomes a row
SAMPLE_RATE = 16_000
N_SAMPLES = 1_600  # that become a row: 0.1 s


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
        self._has_one_time = span.has_one_time

    def positions(self, p0: int) -> NDArray[np.int32]:
        """Return the positions of its rows after `p0` positions."""
        at = np.arange(p0, p0 + len(self.rows), dtype=np.int32)
        return np.stack([np.full_like(at, p0), at, at, at]) if self._has_one_time else at


def row_ids_of(rows: NDArray[np.float32]) -> tuple[int, ...]:
    """Return the numbers of rows from their embeddings."""
    halves = rows[:, :2].astype(np.int64)
    return tuple((-1 - (halves[:, 0] << 16 | halves[:, 1])).tolist())


class FakeMediaEncoder:
    """An encoder that has encoded an image or audio as soon as it is asked.

    An image has a row for each 32 × 32 pixels, audio one for each 1,600 samples; each has at least 5.

    Attributes
    ----------
    n_encoded : int
        Number of images and recordings that were encoded; those that were shared do not count.
    is_computing : bool
        False: an encode takes no time.
    """

    is_computing: bool = False

    def __init__(self) -> None:
        self.n_encoded: int = 0
        self._post: Callable[[MediaEncoded], object] = lambda encoded: None

    def start(
        self,
        post: Callable[[MediaEncoded | MediaMeasured], object],
        note: Callable[[bytes], object],
    ) -> None:
        """Call `post` with each chunk that is encoded from now on; `note` is never called."""
        self._post = post

    def layout(self, shape: Shape) -> tuple[MediaPiece, ...]:
        """Return the one chunk of an image or audio of this shape."""
        side = PATCH if kind_of(shape) == "image" else N_SAMPLES
        n_rows = max(MIN_ROWS, math.prod(-(-length // side) for length in shape))
        return (MediaPiece(n_rows=n_rows, n_positions=n_rows),)

    def encode(self, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        """Answer with the rows."""
        (piece,) = self.layout(media.shape)
        rows = row_ids(chunk_content(media.digest, 0), piece.n_rows, piece.n_positions)
        self.n_encoded += 1
        self._post(MediaEncoded(media.digest, 0, FakeChunk(rows)))

    def cancel(self, digest: bytes) -> None:
        """Do nothing: everything is encoded at once."""

    def forget(self, shape: Shape) -> None:
        """Do nothing: a layout is known at once."""

    def pause(self, work: Work) -> None:
        """Do nothing: an encode takes no time."""

    def resume(self) -> None:
        """Do nothing: an encode takes no time."""
