"""EngineCore on a fake decoder and a manual clock: endings, order, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.engine.request import FinishReason
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.sequence import AGEING_S
from tests.engine.bench import END, GREEDY, Bench, Outcome, endless, says


# --- Endings ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "text", "token_ids", "reason", "stop_reason"),
    [
        (GREEDY, "hi é", (*"hi é".encode(), END), FinishReason.STOP, END),
        (
            SamplingParams(temperature=0, stop=["é", "i "]),
            "h", tuple(b"hi "), FinishReason.STOP, "i ",
        ),
        (
            SamplingParams(temperature=0, stop_token_ids=[ord("i")]),
            "h", tuple(b"hi"), FinishReason.STOP, ord("i"),
        ),
        (
            SamplingParams(temperature=0, max_tokens=3),
            "hi ", tuple(b"hi "), FinishReason.LENGTH, "max_tokens",
        ),
        (
            SamplingParams(temperature=0, max_tokens=4),
            "hi \ufffd", tuple("hi é".encode()[:4]), FinishReason.LENGTH, "max_tokens",
        ),
        (
            SamplingParams(temperature=0, max_tokens=2, stop=["i and more"]),
            "hi", tuple(b"hi"), FinishReason.LENGTH, "max_tokens",
        ),
    ],
    ids=["end token", "stop string", "stop token", "max_tokens", "half a character", "held back"],
)  # fmt: skip
def test_an_output_ends_where_its_parameters_say(
    params: SamplingParams,
    text: str,
    token_ids: tuple[int, ...],
    reason: FinishReason,
    stop_reason: str | int,
) -> None:
    bench = Bench(answer=says("hi é".encode(), n_prompt=6))
    request_id = bench.submit(b"prompt", params=params)
    bench.run()
    assert bench.outcome(request_id) == Outcome(token_ids, text, reason, stop_reason)
    assert bench.alone(request_id) == bench.outcome(request_id)
    bench.check_idle()


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_prompt", [1, 7, 8])
def test_a_sequence_alone_that_fills_its_context_ends_with_length_context(
    n_prompt: int, kv_unified: bool
) -> None:
    bench = Bench(n_ctx=8 if kv_unified else 16, n_seq_max=2, kv_unified=kv_unified, answer=endless)
    request_id = bench.submit(b"p" * n_prompt)
    bench.run()
    outcome = bench.outcome(request_id)
    assert (outcome.reason, outcome.stop_reason) == (FinishReason.LENGTH, "context")
    assert len(outcome.token_ids) == 8 - n_prompt + 1, "every cell is used, and its logits too"
    assert bench.core.statistics().n_preemptions == 0
    bench.check_idle()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deadline_ends_a_request_with_what_there_is(is_paused: bool) -> None:
    bench = Bench(answer=endless, stream_buffer=4)
    late, other = bench.submit(timeout=2.0), bench.submit()
    bench.tick(3)
    n_tokens = len(bench.tokens[late])
    assert n_tokens
    if is_paused:
        bench.stopped.add(late)
        bench.tick(bench.config.stream_buffer)
        n_tokens = len(bench.tokens[late])
    assert bench.core.next_deadline == 3.0
    bench.now = 2.9
    bench.tick()
    assert late not in bench.finished
    bench.now = 3.0
    assert late in bench.tick()
    assert bench.outcome(late).reason is FinishReason.DEADLINE
    assert len(bench.tokens[late]) == n_tokens + (not is_paused)
    assert bench.core.next_deadline is None
    bench.run()
    assert bench.outcome(other) == bench.alone(other)


def test_a_deadline_ends_a_request_that_never_ran() -> None:
    bench = Bench(n_seq_max=1, answer=endless)
    bench.submit()
    bench.tick()
    waiting = bench.submit(timeout=1.0)
    bench.tick()
    bench.now += 1.0
    bench.tick()
    completion = bench.finished[waiting].completion
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.DEADLINE, ())
    assert completion.timings.ttft_s is None
    assert completion.timings.queued_s == completion.timings.total_s == 1.0


def test_cancelling_frees_the_cells_before_the_next_tick() -> None:
    bench = Bench(answer=endless)
    request_id, other = bench.submit(), bench.submit()
    bench.tick(3)
    bench.core.cancel(request_id)
    assert bench.decoder.seq_pos_max(0) is None
    bench.core.cancel("unknown")
    bench.hear()
    bench.run()
    assert bench.outcome(request_id).reason is FinishReason.CANCELLED
    assert bench.outcome(other) == bench.alone(other)


def test_cancelling_all_leaves_nothing() -> None:
    bench = Bench(n_seq_max=2)
    for _ in range(5):
        bench.submit()
    bench.tick(2)
    bench.core.cancel_all()
    bench.hear()
    bench.check_idle()


# --- Order --------------------------------------------------------------------------------------
def test_the_most_urgent_request_runs_first_and_equals_in_order_of_arrival() -> None:
    bench = Bench(n_seq_max=1)
    normal = [bench.submit() for _ in range(2)]
    late = bench.submit(timeout=1e6)
    urgent, background = bench.submit(priority=-1), bench.submit(priority=1)
    bench.run()
    assert list(bench.finished) == [urgent, late, *normal, background]


def test_a_long_prompt_never_makes_a_decoding_request_wait() -> None:
    bench = Bench(n_ctx=256, n_batch=4, answer=endless)
    decoding = bench.submit(b"p")
    bench.tick()
    bench.submit(b"q" * 100, priority=-9)
    for _ in range(30):
        assert decoding in bench.tick()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_thousandth_request_costs_what_the_first_did(prefix_cache: bool) -> None:
    bench = Bench(n_seq_max=2, answer=says(b"answer", n_prompt=6), prefix_cache=prefix_cache)
    costs = []
    for _ in range(200):
        before = (bench.core.recorder.n_ticks, bench.core.recorder.n_decode_rows)
        bench.submit(b"prompt")
        bench.run()
        after = (bench.core.recorder.n_ticks, bench.core.recorder.n_decode_rows)
        costs.append((after[0] - before[0], after[1] - before[1]))
    # With the prefix cache all but the last token of a known prompt is shared.
    assert costs[0] == (7, 12)
    assert set(costs[1:]) == {(7, 7) if prefix_cache else (7, 12)}
    bench.check_idle()


def test_equal_prompts_get_their_first_tokens_one_after_another() -> None:
    """All at once, each would get its first token as late as the last."""
    bench = Bench(n_ctx=512, n_seq_max=8, n_batch=40, answer=endless, decode_s=1.0)
    request_ids = [bench.submit(bytes([letter]) * 40, max_tokens=1) for letter in b"abcdefgh"]
    bench.run()
    first = [bench.finished[r].completion.timings.ttft_s for r in request_ids]
    assert bench.decoder.n_decodes == 8, "at the same throughput"
    assert first == [float(n) for n in range(1, 9)], "the median is near half of the last"


def test_a_request_that_waits_long_enough_passes_more_urgent_ones() -> None:
    bench = Bench(n_seq_max=1, answer=says(b"a", n_prompt=6), decode_s=AGEING_S / 4)
    patient = bench.submit(priority=3)
    for n_urgent in range(1, 100):
        bench.submit(priority=0)
        while len(bench.finished) < n_urgent:
            bench.tick()
        if patient in bench.finished:
            break
    waited = bench.finished[patient].completion.timings.queued_s
    assert 3 * AGEING_S <= waited <= 4 * AGEING_S + 2 * bench.decode_s


# --- Pace ---------------------------------------------------------------------------------------
class TimedBench(Bench):
    """Ticks cost 10 ms, 1 ms for each row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(n_ctx=4096, n_seq_max=5, n_batch=512, answer=endless, **options)
        self.gaps: list[float] = []

    def _take_time(self) -> None:
        seconds = 0.010 + 0.001 * self.decoder.n_rows
        self.now += seconds
        self.gaps.append(seconds)


