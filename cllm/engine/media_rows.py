"""Rows of images and audio in a list of tokens, and the positions that they take in llama.cpp.  Pure.

They are computed as one or several *media chunks*: rows of embeddings in place of tokens.  In a list
of tokens each row is a negative number, and the rows of a chunk spell what it is: the number of its
positions, and a hash of its content (30 bits a row).  So equal rows mean equal media, in a running
engine as well as in a file or in another process, and a list of tokens alone says where its chunks are.

Number of a row: `-1 - w`.  Bit 30 of `w` marks the first row of a chunk.  Its low 17 bits are the number
of positions, and bit 17 says that all rows have one time.  All other bits are bits of the hash.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from cllm.engine.media import MAX_ROWS, MIN_ROWS, MediaInput

_FIRST = 1 << 30
_POSITION_BITS = 17
_ONE_TIME = 1 << _POSITION_BITS


class Span(NamedTuple):
    """Rows of one media chunk in a list of tokens.

    Attributes
    ----------
    start, end : int
        Indices `[start, end)` of its rows.
    n_positions : int
        Positions that it takes: as many as rows, or fewer with M-RoPE.
    has_one_time : bool
        True if all its rows have the same time, as with M-RoPE: llama.cpp reports one position for all.
    """

    start: int
    end: int
    n_positions: int
    has_one_time: bool


def row_ids(
    content: bytes, n_rows: int, n_positions: int, *, has_one_time: bool = False
) -> tuple[int, ...]:
    """Return the numbers of the rows of a chunk.

    Parameters
    ----------
    content : bytes
        Everything that its embeddings depend on, besides the projector.
    n_rows : int
        5 to 65,536.
    n_positions : int
        1 to `n_rows`.
    has_one_time : bool
        True if all its rows have the same time.
    """
    assert MIN_ROWS <= n_rows <= MAX_ROWS, n_rows
    assert 1 <= n_positions <= n_rows, n_positions
    head = b"%d %d %d " % (n_rows, n_positions, has_one_time)
    words = np.frombuffer(hashlib.shake_256(head + content).digest(4 * n_rows), "<u4")
    words = (words & (_FIRST - 1)).astype(np.int64)
    shape = n_positions | _ONE_TIME * has_one_time
    words[0] = _FIRST | words[0] & -(_ONE_TIME << 1) | shape
    return tuple((-1 - words).tolist())


def chunk_content(digest: bytes, ordinal: int) -> bytes:
    """Return the `content` of `row_ids` for one chunk of media: its digest, and its number from 0."""
    return digest + ordinal.to_bytes(4, "little")


class Spans:
    """The media chunks in a list of tokens, in order.

    Their rows cannot be separated: sharing, truncation and checkpoints end between chunks (`floor`).
    """

    __slots__ = ("_end", "_ends", "_shifts", "_spans", "_starts")

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = tuple(spans)
        self._starts = [span.start for span in spans]
        self._ends = [span.end for span in spans]
        self._end = self._ends[-1] if spans else 0  # asked of every sequence in every tick
        grown = (span.n_positions - (span.end - span.start) for span in spans)
        self._shifts = [0, *accumulate(grown)]  # positions less rows, after so many chunks

    @classmethod
    def of(cls, tokens: NDArray[np.int32] | Sequence[int]) -> Spans:
        """Return the chunks in a list of tokens."""
        array = np.asarray(tokens, np.int64)
        rows = np.flatnonzero(array < 0)
        if not len(rows):
            return NO_SPANS
        words = -1 - array[rows]
        starts = np.flatnonzero(words & _FIRST)
        # A chunk is followed by another one or by a token.
        last = np.append(starts[1:], len(rows)) - 1
        firsts = words[starts]
        shapes = zip(
            rows[starts].tolist(),
            (rows[last] + 1).tolist(),
            (firsts & _ONE_TIME - 1).tolist(),
            (firsts & _ONE_TIME != 0).tolist(),
            strict=True,
        )
        return cls([Span(*shape) for shape in shapes])

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Span:
        return self._spans[index]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def index_at(self, n: int) -> int | None:
        """Return the number of the chunk that row `n` belongs to, counted from 0; None if it is a token."""
        if n >= self._end:
            return None
        index = bisect_right(self._starts, n) - 1
        return index if index >= 0 and n < self._ends[index] else None

    def n_tokens_from(self, n: int) -> int | None:
        """Return how many tokens follow from `n` on before the next chunk; None if no chunk follows."""
        if n >= self._end:
            return None
        if self.index_at(n) is not None:
            return 0
        index = bisect_left(self._starts, n)
        return self._starts[index] - n

    def floor(self, n: int) -> int:
        """Return the largest number of rows, at most `n`, that does not end inside a chunk."""
        index = self.index_at(n)
        return n if index is None else self._starts[index]

    def ceil(self, n: int) -> int:
        """Return the smallest number of rows, at least `n`, that does not end inside a chunk."""
        index = self.index_at(n)
        return n if index is None or n == self._starts[index] else self._ends[index]

    def position(self, n: int) -> int:
        """Return the position of row `n`; within a chunk with M-RoPE, the one time of all its rows."""
        index = self.index_at(n)
        if index is not None and self._spans[index].has_one_time:
            n = self._starts[index]
        return n + self._shifts[bisect_right(self._ends, n)]

    def last_position(self, n: int) -> int | None:
        """Return the last position that llama.cpp reports for the first `n` rows; None without any."""
        return self.position(n - 1) if n else None

    def n_rows(self, last_position: int | None, n_before: int) -> int:
        """Return how many rows a sequence holds if llama.cpp reports this last position.

        A partly held chunk counts as 0.  A chunk with M-RoPE has one time, so llama.cpp does not tell how
        many of its rows it holds: it counts if the sequence had it before, with `n_before` rows.
        """
        if last_position is None:
            return 0
        index = bisect_right([self.position(start) for start in self._starts], last_position) - 1
        if index >= 0 and self._spans[index].has_one_time:
            span = self._spans[index]
            if last_position < self.position(span.end):
                return span.end if n_before >= span.end else span.start
        return self.floor(last_position + 1 - self._shifts[index + 1])


NO_SPANS = Spans()


class MediaTokens(TypedDict):
    """Fields of `Usage` for the rows of media."""

    n_image_tokens: int
    n_audio_tokens: int


def n_media_tokens(spans: Spans, media: Iterable[MediaInput]) -> MediaTokens:
    """Return the numbers of rows that images and audio have, in the order of the chunks of a prompt."""
    kinds = [each.kind for each in media for _ in range(each.n_chunks)]
    n_rows = {"image": 0, "audio": 0}
    for kind, span in zip(kinds, spans, strict=False):
        n_rows[kind] += span.end - span.start
    return MediaTokens(n_image_tokens=n_rows["image"], n_audio_tokens=n_rows["audio"])
