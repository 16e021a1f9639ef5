"""Decide which requests fail after a failed decode: as few as possible.  Pure: `engine_core` acts on it.

After a first fatal failure the context is recreated and every sequence is computed again; no request
fails.  The batch is halved until one sequence fails alone, if it fails again or llama.cpp refused it.
A sequence that was alone by chance is tried once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from enum import Enum, auto

from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence


class Verdict(Enum):
    """Decision after a failed decode."""

    REBUILD = auto()
    """Recreate the context and compute every sequence again."""
    BISECT = auto()
    """Decode parts of the batch separately; `Recovery.restrict` returns the next part."""
    END = auto()
    """The only sequence of the batch has failed alone: it is the culprit."""


class Recovery:
    """Memory of failures, until everything that failed has been computed."""

    def __init__(self) -> None:
        # Number of computed tokens at which the failure of each sequence is over.
        self._marks: dict[Sequence, int] = {}
        # Groups of failed sequences to decode apart from all others, the next group first.
        self._groups: list[list[Sequence]] = []

    @property
    def is_over(self) -> bool:
        """True if everything that failed has since been computed or has ended."""
        return not self._marks

    def restrict(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the running sequences that may be in the next batch."""
        sequences = list(running)
        while self._groups:
            group = [s for s in self._groups[0] if s in sequences and s.is_ready]
            if group:
                return group
            # The whole group was computed, ended, preempted or paused: do not wait for it.
            del self._groups[0]
        return sequences

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence whose request has ended."""
        self._marks.pop(sequence, None)

    def on_success(self) -> None:
        """Forget the failures that a computed batch has got past; call after the bookkeeping is updated."""
        if self._marks:
            self._marks = {s: mark for s, mark in self._marks.items() if s.n_computed < mark}
            self._groups = [[s for s in group if s in self._marks] for group in self._groups]

    def on_failure(self, chunks: SequenceOf[Chunk], *, is_fatal: bool) -> Verdict:
        """Return what to do after a batch of these chunks failed; `is_fatal` if the context may be damaged."""
        batch = [c.sequence for c in chunks]
        is_again = any(s in self._marks for s in batch)
        for chunk in chunks:
            mark = chunk.sequence.n_computed + chunk.n_tokens
            self._marks[chunk.sequence] = max(mark, self._marks.get(chunk.sequence, 0))
        if is_fatal and not is_again:
            return Verdict.REBUILD
        if len(batch) == 1 and self._groups[:1] == [batch]:
            return Verdict.END
        self._groups = [[s for s in group if s not in batch] for group in self._groups]
        middle = (len(batch) + 1) // 2
        self._groups[:0] = [batch[:middle], batch[middle:]]
        return Verdict.BISECT
