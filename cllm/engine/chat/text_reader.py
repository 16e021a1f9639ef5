"""TextReader: text that arrives in parts, read by generators that wait for more.  Pure.

A step of a grammar is a generator: it yields where it needs more text, and returns what it read.  What
it decides depends on the text alone, never on how that was cut.
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
# Text that was read is dropped so many characters at a time.
N_DROPPED_AT_ONCE = 4096


class MismatchError(Exception):
    """The text does not match the grammar at this point."""


class EndOfTextError(MismatchError):
    """The text ends inside an element of the grammar."""


class Markers:
    """Strings that are searched for together."""

    def __init__(self, markers: Iterable[str]) -> None:
        # The longest first: one may begin another.
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
        """The first marker in the text, the longest that begins there."""
        return self._whole.search(text, start)

    def may_grow(self, text: str, start: int) -> bool:
        """Return True if more text may complete a longer marker that begins here."""
        n_left = len(text) - start
        return n_left < self.longest and any(
            len(marker) > n_left and text.startswith(marker[:n_left], start)
            for marker in self.markers
        )

    def begun(self, text: str, start: int) -> int:
        """Return the position from which the end of the text may begin a marker; its length if there is none."""
        match = self._begun.search(text, max(start, len(text) - self.longest))
        return len(text) if match is None else match.start()


@lru_cache(256)
def markers_of(*texts: str) -> Markers:
    """`Markers`, made once."""
    return Markers(texts)


class TextReader:
    """Text, how far it has been read, and whether there will be more.

    Attributes
    ----------
    at : int
        Where the next step reads; may be set back to what it was after `hold`.
    is_closed : bool
        No more text will be added.
    """

    def __init__(self) -> None:
        self._text = ""
        self.at: int = 0
        self.is_closed = False
        self._is_held = False
        # While `until` waits and nothing is unread: who is given text, and how a marker begins.
        self._emit: Callable[[str], None] | None = None
        self._first: re.Pattern[str] | None = None

    def has_no_marker(self, text: str, emit: Callable[[str], None]) -> bool:
        """Return True if `until`, which waits for a marker, would pass all of this text to `emit` at once.

        False as well for no text, and where white space at its end may stand before a marker.
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
        """Release the text that has been read."""
        self._is_held = False

    def since(self, at: int) -> str:
        """The text from `at` to here."""
        return self._text[at : self.at]

    def rest(self) -> str:
        """All text that is there."""
        text, self.at = self._text[self.at :], len(self._text)
        return text

    def _more(self) -> Step[None]:
        if self.is_closed:
            raise EndOfTextError
        yield

    def is_at_end(self) -> Step[bool]:
        """True if nothing follows."""
        while self.at == len(self._text):
            if self.is_closed:
                return True
            yield
        return False

    def skip_space(self) -> Step[None]:
        """Spaces, tabs and line ends."""
        while not (yield from self.is_at_end()) and self._text[self.at] in SPACE:
            self.at += 1

    def peek(self) -> Step[str]:
        """The next character; "" at the end."""
        return "" if (yield from self.is_at_end()) else self._text[self.at]

    def accept(self, literal: str) -> Step[bool]:
        """Read the literal if it is next."""
        while True:
            if self._text.startswith(literal, self.at):
                self.at += len(literal)
                return True
            left = self._text[self.at : self.at + len(literal)]
            if not literal.startswith(left) or self.is_closed:
                return False
            yield

    def accept_any(self, literals: Iterable[str]) -> Step[str | None]:
        """Read the first of these that is next."""
        for literal in literals:
            if literal and (yield from self.accept(literal)):
                return literal
        return None

    def accept_behind_space(self, literal: str) -> Step[bool]:
        """Read white space and the literal behind it; neither, if that is not next."""
        at, was_held = self.at, self._is_held
        self._is_held = True
        yield from self.skip_space()
        found = bool(literal) and (yield from self.accept(literal))
        self._is_held = was_held
        if not found:
            self.at = at
        return found

    def is_before(self, literals: Iterable[str]) -> Step[bool]:
        """Return True if one of these is next, behind white space, or nothing is."""
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
        """Text up to the first of some literals, and which; that one is read too.

        Parameters
        ----------
        emit : callable, optional
            Given the text as it comes; then "" is returned for it.
        limit : int, optional
            Characters of text at the most.

        Raises
        ------
        EndOfTextError
            None of them comes.
        MismatchError
            None of them comes within the limit.
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
        """The marker that comes first; None if that is not known yet."""
        match = markers.search(self._text, self.at)
        if match is None or self.is_closed:
            return match
        begins_before = markers.begun(self._text, self.at) < match.start()
        return None if begins_before or markers.may_grow(self._text, match.start()) else match

    def _spend(self, left: int, n: int) -> int:
        """Return the rest of a limit; the position where it is exceeded is independent of the cuts."""
        if n > left:
            self.at += left
            raise MismatchError
        return left - n

    def _read_to(self, end: int, take: Callable[[str], None]) -> None:
        if end > self.at:
            text, self.at = self._text[self.at : end], end
            take(text)

    def json(self, emit: Callable[[str], None]) -> Step[None]:
        """Read one JSON value, and pass it to `emit` as it arrives; line ends inside strings are escaped.

        Raises
        ------
        MismatchError
            It is none, or ends too early.
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
        """One JSON value."""
        parts: list[str] = []
        yield from self.json(parts.append)
        return "".join(parts)


def _give(scanner: JsonScanner, emit: Callable[[str], None]) -> None:
    if piece := scanner.taken():
        emit(piece)
