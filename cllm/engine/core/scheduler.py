"""Decide, for one tick, which sequences run and which of their tokens go into the batch.

Nothing here calls llama.cpp, reads a clock or knows about threads: same input, same plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cllm.engine.core.sequence import Sequence
from cllm.engine.core.tenants import by_turn, seats, share_without, with_their_seats

# llama.cpp's attention on a CPU computes so many rows together, and what is left over one by one:
# 2,000 tokens beside 4 streams took 15.0 s in batches of 64, and 18.6 s in batches of 68.
ATTENTION_TILE = 64
# A prompt of no more chunks than this is not cut, and whole prompts are computed together up to so
# many chunks at most.
N_CHUNKS_WHOLE = 2
# However many sequences decode, a media chunk advances by so many rows in a tick.
N_MEDIA_LEAST = 2
# A preempted sequence runs again only if all sequences have cells for so many more tokens each.
N_AHEAD_AGAIN = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Next `n_tokens` pending tokens of one sequence, or rows of a media chunk, and drafts after them."""

    sequence: Sequence
    n_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Number of rows of the chunk in the batch."""
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
    them all at once would give each its first token as late as the last.

    `n_prefill_chunk` limits the rows of a long prompt in a tick that another sequence waits for.
    `is_awaited` is True if that sequence is not in `running`.  Other prompts join the first one up to
    `n_together` rows, and up to two such chunks.  A prompt that is scored takes the output rows that
    no other sequence needs.  Chunks are in the order of their seq_ids, which lets llama.cpp use its
    graph again.
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
    if n_rows > 0 and (prompts := prompts_by_turn(sequences, now)):
        n_spare = n_outputs_max - len(ready)
        n_taken = 0
        for sequence in prompts:
            # Each sequence has one output row of its own.
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


def plan_media(
    sequences: Iterable[Sequence], n_free: int, n_rows: int, n_rows_max: int, now: float
) -> Chunk | None:
    """Return the rows of a media chunk that are decoded next; None if there is no room for any.

    Parameters
    ----------
    sequences : iterable of Sequence
        Those whose next rows are of a media chunk that is encoded.  The most urgent one for which there is room is
        served.
    n_free : int
        Number of free cells.
    n_rows : int
        Rows to compute now at most, of a chunk that can be cut.
    n_rows_max : int
        Rows of one decode at most.  A chunk that cannot be cut is decoded whole in any case.
    """
    sequence = most_urgent((s for s in sequences if s.n_whole <= n_free), now)
    if sequence is None:
        return None
    if sequence.n_whole:
        return Chunk(sequence, sequence.n_whole)
    n_left = sequence.n_media_left
    n_tokens = min(n_left, max(n_rows, N_MEDIA_LEAST), n_rows_max, n_free)
    if n_left - n_tokens == 1 and n_tokens > 1:  # a row alone is computed by another method
        n_tokens -= 1
    return Chunk(sequence, n_tokens) if n_tokens > 0 else None


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
        # However many sequences decode, a prompt advances: by the rows that fill up whole tiles.
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
    """Return the sort key of each request id: the smallest of its own and those of its followers."""
    prompts = [s for s in running if not (s.is_paused or s.is_decoding)]
    key = by_turn(prompts, now, prefers_few=True)
    urgencies = {s.request_id: key(s) for s in running}
    for follower in running:
        leader = follower.placement.leader
        if leader is not None and not follower.is_paused:
            leader_id = leader.request_id
            own = urgencies.get(leader_id)
            if own is not None:
                urgencies[leader_id] = min(own, key(follower))
    return urgencies


def prompts_by_turn(running: list[Sequence], now: float) -> list[Sequence]:
    """Return the prompts that are ready, in the order in which `plan` computes them."""
    prompts = [s for s in running if s.is_ready and s.n_pending > 1]
    if len(prompts) > 1:
        urgencies = _with_followers(running, now)
        prompts.sort(key=lambda s: urgencies[s.request_id])
    return prompts


def most_urgent(sequences: Iterable[Sequence], now: float) -> Sequence | None:
    """Return the sequence that is served first; None without any."""
    several = list(sequences)
    return min(several, key=by_turn(several, now), default=None)


def next_admitted(
    waiting: Iterable[Sequence], now: float, running: Collection[Sequence] = (), n_seats: int = 0
) -> Sequence | None:
    """Return the waiting sequence to start next, the most urgent one; None without any.

    Paused sequences, and those whose prefix is being read from a file, are skipped.  `n_seats` is the number
    of seq_ids that requests have, and those in `running` have one.
    """
    able = [s for s in waiting if not (s.is_paused or s.placement.is_loading)]
    satisfied = with_their_seats(able, running, n_seats) if n_seats else ()
    return min(able, key=by_turn(able, now, satisfied), default=None)


def has_room(
    sequence: Sequence, n_new_cells: int, n_available: int, running: Iterable[Sequence]
) -> bool:
    """Return True if a sequence that needs `n_new_cells` may start now.

    The cells must suffice for the pending tokens of all sequences that are not paused, and for some more
    of each.  With fewer cells, it would be preempted again at once.  A sequence alone may fill all cells.
    """
    present = [s for s in running if not s.is_paused]
    if not present:
        return n_new_cells <= n_available
    n_ahead = N_AHEAD_AGAIN if sequence.n_preemptions else 1
    n_promised = sum(s.n_to_compute + n_ahead for s in present)
    return n_promised + n_new_cells + n_ahead <= n_available


def choose_preempted(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt: a paused one, otherwise the least urgent and newest one.

    Among equally urgent ones, it is of the tenant that would still have most sequences for its weight.
    So the oldest of equally urgent sequences that are not paused stays, and can finish.
    """
    several = list(running)
    taken = seats(several)

    def key(s: Sequence) -> tuple[bool, int, float, int]:
        return s.is_paused, s.request.priority, share_without(s, taken), s.request.serial

    return max(several, key=key)


def n_rows_needed(running: Iterable[Sequence]) -> int:
    """Return the number of cells that a tick needs at least: one for each decoding sequence.

    A chunk that is decoded at once needs its cells, too.
    """
    several = list(running)
    n_whole = min((s.n_whole for s in several if s.is_ready and s.n_whole), default=0)
    return sum(1 for s in several if s.is_decoding) + n_whole


def n_rows_wanted(running: Iterable[Sequence], n_rows: int) -> int:
    """Return the number of rows, at most `n_rows`, that a tick would compute with enough cells."""
    return min(n_rows, sum(s.n_pending for s in running if s.is_ready))
