"""The bookkeeping of the KV cache, against lists of cells, through any mix of what can happen."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.engine.core.kv_cache import KVCache, Slot
from tests.conftest import examples

DETERMINISTIC = examples(200, stateful_step_count=50)


class Reader:
    """What llama.cpp would say: how many positions, from 0 on, each seq_id has."""

    def __init__(self, held: dict[int, int]) -> None:
        self.held = held

    def seq_pos_min(self, seq_id: int) -> int | None:
        return 0 if self.held.get(seq_id) else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self.held[seq_id] - 1 if self.held.get(seq_id) else None


class LastPositionOnly(Reader):
    """Recurrent memory: its first position is its last."""

    def seq_pos_min(self, seq_id: int) -> int | None:
        return self.seq_pos_max(seq_id)


class KVCacheMachine(RuleBasedStateMachine):
    """Each seq_id in use has a list of cell numbers; every sum is the size of a set of them."""

    @initialize(
        n_seq_ids=st.integers(2, 6),
        n_ctx_seq=st.integers(2, 12),
        n_shares=st.integers(1, 6),
        kv_unified=st.sampled_from([True, True, True, False]),
    )
    def make(self, n_seq_ids: int, n_ctx_seq: int, n_shares: int, kv_unified: bool) -> None:
        self.kv_cache = KVCache(
            n_cells=n_ctx_seq * min(n_shares, n_seq_ids),
            n_seq_ids=n_seq_ids,
            n_ctx_seq=n_ctx_seq,
            kv_unified=kv_unified,
        )
        self.slots: dict[int, Slot] = {}
        self.cells: dict[int, list[int]] = {}
        self.cached: set[int] = set()
        self.n_cells_made = 0

    # --- The model ---------------------------------------------------------------------------
    def new_cells(self, n_cells: int) -> list[int]:
        self.n_cells_made += n_cells
        return list(range(self.n_cells_made - n_cells, self.n_cells_made))

    def held_by(self, seq_ids: set[int]) -> set[int]:
        return {cell for seq_id in seq_ids for cell in self.cells[seq_id]}

    @property
    def live(self) -> set[int]:
        return set(self.slots) - self.cached

    @property
    def n_free(self) -> int:
        return self.kv_cache.n_cells - len(self.held_by(set(self.slots)))

    @property
    def free_ids(self) -> list[int]:
        return sorted(set(range(self.kv_cache.n_seq_ids)) - set(self.slots))

    @property
    def reader(self) -> Reader:
        return Reader({seq_id: len(cells) for seq_id, cells in self.cells.items()})

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.slots)))

    # --- What can happen ---------------------------------------------------------------------
    @precondition(lambda self: self.free_ids)
    @rule(data=st.data(), is_given=st.booleans(), is_cached=st.booleans())
    def open(self, data: st.DataObject, is_given: bool, is_cached: bool) -> None:
        given = data.draw(st.sampled_from(self.free_ids)) if is_given else None
        seq_id = self.opened(given, is_cached)
        self.advance_by(data, seq_id)

    def opened(self, given: int | None, is_cached: bool) -> int:
        """By default the lowest free seq_id, the highest for the prefix cache."""
        expected = max(self.free_ids) if is_cached else min(self.free_ids)
        slot = self.kv_cache.open(given, is_cached=is_cached)
        assert slot.seq_id == (expected if given is None else given)
        self.slots[slot.seq_id], self.cells[slot.seq_id] = slot, []
        if is_cached:
            self.cached.add(slot.seq_id)
        return slot.seq_id

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        self.advance_by(data, self.some(data))

    def advance_by(self, data: st.DataObject, seq_id: int) -> None:
        room = min(self.kv_cache.n_ctx_seq - len(self.cells[seq_id]), self.n_free)
        n_tokens = data.draw(st.integers(0, room))
        self.kv_cache.advance(self.slots[seq_id], n_tokens)
        self.cells[seq_id] += self.new_cells(n_tokens)

    @precondition(lambda self: self.free_ids and any(self.cells.values()))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.share_into(data, True)

    @precondition(lambda self: self.free_ids and any(self.cells.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.share_into(data, False)

    def share_into(self, data: st.DataObject, is_cached: bool) -> None:
        """A seq_id opened just now, from any other, any number of positions."""
        source = data.draw(st.sampled_from([s for s, cells in self.cells.items() if cells]))
        n_most = len(self.cells[source])
        if not self.kv_cache.kv_unified:
            n_most = min(n_most, self.n_free)
        if not n_most:
            return
        n_tokens = data.draw(st.integers(1, n_most))
        seq_id = self.opened(None, is_cached)
        self.kv_cache.share(self.slots[source], self.slots[seq_id], n_tokens)
        self.cells[seq_id] = (
            self.cells[source][:n_tokens] if self.kv_cache.kv_unified else self.new_cells(n_tokens)
        )

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq_id = self.some(data)
        n_tokens = data.draw(st.integers(0, len(self.cells[seq_id]) + 1))
        self.kv_cache.truncate(self.slots[seq_id], n_tokens)
        del self.cells[seq_id][n_tokens:]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), is_cached=st.booleans())
    def set_cached(self, data: st.DataObject, is_cached: bool) -> None:
        seq_id = self.some(data)
        self.kv_cache.set_cached(self.slots[seq_id], is_cached)
        (self.cached.add if is_cached else self.cached.discard)(seq_id)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def read_back_after_a_failed_decode(self, data: st.DataObject) -> None:
        seq_id = self.some(data)
        n_held = len(self.cells[seq_id])
        n_kept = data.draw(st.integers(0, min(self.kv_cache.n_ctx_seq, n_held + self.n_free)))
        self.kv_cache.read_back(self.slots[seq_id], Reader({seq_id: n_kept}))
        del self.cells[seq_id][n_kept:]
        self.cells[seq_id] += self.new_cells(n_kept - len(self.cells[seq_id]))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id, n_free = self.some(data), self.n_free
        slot = self.slots.pop(seq_id)
        self.cached.discard(seq_id)
        del self.cells[seq_id]
        assert self.kv_cache.release(slot) == self.n_free - n_free, (
            "it tells how many cells it freed"
        )
        assert slot.n_computed == 0

    @precondition(lambda self: len(self.slots) > 3)
    @rule(is_meant=st.sampled_from([False] * 40 + [True]))
    def clear(self, is_meant: bool) -> None:
        if is_meant:
            self.kv_cache.clear()
            self.slots, self.cells, self.cached = {}, {}, set()

    # --- What must hold then -----------------------------------------------------------------
    @invariant()
    def every_sum_is_the_size_of_a_set_of_cells(self) -> None:
        kv_cache = self.kv_cache
        assert kv_cache.n_used == len(self.held_by(self.live)) <= kv_cache.n_cells
        assert kv_cache.n_cached == len(self.held_by(self.cached))
        assert kv_cache.n_free == self.n_free >= 0
        assert kv_cache.n_available == kv_cache.n_cells - len(self.held_by(self.live))

    @invariant()
    def the_seq_ids_are_what_was_opened(self) -> None:
        kv_cache = self.kv_cache
        assert kv_cache.free_ids == self.free_ids
        assert kv_cache.live_ids == sorted(self.live)
        assert (len(kv_cache.live_ids), kv_cache.n_cached_ids) == (len(self.live), len(self.cached))

    @invariant()
    def every_slot_knows_what_it_shares(self) -> None:
        live = self.held_by(self.live)
        for seq_id, slot in self.slots.items():
            cells = self.cells[seq_id]
            assert (slot.seq_id, slot.is_cached) == (seq_id, seq_id in self.cached)
            assert slot.n_computed == len(cells)
            assert sum(e.end - e.start for e in slot.extents()) == len(cells)
            others = self.held_by(set(self.slots) - {seq_id})
            assert self.kv_cache.n_own(slot) == len(set(cells) - others)
            if seq_id in self.live:
                kept = self.held_by(self.live - {seq_id})
                assert self.kv_cache.n_freed_by([slot]) == len(set(cells) - kept)
            for n_tokens in range(len(cells) + 2):
                n_shared = sum(cell in live for cell in cells[:n_tokens])
                assert self.kv_cache.n_shared_live(slot, n_tokens) == n_shared

    @invariant()
    def the_books_agree_with_this_reader_and_no_other(self) -> None:
        held = self.reader.held
        assert self.kv_cache.discrepancies(self.reader) == []
        for seq_id in range(self.kv_cache.n_seq_ids):
            for change in (-1, +1):
                other = {**held, seq_id: held.get(seq_id, 0) + change}
                if other[seq_id] >= 0:
                    (found,) = self.kv_cache.discrepancies(Reader(other))
                    assert found.startswith(f"seq_id {seq_id}:")


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = DETERMINISTIC


def new_kv_cache(n_cells: int = 64, *, has_pos_min: bool = True) -> KVCache:
    return KVCache(n_cells=n_cells, n_seq_ids=4, n_ctx_seq=n_cells, has_pos_min=has_pos_min)


def test_a_slot_that_was_shared_at_every_length_does_not_stay_in_pieces() -> None:
    kv_cache = new_kv_cache()
    system_prompt = kv_cache.open(is_cached=True)
    kv_cache.advance(system_prompt, 50)
    for n_tokens in range(1, 51):
        follower = kv_cache.open()
        kv_cache.share(system_prompt, follower, n_tokens)
        assert len(list(system_prompt.extents())) <= 2
        kv_cache.advance(follower, 3)
        assert kv_cache.release(follower) == 3
    assert kv_cache.n_own(system_prompt) == 50
    assert (kv_cache.n_used, kv_cache.n_cached) == (0, 50)


def test_a_cut_that_somebody_still_needs_is_kept() -> None:
    kv_cache = new_kv_cache()
    source, short = kv_cache.open(), kv_cache.open()
    kv_cache.advance(source, 9)
    kv_cache.share(source, short, 3)
    kv_cache.release(_shared(kv_cache, source, 6))
    long = _shared(kv_cache, source, 9)
    assert [(e.start, e.end) for e in source.extents()] == [(3, 9), (0, 3)]
    assert [(e.start, e.end) for e in long.extents()] == [(3, 9), (0, 3)]
    kv_cache.release(short)
    _shared(kv_cache, source, 9)
    assert [(e.start, e.end) for e in long.extents()] == [(0, 9)]


def _shared(kv_cache: KVCache, source: Slot, n_tokens: int) -> Slot:
    slot = kv_cache.open()
    kv_cache.share(source, slot, n_tokens)
    return slot


def test_a_sequence_that_does_not_start_at_0_is_a_discrepancy() -> None:
    kv_cache = new_kv_cache()
    kv_cache.advance(kv_cache.open(), 3)
    assert kv_cache.discrepancies(LastPositionOnly({0: 3})) == [
        "seq_id 0: llama.cpp holds positions (2, 2), the bookkeeping says (0, 2)"
    ]


def test_memory_that_forgets_is_compared_by_its_last_position_alone() -> None:
    kv_cache = new_kv_cache(has_pos_min=False)
    kv_cache.advance(kv_cache.open(), 3)
    assert kv_cache.discrepancies(LastPositionOnly({0: 3})) == []
    assert len(kv_cache.discrepancies(LastPositionOnly({0: 2}))) == 1


def test_a_wrong_sum_of_cells_is_a_discrepancy() -> None:
    kv_cache = new_kv_cache()
    kv_cache.advance(kv_cache.open(), 3)
    kv_cache.advance(kv_cache.open(is_cached=True), 2)
    kv_cache.n_used += 1
    kv_cache.n_cached -= 1
    assert kv_cache.discrepancies(Reader({0: 3, 3: 2})) == [
        "4 cells in use, but the seq_ids hold 3",
        "1 cells cached, but the seq_ids hold 2",
    ]


@pytest.mark.parametrize(("n_others", "n_tokens"), [(0, 5), (4, 3)], ids=["of one", "in all"])
def test_more_positions_than_there_can_be_are_refused(n_others: int, n_tokens: int) -> None:
    kv_cache = KVCache(n_cells=6, n_seq_ids=2, n_ctx_seq=4)
    kv_cache.advance(kv_cache.open(), n_others)
    slot = kv_cache.open()
    kv_cache.advance(slot, n_tokens - 1)
    with pytest.raises(AssertionError):
        kv_cache.advance(slot, 1)


@pytest.mark.parametrize("n_tokens", [0, 4])
def test_only_positions_that_a_slot_has_can_be_shared(n_tokens: int) -> None:
    kv_cache = new_kv_cache()
    source, slot = kv_cache.open(), kv_cache.open()
    kv_cache.advance(source, 3)
    with pytest.raises(AssertionError):
        kv_cache.share(source, slot, n_tokens)


def test_representations_show_the_state() -> None:
    kv_cache = new_kv_cache(6)
    live, cached = kv_cache.open(), kv_cache.open(is_cached=True)
    kv_cache.advance(live, 3)
    kv_cache.share(live, cached, 2)
    assert repr(live) == "<Slot seq_id=0 n_computed=3>"
    assert repr(kv_cache) == "<KVCache seqs=2/4 cells=3+2/6>"
