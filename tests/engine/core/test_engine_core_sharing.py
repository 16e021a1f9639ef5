"""Prefix sharing, cells under pressure and stopped readers, on a fake decoder: to the token."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.engine.core.cells import MIN_STREAM_SHARE
from cllm.engine.core.checkpoints import (
    INTERVAL,
    MIN_GAIN,
    N_OUTPUT_CHECKPOINTS,
    OUTPUT_INTERVAL,
    TAIL,
)
from cllm.engine.output import FinishReason
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import DecodeFailedError
from tests.simulation.reference import endless, says
from tests.simulation.simulator import Simulator

ABORTED = DecodeFailedError("llama_decode", 2, "aborted")
# Memory that only all of a sequence can be shared of.
WHOLE_ONLY = pytest.mark.parametrize(
    "memory", [{"has_pos_min": False}, {"is_windowed": True}], ids=["recurrent", "windowed"]
)
LAYOUTS = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "per-sequence"])


def n_computed(sim: Simulator) -> int:
    """Prompt tokens that were really computed."""
    return sim.core.statistics().n_prefill_tokens


# --- Sharing ------------------------------------------------------------------------------------
@LAYOUTS
def test_prompts_with_a_shared_head_compute_it_once(kv_unified: bool) -> None:
    """All arrive together: the first computes the head, the others wait for it."""
    sim = Simulator(
        n_ctx=8192, n_seq_max=8, n_batch=64, kv_unified=kv_unified, answer=endless
    )  # fmt: skip
    head = bytes(range(256)) + bytes(range(144))
    tails = [bytes([letter]) * n for letter, n in zip(b"abcdefgh", range(1, 30, 4), strict=False)]
    request_ids = [sim.submit(head + tail, max_tokens=3) for tail in tails]
    sim.run()
    assert n_computed(sim) == len(head) + sum(map(len, tails))
    n_cached = [sim.finished[r].completion.usage.n_cached for r in request_ids]
    assert n_cached == [0] + [len(head)] * 7
    assert sim.core.statistics().n_cached_tokens == 7 * len(head)
    sim.check_outcomes()
    sim.check_idle()


@LAYOUTS
@pytest.mark.parametrize("n_prompt", [2, 3, 40])
def test_n_identical_prompts_cost_one_prefill_and_a_row_each(
    n_prompt: int, kv_unified: bool
) -> None:
    sim = Simulator(n_ctx=16384, n_seq_max=8, n_batch=16, kv_unified=kv_unified, answer=endless)
    prompt = bytes(range(n_prompt))
    for _ in range(8):
        sim.submit(prompt, max_tokens=2)
    sim.run()
    is_worth_a_copy = kv_unified or n_prompt >= sim.kv_cache.n_ctx_seq * MIN_STREAM_SHARE
    assert n_computed(sim) == (n_prompt + 7 if is_worth_a_copy else 8 * n_prompt)
    sim.check_outcomes()


@LAYOUTS
def test_a_question_that_begins_as_a_long_chat_did_leaves_the_chat_cached(
    kv_unified: bool,
) -> None:
    sim = Simulator(n_ctx=1024, n_seq_max=4, n_batch=256, kv_unified=kv_unified, answer=endless)
    system, chat = b"s" * 20, b"c" * 100
    for prompt in (system + chat, system + b"q" * 5, system + chat + b"d" * 10):
        sim.submit(prompt, max_tokens=1)
        sim.run()
    n_cached = [done.completion.usage.n_cached for done in sim.finished.values()]
    assert n_cached == [0, 20, 120]
    sim.check_outcomes()


def test_without_a_free_seq_id_what_is_shared_is_taken_over_uncopied() -> None:
    sim = Simulator(n_ctx=256, n_seq_max=1, n_batch=256, kv_unified=False, answer=endless)
    for prompt in (b"s" * 20 + b"c" * 100, b"s" * 20 + b"q"):
        sim.submit(prompt, max_tokens=1)
        sim.run()
    assert [done.completion.usage.n_cached for done in sim.finished.values()] == [0, 20]
    assert not sim.decoder.n_calls["seq_cp"]
    sim.check_outcomes()


def test_a_head_of_heads_is_shared_at_every_branch() -> None:
    """A, then B and C from A's beginning, where C has more in common with B than with A."""
    sim = Simulator(n_ctx=512, n_batch=16, answer=endless)
    for prompt in (b"h" * 40 + b"A" * 10, b"h" * 40 + b"B" * 30, b"h" * 40 + b"B" * 20 + b"C"):
        sim.submit(prompt, max_tokens=1)
    sim.run()
    assert n_computed(sim) == 50 + 30 + 1
    sim.check_outcomes()


