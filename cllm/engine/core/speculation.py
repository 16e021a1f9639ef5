"""Speculation: drafts of the next tokens, computed together with the token they follow.

A draft is a guess of the next token.  Its row is computed in the same decode as the row before it,
and is sampled from only if that row gave exactly this token.  So each token is chosen as without
drafts, whatever the guesses are.  A wrong draft costs its row.

The number of drafts in a tick is chosen here, for all sequences together, to give the most tokens per
second.  It follows from the probabilities of the drafter and the measured cost of rows (`row_cost`).

Rows of memory with states can be removed only if all sequences had equally many rows in the decode
(`KVCache.rolls_back_alike`).  There, a sequence with too few drafts gets its last token as a draft.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.scheduler import Chunk, is_decoding, seq_id_of
from cllm.engine.core.sequence import Sequence

# Rows of drafts in one tick, at the most.
N_DRAFT_ROWS = 32
# Drafts are computed only if the expected tokens per second rise by this factor.
MARGIN = 1.03
# A draft that is less likely than this is not computed.
MIN_PROBABILITY = 0.05
# Probability that a token which a constraint forces is right: at first, the weight of each result, and
# of the return to the first value.  Forced bytes may also be the text of other tokens.
FORCED_AT_FIRST, FORCED_WEIGHT, FORCED_RECOVERY = 0.95, 0.05, 0.002
# The drafter is used instead of forced tokens if the first of these is less likely than this.
FORCED_MIN = 0.3

Drafts = tuple[int, ...]


class Drafter(Protocol):
    """Source of drafts.  Inference thread only.

    Attributes
    ----------
    step_s : float
        Seconds that it takes to draft one token more, of all sequences together.
    """

    @property
    def step_s(self) -> float: ...

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        """Return, for each of `n_max` drafts at most, the probability that it and all before it are right.

        None of them is larger than the one before it; empty where there is nothing to draft.
        """

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """Return the wanted number of drafts of each sequence, or fewer; called after `expect`, in the same tick."""

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Learn that drafts were computed, of which the first `n_accepted` were right."""