@pytest.mark.parametrize("target_itl_ms", [None, 60.0])
def test_a_long_prompt_keeps_the_pace_of_the_streams_where_it_is_wanted(
    target_itl_ms: float | None,
) -> None:
    bench = TimedBench(target_itl_ms=target_itl_ms)
    for letter in b"abcd":
        bench.submit(bytes([letter]) * 4, max_tokens=400)
    bench.tick(20)
    bench.gaps.clear()
    long = bench.submit(b"z" * 2000, max_tokens=1)
    while long not in bench.finished:
        bench.tick()
    if target_itl_ms is None:
        assert max(bench.gaps) > 0.5, "512 rows at once"
    else:
        assert max(bench.gaps) <= 1.2 * target_itl_ms / 1000
        # 2,000 rows of prompt cost 2 s; a fixed 10 ms and four rows come with every 46 of them.
        assert sum(bench.gaps) <= 2000 / (60 - 14) * 0.060 * 1.1
    bench.run()
    bench.check_outcomes()


# --- Statistics ---------------------------------------------------------------------------------
def test_statistics_count_what_was_computed() -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=6))
    bench.submit(b"prompt")
    bench.run()
    statistics = bench.core.statistics()
    assert (statistics.n_ticks, statistics.n_decoding_ticks) == (5, 4)
    assert statistics.n_prefill_tokens == 6
    assert statistics.n_output_tokens == statistics.n_decoding_rows == 4
    assert statistics.n_decode_rows == 6 + 3
    assert statistics.n_finished == {r: int(r is FinishReason.STOP) for r in FinishReason}


@pytest.mark.parametrize("code", [2, -1])
@pytest.mark.parametrize("n_decode", [1, 2, 3])
def test_a_failed_decode_counts_every_prompt_token_once(n_decode: int, code: int) -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=10), faults={n_decode: code})
    bench.submit(b"ten tokens")
    bench.run(at_most=60)
    assert bench.core.statistics().n_prefill_tokens == 10


def test_timings_are_taken_from_the_clock() -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=6))
    request_id = bench.submit(b"prompt")
    for _ in range(5):
        bench.now += 1.0
        bench.tick()
    timings = bench.finished[request_id].completion.timings
    assert (timings.queued_s, timings.prefill_s, timings.decode_s) == (1.0, 1.0, 3.0)
    assert (timings.ttft_s, timings.total_s) == (2.0, 5.0)
    assert (timings.itl_p50_s, timings.itl_max_s, timings.n_preemptions) == (1.0, 1.0, 0)
