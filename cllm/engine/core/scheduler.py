"""Decide, for one tick, who runs and which tokens go into the batch.

Nothing here calls llama.cpp, reads a clock or knows about threads: same input, same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cllm.engine.core.sequence import Sequence
from cllm.engine.core.tenants import by_turn, seats, share_without

# llama.cpp's attention on a CPU computes so many rows together, and what is left over one by one:
# 2,000 tokens beside 4 streams took 15.0 s in batches of 64, and 18.6 s in batches of 68.
ATTENTION_TILE = 64
# A prompt of no more chunks than this is not cut, and whole prompts are computed together up to so
# many chunks at most.
N_CHUNKS_WHOLE = 2
# Tokens for which all have room before a sequence that was preempted may run again.
N_AHEAD_AGAIN = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Next `n_tokens` pending tokens of one sequence, and drafts after them."""

    sequence: Sequence
    n_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Rows of the batch."""
        return self.n_tokens + len(self.drafts)

    @property
    def completes(self) -> bool:
        """True if nothing is pending after this chunk, so that its last row is sampled."""
        return self.n_tokens == self.sequence.n_pending

    @property
    def n_outputs(self) -> int:
        """Number of output rows, the last ones of the chunk."""
        return self.sequence.n_outputs(self.n_tokens) + len(self.drafts)


def is_decoding(chunk: Chunk) -> bool:
    """Return whether a chunk is the last token of a sequence, with or without drafts."""
    return chunk.n_tokens == 1 and chunk.completes and chunk.sequence.is_scored


def plan(
    running: Iterable[Sequence],
    n_rows: int,
    n_prompt_rows: int | None = None,
    *,
    n_prefill_chunk: int | None = None,
    n_together: float = math.inf,
    n_outputs_max: int,
    is_awaited: bool = False,
    now: float,
) -> list[Chunk]:
    """Share `n_rows` rows, and `n_outputs_max` output rows, among the running sequences.

    Decoding sequences come first, one row each, so that a prompt never makes them wait.  What is
    left, at most `n_prompt_rows`, goes to prompts one after another, most urgent first: computing
    them all at once would give each its first token as late as the last.  With `n_prefill_chunk`,
    a long prompt gets no more than that of a tick which another sequence waits for; with `is_awaited`
    that is one which is not among the running ones given here.  Other prompts join one in a tick
    up to `n_together` rows, if that is less than two such chunks.  A prompt that is scored takes the
    output rows that no other sequence needs.  Chunks are in the order of their seq_ids, which lets
    llama.cpp use its graph again.
    """
    sequences = list(running)
    ready = [s for s in sequences if s.is_ready]
    n_rows = max(0, n_rows)
    decoding = [s for s in ready if s.is_decoding]
    if len(decoding) > n_rows:
        decoding = sorted(decoding, key=by_turn(decoding, now))[:n_rows]
    chunks = [Chunk(s, 1) for s in decoding]
    n_rows -= len(chunks)
    if n_prompt_rows is not None:
        n_rows = min(n_rows, n_prompt_rows)
    prompts = [s for s in ready if s.n_pending > 1]
    if prompts and n_rows > 0:
        urgencies = _with_followers(sequences, now)
        n_spare = n_outputs_max - len(ready)
        n_taken = 0
        for sequence in sorted(prompts, key=lambda s: urgencies[s.request_id]):
            # One output row is every sequence's own.
            n_tokens = min(sequence.n_next, n_rows, _n_tokens_for(sequence, 1 + n_spare))
            if n_prefill_chunk is not None and (decoding or n_taken or is_awaited):
                n_tokens = _n_polite(
                    n_tokens, sequence, n_prefill_chunk, n_together, len(decoding), n_taken
                )
            if n_tokens <= 0:
                break
            chunks.append(Chunk(sequence, n_tokens))
            n_rows -= n_tokens
            n_taken += n_tokens
            n_spare -= max(0, chunks[-1].n_outputs - 1)
    chunks.sort(key=lambda c: seq_id_of(c.sequence))
    return chunks


def seq_id_of(sequence: Sequence) -> int:
    """Return the seq_id of a sequence; -1 if it does not run."""
    slot = sequence.placement.slot
    return slot.seq_id if slot else -1


def _n_polite(
    n_tokens: int,
    sequence: Sequence,
    n_prefill_chunk: int,
    n_together: float,
    n_decoding: int,
    n_taken: int,
) -> int:
    """Return the number of prompt tokens for a tick that does not delay the decoding sequences too long."""

    def n_left(n_rows: int) -> int:
        # However many decode, a prompt goes on: by as many rows as make whole tiles.
        n_least = -(-(n_decoding + ATTENTION_TILE // 2) // ATTENTION_TILE) * ATTENTION_TILE
        return max(n_rows, n_least) - n_decoding - n_taken

    n_whole = N_CHUNKS_WHOLE * n_prefill_chunk
    is_whole = len(sequence.tokens) <= n_whole and sequence.n_pending <= n_tokens
    if not n_taken:
        return n_tokens if is_whole else min(n_tokens, n_left(n_prefill_chunk))
    if is_whole and sequence.n_pending <= min(n_left(n_whole), n_together - n_taken):
        return n_tokens
    return int(min(n_tokens, n_left(n_prefill_chunk), n_together - n_taken))


def _n_tokens_for(sequence: Sequence, n_outputs: int) -> int:
    """Return the length of the longest chunk with at most so many output rows."""
    return sequence.n_pending - max(0, sequence.n_outputs(sequence.n_pending) - n_outputs)


def _with_followers(running: list[Sequence], now: float) -> Mapping[str, tuple[object, ...]]:
    """Return the sort key of each sequence, or the smallest of those that wait for its tokens."""
    key = by_turn([s for s in running if not (s.is_paused or s.is_decoding)], now)
    urgencies = {s.request_id: key(s) for s in running}
    for follower in running:
        leader = follower.placement.leader
        if leader is not None and not follower.is_paused:
            leader_id = leader.request_id
            own = urgencies.get(leader_id)
            if own is not None:
                urgencies[leader_id] = min(own, key(follower))
    return urgencies


def most_urgent(sequences: Iterable[Sequence], now: float) -> Sequence | None:
    """Return the sequence that is served first."""
    several = list(sequences)
    return min(several, key=by_turn(several, now), default=None)


def next_admitted(waiting: Iterable[Sequence], now: float) -> Sequence | None:
    """Return the waiting sequence to start next: the most urgent; no other overtakes it.

    Whose prefix is being read from a file is not asked yet.
    """
    return most_urgent((s for s in waiting if not (s.is_paused or s.placement.is_loading)), now)


def has_room(
    sequence: Sequence, n_new_cells: int, n_available: int, running: Iterable[Sequence]
) -> bool:
    """Return True if a sequence that needs `n_new_cells` may start now.

    It may when the cells suffice for what it and the running ones have pending, and for some more
    tokens of each: a sequence admitted into less would be preempted again at once.  One alone may
    fill every cell.
    """
    present = [s for s in running if not s.is_paused]
    if not present:
        return n_new_cells <= n_available
    n_ahead = N_AHEAD_AGAIN if sequence.n_preemptions else 1
    n_promised = sum(s.n_to_compute + n_ahead for s in present)
    return n_promised + n_new_cells + n_ahead <= n_available


def choose_preempted(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt: a paused one, otherwise the least urgent and newest one.

    Of several tenants, one of the tenant that would still have most for its weight: the oldest of all
    sequences stays, and comes to its end.
    """
    several = list(running)
    taken = seats(several)

    def key(s: Sequence) -> tuple[bool, int, float, int]:
        return s.is_paused, s.request.priority, share_without(s, taken), s.request.serial

    return max(several, key=key)


def n_rows_needed(running: Iterable[Sequence]) -> int:
    """Cells that this tick needs at least: one for every sequence that is decoding."""
    return sum(1 for s in running if s.is_decoding)


def n_rows_wanted(running: Iterable[Sequence], n_rows: int) -> int:
    """Rows that this tick would compute if there were cells enough."""
    return min(n_rows, sum(s.n_pending for s in running if s.is_ready))
