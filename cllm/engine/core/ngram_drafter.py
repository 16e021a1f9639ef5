"""NgramDrafter: drafts the tokens that followed an earlier occurrence of a sequence's last tokens.

Text that is copied, edited, quoted or repeated is found in the prompt or in the output so far.
The probability that such a draft is right depends on the length of the match.  It is learned from
every sampled token, drafted or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import MIN_PROBABILITY, Drafts

# Length of the shortest match that gives drafts.
N_MATCH_MIN = 3
# If the last such place matches fewer tokens than these, an earlier place that matches as many is
# searched, the longer match first.
N_MATCH_LONGER = (12, 6)
TOKEN_BYTES = 4
# First hit rates, for matches of up to 3, 4-7, 8-15, 16-31 tokens, and longer ones.
AT_FIRST = (0.3, 0.5, 0.7, 0.8, 0.9)
# Factor by which each guess reduces the weight of earlier ones: of all sequences, of one sequence.
FORGETTING_ALL, FORGETTING = 0.995, 0.9
# The hit rate of all sequences counts as so many guesses of one sequence.
N_PRIOR = 2.0
N_FIRST = 20.0  # guesses of all sequences that the first hit rates count as


class _Hits:
    """Hit rates of guesses, one for each range of match lengths in `AT_FIRST`; later guesses count more."""

    def __init__(self, forgetting: float, first: float = 0.0) -> None:
        self._forgetting = forgetting
        self.hits: list[float] = [first * share for share in AT_FIRST]
        self.guesses: list[float] = [first for _ in AT_FIRST]

    def add(self, level: int, is_hit: bool) -> None:
        self.hits[level] = self._forgetting * self.hits[level] + is_hit
        self.guesses[level] = self._forgetting * self.guesses[level] + 1


def _level(n_match: int) -> int:
    return min(max(n_match.bit_length() - 2, 0), len(AT_FIRST) - 1)


class NgramMatch:
    """Position where the end of one sequence occurred before.

    Attributes
    ----------
    at : int or None
        Index of the token that followed there; None if the end did not occur before.
    n_match : int
        Number of tokens before it that equal the last tokens of the sequence.
    """

    def __init__(self, all_hits: _Hits) -> None:
        self._all_hits = all_hits
        self._own = _Hits(FORGETTING)
        self._bytes = bytearray()
        self._n_seen = 0
        self.at: int | None = None
        self.n_match: int = 0

    def update(self, tokens: list[int]) -> None:
        """Read the tokens that were added since the last call."""
        n_known, self._n_seen = self._n_seen, len(tokens)
        self._bytes += array("i", tokens[n_known:]).tobytes()
        for token in tokens[n_known:]:
            if self.at is None:
                break
            is_hit = tokens[self.at] == token
            level = _level(self.n_match)
            self._own.add(level, is_hit)
            self._all_hits.add(level, is_hit)
            self.at = self.at + 1 if is_hit else None
            self.n_match += 1
        if self.at is None and n_known < len(tokens):
            self._search(tokens)

    def expect(self, n_max: int) -> list[float]:
        """Return the probability that each of the next drafts, and all before it, are right."""
        expected, probability = [], 1.0
        for n in range(n_max):
            level = _level(self.n_match + n)
            share = self._all_hits.hits[level] / self._all_hits.guesses[level]
            n_own = self._own.guesses[level] + N_PRIOR
            probability *= (self._own.hits[level] + N_PRIOR * share) / n_own
            if probability < MIN_PROBABILITY:
                break
            expected.append(probability)
        return expected

    def drafts(self, tokens: list[int], n: int) -> Drafts:
        """Return the next `n` tokens after the match."""
        assert self.at is not None
        found = tokens[self.at : self.at + n]
        n_tokens = next((i for i, token in enumerate(found) if token < 0), len(found))
        if n_tokens < len(found):  # no output repeats media
            return tuple(found[:n_tokens])
        # A match that overlaps its own end is a period.
        return tuple((found * (n // len(found) + 1))[:n])

    def _search(self, tokens: list[int]) -> None:
        """Find the last earlier place of the last tokens, and set `at` and `n_match` if there is one."""
        place = self._find(N_MATCH_MIN)
        if place is None:
            return
        n_match = self._length(tokens, place)
        for n_tokens in N_MATCH_LONGER:
            if n_match >= n_tokens:
                break
            if (longer := self._find(n_tokens)) is not None:
                place, n_match = longer, self._length(tokens, longer)
                break
        self.at, self.n_match = place, n_match

    def _find(self, n_tokens: int) -> int | None:
        """Return the index after the last earlier place of the last `n_tokens` tokens; None without one."""
        size = TOKEN_BYTES * n_tokens
        if len(self._bytes) <= size:
            return None
        pattern, end = bytes(self._bytes[-size:]), len(self._bytes) - TOKEN_BYTES
        while (found := self._bytes.rfind(pattern, 0, end)) >= 0:
            if found % TOKEN_BYTES == 0:
                return found // TOKEN_BYTES + n_tokens
            end = found + size - 1
        return None

    def _length(self, tokens: list[int], place: int) -> int:
        """Return how many tokens before a position equal those before the end."""
        n_match, n_most = 0, min(place, 1 << len(AT_FIRST))
        while n_match < n_most and tokens[place - 1 - n_match] == tokens[-1 - n_match]:
            n_match += 1
        return n_match


class NgramDrafter:
    """A `Drafter` that looks for the end of a sequence in the sequence itself."""

    step_s: float = 0.0

    def __init__(self) -> None:
        self._all_hits = _Hits(FORGETTING_ALL, N_FIRST)
        self._matches: WeakKeyDictionary[Sequence, NgramMatch] = WeakKeyDictionary()

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        """See `Drafter`."""
        match = self._matches.get(sequence)
        if match is None:
            match = self._matches[sequence] = NgramMatch(self._all_hits)
        match.update(sequence.tokens)
        return [] if match.at is None else match.expect(n_max)

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """See `Drafter`."""
        return [self._matches[sequence].drafts(sequence.tokens, n) for sequence, n in wanted]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Do nothing: the drafter learns from the tokens themselves."""
