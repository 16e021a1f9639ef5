"""The embedded model under pressure: small caches, shared heads, cancelled and stopped readers.

Its answers computed alone are the oracle.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from cllm import Completion, Engine, FinishReason, SamplingOptions, TokenStream
from cllm.engine.core.commands import CancelRequest, Command
from cllm.engine.core.tick_cost import TickCost
from tests.conftest import QUIET, running_batch, submitted_together

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

GREEDY: SamplingOptions = {"temperature": 0.0}
LAYOUTS = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "per-sequence"])


def counting(first: int, last: int) -> tuple[str, str]:
    """A question and its answer of many tokens."""
    return f"count:{first}..{last}", " ".join(str(n) for n in range(first, last + 1))


async def settle(engine: Engine) -> None:
    """Everything has ended, and nothing is left of it."""
    with anyio.fail_after(30):
        while engine.statistics().n_running or engine.statistics().n_waiting:
            await engine.audit()
    assert await engine.audit() == []
    statistics = engine.statistics()
    assert (statistics.n_kv_cells_used, statistics.n_seq_ids_used) == (0, 0)
    await engine.reset_prefix_cache()
    await engine.audit()
    assert engine.statistics().n_kv_cells_cached == engine.statistics().n_seq_ids_cached == 0


async def finish_all(streams: list[TokenStream]) -> list[Completion]:
    """The completions of many streams, read at the same time."""
    results: dict[int, Completion] = {}

    async def read(index: int) -> None:
        results[index] = await streams[index].completion()

    async with anyio.create_task_group() as tasks:
        for index in range(len(streams)):
            tasks.start_soon(read, index)
    return [results[index] for index in range(len(streams))]


# --- Cells --------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{}, {"prefix_cache_bytes": 0}, {"prefix_cache": False}], ids=str
)
async def test_requests_that_need_three_times_the_cache_all_finish_with_the_same_ids(
    anyio_backend: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What it takes on this machine, and so whether a copy is worth it, is not the subject.
    monkeypatch.setattr(TickCost, "recompute_s", lambda cost, n_tokens: float(n_tokens))
    questions = [counting(100 + n, 138 + n) for n in range(10)]
    prompts = [question for question, _ in questions]
    async with Engine(n_ctx=8192, n_seq_max=10, **QUIET) as engine:
        free = await engine.generate_all(prompts, **GREEDY)
    assert sum(c.usage.n_prompt + c.usage.n_output for c in free) >= 3 * 512
    async with Engine(n_ctx=512, n_seq_max=10, n_batch=32, **options, **QUIET) as engine:
        with submitted_together(engine, 10):
            tight = await engine.generate_all(prompts, **GREEDY)
        assert [c.token_ids for c in tight] == [c.token_ids for c in free]
        assert [c.text for c in tight] == [answer for _, answer in questions]
        statistics = engine.statistics()
        assert statistics.n_preemptions > 0
        assert (statistics.n_swaps > 0) == ("prefix_cache_bytes" not in options)
        assert statistics.n_finished[FinishReason.STOP] == 10
        await settle(engine)


@LAYOUTS
async def test_a_context_can_be_full_to_the_last_cell(anyio_backend: str, kv_unified: bool) -> None:
    async with Engine(n_ctx=512, n_seq_max=2, kv_unified=kv_unified, **QUIET) as engine:
        n_ctx = engine.model.n_ctx
        for n_prompt in (n_ctx, n_ctx - 1, n_ctx - 5):
            completion = await engine.generate([65] * n_prompt, temperature=0)
            if completion.finish_reason is FinishReason.LENGTH:
                assert completion.stop_reason == "context"
                assert completion.usage.n_output == n_ctx - n_prompt + 1
        await settle(engine)


async def test_one_sequence_and_a_batch_smaller_than_the_prompt_are_enough(
    anyio_backend: str,
) -> None:
    async with Engine(n_ctx=256, n_seq_max=1, n_batch=2, **QUIET) as engine:
        questions = [counting(5, 30), ("repeat:hello there", "hello there"), ("12+30=", "42")]
        completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        assert [c.text for c in completions] == [answer for _, answer in questions]
        await settle(engine)


# --- Sharing ------------------------------------------------------------------------------------
@LAYOUTS
async def test_eight_prompts_with_a_shared_head_compute_it_once(
    anyio_backend: str, kv_unified: bool
) -> None:
    async with Engine(
        n_ctx=8192, n_seq_max=8, n_batch=64, kv_unified=kv_unified, **QUIET
    ) as engine:
        head = (await engine.tokenize("a note of some length; " * 18))[:400]
        tails = [
            await engine.tokenize(f"{chr(97 + n)}\n{n}+{n}=" + "x" * n, add_special=False)
            for n in range(8)
        ]
        assert len(head) == 400
        alone = [await engine.generate([*head, *t], max_tokens=8, temperature=0) for t in tails]
        await engine.reset_prefix_cache()
        before = engine.statistics().n_prefill_tokens
        shared = await engine.generate_all(
            [[*head, *t] for t in tails], max_tokens=8, temperature=0
        )
        assert engine.statistics().n_prefill_tokens - before == 400 + sum(map(len, tails))
        assert [c.token_ids for c in shared] == [c.token_ids for c in alone]
        assert sorted(c.usage.n_cached for c in shared) == [0] + [400] * 7
        await settle(engine)


async def test_n_identical_prompts_cost_one_prefill_and_a_row_each(engine: Engine) -> None:
    before = engine.statistics()
    completions = await engine.generate_all(["count:1..30"] * 8, **GREEDY)
    assert len({c.token_ids for c in completions}) == 1
    n_prompt = completions[0].usage.n_prompt
    after = engine.statistics()
    assert after.n_prefill_tokens - before.n_prefill_tokens == n_prompt + 7
    assert after.n_cached_tokens - before.n_cached_tokens == 7 * (n_prompt - 1)
    await settle(engine)


async def test_the_second_turn_of_a_chat_computes_only_what_is_new(engine: Engine) -> None:
    first = await engine.generate("repeat:hello", **GREEDY)
    history = [*first.prompt_token_ids, *first.token_ids]
    second = await engine.generate([*history, *await engine.tokenize("1+1=")], **GREEDY)
    # The end token was sampled and never computed.
    assert second.usage.n_cached == len(history) - 1


# --- Cancelling ---------------------------------------------------------------------------------
@pytest.mark.same_process("when a command reaches another process is not known")
async def test_cancelling_a_long_prefill_ends_it_before_the_second_tick(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are never computed after that, and nobody else notices."""
    submitted_at = 0.0
    path = tmp_path / "trace.json"
    question, answer = counting(1, 150)
    async with Engine(n_ctx=8192, n_seq_max=4, n_batch=16, trace=path, **QUIET) as engine:
        others = [engine.stream(question, **GREEDY) for _ in range(2)]
        for stream in others:
            await stream.__anext__()
        long = engine.stream([65] * 4000, request_id="long", **GREEDY)
        await long.__aenter__()
        while engine.statistics().n_prefill_tokens < 200:
            await others[0].__anext__()
        put = engine._parts.inbox.put

        def put_and_note(command: Command) -> None:
            nonlocal submitted_at
            put(command)
            if isinstance(command, CancelRequest):
                submitted_at = 1e6 * time.perf_counter()

        monkeypatch.setattr(engine._parts.inbox, "put", put_and_note)
        await long.cancel()
        cancelled = await long.completion()
        assert submitted_at
        assert cancelled.finish_reason is FinishReason.CANCELLED
        assert [c.text for c in await finish_all(others)] == [answer] * 2
        await settle(engine)
    events = json.loads(path.read_text())
    names = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] != "tick"
    }
    later = [e for e in events if e["name"] == "prefill" and e["ts"] > submitted_at]
    assert len([e for e in later if names[e["tid"]] == "long"]) <= 1