class Speculation(Protocol):
    """Source of drafts for `EngineCore`.  Inference thread only.

    Attributes
    ----------
    has_model : bool
        True if a model computes the drafts.
    """

    @property
    def has_model(self) -> bool: ...

    def extend(
        self, chunks: list[Chunk], n_rows: int, n_outputs: int, target_s: float | None
    ) -> list[Chunk]:
        """Return the chunks of a tick, some of them with drafts.

        Parameters
        ----------
        chunks : list of Chunk
        n_rows, n_outputs : int
            Rows, and output rows, that are left in the batch.
        target_s : float or None
            Longest time of a tick that only decodes, in seconds; None: no limit.
        """

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Learn that the first `n_accepted` of `n_drafted` drafts of a sequence were right."""


@dataclass(slots=True)
class _Offer:
    """Drafts that one sequence could get."""

    index: int  # of its chunk
    probabilities: list[float]
    forced: Drafts


class BudgetedSpeculation:
    """`Speculation` with the number of drafts that gives the most tokens per second.

    Parameters
    ----------
    drafter : Drafter
    row_cost : RowCost
    kv_cache : KVCache
        Only its properties are read.  In the per-sequence layout llama.cpp computes sequences with
        different numbers of rows in several parts, one after another.
    stream_buffer : int
        Deltas that a reader may leave unread.
    """

    def __init__(
        self, drafter: Drafter, row_cost: RowCost, kv_cache: KVCache, *, stream_buffer: int
    ) -> None:
        self._drafter = drafter
        self._row_cost = row_cost
        self._stream_buffer = stream_buffer
        self._n_ctx_seq = kv_cache.n_ctx_seq
        self._kv_unified = kv_cache.kv_unified
        self._n_each = N_DRAFT_ROWS if kv_cache.has_pos_min else kv_cache.n_rollback
        self._alike = kv_cache.rolls_back_alike
        self._forced_share = FORCED_AT_FIRST
        self._forced: set[Sequence] = set()
        self._n_drafts: dict[Sequence, int] = {}  # without those that only fill the batch

    @property
    def has_model(self) -> bool:
        """See `Speculation`."""
        return self._drafter.step_s > 0.0

    def extend(
        self, chunks: list[Chunk], n_rows: int, n_outputs: int, target_s: float | None
    ) -> list[Chunk]:
        """See `Speculation`; a tick with prompts gets no drafts, because rows are not free there."""
        self._forced.clear()
        self._n_drafts.clear()
        n_max, n_each = min(n_rows, n_outputs, N_DRAFT_ROWS), self._n_each
        if n_max <= 0 or not all(is_decoding(chunk) for chunk in chunks):
            return chunks
        if self._alike:
            chunks = sorted(chunks, key=lambda chunk: seq_id_of(chunk.sequence))
            limits = [self._limit(chunk.sequence) for chunk in chunks]
            n_each = min(n_each, n_max // len(chunks), *limits) if self._are_one(chunks) else 0
        offers = [
            o for i, chunk in enumerate(chunks) if (o := self._offer(i, chunk.sequence, n_each))
        ]
        counts = self._choose(len(chunks), offers, n_max, target_s) if offers else []
        if not any(counts):
            return chunks
        wanted = [(o, n) for o, n in zip(offers, counts, strict=True) if n]
        guessed = iter(
            self._drafter.draft([(chunks[o.index].sequence, n) for o, n in wanted if not o.forced])
        )
        extended = list(chunks)
        for offer, n in wanted:
            drafts = offer.forced[:n] if offer.forced else next(guessed)
            if offer.forced:
                self._forced.add(chunks[offer.index].sequence)
            extended[offer.index] = replace(chunks[offer.index], drafts=drafts)
        return self._filled(extended) if self._alike else extended

    def _are_one(self, chunks: list[Chunk]) -> bool:
        """Return True if llama.cpp computes these sequences together.

        In the per-sequence layout, their seq_ids must be consecutive.
        """
        ids = [seq_id_of(chunk.sequence) for chunk in chunks]
        return self._kv_unified or ids[-1] - ids[0] == len(ids) - 1

    def _filled(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return chunks with equally many drafts: last tokens of sequences fill the gaps."""
        n = max(len(chunk.drafts) for chunk in chunks)
        self._n_drafts = {chunk.sequence: len(chunk.drafts) for chunk in chunks}
        return [
            replace(c, drafts=c.drafts + (c.sequence.tokens[-1],) * (n - len(c.drafts)))
            for c in chunks
        ]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """See `Speculation`."""
        n_drafted = self._n_drafts.get(sequence, n_drafted)
        n_accepted = min(n_accepted, n_drafted)
        if not n_drafted:
            return
        if sequence not in self._forced:
            self._drafter.observe(sequence, n_drafted, n_accepted)
            return
        for is_right in verdicts(n_drafted, n_accepted):
            self._forced_share += FORCED_WEIGHT * (is_right - self._forced_share)

    def _limit(self, sequence: Sequence) -> int:
        """Return how many drafts a sequence may have at most."""
        params = sequence.request.params
        limits = [self._n_each, self._n_ctx_seq - len(sequence.tokens)]
        limits.append(self._stream_buffer - sequence.n_unread - 1)
        limits.append(sequence.n_alike - 1)
        if params.max_tokens is not None:
            limits.append(params.max_tokens - sequence.n_output - 1)
        return 0 if params.speculation is False else min(limits)

    def _offer(self, index: int, sequence: Sequence, n_each: int) -> _Offer | None:
        """Return the drafts that a sequence could get, if any."""
        n_max = min(n_each, self._limit(sequence))
        if n_max <= 0:
            return None
        forced, expected = _forced(sequence, n_max), []
        if forced:
            expected = [self._forced_share ** (n + 1) for n in range(len(forced))]
            self._forced_share += FORCED_RECOVERY * (FORCED_AT_FIRST - self._forced_share)
        if not expected or expected[0] < FORCED_MIN:
            forced, expected = (), self._drafter.expect(sequence, n_max)
        likely = [p for p in expected if p >= MIN_PROBABILITY]
        return _Offer(index, likely, forced) if likely else None

    def _choose(
        self, n_decoding: int, offers: list[_Offer], n_max: int, target_s: float | None
    ) -> list[int]:
        """Return the number of drafts of each offer for the most tokens per second; empty for no drafts."""
        best: list[int] = []
        best_rate = MARGIN * n_decoding / self._row_cost.measured(n_decoding)
        step_s = self._drafter.step_s
        ways = _levels if step_s or not self._kv_unified else _one_by_one
        if self._alike:
            ways, n_max = _alike, n_max // n_decoding
        for counts, gain in ways(offers, n_max):
            seconds = self._seconds(n_decoding, counts)
            if step_s:
                guessed = (n for o, n in zip(offers, counts, strict=True) if not o.forced)
                seconds += step_s * max(guessed, default=0)
            if target_s is not None and seconds > target_s:
                break
            if (rate := (n_decoding + gain) / seconds) > best_rate:
                best, best_rate = list(counts), rate
        return best

    def _seconds(self, n_decoding: int, counts: list[int]) -> float:
        """Return the expected seconds of a decode with so many drafts for some of its sequences."""
        if self._alike:
            return self._row_cost.seconds(n_decoding * (1 + max(counts)))
        if self._kv_unified:
            return self._row_cost.seconds(n_decoding + sum(counts))
        # `llama_batch_allocr::split_equal`: equally many rows of each sequence that has any left.
        counts_of_all = [*counts, *[0] * (n_decoding - len(counts))]
        seconds, n_done = 0.0, -1
        for count in sorted(set(counts_of_all)):
            n_sequences = sum(n >= count for n in counts_of_all)
            seconds += self._row_cost.seconds(n_sequences * (count - n_done))
            n_done = count
        return seconds