@pytest.mark.parametrize("kind", ["finished", "cancelled", "running"])
@LAYOUTS
def test_a_prompt_shares_with_whatever_has_computed_it(kind: str, kv_unified: bool) -> None:
    sim = Simulator(n_ctx=1024, n_seq_max=2, n_batch=32, kv_unified=kv_unified, answer=endless)
    first = sim.submit(b"p" * 60 + b"q", max_tokens=1 if kind == "finished" else 30)
    sim.tick(3)
    if kind == "cancelled":
        sim.core.queue.cancel(first)
        sim.hear()
    second = sim.submit(b"p" * 50 + b"z" * 7, max_tokens=2)
    sim.run()
    assert sim.finished[second].completion.usage.n_cached == 50
    sim.check_outcomes()
    sim.check_idle()


def test_the_answer_of_one_turn_is_shared_by_the_next() -> None:
    sim = Simulator(n_ctx=256, answer=says(b"the answer", n_prompt=6))
    sim.submit(b"prompt")
    sim.run()
    turn = b"promptthe answer" + b" and more"
    sim.decoder.answer = endless
    second = sim.submit(turn, max_tokens=1)
    sim.run()
    assert sim.finished[second].completion.usage.n_cached == len(b"promptthe answer")
    assert sim.outcome(second) == sim.alone(second)


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    sim = Simulator(n_ctx=256, n_batch=8, prefix_cache_tokens=4, answer=endless)
    leader = sim.submit(b"h" * 40 + b"a")
    follower = sim.submit(b"h" * 40 + b"b", max_tokens=3)
    sim.tick(2)
    sim.core.queue.cancel(leader)
    sim.hear()
    sim.run()
    assert sim.outcome(follower) == sim.alone(follower)
    assert sim.finished[follower].completion.usage.n_cached <= 4, "as much as was kept"
    sim.check_idle()


def test_a_leader_is_as_urgent_as_who_waits_for_it() -> None:
    sim = Simulator(n_ctx=512, n_batch=8, answer=endless)
    slow = sim.submit(b"h" * 64 + b"a", priority=5, max_tokens=1)
    sim.tick()
    other = sim.submit(b"x" * 64, priority=1, max_tokens=1)
    urgent = sim.submit(b"h" * 64 + b"b", priority=0, max_tokens=1)
    sim.run()
    assert list(sim.finished) == [slow, urgent, other]


def test_what_failed_is_not_shared() -> None:
    sim = Simulator(n_ctx=256, answer=endless, faults={2: "nan"})
    sim.submit(b"prompt")
    sim.run()
    assert sim.core.statistics().n_kv_cells_cached == 0


@pytest.mark.parametrize("memory", [{}, {"has_pos_min": False}], ids=["cells", "states"])
@LAYOUTS
def test_nothing_is_shared_where_it_is_off(kv_unified: bool, memory: Any) -> None:
    sim = Simulator(answer=endless, prefix_cache=False, kv_unified=kv_unified, **memory)
    for _ in range(4):
        sim.submit(b"prompt", max_tokens=2)
    sim.run()
    assert n_computed(sim) == 4 * 6
    assert sim.core.statistics().n_kv_cells_cached == 0
    sim.check_outcomes()