async def test_cancelling_inside_a_long_decode_aborts_it(
    anyio_backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    async with Engine(
        n_ctx=16384,
        n_seq_max=4,
        n_batch=16384,
        n_ubatch=64,
        kv_unified=True,
        trace=path,
        **QUIET,
    ) as engine:
        long = engine.stream([65] * 16000, request_id="long", **GREEDY)
        await long.__aenter__()
        with anyio.fail_after(30):
            while "long" not in running_batch(engine):  # its only decode has begun
                await anyio.sleep(0)
        await long.cancel()
        assert (await long.completion()).finish_reason is FinishReason.CANCELLED
        assert (await engine.generate("1+1=", **GREEDY)).text == "2"
        await settle(engine)
    events = json.loads(path.read_text())
    first, *later = [e["name"] for e in events if e["pid"] == 1 and "decode" in e["name"]]
    assert first == "failed decode"
    assert set(later) == {"decode"}


# --- Readers that stop --------------------------------------------------------------------------
@pytest.mark.full
@LAYOUTS
async def test_readers_that_stop_hold_a_buffer_and_nobody_up_and_read_on_to_the_right_end(
    anyio_backend: str, kv_unified: bool
) -> None:
    n_seq_max, stream_buffer = 3, 8
    async with Engine(
        n_ctx=4096, n_seq_max=n_seq_max, stream_buffer=stream_buffer, kv_unified=kv_unified, **QUIET
    ) as engine:
        questions = [counting(n, 130 + n) for n in range(n_seq_max)]
        idle = [engine.stream(question, **GREEDY) for question, _ in questions]
        for stream in idle:
            await stream.__aenter__()
        with anyio.fail_after(30):
            while engine.statistics().n_paused < n_seq_max:
                await engine.audit()
        n_generated = engine.statistics().n_output_tokens
        assert n_generated == n_seq_max * stream_buffer, "as many as the buffers hold"
        ticks = engine.statistics().n_ticks
        others = await engine.generate_all([f"{n}+{n}=" for n in range(6)], **GREEDY)
        assert [c.text for c in others] == [str(2 * n) for n in range(6)]
        statistics = engine.statistics()
        n_others = sum(c.usage.n_output for c in others)
        assert statistics.n_output_tokens == n_generated + n_others, "the idle ones made no more"
        assert statistics.n_ticks - ticks <= n_others + 6
        completions = await finish_all(idle)
        assert [c.text for c in completions] == [answer for _, answer in questions]
        await settle(engine)


async def test_a_reader_that_stops_does_not_slow_the_others(anyio_backend: str) -> None:
    """Every tick has a token for the stream that is read: as many ticks as alone."""
    question, answer = counting(1, 60)
    n_ticks = []
    for n_idle in (0, 3):
        async with Engine(n_ctx=4096, n_seq_max=4, stream_buffer=4, **QUIET) as engine:
            idle = [engine.stream(counting(9, 99)[0], **GREEDY) for _ in range(n_idle)]
            for stream in idle:
                await stream.__aenter__()
            with anyio.fail_after(30):
                while engine.statistics().n_paused < n_idle:
                    await engine.audit()
            before = engine.statistics().n_ticks
            assert (await engine.generate(question, **GREEDY)).text == answer
            n_ticks.append(engine.statistics().n_ticks - before)
            for stream in idle:
                await stream.aclose()
    assert n_ticks[0] == n_ticks[1]


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_idle_engine_counts_the_prefix_that_it_copied_after_the_last_answer(
    anyio_backend: str, process: bool
) -> None:
    options = {"n_seq_max": 1, "kv_unified": True, "process": process, **QUIET}
    async with Engine(**options) as engine:
        for first in (100, 200):
            question, _ = counting(first, first + 20)
            await engine.generate(question + " " * 100, temperature=0, max_tokens=1)
        with anyio.fail_after(30):
            while not engine.statistics().n_prefix_bytes_host:
                await anyio.lowlevel.checkpoint()
        assert engine.statistics().n_evictions == 1
        assert engine.statistics().n_seq_ids_cached == 1
