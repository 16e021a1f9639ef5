"""Decide, for one tick, who runs and which tokens go into the batch.

Nothing here calls llama.cpp, reads a clock or knows about threads: same input, same plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `n_tokens` pending tokens of one sequence."""

    sequence: Sequence
    n_tokens: int

    @property
    def completes(self) -> bool:
        """Whether nothing is pending after this chunk, so that its last row is sampled."""
        return self.n_tokens == self.sequence.n_pending


def plan(running: Iterable[Sequence], n_rows: int) -> list[Chunk]:
    """Share `n_rows` rows among the running sequences.

    Decoding sequences come first, one row each, so that a prompt never makes them wait.  What is
    left goes to prompts one after another, most urgent first: computing them all at once would
    give each its first token as late as the last.  Chunks are in the order of their seq_ids, which
    lets llama.cpp use its graph again.
    """
    chunks: list[Chunk] = []
    active = (s for s in running if not s.is_paused)
    for sequence in sorted(active, key=lambda s: (s.n_pending > 1, s.urgency)):
        n_tokens = min(sequence.n_pending, n_rows)
        if n_tokens <= 0:
            break
        chunks.append(Chunk(sequence, n_tokens))
        n_rows -= n_tokens
    chunks.sort(key=lambda c: c.sequence.slot.seq_id if c.sequence.slot else -1)
    return chunks


def next_admitted(
    waiting: Iterable[Sequence], running: Iterable[Sequence], n_free_cells: int
) -> Sequence | None:
    """The most urgent waiting sequence, if it may start now.

    It may when the cells suffice for what it and the running ones have pending, and for one more
    token of each: a sequence admitted into less would be preempted again at once.
    """
    first = min((s for s in waiting if not s.is_paused), key=lambda s: s.urgency, default=None)
    if first is None:
        return None
    present = [s for s in running if not s.is_paused]
    n_promised = sum(s.n_pending + 1 for s in present)
    if present and n_free_cells < n_promised + first.n_pending + 1:
        return None
    if n_free_cells < first.n_pending:
        return None
    return first


def choose_preempted(running: Iterable[Sequence]) -> Sequence:
    """Who gives up its cells: a paused sequence, else the least urgent, newest one."""
    return max(running, key=lambda s: (s.is_paused, s.request.priority, s.request.serial))


def n_rows_needed(running: Iterable[Sequence]) -> int:
    """Cells that this tick needs at least: one for every sequence that is decoding."""
    return sum(1 for s in running if not s.is_paused and s.n_pending == 1)
