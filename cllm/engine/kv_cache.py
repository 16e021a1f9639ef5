"""The books of the KV cache: which seq_id holds how many positions.

The position of a token is its index in its sequence, so one number for each seq_id says it all:
positions `[0, n_computed)` are in the cache.  These books decide what is decoded next; llama.cpp's
own are only compared with them (`discrepancies`) or, after a failed decode, read back.

Invariants: a free seq_id is empty; seq_ids are handed out lowest first (gaps are expensive in the
per-sequence layout); the cells in use never exceed the cells there are.
"""

from __future__ import annotations

import heapq
from typing import Protocol


class CacheReader(Protocol):
    """What llama.cpp can be asked about its cache."""

    def seq_pos_min(self, seq_id: int) -> int | None: ...
    def seq_pos_max(self, seq_id: int) -> int | None: ...


class Slot:
    """One seq_id in use, and the positions `[0, n_computed)` it holds."""

    __slots__ = ("n_computed", "seq_id")

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.n_computed = 0

    def __repr__(self) -> str:
        return f"<Slot seq_id={self.seq_id} n_computed={self.n_computed}>"


class KVCache:
    """Books for one context.

    Parameters
    ----------
    n_cells : int
        KV cells in all.
    n_seq_max : int
        seq_ids `0 … n_seq_max - 1`.
    n_ctx_seq : int
        Positions that one sequence can have.
    has_pos_min : bool
        False for recurrent memory, which keeps the last position only.
    """

    def __init__(
        self, *, n_cells: int, n_seq_max: int, n_ctx_seq: int, has_pos_min: bool = True
    ) -> None:
        self.n_cells = n_cells
        self.n_seq_max = n_seq_max
        self.n_ctx_seq = n_ctx_seq
        self._has_pos_min = has_pos_min
        self._free_ids = list(range(n_seq_max))
        self._slots: dict[int, Slot] = {}
        self.n_used = 0

    @property
    def n_free(self) -> int:
        """Cells that nothing holds."""
        return self.n_cells - self.n_used

    @property
    def n_free_ids(self) -> int:
        """seq_ids that can be opened."""
        return len(self._free_ids)

    @property
    def n_used_ids(self) -> int:
        """seq_ids in use."""
        return len(self._slots)

    def open(self) -> Slot:
        """Take the lowest free seq_id."""
        slot = Slot(heapq.heappop(self._free_ids))
        self._slots[slot.seq_id] = slot
        return slot

    def advance(self, slot: Slot, n_tokens: int) -> None:
        """A decode has stored the next `n_tokens` positions."""
        slot.n_computed += n_tokens
        self.n_used += n_tokens
        assert slot.n_computed <= self.n_ctx_seq, slot
        assert self.n_used <= self.n_cells, self

    def release(self, slot: Slot) -> int:
        """The seq_id has been emptied; return how many cells that freed."""
        del self._slots[slot.seq_id]
        heapq.heappush(self._free_ids, slot.seq_id)
        n_cells, slot.n_computed = slot.n_computed, 0
        self.n_used -= n_cells
        return n_cells

    def read_back(self, slot: Slot, reader: CacheReader) -> None:
        """After a failed decode: what llama.cpp kept of the sequence is what we have."""
        last = reader.seq_pos_max(slot.seq_id)
        n_computed = 0 if last is None else last + 1
        self.n_used += n_computed - slot.n_computed
        slot.n_computed = n_computed

    def discrepancies(self, reader: CacheReader) -> list[str]:
        """Compare these books with llama.cpp's, seq_id by seq_id; empty means they agree."""
        found = []
        for seq_id in range(self.n_seq_max):
            slot = self._slots.get(seq_id)
            n_computed = slot.n_computed if slot else 0
            first = 0 if n_computed and self._has_pos_min else None
            expected = (first, n_computed - 1 if n_computed else None)
            pos_min = reader.seq_pos_min(seq_id) if self._has_pos_min else None
            actual = (pos_min, reader.seq_pos_max(seq_id))
            if actual != expected:
                found.append(
                    f"seq_id {seq_id}: llama.cpp holds positions {actual}, the books say {expected}"
                )
        n_held = sum(slot.n_computed for slot in self._slots.values())
        if n_held != self.n_used:
            found.append(f"{self.n_used} cells in use, but the seq_ids hold {n_held}")
        return found

    def __repr__(self) -> str:
        return (
            f"<KVCache seqs={len(self._slots)}/{self.n_seq_max} cells={self.n_used}/{self.n_cells}>"
        )
