"""Tasks that wait for an engine stop waiting when it ends."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from cllm import ClosedError, EngineFailedError, EngineStatus, Image
from cllm.engine.loop.media_reader import Decoded, Decoder
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio

PICTURE = Image(np.zeros((8, 8, 3), np.uint8))


async def fail(engine: FakeEngine) -> None:
    """End an engine with an error."""
    engine.decoder.poison = lambda run: -3
    with pytest.raises(EngineFailedError):
        await engine.generate("x")


@pytest.mark.parametrize("has_failed", [False, True], ids=["closed", "failed"])
async def test_an_image_that_is_decoded_while_the_engine_ends_gets_the_error_of_the_engine(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    is_begun, may_end, decode = threading.Event(), threading.Event(), Decoder.run

    def run(decoder: Decoder, *arguments: Any) -> Decoded:
        is_begun.set()
        may_end.wait(30)
        return decode(decoder, *arguments)

    async def ask(engine: FakeEngine) -> None:
        with pytest.raises(EngineFailedError if has_failed else ClosedError):
            await engine.generate([PICTURE])

    monkeypatch.setattr(Decoder, "run", run)
    with anyio.fail_after(30):
        async with FakeEngine() as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, engine)
            while not is_begun.is_set():
                await anyio.lowlevel.checkpoint()
            await (fail(engine) if has_failed else engine.aclose())
            may_end.set()


@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_drain_returns_when_the_engine_fails_before_it_has_seen_a_request(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    is_begun, may_end = threading.Event(), threading.Event()

    def rebuild() -> None:
        is_begun.set()
        may_end.wait(30)
        raise RuntimeError("no memory")

    async def ask(name: str) -> None:
        with pytest.raises(EngineFailedError):
            await engine.generate([name, PICTURE], request_id=name)

    with anyio.fail_after(30):
        async with FakeEngine(faults={1: -3}) as engine:
            monkeypatch.setattr(engine.decoder, "rebuild", rebuild)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "first")
                while not is_begun.is_set():
                    await anyio.lowlevel.checkpoint()
                tasks.start_soon(ask, "second")
                while not engine.is_open("second"):
                    await anyio.lowlevel.checkpoint()
                tasks.start_soon(engine.drain, timeout)
                while engine.health().status is not EngineStatus.DRAINING:
                    await anyio.lowlevel.checkpoint()
                may_end.set()
            gate = engine._parts.gate
            assert (gate.n_open, gate.n_media_bytes) == (0, 0)