def test_a_state_is_kept_in_host_memory_where_there_are_no_cells_to_share() -> None:
    sim = Simulator(
        n_ctx=2048, n_seq_max=2, n_batch=64, kv_unified=False, has_pos_min=False, answer=endless,
        prefix_cache_bytes=1 << 20,
    )  # fmt: skip
    head = bytes(range(100, 200))
    for i in range(6):
        sim.submit(head + bytes([i]) * 40, max_tokens=2)
        sim.run()
    statistics = sim.core.statistics()
    # The second finds out where they part, and has it kept; from the third on only the rest is computed.
    assert statistics.n_checkpoints > 0
    assert n_computed(sim) <= 2 * 140 + 4 * (40 + TAIL)
    sim.check_outcomes()


def test_where_they_part_is_found_out_behind_what_is_restored() -> None:
    """A head that is longer than where memory is kept regularly: what is behind that is not computed for ever."""
    sim = Simulator(
        n_ctx=4096, n_seq_max=2, n_batch=128, kv_unified=False, has_pos_min=False, answer=endless,
        prefix_cache_bytes=1 << 20,
    )  # fmt: skip
    head = bytes(i % 251 for i in range(INTERVAL + 90))
    computed = []
    for i in range(6):
        before = n_computed(sim)
        sim.submit(head + bytes([i]) * 40, max_tokens=2)
        sim.run()
        computed.append(n_computed(sim) - before)
    assert max(computed[3:]) <= 40 + MIN_GAIN, computed
    sim.check_outcomes()


@pytest.mark.parametrize("memory", [{"has_pos_min": False}, {"is_windowed": True}], ids=str)
@pytest.mark.parametrize("n_bytes", [0, 1 << 20], ids=["no host memory", "host memory"])
def test_those_who_come_together_compute_what_they_share_once_in_the_per_sequence_layout(
    memory: Any, n_bytes: int
) -> None:
    sim = Simulator(
        n_ctx=8192, n_seq_max=8, n_batch=256, kv_unified=False, answer=endless,
        prefix_cache_bytes=n_bytes, **memory,
    )  # fmt: skip
    head = bytes(i % 251 for i in range(400))
    for i in range(8):
        sim.submit(head + bytes([i]) * 20, max_tokens=2)
    sim.run()
    assert n_computed(sim) <= 400 + 8 * 20 + 8 * MIN_GAIN
    sim.check_outcomes()


@LAYOUTS
@pytest.mark.parametrize("n_bytes", [0, 1 << 20], ids=["no host memory", "host memory"])
def test_where_no_sequence_can_be_copied_a_turn_takes_the_seq_id_of_the_one_before(
    kv_unified: bool, n_bytes: int
) -> None:
    sim = Simulator(
        n_ctx=2048, n_seq_max=3, n_batch=64, kv_unified=kv_unified, has_pos_min=False,
        can_copy=False, answer=endless, prefix_cache_bytes=n_bytes,
    )  # fmt: skip
    chats = [bytes([i]) * 90 for i in range(3)]
    for _ in range(4):
        requests = [sim.submit(chat, max_tokens=10) for chat in (*chats, chats[0])]
        sim.run()
        chats = [
            chat + bytes(sim.tokens[request_id]) + b"more"
            for chat, request_id in zip(chats, requests, strict=False)
        ]
    statistics = sim.core.statistics()
    assert sim.decoder.n_calls["seq_cp"] == 0
    assert statistics.n_rebuilds == 0
    assert statistics.n_cached_tokens > 0
    sim.check_outcomes()


def test_without_host_memory_no_state_is_kept_in_the_per_sequence_layout() -> None:
    sim = Simulator(
        n_ctx=2048, n_seq_max=2, n_batch=64, kv_unified=False, has_pos_min=False, answer=endless,
        prefix_cache_bytes=0,
    )  # fmt: skip
    sim.submit(bytes(200), max_tokens=2)
    sim.run()
    assert sim.core.statistics().n_checkpoints == 0


