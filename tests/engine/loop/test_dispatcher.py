"""Tasks that wait for an engine stop waiting when it ends."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from cllm import ClosedError, EngineFailedError, Image
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
        may_end.wait()
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
