"""The bookkeeping of the KV cache: which seq_id holds how many positions, and which cells they share.

The rows of a sequence are computed in their order, so one number for each seq_id says what it
holds: rows `[0, n_computed)`.  The position of a row in llama.cpp is its index, except behind media
with M-RoPE (`Spans`).  This bookkeeping decides what is decoded next.  llama.cpp's own
positions are only compared with it (`discrepancies`) or, after a failed decode, read back.

Sequences share cells only from position 0 on, so shared cells form a tree.  An `Extent` is a range
of cells with the same holders, and its parent is the range before it.  A slot refers to the extent
of its last position, and holds that extent and its ancestors.

Invariants: a free seq_id is empty; the cells in use, each counted once, never exceed the cells
there are.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from cllm.engine.media_rows import NO_SPANS, Spans


class CacheReader(Protocol):
    """First and last position that llama.cpp holds of a sequence; None if it holds none."""

    def seq_pos_min(self, seq_id: int) -> int | None: ...
    def seq_pos_max(self, seq_id: int) -> int | None: ...


class Extent:
    """Positions `[start, end)` in cells with the same holders: `n_live` live slots, `n_cached` cached ones.

    `reach` estimates the last of its cells: the number of cells in use when it was stored.
    """

    __slots__ = ("end", "n_cached", "n_live", "parent", "reach", "start")

    def __init__(self, parent: Extent | None, start: int, end: int) -> None:
        self.parent: Extent | None = parent
        self.start: int = start
        self.end: int = end
        self.n_live: int = 0
        self.n_cached: int = 0
        self.reach: int = 0


class Slot:
    """One seq_id in use, and the rows `[0, n_computed)` it holds.

    Attributes
    ----------
    is_cached : bool
        True if the prefix cache holds it, not a live request.
    leaf : Extent or None
        Extent of its last row; None while it holds nothing.
    spans : Spans
        Media chunks of its rows.
    """

    __slots__ = ("is_cached", "leaf", "n_computed", "seq_id", "spans")

    def __init__(self, seq_id: int, *, is_cached: bool) -> None:
        self.seq_id: int = seq_id
        self.is_cached: bool = is_cached
        self.n_computed: int = 0
        self.leaf: Extent | None = None
        self.spans: Spans = NO_SPANS

    def extents(self) -> Iterator[Extent]:
        """Yield the extents of the slot, last positions first."""
        extent = self.leaf
        while extent is not None:
            yield extent
            extent = extent.parent

    def __repr__(self) -> str:
        return f"<Slot seq_id={self.seq_id} n_computed={self.n_computed}>"


class KVCache:
    """Bookkeeping of the KV cells of one context.

    Parameters
    ----------
    n_cells : int
        KV cells in all.
    n_seq_ids : int
        seq_ids `0 … n_seq_ids - 1`, for running sequences and cached prefixes.
    n_ctx_seq : int
        Positions that one sequence can have.
    kv_unified : bool
        False: nothing is shared, a copied position takes a cell of its own.
    has_pos_min : bool
        False for memory that forgets positions: recurrent, or a sliding window.
    is_windowed : bool
        True for a sliding window: positions behind it may be gone, in any order.  A sequence can only
        be continued at its end, and so be shared as a whole only.
    n_rollback : int
        Number of positions of the last decode that can be removed from a sequence, if `has_pos_min`
        is False.
    can_copy : bool
        False: no sequence can be copied.  A new one can only take over a finished one's seq_id.

    Attributes
    ----------
    n_used, n_cached : int
        Distinct cells held by live requests, and by the prefix cache; some may be both.
    n_held : int
        Distinct cells held by either.
    """

    def __init__(
        self,
        *,
        n_cells: int,
        n_seq_ids: int,
        n_ctx_seq: int,
        kv_unified: bool = True,
        has_pos_min: bool = True,
        is_windowed: bool = False,
        n_rollback: int = 0,
        can_copy: bool = True,
    ) -> None:
        self.n_cells = n_cells
        self.n_seq_ids = n_seq_ids
        self.n_ctx_seq = n_ctx_seq
        self.kv_unified = kv_unified
        self.has_pos_min = has_pos_min
        self.is_windowed = is_windowed
        self.n_rollback = n_rollback
        self.can_copy = can_copy
        self.clear()

    def clear(self) -> None:
        """Release everything: the context is new."""
        self._free_ids = list(range(self.n_seq_ids))
        self._slots: dict[int, Slot] = {}
        self.n_used: int = 0
        self.n_cached: int = 0
        self.n_held: int = 0

    # --- What there is -----------------------------------------------------------------------
    @property
    def n_free(self) -> int:
        """Number of cells that nothing holds."""
        return self.n_cells - self.n_held

    @property
    def n_available(self) -> int:
        """Number of cells that no live request holds: free, or held by the prefix cache only."""
        return self.n_cells - self.n_used

    @property
    def free_ids(self) -> list[int]:
        """seq_ids that can be opened, in ascending order."""
        return self._free_ids

    @property
    def live_ids(self) -> list[int]:
        """seq_ids of live requests, in ascending order."""
        return sorted(s.seq_id for s in self._slots.values() if not s.is_cached)

    @property
    def slots(self) -> list[Slot]:
        """Slots in use, in ascending order of their seq_ids."""
        return [self._slots[seq_id] for seq_id in sorted(self._slots)]

    @property
    def n_cached_ids(self) -> int:
        """Number of seq_ids that the prefix cache holds."""
        return sum(slot.is_cached for slot in self._slots.values())

    def n_shared_live(self, slot: Slot, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` positions of a slot live requests hold already."""
        return sum(
            min(extent.end, n_tokens) - extent.start
            for extent in slot.extents()
            if extent.n_live and extent.start < n_tokens
        )

    def n_own(self, slot: Slot) -> int:
        """Return the number of positions that no other slot holds."""
        return sum(e.end - e.start for e in slot.extents() if e.n_live + e.n_cached == 1)

    def n_freed_by(self, slots: Iterable[Slot]) -> int:
        """Return the number of cells that live requests would no longer hold without these slots."""
        n_holders = Counter(extent for slot in slots for extent in slot.extents())
        return sum(e.end - e.start for e, n in n_holders.items() if n == e.n_live)

    def holders(self) -> dict[Extent, list[int]]:
        """Return the seq_ids that hold each extent, in ascending order; parents come before children."""
        found: dict[Extent, list[int]] = {}
        for seq_id, slot in sorted(self._slots.items()):
            for extent in reversed(list(slot.extents())):
                found.setdefault(extent, []).append(seq_id)
        return found

    @property
    def n_visited(self) -> int:
        """Estimated number of cells up to the last one in use."""
        slots = self._slots.values()
        return max((e.reach for slot in slots for e in slot.extents()), default=0)

    @property
    def is_recurrent(self) -> bool:
        """True if a sequence has a state, which llama.cpp moves as it computes other sequences."""
        return not self.has_pos_min and not self.is_windowed

    @property
    def shares_cells(self) -> bool:
        """True if sequences can hold the same cells."""
        return self.kv_unified and self.can_copy

    @property
    def rolls_back_alike(self) -> bool:
        """True if rows can be removed only after a decode with equally many rows of all sequences.

        llama.cpp splits other batches: always with states, and with a window in the per-sequence layout.
        """
        return self.is_recurrent or (self.is_windowed and not self.kv_unified)

    # --- What changes ------------------------------------------------------------------------
    def open(self, seq_id: int | None = None, *, is_cached: bool = False) -> Slot:
        """Take a free seq_id, by default the lowest (for the prefix cache the highest); return its slot."""
        if seq_id is None:
            seq_id = self._free_ids[-1 if is_cached else 0]
        self._free_ids.remove(seq_id)
        slot = self._slots[seq_id] = Slot(seq_id, is_cached=is_cached)
        return slot

    def advance(self, slot: Slot, n_tokens: int) -> None:
        """Note that the next `n_tokens` positions of a slot were stored."""
        if n_tokens == 0:
            return
        leaf, start = slot.leaf, slot.n_computed
        if leaf is None or leaf.n_live + leaf.n_cached > 1:
            leaf = slot.leaf = Extent(leaf, start, start)
            self._hold(leaf, slot.is_cached, +1)
        leaf.end = slot.n_computed = start + n_tokens
        self.n_held += n_tokens
        leaf.reach = max(leaf.reach, self.n_held)
        if slot.is_cached:
            self.n_cached += n_tokens
        else:
            self.n_used += n_tokens
        assert slot.n_computed <= self.n_ctx_seq, slot
        assert self.n_held <= self.n_cells, self

    def share(self, source: Slot, slot: Slot, n_tokens: int) -> None:
        """Note that an empty slot now holds the first `n_tokens` positions of `source`, too."""
        assert slot.leaf is None, slot
        assert 0 < n_tokens <= source.n_computed, (source, n_tokens)
        if not self.kv_unified:
            self.advance(slot, n_tokens)
            return
        _merge(source)
        slot.leaf = self._cut(source, n_tokens)
        slot.n_computed = n_tokens
        for extent in slot.extents():
            self._hold(extent, slot.is_cached, +1)

    def truncate(self, slot: Slot, n_tokens: int) -> None:
        """Keep only the first `n_tokens` positions of a slot."""
        if n_tokens >= slot.n_computed:
            return
        kept = self._cut(slot, n_tokens) if n_tokens else None
        for extent in slot.extents():
            if extent is kept:
                break
            self._hold(extent, slot.is_cached, -1)
        slot.leaf, slot.n_computed = kept, n_tokens

    def release(self, slot: Slot) -> int:
        """Free the seq_id of a slot that llama.cpp has emptied; return the number of cells freed."""
        n_held = self.n_held
        self.truncate(slot, 0)
        del self._slots[slot.seq_id]
        insort(self._free_ids, slot.seq_id)
        return n_held - self.n_held

    def set_cached(self, slot: Slot, is_cached: bool) -> None:
        """Hand a slot from a live request to the prefix cache, or back."""
        for extent in slot.extents():
            self._hold(extent, is_cached, +1)
            self._hold(extent, slot.is_cached, -1)
        slot.is_cached = is_cached

    def read_back(self, slot: Slot, reader: CacheReader) -> None:
        """Set the length of a slot to what llama.cpp has kept of it after a failed decode."""
        last = reader.seq_pos_max(slot.seq_id)
        n_computed = slot.spans.n_rows(last, slot.n_computed)
        self.truncate(slot, n_computed)
        self.advance(slot, n_computed - slot.n_computed)

    def _hold(self, extent: Extent, is_cached: bool, change: int) -> None:
        """Add one holder to an extent, or remove one (`change` is 1 or -1), and update the counts."""
        n_cells = extent.end - extent.start
        was_held = extent.n_live + extent.n_cached > 0
        if is_cached:
            before, extent.n_cached = extent.n_cached, extent.n_cached + change
            self.n_cached += ((extent.n_cached > 0) - (before > 0)) * n_cells
        else:
            before, extent.n_live = extent.n_live, extent.n_live + change
            self.n_used += ((extent.n_live > 0) - (before > 0)) * n_cells
        self.n_held += ((extent.n_live + extent.n_cached > 0) - was_held) * n_cells

    def _cut(self, slot: Slot, n_tokens: int) -> Extent:
        """Return the extent of a slot that ends at `n_tokens`, and cut one if needed."""
        for extent in slot.extents():
            if extent.start < n_tokens <= extent.end:
                break
        if n_tokens == extent.end:
            return extent
        head = Extent(extent.parent, extent.start, n_tokens)
        head.n_live, head.n_cached = extent.n_live, extent.n_cached
        head.reach = max(0, extent.reach - (extent.end - n_tokens))
        # The tail stays the object that the leaves of its holders point to.
        extent.parent, extent.start = head, n_tokens
        return head

    # --- Proof -------------------------------------------------------------------------------
    def discrepancies(self, reader: CacheReader) -> list[str]:
        """Return a text for each difference between this bookkeeping and llama.cpp's; empty if they agree."""
        found = []
        for seq_id in range(self.n_seq_ids):
            slot = self._slots.get(seq_id)
            n_computed = slot.n_computed if slot else 0
            first = 0 if n_computed and self.has_pos_min else None
            expected = (first, slot.spans.last_position(n_computed) if slot else None)
            pos_min = reader.seq_pos_min(seq_id) if self.has_pos_min else None
            actual = (pos_min, reader.seq_pos_max(seq_id))
            if actual != expected:
                found.append(
                    f"seq_id {seq_id}: llama.cpp holds positions {actual}, the bookkeeping says {expected}"
                )
        return found + self._miscounts()

    def _miscounts(self) -> list[str]:
        """Return the differences between the counted cells and those of the slots."""
        extents = {e for slot in self._slots.values() for e in slot.extents()}
        sums = [
            ("held", self.n_held, sum(e.end - e.start for e in extents)),
            ("in use", self.n_used, sum(e.end - e.start for e in extents if e.n_live)),
            ("cached", self.n_cached, sum(e.end - e.start for e in extents if e.n_cached)),
        ]
        return [
            f"{n_cells} cells {what}, but the seq_ids hold {n_found}"
            for what, n_cells, n_found in sums
            if n_cells != n_found
        ]

    def __repr__(self) -> str:
        n_used = f"{self.n_used}+{self.n_cached}/{self.n_cells}"
        return f"<KVCache seqs={len(self._slots)}/{self.n_seq_ids} cells={n_used}>"


def _merge(slot: Slot) -> None:
    """Undo cuts that are no longer needed, so that a cached prefix stays in few pieces.

    The holders of an extent are holders of its parent, so equal numbers mean the same slots.
    """
    for extent in slot.extents():
        while (
            (parent := extent.parent) is not None
            and parent.n_live == extent.n_live
            and parent.n_cached == extent.n_cached
        ):
            extent.parent, extent.start = parent.parent, parent.start
            extent.reach = max(extent.reach, parent.reach)
