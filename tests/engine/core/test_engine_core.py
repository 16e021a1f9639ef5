"""EngineCore on a fake decoder and a manual clock: endings, order, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cllm.engine.core.sequence import AGEING_S
from cllm.engine.output import FinishReason
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import FakeRun
from tests.simulation.reference import END, GREEDY, Outcome, endless, says
from tests.simulation.simulator import Simulator


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
    sim = Simulator(answer=says("hi é".encode(), n_prompt=6))
    request_id = sim.submit(b"prompt", params=params)
    sim.run()
    assert sim.outcome(request_id) == Outcome(token_ids, text, reason, stop_reason)
    assert sim.alone(request_id) == sim.outcome(request_id)
    sim.check_idle()


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_prompt", [1, 7, 8])
def test_a_sequence_alone_that_fills_its_context_ends_with_length_context(
    n_prompt: int, kv_unified: bool
) -> None:
    sim = Simulator(
        n_ctx=8 if kv_unified else 16, n_seq_max=2, kv_unified=kv_unified, answer=endless
    )
    request_id = sim.submit(b"p" * n_prompt)
    sim.run()
    outcome = sim.outcome(request_id)
    assert (outcome.reason, outcome.stop_reason) == (FinishReason.LENGTH, "context")
    assert len(outcome.token_ids) == 8 - n_prompt + 1, "every cell is used, and its logits too"
    assert sim.core.statistics().n_preemptions == 0
    sim.check_idle()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deadline_ends_a_request_with_what_there_is(is_paused: bool) -> None:
    sim = Simulator(answer=endless, stream_buffer=4)
    late, other = sim.submit(timeout=2.0), sim.submit()
    sim.tick(3)
    n_tokens = len(sim.tokens[late])
    assert n_tokens
    if is_paused:
        sim.stopped.add(late)
        sim.tick(sim.config.stream_buffer)
        n_tokens = len(sim.tokens[late])
    assert sim.core.next_deadline == 3.0
    sim.now = 2.9
    sim.tick()
    assert late not in sim.finished
    sim.now = 3.0
    assert late in sim.tick()
    assert sim.outcome(late).reason is FinishReason.DEADLINE
    assert len(sim.tokens[late]) == n_tokens + (not is_paused)
    assert sim.core.next_deadline is None
    sim.run()
    assert sim.outcome(other) == sim.alone(other)


def test_a_deadline_ends_a_request_that_never_ran() -> None:
    sim = Simulator(n_seq_max=1, answer=endless)
    sim.submit()
    sim.tick()
    waiting = sim.submit(timeout=1.0)
    sim.tick()
    sim.now += 1.0
    sim.tick()
    completion = sim.finished[waiting].completion
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.DEADLINE, ())
    assert completion.timings.ttft_s is None
    assert completion.timings.queued_s == completion.timings.total_s == 1.0


def test_cancelling_frees_the_cells_before_the_next_tick() -> None:
    sim = Simulator(answer=endless)
    request_id, other = sim.submit(), sim.submit()
    sim.tick(3)
    sim.core.queue.cancel(request_id)
    assert sim.decoder.seq_pos_max(0) is None
    sim.core.queue.cancel("unknown")
    sim.hear()
    sim.run()
    assert sim.outcome(request_id).reason is FinishReason.CANCELLED
    assert sim.outcome(other) == sim.alone(other)


def test_cancelling_all_leaves_nothing() -> None:
    sim = Simulator(n_seq_max=2)
    for _ in range(5):
        sim.submit()
    sim.tick(2)
    sim.core.queue.cancel_all()
    sim.hear()
    sim.check_idle()


# --- Order --------------------------------------------------------------------------------------
def test_the_most_urgent_request_runs_first_and_equals_in_order_of_arrival() -> None:
    sim = Simulator(n_seq_max=1)
    normal = [sim.submit() for _ in range(2)]
    late = sim.submit(timeout=1e6)
    urgent, background = sim.submit(priority=-1), sim.submit(priority=1)
    sim.run()
    assert list(sim.finished) == [urgent, late, *normal, background]


def test_a_long_prompt_never_makes_a_decoding_request_wait() -> None:
    sim = Simulator(n_ctx=256, n_batch=4, answer=endless)
    decoding = sim.submit(b"p")
    sim.tick()
    sim.submit(b"q" * 100, priority=-9)
    for _ in range(30):
        assert decoding in sim.tick()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_thousandth_request_costs_what_the_first_did(prefix_cache: bool) -> None:
    sim = Simulator(n_seq_max=2, answer=says(b"answer", n_prompt=6), prefix_cache=prefix_cache)
    costs = []
    for _ in range(200):
        before = (sim.core.recorder.n_ticks, sim.core.recorder.n_decode_rows)
        sim.submit(b"prompt")
        sim.run()
        after = (sim.core.recorder.n_ticks, sim.core.recorder.n_decode_rows)
        costs.append((after[0] - before[0], after[1] - before[1]))
    # With the prefix cache all but the last token of a known prompt is shared.
    assert costs[0] == (7, 12)
    assert set(costs[1:]) == {(7, 7) if prefix_cache else (7, 12)}
    sim.check_idle()


def test_equal_prompts_get_their_first_tokens_one_after_another() -> None:
    """All at once, each would get its first token as late as the last."""
    sim = Simulator(n_ctx=512, n_seq_max=8, n_batch=40, answer=endless, latency_s=1.0)
    request_ids = [sim.submit(bytes([letter]) * 40, max_tokens=1) for letter in b"abcdefgh"]
    sim.run()
    first = [sim.finished[r].completion.timings.ttft_s for r in request_ids]
    assert sim.decoder.n_decodes == 8, "at the same throughput"
    assert first == [float(n) for n in range(1, 9)], "the median is near half of the last"


def test_a_request_that_waits_long_enough_passes_more_urgent_ones() -> None:
    sim = Simulator(n_seq_max=1, answer=says(b"a", n_prompt=6), latency_s=AGEING_S / 4)
    patient = sim.submit(priority=3)
    for n_urgent in range(1, 100):
        sim.submit(priority=0)
        while len(sim.finished) < n_urgent:
            sim.tick()
        if patient in sim.finished:
            break
    waited = sim.finished[patient].completion.timings.queued_s
    assert 3 * AGEING_S <= waited <= 4 * AGEING_S + AGEING_S / 2


# --- Pace ---------------------------------------------------------------------------------------
class TimedSimulator(Simulator):
    """Ticks cost 10 ms, 1 ms for each row."""

    def __init__(self, **options: Any) -> None:
        self.gaps: list[float] = []
        super().__init__(
            n_ctx=4096, n_seq_max=5, n_batch=512, answer=endless, latency_s=self._cost, **options
        )

    def _cost(self, runs: Sequence[FakeRun]) -> float:
        self.gaps.append(0.010 + 0.001 * sum(len(run.tokens) for run in runs))
        return self.gaps[-1]


@pytest.mark.parametrize("target_itl_ms", [None, 60.0])
def test_a_long_prompt_keeps_the_pace_of_the_streams_where_it_is_wanted(
    target_itl_ms: float | None,
) -> None:
    sim = TimedSimulator(target_itl_ms=target_itl_ms)
    for letter in b"abcd":
        sim.submit(bytes([letter]) * 4, max_tokens=400)
    sim.tick(20)
    sim.gaps.clear()
    long = sim.submit(b"z" * 2000, max_tokens=1)
    while long not in sim.finished:
        sim.tick()
    if target_itl_ms is None:
        assert max(sim.gaps) > 0.5, "512 rows at once"
    else:
        assert max(sim.gaps) <= 1.2 * target_itl_ms / 1000
        # 2,000 rows of prompt cost 2 s; a fixed 10 ms and four rows come with every 46 of them.
        assert sum(sim.gaps) <= 2000 / (60 - 14) * 0.060 * 1.1
    sim.run()
    sim.check_outcomes()


# --- Statistics ---------------------------------------------------------------------------------
def test_statistics_count_what_was_computed() -> None:
    sim = Simulator(n_batch=4, answer=says(b"abc", n_prompt=6))
    sim.submit(b"prompt")
    sim.run()
    statistics = sim.core.statistics()
    assert (statistics.n_ticks, statistics.n_decoding_ticks) == (5, 4)
    assert statistics.n_prefill_tokens == 6
    assert statistics.n_output_tokens == statistics.n_decoding_rows == 4
    assert statistics.n_decode_rows == 6 + 3
    assert statistics.n_finished == {r: int(r is FinishReason.STOP) for r in FinishReason}


@pytest.mark.parametrize("code", [2, -1])
@pytest.mark.parametrize("n_decode", [1, 2, 3])
def test_a_failed_decode_counts_every_prompt_token_once(n_decode: int, code: int) -> None:
    sim = Simulator(n_batch=4, answer=says(b"abc", n_prompt=10), faults={n_decode: code})
    sim.submit(b"ten tokens")
    sim.run(at_most=60)
    assert sim.core.statistics().n_prefill_tokens == 10


def test_timings_are_taken_from_the_clock() -> None:
    sim = Simulator(n_batch=4, answer=says(b"abc", n_prompt=6))
    request_id = sim.submit(b"prompt")
    for _ in range(5):
        sim.now += 1.0
        sim.tick()
    timings = sim.finished[request_id].completion.timings
    assert (timings.queued_s, timings.prefill_s, timings.decode_s) == (1.0, 1.0, 3.0)
    assert (timings.ttft_s, timings.total_s) == (2.0, 5.0)
    assert (timings.itl_p50_s, timings.itl_max_s, timings.n_preemptions) == (1.0, 1.0, 0)
