"""Turn the pieces of one output into text that is safe to stream.

Two things make a piece unsafe: it may end inside a UTF-8 character, and it may be the beginning of
a stop string.  Both are held back until the next piece, or `flush`, decides.  Pure: how the bytes
were cut into pieces never changes the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Detokenizer:
    """The text of one output.

    Parameters
    ----------
    stop : sequence of str
    strips_space : bool
        Leave out a space at the very beginning: some vocabularies put one before every text, which
        is not part of it.

    Attributes
    ----------
    stop_match : str or None
        The stop string that ended the text; the first to be complete wins.
    """

    def __init__(self, stop: Sequence[str] = (), *, strips_space: bool = False) -> None:
        self._strips_space = strips_space
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        # Invalid bytes become U+FFFD exactly as `bytes.decode(errors="replace")` makes them.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop_match: str | None = None

    def push(self, piece: bytes) -> str:
        """Add one piece and return the text that can no longer change."""
        if self._strips_space and piece:
            piece, self._strips_space = piece.removeprefix(b" "), False
        return self._take(self._decoder.decode(piece), final=False)

    def flush(self) -> str:
        """End the output, and return the text that was held back."""
        return self._take(self._decoder.decode(b"", final=True), final=True)

    def _take(self, text: str, *, final: bool) -> str:
        if not self._stop:
            return text
        if self.stop_match is not None:
            return ""
        self._held += text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            # The match that ends first wins, as if the text had come one character at a time.
            _, n_safe, self.stop_match = min(matches)
            safe, self._held = self._held[:n_safe], ""
            return safe
        n_safe = len(self._held) - (0 if final else self._n_maybe_stop())
        safe, self._held = self._held[:n_safe], self._held[n_safe:]
        return safe

    def _n_maybe_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for n in range(min(len(self._held), self._longest_stop - 1), 0, -1):
            tail = self._held[-n:]
            if any(stop.startswith(tail) for stop in self._stop):
                return n
        return 0
