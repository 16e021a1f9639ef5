"""Requests never disturb each other: thousands, batched, in both layouts, in too small a cache.

The embedded model's answers are the oracle.  What the field reports found, O1 to O13, is in
tests/reliability/test_origin.py.
"""

from __future__ import annotations

import pytest

from cllm import Engine, FinishReason
from tests.conftest import QUIET, submitted_together
from tests.reliability.origin import GREEDY, assert_idle_and_clean, check, counting

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

MIXED: list[tuple[str, str]] = [
    ("1+1=", "2"),
    ("37+58=", "95"),
    ("99+99=", "198"),
    counting(1, 40),
    ("repeat:你好🙂", "你好🙂"),
    ("reverse:streams", "smaerts"),
    counting(123, 150),
    ("repeat:Hello, world", "Hello, world"),
]


@pytest.mark.full
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
async def test_ten_thousand_sums_are_right_64_at_once(step: int, anyio_backend: str) -> None:
    """And afterwards the proof that bypasses the bookkeeping holds: the cache has every cell again."""
    n_ctx = 4096
    async with Engine(n_ctx=n_ctx, n_seq_max=64, **QUIET) as engine:
        pairs = [(a, b) for a in range(100) for b in range(100)][::step]
        completions = await engine.generate_all([f"{a}+{b}=" for a, b in pairs], **GREEDY)
        check(completions, [str(a + b) for a, b in pairs])
        await assert_idle_and_clean(engine)
        assert engine.statistics().n_finished[FinishReason.STOP] == len(pairs)
        # llama.h cannot count cells.  If one was still held, exactly n_ctx tokens would not fit.
        full = await engine.generate([65] * n_ctx, max_tokens=1, temperature=0)
        assert full.usage.n_prompt == n_ctx
        assert (full.finish_reason, full.stop_reason) == ("length", "max_tokens")
        await assert_idle_and_clean(engine)


async def test_batched_equals_alone_in_both_kv_layouts(anyio_backend: str) -> None:
    for kv_unified in (True, False):
        async with Engine(n_ctx=4096, n_seq_max=8, kv_unified=kv_unified, **QUIET) as engine:
            alone = [await engine.generate(q, **GREEDY) for q, _ in MIXED]
            together = await engine.generate_all([q for q, _ in MIXED], **GREEDY)
            assert [c.token_ids for c in alone] == [c.token_ids for c in together]
            check(together, [answer for _, answer in MIXED])
            await assert_idle_and_clean(engine)


async def test_eight_prompts_share_their_ticks(anyio_backend: str) -> None:
    async with Engine(n_ctx=4096, n_seq_max=8, **QUIET) as engine:
        questions = [counting(100 + n, 130 + n) for n in range(8)]
        with submitted_together(engine, 8):
            completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        check(completions, [answer for _, answer in questions])
        statistics = engine.statistics()
        assert statistics.n_decoding_rows / statistics.n_decoding_ticks >= 6


async def test_too_small_a_cache_preempts_and_every_answer_stays_right(anyio_backend: str) -> None:
    """Eight answers of 160 tokens in a cache for a bit more than two."""
    async with Engine(n_ctx=512, n_seq_max=8, n_batch=32, **QUIET) as engine:
        questions = [counting(100 + n, 138 + n) for n in range(8)]
        with submitted_together(engine, 8):
            completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        check(completions, [answer for _, answer in questions])
        assert engine.statistics().n_preemptions > 0
        assert sum(c.timings.n_preemptions for c in completions) > 0
        await assert_idle_and_clean(engine)
