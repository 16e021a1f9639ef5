"""Where a decode of both is dear, prompts and rows that decode take turns; nobody starves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.closed_loop import CHAT, SMALL, ClosedLoop
from cllm.engine.core.scheduler import ATTENTION_TILE
from cllm.testing.fake_decoder import FakeRun, Latency
from tests.simulation.reference import endless
from tests.simulation.simulation import simulate
from tests.simulation.simulator import Simulator


@pytest.mark.parametrize("draft_share", [None, 0.7])
def test_every_request_gets_its_answer_and_the_books_agree(draft_share: float | None) -> None:
    report = simulate(300, seed=18, separates_prompts=True, draft_share=draft_share)
    assert report.n_tokens > 500


def n_rows_of(sim: Simulator, n_ticks: int) -> list[tuple[int, int]]:
    """Rows that decode, and rows of prompts, of each tick."""
    batches = sim.decoder.batches = []
    sim.tick(n_ticks)
    return [
        (
            sum(n_tokens for _, n_tokens, _ in runs if n_tokens == 1),
            sum(n_tokens for _, n_tokens, _ in runs if n_tokens > 1),
        )
        for runs in batches
    ]


def with_streams(n_streams: int, *, separates_prompts: bool, latency_s: Latency = 0.0) -> Simulator:
    """So many requests that decode."""
    sim = Simulator(
        n_ctx=4096,
        n_seq_max=2 * n_streams,
        n_batch=512,
        n_prefill_chunk=128,
        answer=endless,
        separates_prompts=separates_prompts,
        latency_s=latency_s,
    )
    for _ in range(n_streams):
        sim.submit(b"ab", max_tokens=1000)
    while len(sim.tokens) < n_streams:
        sim.tick()
    return sim


def test_a_long_prompt_and_the_streams_take_turns_in_chunks() -> None:
    sim = with_streams(4, separates_prompts=True)
    sim.submit(b"p" * 500, max_tokens=1)
    assert n_rows_of(sim, 6) == [(0, 128), (4, 0)] * 3


def test_short_questions_that_come_at_once_do_not_all_wait_for_the_last() -> None:
    """With the costs of a small model on two cores, in the real core and a virtual clock."""
    n_clients = 8
    outcome = ClosedLoop(n_clients, 8, turnaround_s=0.008, lingers=True, costs=CHAT).run()
    all_together_s = n_clients * CHAT.n_prompt * CHAT.prompt_row_ms / 1000.0
    assert outcome.ttft_p50 < 0.6 * all_together_s


@pytest.mark.full
def test_a_batch_that_once_seemed_dear_does_not_make_clients_wait_from_then_on() -> None:
    """One prompt for each token of all others is too few for 64 clients of 32 tokens."""

    def ttft_p50(*, was_disturbed: bool) -> float:
        loop = ClosedLoop(
            64, 12, turnaround_s=0.004, lingers=True, costs=SMALL, was_disturbed=was_disturbed
        )
        return loop.run().ttft_p50

    assert ttft_p50(was_disturbed=True) < 1.5 * ttft_p50(was_disturbed=False)


def test_where_a_tile_is_dear_prompts_take_turns_as_long_as_those_that_decode() -> None:
    sim = with_streams(
        4, separates_prompts=True, latency_s=lambda runs: 0.1 if len(runs) == 4 else 0.03
    )
    for n_rows, n_prompts, seconds in ((32, 1, 0.01), (128, 2, 0.1)):
        sim.core.cost.prompts.observe(n_rows, 0, n_prompts, 0, seconds)
    for first in b"pqrs":
        sim.submit(bytes([first]) * 60, max_tokens=1)
    assert n_rows_of(sim, 5) == [(0, 63), (0, 63), (0, 63), (4, 0), (0, 4 * 60 - 3 * 63)]


def test_elsewhere_they_share_a_tick() -> None:
    sim = with_streams(4, separates_prompts=False)
    sim.submit(b"p" * 500, max_tokens=1)
    assert n_rows_of(sim, 2) == [(4, 124)] * 2


def test_with_a_target_for_the_gap_they_share_a_tick() -> None:
    sim = Simulator(
        n_ctx=4096, n_batch=512, target_itl_ms=50.0, answer=endless, separates_prompts=True
    )
    sim.submit(b"ab", max_tokens=1000)
    sim.tick(2)
    sim.submit(b"p" * 500, max_tokens=1)
    ((n_decoding, n_prompt_rows),) = n_rows_of(sim, 1)
    assert n_decoding == 1
    assert n_prompt_rows > 0


def test_who_has_its_turn_does_not_wait_longer_because_others_end() -> None:
    """By their places in a list that grows shorter, one would be left out for ever."""
    sim = Simulator(n_ctx=8192, n_seq_max=128, n_batch=512, answer=endless, separates_prompts=True)
    for number in range(ATTENTION_TILE):
        sim.submit(b"ab", max_tokens=40 + number)
    while len(sim.tokens) < ATTENTION_TILE:
        sim.tick()
    unheard = dict.fromkeys(sim.requests, 0)
    for number in range(60):
        heard = sim.tick()
        for request_id in unheard.keys() - sim.finished.keys():
            unheard[request_id] = 0 if request_id in heard else unheard[request_id] + 1
            assert unheard[request_id] <= 3
        if len(sim.requests) - len(sim.finished) < ATTENTION_TILE:
            unheard[sim.submit(b"ab", max_tokens=40 + number)] = 0


@pytest.mark.parametrize("n_streams", [ATTENTION_TILE - 1, ATTENTION_TILE, 100])
def test_fewer_rows_decode_than_fill_a_tile_and_everybody_gets_as_many_tokens(
    n_streams: int,
) -> None:
    sim = with_streams(n_streams, separates_prompts=True)
    n_before = [len(tokens) for tokens in sim.tokens.values()]
    n_ticks = 10
    assert n_rows_of(sim, n_ticks) == [(ATTENTION_TILE - 1, 0)] * n_ticks
    n_after = [len(tokens) for tokens in sim.tokens.values()]
    n_tokens = {after - before for before, after in zip(n_before, n_after, strict=True)}
    assert max(n_tokens) - min(n_tokens) <= 1


@pytest.mark.parametrize("target_itl_ms", [None, 400.0])
def test_a_decode_that_abort_cannot_end_is_short(target_itl_ms: float | None) -> None:
    """A cancel waits for the end of the decode."""

    def longest_s(max_tick_s: float | None) -> float:
        taken = [0.0]

        def latency_s(runs: Sequence[FakeRun]) -> float:
            taken.append(0.002 + 0.005 * sum(len(run.tokens) for run in runs))
            return taken[-1]

        sim = Simulator(
            n_ctx=8192,
            n_batch=512,
            n_prefill_chunk=512,
            target_itl_ms=target_itl_ms,
            answer=endless,
            max_tick_s=max_tick_s,
            latency_s=latency_s,
        )
        for first in b"pq":
            sim.submit(bytes([first]) * 2000, max_tokens=1)
        while len(sim.finished) < 2:
            sim.tick()
        return max(taken)

    assert longest_s(None) > 1.5
    assert longest_s(0.5) < 0.55


def test_a_prompt_that_takes_all_free_cells_leaves_the_streams_their_turn() -> None:
    """Ticks of few rows are quick, and tiles are dear here, so that another tick of prompts may follow."""

    def latency(runs: Sequence[FakeRun]) -> float:
        n_rows = sum(len(run.tokens) for run in runs)
        n_prompts = sum(len(run.tokens) > 1 for run in runs)
        if not n_prompts:
            return 0.002 + 0.0015 * n_rows
        return 0.002 + n_rows * (0.0015 if n_prompts > 1 and n_rows >= ATTENTION_TILE else 0.0008)

    sim = Simulator(
        n_ctx=1040,
        n_seq_max=32,
        n_batch=512,
        n_prefill_chunk=128,
        answer=endless,
        latency_s=latency,
        separates_prompts=True,
        prefix_cache=False,
        stream_buffer=4096,
    )
    numbers = iter(range(10_000))

    def submit(n_tokens: int, max_tokens: int) -> None:
        sim.submit([97 + next(numbers) % 26 for _ in range(n_tokens)], max_tokens=max_tokens)

    for _ in range(28):
        submit(5, 300)
    sim.tick(2)
    for _ in range(3):
        submit(40, 1)
    sim.tick(3)
    submit(30, 1)
    sim.tick(3)
    submit(sim.kv_cache.n_free - 80, 5)
    for _ in range(6000):
        if not sim.core.has_work:
            break
        n_decodes = sim.decoder.n_decodes
        sim.tick()
        assert sim.decoder.n_decodes > n_decodes or not sim.core.has_work
    assert len(sim.finished) == len(sim.requests) == 33