@LAYOUTS
def test_with_a_sliding_window_a_sequence_is_shared_as_a_whole_or_not_at_all(
    kv_unified: bool,
) -> None:
    """llama.cpp uses cells behind the window again, in any order: the middle may be gone."""
    sim = Simulator(
        n_ctx=512, n_seq_max=2, n_batch=32, kv_unified=kv_unified, is_windowed=True, answer=endless
    )  # fmt: skip
    first = sim.submit(b"p" * 60, max_tokens=9)
    sim.run()
    turn = b"p" * 60 + bytes(sim.tokens[first])
    branch = sim.submit(b"p" * 40 + b"q" * 9, max_tokens=2)
    sim.run()
    assert sim.finished[branch].completion.usage.n_cached == 0
    second = sim.submit(turn + b"and more", max_tokens=2)
    sim.run()
    assert sim.finished[second].completion.usage.n_cached == len(turn) - 1
    sim.check_outcomes()
    sim.check_idle()


def test_a_long_prompt_is_kept_whole_while_nobody_wants_its_cells() -> None:
    """A cap of half of the context would have it computed again on an engine that is empty."""
    sim = Simulator(n_ctx=512, n_seq_max=4, n_batch=64)
    prompt = bytes(range(1, 44)) * 7
    first, second = sim.submit(prompt, max_tokens=1), None
    sim.run()
    second = sim.submit(prompt, max_tokens=1)
    sim.run()
    assert sim.finished[first].completion.usage.n_cached == 0
    assert sim.finished[second].completion.usage.n_cached == len(prompt) - 1 == 300
    other = sim.submit(bytes(range(50, 90)) * 12, max_tokens=1)
    sim.run()
    assert sim.finished[other].completion.finish_reason is FinishReason.LENGTH
    assert sim.core.statistics().n_evictions == 1, "cells that a request wants are given up"
    sim.check_outcomes()
    sim.check_idle()


@LAYOUTS
def test_the_least_recently_used_prefix_is_evicted_first(kv_unified: bool) -> None:
    sim = Simulator(
        n_ctx=256, n_seq_max=4, n_batch=64, kv_unified=kv_unified, prefix_cache_tokens=50
    )  # fmt: skip
    for letter in b"ab":
        sim.submit(bytes([letter]) * 20, max_tokens=1)
        sim.run()
    sim.submit(b"a" * 20, max_tokens=1)  # used once more
    sim.run()
    sim.submit(b"c" * 20, max_tokens=1)
    sim.run()
    kept = {entry.tokens[0] for entry in sim.core.manager.cells.prefixes.entries}
    assert kept == set(b"ac")
    assert sim.core.statistics().n_evictions == 1


def test_in_the_per_sequence_layout_an_unrelated_prompt_leaves_a_cached_one_alone() -> None:
    """Most prompts begin with the same token: it is not worth a whole cached prefix."""
    sim = Simulator(n_ctx=256, n_seq_max=4, n_batch=64, kv_unified=False, answer=endless)
    prompt = b"^" + b"a" * 40
    for text in (prompt, b"^" + b"z" * 30):
        sim.submit(text, max_tokens=1)
        sim.run()
    again = sim.submit(prompt, max_tokens=1)
    sim.run()
    assert sim.finished[again].completion.usage.n_cached == 40


@WHOLE_ONLY
def test_memory_of_one_position_is_kept_where_prompts_part(memory: dict[str, Any]) -> None:
    """All arrive together: the first ends a chunk where the others part from it."""
    sim = Simulator(n_ctx=8192, n_seq_max=8, n_batch=256, answer=endless, **memory)
    head = bytes(range(256)) + bytes(range(144))
    tails = [bytes([letter]) * n for letter, n in zip(b"abcdefgh", range(1, 30, 4), strict=False)]
    request_ids = [sim.submit(head + tail, max_tokens=3) for tail in tails]
    sim.run()
    assert n_computed(sim) == len(head) + sum(map(len, tails))
    n_cached = [sim.finished[r].completion.usage.n_cached for r in request_ids]
    assert n_cached == [0] + [len(head)] * 7
    sim.check_outcomes()
    sim.check_idle()


