"""Interrupter: abort a decode if most of its rows belong to cancelled requests.

An abort ends the whole batch, and the rows of other requests are computed again.  So a decode with other
requests is aborted only if most rows are cancelled, and never twice in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

# An aborted decode of fewer rows would have ended about as soon.
MIN_ROWS = 16


class Abortable(Protocol):
    """The abort flag of a decoder; any thread."""

    def abort(self) -> None: ...
    def allow(self) -> None: ...


class Interrupter:
    """The requests that are being decoded, and the cancelled ones among them."""

    def __init__(self) -> None:
        self._decoder: Abortable | None = None
        self._computing: Abortable | None = None
        self._can_truncate = False
        # Reentrant: a garbage collection inside may drop a stream, which cancels its request.
        self._lock = threading.RLock()
        self._n_rows: Mapping[str, int] = {}
        self._cancelled: set[str] = set()
        self._has_aborted = self._was_aborted = False

    def attach(self, decoder: Abortable, *, can_truncate: bool) -> None:
        """Set the decoder after the model was loaded.  Inference thread, once.

        Parameters
        ----------
        can_truncate : bool
            False for memory that cannot remove part of a sequence.  After an abort, the other requests of
            the batch would have to compute all their tokens again.
        """
        self._decoder = self._computing = decoder
        self._can_truncate = can_truncate

    @property
    def batch(self) -> Mapping[str, int]:
        """Rows of the decode that runs now, by request id; empty between decodes.  Any thread."""
        return self._n_rows

    def begin(self, n_rows: Mapping[str, int], computing: Abortable | None = None) -> None:
        """Record the start of a decode.  Inference thread.

        Parameters
        ----------
        n_rows : mapping of str to int
            Rows in the batch by request id.
        computing : Abortable, optional
            Object that computes the batch, such as an encoder; None: the decoder.
        """
        with self._lock:
            self._was_aborted, self._has_aborted = self._has_aborted, False
            self._n_rows, self._computing = n_rows, computing or self._decoder
            self._present.allow()
            self._consider()

    def end(self) -> None:
        """Record the end of the decode, and reset the abort flag for the next one.  Inference thread."""
        with self._lock:
            self._n_rows = {}
            self._present.allow()
            self._computing = self._decoder

    def note_media(self, digest: bytes) -> None:
        """Note the image or audio that is encoded from now on; empty: none.  Encoder's thread."""

    def cancel(self, request_id: str) -> None:
        """Record that a request is cancelled; this may abort the decode.  Any thread; returns at once."""
        with self._lock:
            self._cancelled.add(request_id)
            self._consider()

    def forget(self, request_id: str) -> None:
        """Record that a cancelled request has ended.  Inference thread."""
        with self._lock:
            self._cancelled.discard(request_id)

    def _consider(self) -> None:
        if not self._cancelled:
            return
        n_lost = sum(self._n_rows.get(request_id, 0) for request_id in self._cancelled)
        n_wanted = sum(self._n_rows.values()) - n_lost
        is_alone = n_wanted == 0
        is_fair = is_alone or (self._can_truncate and not self._was_aborted)
        if n_lost >= MIN_ROWS and n_lost > n_wanted and is_fair and not self._has_aborted:
            self._has_aborted = True
            self._present.abort()

    @property
    def _present(self) -> Abortable:
        assert self._computing is not None
        return self._computing
