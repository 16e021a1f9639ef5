"""Prefix sharing, cells under pressure and stopped readers, on a fake decoder: to the token."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.engine.request import FinishReason
from cllm.engine.sampling_params import SamplingParams
from tests.engine.bench import Bench, endless, says

LAYOUTS = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "per-sequence"])


def n_computed(bench: Bench) -> int:
    """Prompt tokens that were really computed."""
    return bench.core.statistics().n_prefill_tokens


# --- Sharing ------------------------------------------------------------------------------------
@LAYOUTS
def test_prompts_with_a_shared_head_compute_it_once(kv_unified: bool) -> None:
    """All arrive together: the first computes the head, the others wait for it."""
    bench = Bench(
        n_ctx=8192, n_seq_max=8, n_batch=64, kv_unified=kv_unified, answer=endless
    )  # fmt: skip
    head = bytes(range(256)) + bytes(range(144))
    tails = [bytes([letter]) * n for letter, n in zip(b"abcdefgh", range(1, 30, 4), strict=False)]
    request_ids = [bench.submit(head + tail, max_tokens=3) for tail in tails]
    bench.run()
    assert n_computed(bench) == len(head) + sum(map(len, tails))
    n_cached = [bench.finished[r].completion.usage.n_cached for r in request_ids]
    assert n_cached == [0] + [len(head)] * 7
    assert bench.core.statistics().n_cached_tokens == 7 * len(head)
    bench.check_outcomes()
    bench.check_idle()


@LAYOUTS
@pytest.mark.parametrize("n_prompt", [2, 3, 40])
def test_n_identical_prompts_cost_one_prefill_and_a_row_each(
    n_prompt: int, kv_unified: bool
) -> None:
    bench = Bench(n_ctx=2048, n_seq_max=8, n_batch=16, kv_unified=kv_unified, answer=endless)
    prompt = bytes(range(n_prompt))
    for _ in range(8):
        bench.submit(prompt, max_tokens=2)
    bench.run()
    is_worth_a_copy = kv_unified or n_prompt >= bench.books.n_ctx_seq // 32
    assert n_computed(bench) == (n_prompt + 7 if is_worth_a_copy else 8 * n_prompt)
    bench.check_outcomes()


def test_a_head_of_heads_is_shared_at_every_branch() -> None:
    """A, then B and C from A's beginning, where C has more in common with B than with A."""
    bench = Bench(n_ctx=512, n_batch=16, answer=endless)
    for prompt in (b"h" * 40 + b"A" * 10, b"h" * 40 + b"B" * 30, b"h" * 40 + b"B" * 20 + b"C"):
        bench.submit(prompt, max_tokens=1)
    bench.run()
    assert n_computed(bench) == 50 + 30 + 1
    bench.check_outcomes()


@pytest.mark.parametrize("kind", ["finished", "cancelled", "running"])
@LAYOUTS
def test_a_prompt_shares_with_whatever_has_computed_it(kind: str, kv_unified: bool) -> None:
    bench = Bench(n_ctx=1024, n_seq_max=2, n_batch=32, kv_unified=kv_unified, answer=endless)
    first = bench.submit(b"p" * 60 + b"q", max_tokens=1 if kind == "finished" else 30)
    bench.tick(3)
    if kind == "cancelled":
        bench.core.cancel(first)
        bench.hear()
    second = bench.submit(b"p" * 50 + b"z" * 7, max_tokens=2)
    bench.run()
    assert bench.finished[second].completion.usage.n_cached == 50
    bench.check_outcomes()
    bench.check_idle()


