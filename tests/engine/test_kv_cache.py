"""The books of the KV cache, against a dict, through any mix of what can happen to a seq_id."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.engine.kv_cache import KVCache, Slot

DETERMINISTIC = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=40, database=None
)


class DictCache:
    """What llama.cpp would say: how many positions, from 0 on, each seq_id has."""

    def __init__(self, held: dict[int, int]) -> None:
        self.held = held

    def seq_pos_min(self, seq_id: int) -> int | None:
        return 0 if self.held.get(seq_id) else None

    def seq_pos_max(self, seq_id: int) -> int | None:
        return self.held[seq_id] - 1 if self.held.get(seq_id) else None


class LastPositionOnly(DictCache):
    """Recurrent memory: its first position is its last."""

    def seq_pos_min(self, seq_id: int) -> int | None:
        return self.seq_pos_max(seq_id)


class KVCacheMachine(RuleBasedStateMachine):
    """Any mix of opening, advancing, reading back and releasing keeps the invariants."""

    @initialize(n_seq_max=st.integers(1, 5), n_ctx_seq=st.integers(1, 9), share=st.integers(1, 5))
    def make(self, n_seq_max: int, n_ctx_seq: int, share: int) -> None:
        self.books = KVCache(
            n_cells=n_ctx_seq * min(share, n_seq_max), n_seq_max=n_seq_max, n_ctx_seq=n_ctx_seq
        )
        self.slots: dict[int, Slot] = {}
        self.held: dict[int, int] = {}

    @precondition(lambda self: self.books.n_free_ids)
    @rule()
    def open(self) -> None:
        free = min(set(range(self.books.n_seq_max)) - set(self.slots))
        slot = self.books.open()
        assert slot.seq_id == free, "the lowest free seq_id comes first"
        assert slot.n_computed == 0
        self.slots[slot.seq_id] = slot
        self.held[slot.seq_id] = 0

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.slots)))
        room = min(self.books.n_ctx_seq - self.held[seq_id], self.books.n_free)
        n_tokens = data.draw(st.integers(0, room))
        self.books.advance(self.slots[seq_id], n_tokens)
        self.held[seq_id] += n_tokens

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def read_back_after_a_failed_decode(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.slots)))
        room = min(self.books.n_ctx_seq, self.held[seq_id] + self.books.n_free)
        self.held[seq_id] = data.draw(st.integers(0, room))
        self.books.read_back(self.slots[seq_id], DictCache(self.held))
        assert self.slots[seq_id].n_computed == self.held[seq_id]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.slots)))
        slot = self.slots.pop(seq_id)
        assert self.books.release(slot) == self.held.pop(seq_id)
        assert slot.n_computed == 0

    @invariant()
    def the_books_agree_with_the_dict(self) -> None:
        assert self.books.discrepancies(DictCache(self.held)) == []
        assert self.books.n_used == sum(self.held.values()) <= self.books.n_cells
        assert self.books.n_free == self.books.n_cells - self.books.n_used
        assert self.books.n_used_ids == len(self.slots)
        assert self.books.n_free_ids == self.books.n_seq_max - len(self.slots)

    @invariant()
    def any_other_dict_is_a_discrepancy(self) -> None:
        for seq_id in range(self.books.n_seq_max):
            other = {**self.held, seq_id: self.held.get(seq_id, 0) + 1}
            (found,) = self.books.discrepancies(DictCache(other))
            assert f"seq_id {seq_id}:" in found


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = DETERMINISTIC


def test_a_sequence_that_does_not_start_at_0_is_a_discrepancy() -> None:
    books = KVCache(n_cells=8, n_seq_max=2, n_ctx_seq=8)
    books.advance(books.open(), 3)
    assert books.discrepancies(LastPositionOnly({0: 3})) == [
        "seq_id 0: llama.cpp holds positions (2, 2), the books say (0, 2)"
    ]


def test_recurrent_memory_is_compared_by_its_last_position_alone() -> None:
    books = KVCache(n_cells=8, n_seq_max=2, n_ctx_seq=8, has_pos_min=False)
    books.advance(books.open(), 3)
    assert books.discrepancies(LastPositionOnly({0: 3})) == []
    assert len(books.discrepancies(LastPositionOnly({0: 2}))) == 1


def test_a_wrong_sum_of_cells_is_a_discrepancy() -> None:
    books = KVCache(n_cells=8, n_seq_max=2, n_ctx_seq=8)
    books.advance(books.open(), 3)
    books.n_used += 1
    assert books.discrepancies(DictCache({0: 3})) == ["4 cells in use, but the seq_ids hold 3"]


def test_more_positions_than_a_sequence_or_the_cache_can_have_are_refused() -> None:
    books = KVCache(n_cells=6, n_seq_max=2, n_ctx_seq=4)
    first, second = books.open(), books.open()
    with pytest.raises(AssertionError):
        books.advance(first, 5)
    books = KVCache(n_cells=6, n_seq_max=2, n_ctx_seq=4)
    first, second = books.open(), books.open()
    books.advance(first, 4)
    with pytest.raises(AssertionError):
        books.advance(second, 3)


def test_representations_show_the_state() -> None:
    books = KVCache(n_cells=6, n_seq_max=2, n_ctx_seq=4)
    slot = books.open()
    books.advance(slot, 3)
    assert repr(slot) == "<Slot seq_id=0 n_computed=3>"
    assert repr(books) == "<KVCache seqs=1/2 cells=3/6>"