@WHOLE_ONLY
def test_where_one_has_parted_the_next_begins(memory: dict[str, Any]) -> None:
    sim = Simulator(n_ctx=8192, n_seq_max=2, n_batch=256, answer=endless, **memory)
    n_cached = []
    for tail in (b"x" * 100, b"y" * 100, b"z" * 100):
        request_id = sim.submit(b"h" * 400 + tail, max_tokens=1)
        sim.run()
        n_cached.append(sim.finished[request_id].completion.usage.n_cached)
    assert n_cached == [0, 0, 400]
    sim.check_outcomes()


@WHOLE_ONLY
def test_each_turn_of_a_chat_begins_near_the_end_of_the_prompt_before_it(
    memory: dict[str, Any],
) -> None:
    """The template leaves out what the model has thought: the answers are other tokens."""
    sim = Simulator(n_ctx=8192, n_seq_max=2, n_batch=256, answer=endless, **memory)
    chat, n_new = b"the system prompt of this chat" * 10, list[int]()
    for turn in range(10):
        chat += b"question %d, of some length and more than that" % turn
        before = n_computed(sim)
        sim.submit(chat + b"<think>", max_tokens=20)
        sim.run()
        n_new.append(n_computed(sim) - before)
        chat += b"<answer>"
    assert n_new[0] == 352
    assert (
        max(n_new[1:])
        <= len(b"question 1, of some length and more than that<answer><think>") + TAIL
    )
    sim.check_outcomes()
    sim.check_idle()


@WHOLE_ONLY
def test_a_long_prompt_is_kept_at_few_places(memory: dict[str, Any]) -> None:
    sim = Simulator(n_ctx=20_000, n_seq_max=8, n_batch=4096, answer=endless, **memory)
    prompt = bytes(range(1, 251)) * 40
    sim.submit(prompt, max_tokens=1)
    sim.run()
    kept = [len(entry.tokens) for entry in sim.core.manager.cells.prefixes.entries]
    assert kept == [2048, 4096, 6144, 8192, len(prompt) - TAIL, len(prompt)]
    again = sim.submit(prompt[:7000] + b"other", max_tokens=1)
    sim.run()
    assert sim.finished[again].completion.usage.n_cached == 6144
    sim.check_outcomes()


def test_after_a_failed_decode_no_state_of_anybody_is_trusted() -> None:
    """llama.cpp moves the states of others about in the decode that has failed."""
    sim = Simulator(n_ctx=2048, n_seq_max=2, n_batch=64, answer=endless, has_pos_min=False)
    sim.submit(b"h" * 200, max_tokens=1)
    sim.run()
    assert sim.core.statistics().n_kv_cells_cached
    sim.decoder.faults = {len(sim.decoder.batches or ()) + 1: ABORTED}
    request_id = sim.submit(b"h" * 100 + b"x" * 100, max_tokens=3)
    sim.tick(1)
    assert sim.core.statistics().n_kv_cells_cached == 0
    assert sim.core.discrepancies() == []
    sim.run()
    assert sim.outcome(request_id) == sim.alone(request_id)
    sim.check_idle()


def test_with_a_sliding_window_every_turn_can_be_gone_back_to() -> None:
    sim = Simulator(n_ctx=1024, n_seq_max=4, n_batch=64, is_windowed=True, answer=endless)
    turns = [b"the first turn"]
    for _ in range(3):
        request_id = sim.submit(turns[-1], max_tokens=9)
        sim.run()
        turns.append(turns[-1] + bytes(sim.tokens[request_id]) + b" and a question")
    branch = sim.submit(turns[1][: len(turns[0]) + 8] + b" another question", max_tokens=1)
    sim.run()
    assert sim.finished[branch].completion.usage.n_cached == len(turns[0]) + 8