def test_the_answer_of_one_turn_is_shared_by_the_next() -> None:
    bench = Bench(n_ctx=256, answer=says(b"the answer", n_prompt=6))
    bench.submit(b"prompt")
    bench.run()
    turn = b"promptthe answer" + b" and more"
    bench.decoder.answer = endless
    second = bench.submit(turn, max_tokens=1)
    bench.run()
    assert bench.finished[second].completion.usage.n_cached == len(b"promptthe answer")
    assert bench.outcome(second) == bench.alone(second)


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    bench = Bench(n_ctx=256, n_batch=8, prefix_cache_tokens=4, answer=endless)
    leader = bench.submit(b"h" * 40 + b"a")
    follower = bench.submit(b"h" * 40 + b"b", max_tokens=3)
    bench.tick(2)
    bench.core.cancel(leader)
    bench.hear()
    bench.run()
    assert bench.outcome(follower) == bench.alone(follower)
    assert bench.finished[follower].completion.usage.n_cached <= 4, "as much as was kept"
    bench.check_idle()


def test_a_leader_is_as_urgent_as_who_waits_for_it() -> None:
    bench = Bench(n_ctx=512, n_batch=8, answer=endless)
    slow = bench.submit(b"h" * 64 + b"a", priority=5, max_tokens=1)
    bench.tick()
    other = bench.submit(b"x" * 64, priority=1, max_tokens=1)
    urgent = bench.submit(b"h" * 64 + b"b", priority=0, max_tokens=1)
    bench.run()
    assert list(bench.finished) == [slow, urgent, other]


def test_what_failed_is_not_shared() -> None:
    bench = Bench(n_ctx=256, answer=endless, faults={2: "nan"})
    bench.submit(b"prompt")
    bench.run()
    assert bench.core.statistics().n_kv_cells_cached == 0


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {"has_pos_min": False}])
def test_nothing_is_shared_where_it_is_off_or_memory_forgets(options: Any) -> None:
    bench = Bench(answer=endless, **options)
    for _ in range(4):
        bench.submit(b"prompt", max_tokens=2)
    bench.run()
    assert n_computed(bench) == 4 * 6
    assert bench.core.statistics().n_kv_cells_cached == 0
    bench.check_outcomes()


@LAYOUTS
def test_with_a_sliding_window_a_sequence_is_shared_as_a_whole_or_not_at_all(
    kv_unified: bool,
) -> None:
    """llama.cpp uses cells behind the window again, in any order: the middle may be gone."""
    bench = Bench(
        n_ctx=512, n_seq_max=2, n_batch=32, kv_unified=kv_unified, is_windowed=True, answer=endless
    )  # fmt: skip
    first = bench.submit(b"p" * 60, max_tokens=9)
    bench.run()
    turn = b"p" * 60 + bytes(bench.tokens[first])
    branch = bench.submit(b"p" * 40 + b"q" * 9, max_tokens=2)
    bench.run()
    assert bench.finished[branch].completion.usage.n_cached == 0
    second = bench.submit(turn + b"and more", max_tokens=2)
    bench.run()
    assert bench.finished[second].completion.usage.n_cached == len(turn) - 1
    bench.check_outcomes()
    bench.check_idle()


@LAYOUTS
def test_the_least_recently_used_prefix_is_evicted_first(kv_unified: bool) -> None:
    bench = Bench(
        n_ctx=256, n_seq_max=4, n_batch=64, kv_unified=kv_unified, prefix_cache_tokens=50
    )  # fmt: skip
    for letter in b"ab":
        bench.submit(bytes([letter]) * 20, max_tokens=1)
        bench.run()
    bench.submit(b"a" * 20, max_tokens=1)  # used once more
    bench.run()
    bench.submit(b"c" * 20, max_tokens=1)
    bench.run()
    kept = {entry.tokens[0] for entry in bench.core.manager.prefixes.entries}
    assert kept == set(b"ac")
    assert bench.core.statistics().n_evictions == 1


