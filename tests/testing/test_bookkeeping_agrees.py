"""assert_books_agree tells what is held, what was found, and who still runs."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from cllm import Engine, FinishReason, SamplingOptions
from cllm.engine.thread import inference_thread
from cllm.testing import FakeEngine
from cllm.testing.records import assert_books_agree

pytestmark = pytest.mark.anyio

GREEDY: SamplingOptions = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_kv_cells_used": 3}, "3 KV cells are held by requests"),
        ({"n_seq_ids_used": 1}, "1 seq_ids are held by requests"),
        ({"n_seq_ids_cached": 7}, "seq_ids are cached, not 7"),
        ({"n_finished": MappingProxyType({FinishReason.STOP: 2})}, "2 requests have ended, not 1"),
        ({"n_discrepancies": 3}, "3 discrepancies were found and mended"),
        ({"n_running": 2, "n_waiting": 1}, "3 requests still run or wait"),
    ],
    ids=str,
)
async def test_books_that_hold_on_to_a_request_are_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    await engine.reset_prefix_cache()
    await engine.generate("1+1=", **GREEDY)
    await assert_books_agree(engine, n_requests=1)
    statistics = replace(engine.statistics(), **wrong)
    monkeypatch.setattr(engine, "statistics", lambda: statistics)
    with pytest.raises(AssertionError, match=message):
        await assert_books_agree(engine, n_requests=1)


async def test_books_that_differ_from_llama_cpps_are_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def audit() -> list[str]:
        return ["seq_id 0: the bookkeeping ends at 3, llama.cpp at 5"]

    monkeypatch.setattr(engine, "audit", audit)
    with pytest.raises(AssertionError, match="disagree: seq_id 0"):
        await assert_books_agree(engine)


async def test_what_an_audit_has_mended_before_is_told_too(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit of anybody's, or one of the engine's own when it was idle."""
    monkeypatch.setattr(inference_thread, "AUDIT_EVERY_TICK", False)  # as users have it
    monkeypatch.setattr(inference_thread, "IDLE_AUDIT_S", float("inf"))
    async with FakeEngine() as engine:
        await engine.generate("one")
        (cached,) = [slot.seq_id for slot in await engine.slots() if slot.n_computed]
        engine.decoder.seq_rm(cached)  # behind the back of the bookkeeping
        assert await engine.audit() != []
        assert await engine.audit() == []
        with pytest.raises(AssertionError, match="1 discrepancies were found and mended"):
            await assert_books_agree(engine)


async def test_books_of_a_busy_engine_agree_unless_it_has_to_be_idle(engine: Engine) -> None:
    async with engine.stream("count:1..99", **GREEDY) as stream:
        await stream.__anext__()
        await assert_books_agree(engine)
        demands: list[dict[str, Any]] = [{"idle": True}, {"n_requests": 0}, {"n_requests": 1}]
        for must in demands:
            with pytest.raises(AssertionError, match="1 requests still run or wait"):
                await assert_books_agree(engine, **must)
    # What has just been cancelled is gone before the bookkeeping is looked at.
    await assert_books_agree(engine, idle=True, n_requests=1)