# --- Cells under pressure -----------------------------------------------------------------------
def test_cached_prefixes_give_way_before_anybody_is_preempted() -> None:
    sim = Simulator(n_ctx=64, n_seq_max=2, n_batch=64, answer=endless, prefix_cache_tokens=32)
    sim.submit(b"p" * 30, max_tokens=2)
    sim.run()
    assert sim.core.statistics().n_kv_cells_cached == 31
    big = sim.submit(b"q" * 60, max_tokens=5)
    sim.run()
    assert sim.core.statistics().n_preemptions == 0
    assert sim.outcome(big) == sim.alone(big)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prefix_cache_bytes", [1 << 20, 0], ids=["swapped", "recomputed"])
def test_a_preempted_stream_goes_on_with_the_same_tokens(
    temperature: float, prefix_cache_bytes: int
) -> None:
    params = SamplingParams(temperature=temperature, stop=["zzzz"])
    sim = Simulator(
        n_ctx=24, n_seq_max=3, n_batch=4, answer=endless, prefix_cache_bytes=prefix_cache_bytes, latency_s=0.01
    )  # fmt: skip
    request_ids = [sim.submit(bytes([letter]) * 4, params=params) for letter in b"xyz"]
    sim.run()
    statistics = sim.core.statistics()
    assert statistics.n_preemptions > 0
    assert (statistics.n_swaps > 0) == (prefix_cache_bytes > 0)
    preempted = [r for r in request_ids if sim.finished[r].completion.timings.n_preemptions]
    assert preempted, "the completion says so"
    assert request_ids[0] not in preempted, "the oldest never is"
    for request_id in request_ids:
        assert sim.outcome(request_id) == sim.alone(request_id)
        assert len(sim.tokens[request_id]) == 24 - 4 + 1
    sim.check_idle()


