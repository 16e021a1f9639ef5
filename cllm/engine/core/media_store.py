"""MediaStore: embeddings of images and audio, from their encoding until requests have computed them.  Pure.

The encoder works elsewhere; each chunk that it has encoded comes back as a `MediaEncoded`.  A request
waits in the queue until the chunks that it cannot share are encoded.  Embeddings are
kept for later requests, least recently used last, up to `n_bytes_max`.  Those that a request still needs
are kept in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.sequence import Sequence
from cllm.engine.media import MediaInput


class EncodedChunk(Protocol):
    """A media chunk and its embeddings.

    Attributes
    ----------
    rows : ndarray
        float32, shape `(n_rows, n_embd)`.
    """

    @property
    def rows(self) -> NDArray[np.float32]: ...

    def positions(self, p0: int) -> NDArray[np.int32]:
        """Return the positions of its rows after `p0` positions: int32 `(n_rows,)` or `(4, n_rows)`."""


class MediaEncoder(Protocol):
    """Encoder of images and audio; no call waits for it.

    Attributes
    ----------
    is_computing : bool
        True while it encodes with the processors of the decodes.
    """

    @property
    def is_computing(self) -> bool: ...

    def encode(self, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        """Encode these chunks, each answered by one `MediaEncoded`."""

    def cancel(self, digest: bytes) -> None:
        """Encode no further chunk of this image or audio; those under way may still be answered."""


ChunkKey = tuple[bytes, int]  # the digest of media, and the number of a chunk


class MediaStore:
    """The embeddings that sequences wait for, and those of earlier requests.

    Parameters
    ----------
    encoder : MediaEncoder
    n_bytes_max : int
        Bytes of embeddings that no request needs.

    Attributes
    ----------
    n_bytes : int
        Bytes of all embeddings.
    """

    def __init__(self, encoder: MediaEncoder, n_bytes_max: int) -> None:
        self._encoder = encoder
        self._n_bytes_max = n_bytes_max
        self._chunks: dict[ChunkKey, EncodedChunk] = {}  # the least recently used first
        self._awaited: set[ChunkKey] = set()
        self._users: dict[Sequence, list[ChunkKey]] = {}
        self.n_bytes: int = 0

    @property
    def is_encoding(self) -> bool:
        """True while media are encoded with the processors of the decodes."""
        return self._encoder.is_computing

    @property
    def has_users(self) -> bool:
        """True if any request has media."""
        return bool(self._users)

    def enter(self, sequence: Sequence) -> None:
        """Take a new sequence; nothing is encoded yet."""
        if sequence.request.media:
            self._users[sequence] = [
                (media.digest, ordinal)
                for media in sequence.request.media
                for ordinal in range(media.n_chunks)
            ]

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; stop encoding what no other one needs."""
        keys = self._users.pop(sequence, ())
        needed = self._needed()
        for digest in {key[0] for key in keys if key in self._awaited and key not in needed}:
            if not any(other == digest for other, _ in needed):
                self._encoder.cancel(digest)
                self._awaited = {key for key in self._awaited if key[0] != digest}
        self._fit()

    def request(self, sequences: Iterable[Sequence]) -> None:
        """Encode what these waiting sequences will need, and set `awaits_media` on those that must wait."""
        if not self._users:
            return
        for sequence in sequences:
            keys = self._users.get(sequence)
            if keys is not None:
                n_shareable = sequence.placement.n_shareable
                missing = [
                    key
                    for key, span in zip(keys, sequence.spans, strict=True)
                    if span.end > n_shareable and key not in self._chunks
                ]
                self._encode(sequence, missing)
                sequence.placement.awaits_media = bool(missing)

    def _encode(self, sequence: Sequence, missing: list[ChunkKey]) -> None:
        new = [key for key in missing if key not in self._awaited]
        for media in sequence.request.media:
            # It may occur twice in a prompt.
            ordinals = sorted({ordinal for digest, ordinal in new if digest == media.digest})
            if ordinals and (media.digest, ordinals[0]) not in self._awaited:
                self._awaited |= {(media.digest, ordinal) for ordinal in ordinals}
                self._encoder.encode(media, tuple(ordinals))

    def next_chunk(self, sequence: Sequence) -> EncodedChunk | None:
        """Return the chunk that has the next row of a sequence; None, and encode it, if it is missing."""
        index = sequence.media_index
        assert index is not None
        key = self._users[sequence][index]
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            self._encode(sequence, [key])
            sequence.placement.awaits_media = True
            return None
        self._chunks[key] = chunk
        return chunk

    def take(self, key: ChunkKey, chunk: EncodedChunk) -> None:
        """Keep a chunk that was encoded, and let the sequences that wait for it look again."""
        self._awaited.discard(key)
        if key not in self._chunks:
            self._chunks[key] = chunk
            self.n_bytes += chunk.rows.nbytes
        for sequence, keys in self._users.items():
            if key in keys:
                sequence.placement.awaits_media = False
        self._fit()

    def users_of(self, key: ChunkKey) -> list[Sequence]:
        """Return the sequences that have not computed this chunk, after it could not be encoded."""
        self._awaited.discard(key)
        return [sequence for sequence in self._users if key in self._needed_by(sequence)]

    def _needed(self) -> set[ChunkKey]:
        """Return the chunks that some sequence has not computed."""
        return {key for sequence in self._users for key in self._needed_by(sequence)}

    def _needed_by(self, sequence: Sequence) -> Iterator[ChunkKey]:
        """Yield the chunks that a sequence has not computed."""
        for key, span in zip(self._users[sequence], sequence.spans, strict=True):
            if sequence.n_computed < span.end:
                yield key

    def _fit(self) -> None:
        """Drop the least recently used chunks that no sequence needs, beyond the limit."""
        if self.n_bytes <= self._n_bytes_max:
            return
        needed = self._needed()
        for key in [key for key in self._chunks if key not in needed]:
            if self.n_bytes <= self._n_bytes_max:
                return
            self.n_bytes -= self._chunks.pop(key).rows.nbytes
