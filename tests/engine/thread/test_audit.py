"""An audit says where the bookkeeping and llama.cpp differ, and what it finds is mended at once."""

from __future__ import annotations

import logging
import threading

import anyio
import pytest

from cllm.engine.thread import inference_thread
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own audit of every tick ends an engine whose bookkeeping is wrong."""
    monkeypatch.setattr(inference_thread, "AUDIT_EVERY_TICK", False)
    monkeypatch.setattr(inference_thread, "IDLE_AUDIT_S", float("inf"))


def fail_to_read_once(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look at the cache raises."""
    read = engine.decoder.seq_pos_max

    def unreadable(seq_id: int) -> int | None:
        monkeypatch.setattr(engine.decoder, "seq_pos_max", read)
        raise RuntimeError("scripted")

    monkeypatch.setattr(engine.decoder, "seq_pos_max", unreadable)


async def test_a_cache_that_cannot_be_read_costs_a_context_and_not_the_engine(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine(stream_buffer=1) as engine:
        async with engine.stream("hello", max_tokens=5) as stream:
            text = (await stream.__anext__()).text
            fail_to_read_once(engine, monkeypatch)
            (found,) = await engine.audit()
            assert found == "llama.cpp's cannot be read (RuntimeError('scripted'))"
            text += "".join([delta.text async for delta in stream])
        assert text == "hello"
        assert engine.statistics().n_rebuilds == 1
        assert await engine.audit() == []


async def test_wrong_books_are_told_once_and_are_right_from_then_on(anyio_backend: str) -> None:
    async with FakeEngine() as engine:
        assert (await engine.generate("one")).text == "one"
        (cached,) = [slot.seq_id for slot in await engine.slots() if slot.n_computed]
        engine.decoder.seq_rm(cached)  # behind the back of the bookkeeping
        (found,) = await engine.audit()
        assert found.startswith(f"seq_id {cached}: llama.cpp holds positions (None, None)")
        assert engine.statistics().n_discrepancies == 1
        assert await engine.audit() == []
        assert engine.statistics().n_discrepancies == 1
        assert (await engine.generate("one")).text == "one"


async def test_what_is_known_to_be_wrong_is_mended_before_an_audit_looks(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, asked = threading.Event(), threading.Event()

    def refuses_once(seq_id: int, p0: int | None = None) -> bool:
        monkeypatch.setattr(engine.decoder, "seq_rm", seq_rm)
        removing.set()
        assert asked.wait(60)
        return False

    found = []
    async with FakeEngine(prefix_cache=False) as engine:

        async def audit() -> None:
            found.append(await engine.audit())

        seq_rm = engine.decoder.seq_rm
        monkeypatch.setattr(engine.decoder, "seq_rm", refuses_once)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, "one")
            await anyio.to_thread.run_sync(removing.wait)
            tasks.start_soon(audit)
            await anyio.wait_all_tasks_blocked()
            asked.set()
        assert found == [[]]
        assert engine.statistics().n_rebuilds == 1


async def test_an_idle_engine_looks_by_itself(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inference_thread, "IDLE_AUDIT_S", 0.0)
    async with FakeEngine() as engine:
        fail_to_read_once(engine, monkeypatch)
        with caplog.at_level(logging.ERROR, "cllm.engine"):
            while not engine.statistics().n_rebuilds:
                await engine.slots()  # wakes the thread, which is idle again after it
        assert "llama.cpp's cannot be read" in caplog.text
        assert (await engine.generate("hello")).text == "hello"
        assert await engine.audit() == []
        assert engine.statistics().n_discrepancies == 1
