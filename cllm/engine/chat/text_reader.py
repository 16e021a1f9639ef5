"""TextReader: text that arrives in parts, read by generators that wait for more.  Pure.

A step of a grammar is a generator: it yields when it needs more text, and returns its result at the end.
The result depends on the text alone, never on how the text was divided into parts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from cllm.engine.chat.json_scanner import JsonScanner, NotJsonError

T = TypeVar("T")
# A step of a grammar: `yield from` it, or resume it whenever text was added.
Step = Generator[None, None, T]

SPACE = " \t\r\n"
# Text that was read is dropped once it has more characters than this.
N_DROPPED_AT_ONCE = 4096


class MismatchError(Exception):
    """The text does not match the grammar at this point."""


class EndOfTextError(MismatchError):
    """The text ends inside an element of the grammar."""


class Markers:
    """Strings that are searched for together."""

    def __init__(self, markers: Iterable[str]) -> None:
        # The longest first: a marker may be a prefix of another.
        self.markers: tuple[str, ...] = tuple(
            sorted({m for m in markers if m}, key=len, reverse=True)
        )
        self.longest: int = max(map(len, self.markers), default=0)
        begun = {m[:n] for m in self.markers for n in range(1, len(m))}
        self._whole = re.compile("|".join(map(re.escape, self.markers)) or "(?!)")
        self.first: re.Pattern[str] = re.compile(
            "|".join({re.escape(m[0]) for m in self.markers}) or "(?!)"
        )
        longest_first = sorted(begun, key=len, reverse=True)
        self._begun = re.compile(rf"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})\Z")

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first marker at or after `start`, the longest if several begin there; None without one."""
        return self._whole.search(text, start)

    def may_grow(self, text: str, start: int) -> bool:
        """Return True if more text may complete a longer marker that begins here."""
        n_left = len(text) - start
        return n_left < self.longest and any(
            len(marker) > n_left and text.startswith(marker[:n_left], start)
            for marker in self.markers
        )

    def begun(self, text: str, start: int) -> int:
        """Return the position of an incomplete marker at the end of the text; `len(text)` if there is none."""
        match = self._begun.search(text, max(start, len(text) - self.longest))
        return len(text) if match is None else match.start()


@lru_cache(256)
def markers_of(*texts: str) -> Markers:
    """Return the `Markers` of these texts; up to 256 are cached."""
    return Markers(texts)


