"""What a look at the engine tells: who holds which cells, what the ticks were made of, and at what cost."""

from __future__ import annotations

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.live_view import N_TICKS_KEPT, N_TICKS_WATCHED, TickTrace, extents_of


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


def tick(trace: TickTrace) -> None:
    trace.begin([])
    trace.end(1.0, 1.5, 3.5, 3.75)


def test_ticks_are_kept_from_the_first_look_on_and_told_once() -> None:
    trace = TickTrace()
    tick(trace)
    assert trace.take() == ()
    tick(trace)
    tick(trace)
    first, second = trace.take()
    assert first == second
    assert (first.plan_s, first.decode_s, first.sample_s) == (0.5, 2.0, 0.25)
    assert trace.take() == ()


def test_where_nobody_looks_any_more_nothing_is_kept_after_a_while() -> None:
    trace = TickTrace()
    trace.take()
    for _ in range(N_TICKS_WATCHED + 10):
        tick(trace)
    assert len(trace.take()) == N_TICKS_KEPT
    assert trace.take() == ()
