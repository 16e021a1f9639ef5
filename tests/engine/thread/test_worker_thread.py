"""Calls on a worker thread are answered, whatever becomes of them, and outlive a failed engine."""

from __future__ import annotations

import threading

import anyio
import pytest

from cllm import Engine, EngineFailedError, InvalidRequestError
from cllm.engine.constraints.llguidance import Guidance
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.thread.worker_thread import WorkerThread
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio


class Panic(BaseException):
    """As pyo3 raises what a Rust library panics with."""


def panic() -> None:
    raise Panic("of a library")


async def test_a_panic_is_an_answer_and_the_next_call_is_made(anyio_backend: str) -> None:
    worker = WorkerThread("tested")
    with pytest.raises(RuntimeError, match="Panic: of a library"):
        await worker.run(panic)
    assert await worker.run(lambda: 5) == 5
    worker.end()


@pytest.mark.same_process("its compiler is replaced")
async def test_a_compiler_that_panics_refuses_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Guidance, "_compile", lambda self, field, text: panic())
        with pytest.raises(InvalidRequestError, match="Panic"):
            await engine.generate("1+1=", regex="[0-9]+")
    assert (await engine.generate("1+1=", regex="[0-9]+", temperature=0)).text == "2"


@pytest.mark.same_process("its core is replaced")
async def test_a_failed_engine_frees_nothing_while_a_text_is_tokenized(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    tokens: list[int] = []
    async with Engine(**QUIET) as engine:
        vocabulary = engine._check_serving()

        def tokenize() -> list[int]:
            assert may_go_on.wait(30)
            return vocabulary.tokenize("a text", add_special=False)

        async def use_the_vocabulary() -> None:
            tokens.extend(await engine._parts.input_processor.texts.worker.run(tokenize))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use_the_vocabulary)
            monkeypatch.setattr(EngineCore, "tick", lambda self: panic())
            with pytest.raises(EngineFailedError):
                await engine.generate("1+1=")
            may_go_on.set()
    assert bytes(tokens) == b"a text"
