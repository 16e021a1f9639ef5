"""Constraints that begin after the thought of a model, and a token budget for the thought.  Pure.

A thought is unconstrained, except for its budget.  The end of a thought is recognized in the bytes of
the tokens, because its marker may be one token or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np

from cllm.engine.constraint import Mask, TokenConstraint
from cllm.engine.request import Thinking

SPACE = b" \t\r\n"
MAX_GAP = 4  # bytes of white space between a thought and what comes after it
MAX_LATE = 4  # tokens beyond the budget that complete a character

Spelling = Callable[[int], bytes]


class _State(Enum):
    # No output, white space, or a part of the start marker: a thought or the answer may begin.
    BEFORE = auto()
    THINKING = auto()
    # The end marker is forced: the budget is used up, or the model tried to end the output.
    ENDING = auto()
    GAP = auto()  # white space between the thought and the answer
    AFTER = auto()


class ThinkingFamily:
    """The constraint family of outputs that think.

    Parameters
    ----------
    n_vocab : int
    is_eog : callable
        Returns True for a token that ends an output.
    """

    def __init__(self, n_vocab: int, is_eog: Callable[[int], bool]) -> None:
        self.n_vocab = n_vocab
        self.is_eog = is_eog
        self._going_on: dict[bytes, Mask] = {}

    def going_on(self, text: bytes, spelling: Spelling) -> Mask:
        """Return the tokens whose bytes are a beginning of `text`, or begin with it; cached for each text."""
        mask = self._going_on.get(text)
        if mask is None:
            pieces = map(spelling, range(self.n_vocab))
            fits = [bool(p) and (text.startswith(p) or p.startswith(text)) for p in pieces]
            mask = self._going_on[text] = np.array(fits, np.bool_)
        return mask

    def masks(self, constraints: Sequence[ThinkingConstraint]) -> list[Mask | Exception]:
        """See `ConstraintFamily`; an error of one constraint is that of its own request."""
        return [_mask_of(constraint) for constraint in constraints]


class ThinkingConstraint:
    """`TokenConstraint` that leaves the thought free, and applies another constraint to the answer.

    Parameters
    ----------
    rules : Thinking
    inner : TokenConstraint or None
        Constraint of the answer; None if the answer is free.
    spelling : callable
        Returns the bytes of a token; for a control token that is a marker, its name.
    """

    def __init__(
        self,
        family: ThinkingFamily,
        rules: Thinking,
        inner: TokenConstraint | None,
        spelling: Spelling,
    ) -> None:
        self.family = family
        self._rules = rules
        self._inner = inner
        self._spelling = spelling
        self._tail = b""  # the last bytes of the output, in which a marker may have begun
        self._n_tokens = self._n_forced = self._n_gap = 0
        begins = rules.is_open or not rules.start
        self._state = _State.THINKING if begins else _State.BEFORE
        self._longest = max(map(len, rules.ends))
        self._end_if_over()

    def allows(self, token: int) -> bool:
        """Return True if the output may continue, or end, with this token."""
        match self._state:
            case _State.BEFORE:
                if self._begins_thought(token) or self._inner is None:
                    return True
                # A marker is written whole.
                return not self._has_begun and self._inner.allows(token)
            case _State.THINKING:
                return self._inner is None or not self.family.is_eog(token)
            case _State.ENDING:
                return token == self._rules.ending[self._n_forced]
            case _State.GAP:
                return self._is_gap(token) or self._inner_allows(token)
        return self._inner_allows(token)

    def accept(self, token: int) -> None:
        """Advance the constraint by a token that it allows."""
        match self._state:
            case _State.BEFORE:
                self._begin(token)
            case _State.THINKING:
                self._think(token)
            case _State.ENDING:
                self._n_forced += 1
                if self._n_forced == len(self._rules.ending):
                    self._state = _State.GAP
            case _State.GAP:
                if self._is_gap(token):
                    self._n_gap += len(self._spelling(token))
                else:
                    self._go_on_after(token)
            case _State.AFTER:
                self._go_on_after(token)

    def forced(self) -> Sequence[int]:
        """Return the rest of the end of a cut thought, or the forced tokens of the answer's constraint."""
        if self._state is _State.ENDING:
            return self._rules.ending[self._n_forced :]
        if self._state is _State.AFTER and self._inner is not None:
            return self._inner.forced()
        return ()

    def mask(self) -> Mask | Exception:
        """Return the tokens that may come next, after one was rejected; a thought must then end."""
        if self._state is _State.THINKING:
            left = self._missing()
            if left and (mask := self.family.going_on(left, self._spelling)).any():
                return mask
            # The model tried to end the output without an answer: only the thought ends.
            self._state = _State.ENDING
        if self._state is _State.ENDING:
            forced: Mask = np.zeros(self.family.n_vocab, np.bool_)
            forced[self._rules.ending[self._n_forced]] = True
            return forced
        if self._state is _State.BEFORE and self._has_begun:
            left = self._rules.start[len(self._tail.lstrip(SPACE)) :]
            return self.family.going_on(left, self._spelling)
        assert self._inner is not None
        return self._inner.family.masks([self._inner])[0]

    def close(self) -> None:
        """Free all resources."""
        if self._inner is not None:
            self._inner.close()

    def _inner_allows(self, token: int) -> bool:
        return self._inner is None or self._inner.allows(token)

    def _go_on_after(self, token: int) -> None:
        self._state = _State.AFTER
        if self._inner is not None:
            self._inner.accept(token)

    def _begin(self, token: int) -> None:
        """Begin the output: with a thought, or with the answer."""
        said = (self._tail + self._spelling(token)).lstrip(SPACE)
        is_whole = said.startswith(self._rules.start)
        is_answer = not self._begins_thought(token) or (
            # The token fits both.  A marker that is one token never belongs to an answer.
            self._inner is not None
            and not (is_whole or self._has_begun)
            and self._inner.allows(token)
        )
        if is_answer:
            self._go_on_after(token)
        elif is_whole:
            self._state, self._tail = _State.THINKING, b""
            self._end_if_over()
        else:
            self._tail += self._spelling(token)

    @property
    def _has_begun(self) -> bool:
        """True if the output so far is a part of the start marker."""
        return bool(self._tail.strip(SPACE))

    def _begins_thought(self, token: int) -> bool:
        start, piece = self._rules.start, self._spelling(token)
        if not piece:  # such as an end of generation: it never continues a marker
            return False
        output = self._tail + piece
        said = output.lstrip(SPACE)
        # Some models write white space before the marker.  A constraint has no place for it.
        if not said:
            return self._inner is None and len(output) <= MAX_GAP
        return start.startswith(said) or said.startswith(start)

    def _is_gap(self, token: int) -> bool:
        piece = self._spelling(token)
        return bool(piece) and not piece.strip(SPACE) and self._n_gap + len(piece) <= MAX_GAP

    def _think(self, token: int) -> None:
        self._n_tokens += 1
        self._tail += self._spelling(token)
        if any(end in self._tail for end in self._rules.ends):
            self._state = _State.GAP
            return
        self._tail = self._tail[-self._longest - 4 :]
        self._end_if_over()

    def _end_if_over(self) -> None:
        budget = self._rules.budget
        if self._state is not _State.THINKING or budget is None or self._n_tokens < budget:
            return
        n_late = self._n_tokens - budget
        if n_late < MAX_LATE and not _is_whole(self._tail):
            return
        if n_late < self._longest and self._missing():
            return
        self._state, self._n_forced = _State.ENDING, 0

    def _missing(self) -> bytes:
        """Return the rest of the end marker that the thought's last bytes begin; empty if they begin none."""
        begun = (
            end[n:]
            for end in self._rules.ends
            for n in range(len(end) - 1, 0, -1)
            if self._tail.endswith(end[:n])
        )
        return min(begun, key=len, default=b"")


def _mask_of(constraint: ThinkingConstraint) -> Mask | Exception:
    try:
        return constraint.mask()
    except Exception as error:
        return error


def _is_whole(tail: bytes) -> bool:
    """Return True if bytes do not end inside a character."""
    for n in range(1, min(4, len(tail)) + 1):
        lead = tail[-n]
        if lead & 0xC0 != 0x80:
            return not (
                (lead >= 0xF0 and n < 4) or (lead >= 0xE0 and n < 3) or (lead >= 0xC0 and n < 2)
            )
    return True
