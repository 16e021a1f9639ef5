"""What a look at the engine tells: who holds which cells, what the ticks were made of, and at what cost."""

from __future__ import annotations

from cllm.engine.core.commands import SlotState, TickInfo
from cllm.engine.core.decode_cost import TickShape
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.live_view import N_TICKS_KEPT, TickTrace, extents_of
from tests.simulation.simulator import Simulator


def test_each_cell_is_in_one_extent_with_all_who_hold_it() -> None:
    cache = KVCache(n_cells=64, n_seq_ids=4, n_ctx_seq=64)
    first = cache.open()
    cache.advance(first, 10)
    second = cache.open()
    cache.share(first, second, 6)
    cache.advance(second, 3)
    third = cache.open(is_cached=True)
    cache.share(second, third, 8)
    told = extents_of(cache)
    assert sum(e.end - e.start for e in told) == cache.n_held == 13
    assert [(e.start, e.end, e.seq_ids) for e in told] == [
        (0, 6, (0, 1, 3)), (6, 10, (0,)), (6, 8, (1, 3)), (8, 9, (1,)),
    ]  # fmt: skip
    assert [e.parent for e in told] == [-1, 0, 0, 2]


def test_in_a_layout_without_sharing_a_copy_is_an_extent_of_its_own() -> None:
    cache = KVCache(n_cells=64, n_seq_ids=4, n_ctx_seq=16, kv_unified=False)
    first = cache.open()
    cache.advance(first, 10)
    cache.share(first, cache.open(), 6)
    assert [(e.start, e.end, e.seq_ids) for e in extents_of(cache)] == [(0, 10, (0,)), (0, 6, (1,))]


def tick(trace: TickTrace, started: float = 1.0) -> None:
    shape = TickShape(n_rows=9, n_attended=20, n_chunks=3, n_decoding=2, is_even=False)
    trace.note(shape, 3, started, started + 0.5, started + 2.5, started + 2.75)


def test_ticks_are_there_at_the_first_look_and_told_once() -> None:
    trace = TickTrace()
    tick(trace)
    tick(trace, 4.0)
    first, second = trace.take()
    assert first == TickInfo(2, 4, 3, 0.5, 2.0, 0.25, 1.0)
    assert second.started_s == 4.0
    assert trace.take() == ()


def test_only_the_last_ticks_are_kept() -> None:
    trace = TickTrace()
    for n in range(N_TICKS_KEPT + 10):
        tick(trace, float(n))
    ticks = trace.take()
    assert [t.started_s for t in (ticks[0], ticks[-1])] == [10.0, N_TICKS_KEPT + 9.0]


def test_a_request_that_waits_for_a_prefix_names_the_sequence_that_computes_it() -> None:
    sim = Simulator(n_ctx=512, n_seq_max=4, n_batch=8)
    leader = sim.submit(b"the beginning that they share: one", max_tokens=2, tenant="a")
    follower = sim.submit(b"the beginning that they share: two", max_tokens=2, tenant="b")
    sim.tick()
    slots = {slot.request_id: slot for slot in sim.core.live_view().slots}
    assert slots[follower].state is SlotState.WAITING
    assert slots[follower].waits_for == slots[leader].seq_id
    assert (slots[leader].waits_for, slots[leader].tenant) == (None, "a")
    sim.run()
    assert not any(slot.tenant for slot in sim.core.live_view().slots)