class TextReader:
    """Text, how far it has been read, and whether there will be more.

    Attributes
    ----------
    at : int
        Position from which the next step reads.  After `hold`, it may be set back as far as the position then.
    is_closed : bool
        No more text will be added.
    """

    def __init__(self) -> None:
        self._text = ""
        self.at: int = 0
        self.is_closed = False
        self._is_held = False
        # While `until` waits and all text is read: its `emit`, and the first characters of its markers.
        self._emit: Callable[[str], None] | None = None
        self._first: re.Pattern[str] | None = None

    def has_no_marker(self, text: str, emit: Callable[[str], None]) -> bool:
        """Return True if `until`, which waits for a marker, would pass all of this text to `emit` at once.

        False for an empty text, and for white space at its end, which may precede a marker.
        """
        first = self._first
        return (
            first is not None
            and self._emit == emit
            and text[-1:] not in SPACE
            and first.search(text) is None
        )

    def add(self, text: str) -> None:
        """Add text."""
        if self.at > N_DROPPED_AT_ONCE and not self._is_held:
            self._text, self.at = self._text[self.at :], 0
        self._text += text

    def hold(self) -> int:
        """Keep the text from here on until `release`; returns `at`."""
        self._is_held = True
        return self.at

    def release(self) -> None:
        """Allow text that has been read to be dropped again."""
        self._is_held = False

    def since(self, at: int) -> str:
        """Return the text from position `at` to the current position."""
        return self._text[at : self.at]

    def rest(self) -> str:
        """Read all text that has arrived, and return it."""
        text, self.at = self._text[self.at :], len(self._text)
        return text

    def _more(self) -> Step[None]:
        if self.is_closed:
            raise EndOfTextError
        yield

    def is_at_end(self) -> Step[bool]:
        """Return True if the text ends here; wait until that is known."""
        while self.at == len(self._text):
            if self.is_closed:
                return True
            yield
        return False

    def skip_space(self) -> Step[None]:
        """Read spaces, tabs and line ends."""
        while not (yield from self.is_at_end()) and self._text[self.at] in SPACE:
            self.at += 1

    def peek(self) -> Step[str]:
        """Return the next character without reading it; "" at the end."""
        return "" if (yield from self.is_at_end()) else self._text[self.at]

    def accept(self, literal: str) -> Step[bool]:
        """Read the literal and return True if it is next; otherwise return False."""
        while True:
            if self._text.startswith(literal, self.at):
                self.at += len(literal)
                return True
            left = self._text[self.at : self.at + len(literal)]
            if not literal.startswith(left) or self.is_closed:
                return False
            yield

    def accept_any(self, literals: Iterable[str]) -> Step[str | None]:
        """Read and return the first of these that is next; None if none is."""
        for literal in literals:
            if literal and (yield from self.accept(literal)):
                return literal
        return None

    def accept_behind_space(self, literal: str) -> Step[bool]:
        """Read white space and the literal after it, and return True; otherwise read neither: False."""
        at, was_held = self.at, self._is_held
        self._is_held = True
        yield from self.skip_space()
        found = bool(literal) and (yield from self.accept(literal))
        self._is_held = was_held
        if not found:
            self.at = at
        return found

    def is_before(self, literals: Iterable[str]) -> Step[bool]:
        """Return True if one of these, or the end of the text, is next after white space.  Read nothing."""
        at, was_held = self.at, self._is_held
        self._is_held = True
        yield from self.skip_space()
        found = (yield from self.is_at_end()) or (yield from self.accept_any(literals)) is not None
        self._is_held = was_held
        self.at = at
        return found

    def expect(self, literal: str) -> Step[None]:
        """Read the literal, which must be next.

        Raises
        ------
        MismatchError
        """
        if not (yield from self.accept(literal)):
            raise EndOfTextError if (yield from self.is_at_end()) else MismatchError

    def until(
        self,
        *literals: str,
        emit: Callable[[str], None] | None = None,
        limit: int | None = None,
    ) -> Step[tuple[str, str]]:
        """Read up to and including the first of some literals; return the text before it, and the literal.

        Parameters
        ----------
        emit : callable, optional
            Receives the text before the literal as it arrives; "" is returned instead of it.
        limit : int, optional
            Maximum number of characters before the literal.

        Raises
        ------
        EndOfTextError
            The text ends without any of the literals.
        MismatchError
            The limit is exceeded.
        """
        found, before = markers_of(*literals), list[str]()
        take = before.append if emit is None else emit
        left = sys.maxsize if limit is None else limit
        while (match := self._found(found)) is None:
            safe = len(self._text) if self.is_closed else found.begun(self._text, self.at)
            left = self._spend(left, safe - self.at)
            self._read_to(safe, take)
            if self.at == len(self._text):
                self._emit, self._first = emit, found.first
            yield from self._more()
            self._first = None
        self._spend(left, match.start() - self.at)
        self._read_to(match.start(), take)
        self.at = match.end()
        return "".join(before), match.group()

    def _found(self, markers: Markers) -> re.Match[str] | None:
        """Return the first marker; None if there is none, or more text may change which is the first."""
        match = markers.search(self._text, self.at)
        if match is None or self.is_closed:
            return match
        begins_before = markers.begun(self._text, self.at) < match.start()
        return None if begins_before or markers.may_grow(self._text, match.start()) else match

    def _spend(self, left: int, n: int) -> int:
        """Return `left - n`; if it is negative, read `left` characters and raise `MismatchError`.

        The error's position does not depend on how the text was divided into parts.
        """
        if n > left:
            self.at += left
            raise MismatchError
        return left - n

    def _read_to(self, end: int, take: Callable[[str], None]) -> None:
        if end > self.at:
            text, self.at = self._text[self.at : end], end
            take(text)

    def json(self, emit: Callable[[str], None]) -> Step[None]:
        """Read one JSON value, and pass it to `emit` as it arrives; control characters in strings are escaped.

        Raises
        ------
        MismatchError
            The text is not JSON; `EndOfTextError` if it ends inside the value.
        """
        scanner = JsonScanner()
        while not scanner.is_done:
            try:
                self.at = scanner.scan(self._text, self.at)
            except NotJsonError as error:
                self.at = error.at
                _give(scanner, emit)
                raise MismatchError from None
            _give(scanner, emit)
            if not scanner.is_done and self.is_closed:
                if scanner.ends_here():
                    return
                raise EndOfTextError
            if not scanner.is_done:
                yield

    def json_text(self) -> Step[str]:
        """Read one JSON value, and return its text."""
        parts: list[str] = []
        yield from self.json(parts.append)
        return "".join(parts)


def _give(scanner: JsonScanner, emit: Callable[[str], None]) -> None:
    if piece := scanner.taken():
        emit(piece)