@pytest.mark.parametrize("how", ["flipped", "refused"])
def test_a_damaged_swap_is_computed_again(how: str) -> None:
    sim = Simulator(n_ctx=24, n_seq_max=2, n_batch=4, answer=endless, latency_s=0.01)
    request_ids = [sim.submit(bytes([letter]) * 4) for letter in b"xy"]
    while not any(s.placement.swapped for s in sim.core.queue.waiting):
        sim.tick()
    (victim,) = (s for s in sim.core.queue.waiting if s.placement.swapped)
    assert victim.placement.swapped is not None
    if how == "flipped":
        data = bytearray(victim.placement.swapped.data)
        data[len(data) // 2] ^= 1
        victim.placement.swapped = type(victim.placement.swapped)(
            bytes(data), victim.placement.swapped.n_tokens
        )
    else:
        n_calls = sim.decoder.n_calls["state_seq_set_data"]
        sim.decoder.call_faults["state_seq_set_data", n_calls + 1] = False
    sim.run()
    for request_id in request_ids:
        assert sim.outcome(request_id) == sim.alone(request_id)
    sim.check_idle()


def test_many_requests_that_need_three_times_the_cache_all_finish() -> None:
    sim = Simulator(n_ctx=96, n_seq_max=8, n_batch=16, answer=endless, latency_s=0.01)
    for letter in b"abcdefgh":
        sim.submit(bytes([letter]) * 12, max_tokens=24)
    sim.run()
    assert {event.completion.finish_reason for event in sim.finished.values()} == {
        FinishReason.LENGTH
    }
    sim.check_outcomes()
    sim.check_idle()


# --- Readers that stop --------------------------------------------------------------------------
@pytest.mark.parametrize("stream_buffer", [1, 5])
def test_a_reader_that_stops_gets_no_more_than_the_buffer(stream_buffer: int) -> None:
    sim = Simulator(answer=endless, stream_buffer=stream_buffer)
    request_id = sim.submit()
    sim.stopped.add(request_id)
    sim.run()
    assert len(sim.tokens[request_id]) == stream_buffer
    assert not sim.core.has_work
    n_decodes = sim.decoder.n_decodes
    assert sim.tick(5) == set()
    assert sim.decoder.n_decodes == n_decodes
    sim.read_on(request_id)
    sim.run()
    assert sim.core.statistics().n_preemptions == 0
    assert sim.outcome(request_id) == sim.alone(request_id)


@pytest.mark.parametrize("prefix_cache_bytes", [1 << 20, 0], ids=["swapped", "kept as a prefix"])
def test_readers_that_stop_in_every_seq_id_do_not_stall_the_queue(prefix_cache_bytes: int) -> None:
    sim = Simulator(
        n_seq_max=2, answer=endless, stream_buffer=4, prefix_cache_bytes=prefix_cache_bytes, latency_s=0.01
    )  # fmt: skip
    holders = [sim.submit(b"h" * 5), sim.submit(b"i" * 5)]
    sim.stopped.update(holders)
    sim.run()
    third = sim.submit(max_tokens=4)
    sim.run()
    assert set(sim.finished) == {third}
    assert sim.core.statistics().n_preemptions == 1, "one seq_id is enough"
    assert sim.outcome(third) == sim.alone(third)
    for request_id in holders:
        sim.read_on(request_id)
    sim.run()
    sim.check_outcomes()
    sim.check_idle()


def test_a_stopped_reader_is_not_preempted_for_what_would_not_fit_anyway() -> None:
    sim = Simulator(n_ctx=64, n_seq_max=2, answer=endless, stream_buffer=2)
    small = sim.submit(b"s" * 4)
    sim.stopped.add(small)
    sim.tick(3)
    running = sim.submit(b"r" * 30)
    sim.tick(5)
    sim.submit(b"big" * 20, max_tokens=1)
    sim.tick(3)
    assert sim.core.statistics().n_preemptions == 0
    sim.core.queue.cancel(running)
    sim.hear()
    sim.tick(12)
    assert sim.core.statistics().n_preemptions == 1, "now it makes room"
    sim.read_on(small)
    sim.run()
    sim.check_outcomes()


def test_a_stopped_reader_does_not_delay_who_shares_with_others() -> None:
    """What a newcomer shares takes no cells: with that, it fits beside all but the idle one."""
    n_ticks = []
    for has_idle in (False, True):
        sim = Simulator(
            n_ctx=1000, n_batch=64, answer=endless, stream_buffer=2, prefix_cache_tokens=1
        )  # fmt: skip
        if has_idle:
            idle = sim.submit(b"p" * 200, max_tokens=300)
            sim.stopped.add(idle)
            sim.run()
        active = sim.submit(b"h" * 300, max_tokens=690)
        while active not in sim.tokens:
            sim.tick()
        before = sim.decoder.n_decodes
        newcomer = sim.submit(b"h" * 300 + b"t" * 500, max_tokens=2)
        while newcomer not in sim.finished:
            sim.tick()
        n_ticks.append(sim.decoder.n_decodes - before)
        assert sim.finished[newcomer].completion.usage.n_cached == 300
    assert n_ticks[0] == n_ticks[1]


@pytest.mark.parametrize("draft_share", [None, 0.8], ids=["no drafts", "drafts"])
@pytest.mark.parametrize("memory", [{"has_pos_min": False}, {"is_windowed": True}], ids=str)
def test_an_output_that_goes_back_computes_the_tokens_since_its_last_checkpoint(
    memory: Any, draft_share: float | None
) -> None:
    sim = Simulator(
        n_ctx=4096, n_seq_max=2, n_batch=128, answer=endless, draft_share=draft_share,
        n_rollback=8, **memory,
    )  # fmt: skip
    prompt = bytes(i % 251 for i in range(100))
    first = sim.submit(prompt, max_tokens=300, banned_strings=["never"])
    sim.run()
    before = n_computed(sim)
    output = sim.tokens[first][:290]
    second = sim.submit(prompt + bytes(output), max_tokens=5, banned_strings=["never"])
    sim.run()
    assert n_computed(sim) - before <= OUTPUT_INTERVAL + 10
    assert sim.kv_cache.n_cached_ids <= N_OUTPUT_CHECKPOINTS + 5
    assert sim.outcome(second) == sim.alone(second)
    sim.check_outcomes()