def test_in_the_per_sequence_layout_an_unrelated_prompt_leaves_a_cached_one_alone() -> None:
    """Most prompts begin with the same token: it is not worth a whole cached prefix."""
    bench = Bench(n_ctx=256, n_seq_max=4, n_batch=64, kv_unified=False, answer=endless)
    prompt = b"^" + b"a" * 40
    for text in (prompt, b"^" + b"z" * 30):
        bench.submit(text, max_tokens=1)
        bench.run()
    again = bench.submit(prompt, max_tokens=1)
    bench.run()
    assert bench.finished[again].completion.usage.n_cached == 40


def test_with_a_sliding_window_every_turn_can_be_gone_back_to() -> None:
    bench = Bench(n_ctx=1024, n_seq_max=4, n_batch=64, is_windowed=True, answer=endless)
    turns = [b"the first turn"]
    for _ in range(3):
        request_id = bench.submit(turns[-1], max_tokens=9)
        bench.run()
        turns.append(turns[-1] + bytes(bench.tokens[request_id]) + b" and a question")
    branch = bench.submit(turns[1][: len(turns[0]) + 8] + b" another question", max_tokens=1)
    bench.run()
    assert bench.finished[branch].completion.usage.n_cached == len(turns[0]) + 8


# --- Cells under pressure -----------------------------------------------------------------------
def test_cached_prefixes_give_way_before_anybody_is_preempted() -> None:
    bench = Bench(n_ctx=64, n_seq_max=2, n_batch=64, answer=endless, prefix_cache_tokens=32)
    bench.submit(b"p" * 30, max_tokens=2)
    bench.run()
    assert bench.core.statistics().n_kv_cells_cached == 31
    big = bench.submit(b"q" * 60, max_tokens=5)
    bench.run()
    assert bench.core.statistics().n_preemptions == 0
    assert bench.outcome(big) == bench.alone(big)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("swap_tokens", [None, 0], ids=["swapped", "recomputed"])
def test_a_preempted_stream_goes_on_with_the_same_tokens(
    temperature: float, swap_tokens: int | None
) -> None:
    params = SamplingParams(temperature=temperature, stop=["zzzz"])
    bench = Bench(
        n_ctx=24, n_seq_max=3, n_batch=4, answer=endless, swap_tokens=swap_tokens, decode_s=0.01
    )  # fmt: skip
    request_ids = [bench.submit(bytes([letter]) * 4, params=params) for letter in b"xyz"]
    bench.run()
    statistics = bench.core.statistics()
    assert statistics.n_preemptions > 0
    assert (statistics.n_swaps > 0) == (swap_tokens is None)
    preempted = [r for r in request_ids if bench.finished[r].completion.timings.n_preemptions]
    assert preempted, "the completion says so"
    assert request_ids[0] not in preempted, "the oldest never is"
    for request_id in request_ids:
        assert bench.outcome(request_id) == bench.alone(request_id)
        assert len(bench.tokens[request_id]) == 24 - 4 + 1
    bench.check_idle()