def verdicts(n_drafted: int, n_accepted: int) -> list[bool]:
    """Return a list: True for each right draft, then one False if a draft was wrong.

    Drafts after the first wrong one are left out, because nothing is known of them.
    """
    return [True] * n_accepted + [False] * (n_accepted < n_drafted)


def _forced(sequence: Sequence, n_max: int) -> Drafts:
    """Return the tokens that the constraint of a sequence forces."""
    if sequence.sampler is None or (constraint := sequence.sampler.constraint) is None:
        return ()
    try:
        return tuple(itertools.islice(constraint.forced(), n_max))
    except Exception:  # a constraint that cannot continue raises again when a token is checked
        return ()


def _one_by_one(offers: list[_Offer], n_max: int) -> Iterator[tuple[list[int], float]]:
    """Yield the number of drafts of each offer, and the expected gain in tokens.

    Each step adds the most likely draft.
    """
    counts, gain = [0] * len(offers), 0.0
    heap = [(-offer.probabilities[0], i) for i, offer in enumerate(offers)]
    heapq.heapify(heap)
    for _ in range(n_max):
        if not heap:
            return
        negative, i = heap[0]
        counts[i] += 1
        gain -= negative
        probabilities = offers[i].probabilities
        if counts[i] < len(probabilities):
            heapq.heapreplace(heap, (-probabilities[counts[i]], i))
        else:
            heapq.heappop(heap)
        yield counts, gain


def _alike(offers: list[_Offer], n_max: int) -> Iterator[tuple[list[int], float]]:
    """Yield the number of drafts of each offer, and the expected gain in tokens.

    Each step adds one draft to every sequence, up to `n_max` for each.
    """
    gain = 0.0
    for level in range(min(n_max, max(len(offer.probabilities) for offer in offers))):
        gain += sum(o.probabilities[level] for o in offers if level < len(o.probabilities))
        yield [min(level + 1, len(offer.probabilities)) for offer in offers], gain


def _levels(offers: list[_Offer], n_max: int) -> Iterator[tuple[list[int], float]]:
    """Yield the number of drafts of each offer, and the expected gain in tokens.

    Each step adds one draft to every offer that has more, up to `n_max` in all.
    """
    counts, gain = [0] * len(offers), 0.0
    for level in range(max(len(offer.probabilities) for offer in offers)):
        more = [i for i, offer in enumerate(offers) if level < len(offer.probabilities)]
        if sum(counts) + len(more) > n_max:
            return
        for i in more:
            counts[i] += 1
            gain += offers[i].probabilities[level]
        yield counts, gain
