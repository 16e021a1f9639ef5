"""Strings that must not occur in an output, even across several tokens.  Pure.

Deltas are held back while their text may be the beginning of such a string.  The last delta with output is
always held back: the rest of its token's text may follow in a later delta.  When a banned string is complete,
the deltas from its first token on are dropped, and that token is excluded at its position.  Where a
constraint allows no other token there, a later token is excluded, or one before.  If the string begins in
text that the reader already has, its first held token is excluded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cllm.engine.output import TokenDelta


@dataclass(frozen=True, slots=True)
class Ban:
    """Occurrence of a banned string in the output.

    Attributes
    ----------
    kept : tuple of TokenDelta
        Held deltas before the banned string.
    rest : tuple of TokenDelta
        Those from its first token on.
    """

    kept: tuple[TokenDelta, ...]
    rest: tuple[TokenDelta, ...]

    def placed(self, n_before: int, forced: Container[int]) -> Ban | None:
        """Return the ban of a later token, or of one before, if a constraint allows no other at its place.

        None if there is no such token.

        Parameters
        ----------
        n_before : int
            Number of tokens of the output before `kept`.
        forced : container of int
            Numbers of tokens before the places at which no other token is allowed.
        """
        kept, rest = [*self.kept], [*self.rest]

        def is_free() -> bool:
            n = n_before + sum(len(delta.token_ids) for delta in kept)
            return n not in forced and bool(rest[0].token_ids)

        while not is_free() and len(rest) > 1:
            kept.append(rest.pop(0))
            # The output of a token may be in a later delta.
            while not _has_output(kept[-1]) and len(rest) > 1:
                kept.append(rest.pop(0))
        if not is_free():
            kept = [*self.kept]
        while not is_free() and kept and kept[-1].token_ids:
            rest = [kept.pop()]
        return Ban(tuple(kept), tuple(rest)) if is_free() else None


class BannedStrings:
    """Banned strings of one output.

    Parameters
    ----------
    strings : sequence of str
        At least one, each with at least one character.
    before : str
        Text of the output before the first delta: a banned string may begin in it.

    Attributes
    ----------
    n_dropped_characters, n_dropped_tokens : int
        Text and tokens that the engine has written, and that the output does not have: `end` has ended it before a
        banned string.
    """

    def __init__(self, strings: Sequence[str], before: str = "") -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings))
        self._before = self._end_of(before)
        self._held: list[TokenDelta] = []
        self._ready: deque[TokenDelta] = deque()
        self._is_over = False
        self.n_dropped_characters: int = 0
        self.n_dropped_tokens: int = 0

    def push(self, delta: TokenDelta) -> Ban | None:
        """Add a delta; return the ban if it completes a banned string.  Otherwise `take` gets safe deltas."""
        if self._is_over:
            self._drop(delta)
            if delta.finish_reason is not None:
                self._ready.append(_without_text(delta))
            return None
        self._held.append(delta)
        n_before = len(self._before)
        text = self._before + "".join(d.text for d in self._held)
        found = [
            (start + len(s), start - n_before)
            for s in self._strings
            if (start := text.find(s, max(0, n_before - len(s) + 1))) >= 0
        ]
        if found:
            _, start = min(found)
            if (ban := self._ban(max(0, start))) is not None:
                self._held = []
                return ban
        is_last = delta.finish_reason is not None
        n_maybe = 0 if is_last or found else self._n_maybe(text)
        self._release(max(0, len(text) - n_before - n_maybe), everything=is_last)
        return None

    def end(self, ban: Ban, delta: TokenDelta) -> None:
        """End the output of a cancelled request before a banned string; its finish reason stays."""
        self._ready += ban.kept
        for dropped in ban.rest:
            if dropped is not delta:
                self._drop(dropped)
        self._is_over = True
        self.push(delta)

    def _drop(self, delta: TokenDelta) -> None:
        self.n_dropped_characters += len(delta.text)
        self.n_dropped_tokens += len(delta.token_ids)

    @property
    def held(self) -> tuple[TokenDelta, ...]:
        """Deltas that the reader has not received."""
        return (*self._ready, *self._held)

    def take(self) -> TokenDelta | None:
        """Return the next delta for the reader; None if there is none yet."""
        return self._ready.popleft() if self._ready else None

    def _ban(self, start: int) -> Ban | None:
        """Return the ban of a string that begins at this place of the held text; None if no token begins there."""
        ends = accumulate(len(d.text) for d in self._held)
        first = next(i for i, end in enumerate(ends) if end > start)
        # The text of a delta may belong to the tokens of earlier deltas without output.
        held = self._held
        while first > 0 and not (held[first].token_ids and _has_output(held[first - 1])):
            first -= 1
        if not self._held[first].token_ids:
            return None
        return Ban(tuple(self._held[:first]), tuple(self._held[first:]))

    @property
    def _n_sure(self) -> int:
        """Return how many held deltas are safe: none of their tokens can begin a banned string."""
        with_output = [i for i, delta in enumerate(self._held) if _has_output(delta)]
        return with_output[-1] if with_output else 0

    def _n_maybe(self, text: str) -> int:
        """Return the length of the longest end of a text with which a banned string begins."""
        return next(
            (
                n
                for n in range(min(len(text), self._longest - 1), 0, -1)
                if any(s.startswith(text[-n:]) for s in self._strings)
            ),
            0,
        )

    def _release(self, n_safe: int, *, everything: bool) -> None:
        """Make the first held deltas ready for `take`: all with `everything`.

        Otherwise those before the last delta with output, if their own text ends within `n_safe` characters.
        """
        ends = accumulate(len(delta.text) for delta in self._held)
        n_released = len(self._held) if everything else sum(end <= n_safe for end in ends)
        if not everything:
            n_released = min(n_released, self._n_sure)
        released = self._held[:n_released]
        self._before = self._end_of(self._before + "".join(delta.text for delta in released))
        self._ready += released
        del self._held[:n_released]

    def _end_of(self, text: str) -> str:
        """Return the end of a text in which a banned string may begin that ends later."""
        return text[max(0, len(text) - self._longest + 1) :]


def _has_output(delta: TokenDelta) -> bool:
    """Return True if a delta has text, reasoning or a part of a tool call."""
    return bool(delta.text or delta.reasoning or delta.tool_calls)


def _without_text(delta: TokenDelta) -> TokenDelta:
    logprobs = None if delta.logprobs is None else ()
    return replace(delta, text="", token_ids=(), logprobs=logprobs)