@pytest.mark.parametrize("how", ["flipped", "refused"])
def test_a_damaged_swap_is_computed_again(how: str) -> None:
    bench = Bench(n_ctx=24, n_seq_max=2, n_batch=4, answer=endless, decode_s=0.01)
    request_ids = [bench.submit(bytes([letter]) * 4) for letter in b"xy"]
    while not any(s.swapped for s in bench.core.queue.waiting):
        bench.tick()
    (victim,) = (s for s in bench.core.queue.waiting if s.swapped)
    assert victim.swapped is not None
    if how == "flipped":
        data = bytearray(victim.swapped.data)
        data[len(data) // 2] ^= 1
        victim.swapped = type(victim.swapped)(
            bytes(data), victim.swapped.checksum, victim.swapped.n_tokens
        )
    else:
        n_calls = bench.decoder.n_calls["state_seq_set_data"]
        bench.decoder.call_faults["state_seq_set_data", n_calls + 1] = False
    bench.run()
    for request_id in request_ids:
        assert bench.outcome(request_id) == bench.alone(request_id)
    bench.check_idle()


def test_many_requests_that_need_three_times_the_cache_all_finish() -> None:
    bench = Bench(n_ctx=96, n_seq_max=8, n_batch=16, answer=endless, decode_s=0.01)
    for letter in b"abcdefgh":
        bench.submit(bytes([letter]) * 12, max_tokens=24)
    bench.run()
    assert {event.completion.finish_reason for event in bench.finished.values()} == {
        FinishReason.LENGTH
    }
    bench.check_outcomes()
    bench.check_idle()


# --- Readers that stop --------------------------------------------------------------------------
@pytest.mark.parametrize("stream_buffer", [1, 5])
def test_a_reader_that_stops_gets_no_more_than_the_buffer(stream_buffer: int) -> None:
    bench = Bench(answer=endless, stream_buffer=stream_buffer)
    request_id = bench.submit()
    bench.stopped.add(request_id)
    bench.run()
    assert len(bench.tokens[request_id]) == stream_buffer
    assert not bench.core.has_work
    n_decodes = bench.decoder.n_decodes
    assert bench.tick(5) == set()
    assert bench.decoder.n_decodes == n_decodes
    bench.read_on(request_id)
    bench.run()
    assert bench.core.statistics().n_preemptions == 0
    assert bench.outcome(request_id) == bench.alone(request_id)


@pytest.mark.parametrize("swap_tokens", [None, 0], ids=["swapped", "kept as a prefix"])
def test_readers_that_stop_in_every_seq_id_do_not_stall_the_queue(swap_tokens: int | None) -> None:
    bench = Bench(
        n_seq_max=2, answer=endless, stream_buffer=4, swap_tokens=swap_tokens, decode_s=0.01
    )  # fmt: skip
    holders = [bench.submit(b"h" * 5), bench.submit(b"i" * 5)]
    bench.stopped.update(holders)
    bench.run()
    third = bench.submit(max_tokens=4)
    bench.run()
    assert set(bench.finished) == {third}
    assert bench.core.statistics().n_preemptions == 1, "one seq_id is enough"
    assert bench.outcome(third) == bench.alone(third)
    for request_id in holders:
        bench.read_on(request_id)
    bench.run()
    bench.check_outcomes()
    bench.check_idle()


def test_a_stopped_reader_is_not_preempted_for_what_would_not_fit_anyway() -> None:
    bench = Bench(n_ctx=64, n_seq_max=2, answer=endless, stream_buffer=2)
    small = bench.submit(b"s" * 4)
    bench.stopped.add(small)
    bench.tick(3)
    running = bench.submit(b"r" * 30)
    bench.tick(5)
    bench.submit(b"big" * 20, max_tokens=1)
    bench.tick(3)
    assert bench.core.statistics().n_preemptions == 0
    bench.core.cancel(running)
    bench.hear()
    bench.tick(12)
    assert bench.core.statistics().n_preemptions == 1, "now it makes room"
    bench.read_on(small)
    bench.run()
    bench.check_outcomes()


def test_a_stopped_reader_does_not_delay_who_shares_with_others() -> None:
    """What a newcomer shares takes no cells: with that, it fits beside all but the idle one."""
    n_ticks = []
    for has_idle in (False, True):
        bench = Bench(
            n_ctx=1000, n_batch=64, answer=endless, stream_buffer=2, prefix_cache_tokens=1
        )  # fmt: skip
        if has_idle:
            idle = bench.submit(b"p" * 200, max_tokens=300)
            bench.stopped.add(idle)
            bench.run()
        active = bench.submit(b"h" * 300, max_tokens=690)
        while active not in bench.tokens:
            bench.tick()
        before = bench.decoder.n_decodes
        newcomer = bench.submit(b"h" * 300 + b"t" * 500, max_tokens=2)
        while newcomer not in bench.finished:
            bench.tick()
        n_ticks.append(bench.decoder.n_decodes - before)
        assert bench.finished[newcomer].completion.usage.n_cached == 300
    assert n_ticks[0] == n_ticks[1]
