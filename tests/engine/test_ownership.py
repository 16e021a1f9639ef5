"""An engine belongs to one event loop of one process, and ends with its last reference."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from cllm import Engine
from cllm.engine.core.commands import Read
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.health import EngineStatus
from cllm.engine.thread.mailbox import Outbox
from cllm.errors import ClosedError, EngineFailedError, GenerationError, WrongThreadError
from cllm.testing import FakeEngine
from tests.conftest import QUIET, our_threads

AsyncCall = Callable[[FakeEngine], Awaitable[Any]]

ASYNC_CALLS: dict[str, AsyncCall] = {
    "generate": lambda engine: engine.generate("a"),
    "generate_all": lambda engine: engine.generate_all(["a"]),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "a"}]),
    "score": lambda engine: engine.score("a", "b"),
    "embed": lambda engine: engine.embed(["a"]),
    "embeddings": lambda engine: engine.embeddings(["a"]),
    "rerank": lambda engine: engine.rerank("a", ["b"]),
    "classify": lambda engine: engine.classify(["a"]),
    "load_lora": lambda engine: engine.load_lora("a", "a.gguf"),
    "unload_lora": lambda engine: engine.unload_lora("a"),
    "tokenize": lambda engine: engine.tokenize("a"),
    "detokenize": lambda engine: engine.detokenize([97]),
    "pieces": lambda engine: engine.pieces([97]),
    "slots": lambda engine: engine.slots(),
    "live_view": lambda engine: engine.live_view(),
    "audit": lambda engine: engine.audit(),
    "drain": lambda engine: engine.drain(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "aclose": lambda engine: engine.aclose(),
}


@pytest.mark.anyio
@pytest.mark.parametrize("backend_there", ["asyncio", "trio"])
@pytest.mark.parametrize("name", ASYNC_CALLS)
async def test_a_call_from_another_event_loop_is_refused_and_changes_nothing(
    anyio_backend: str, backend_there: str, name: str
) -> None:
    """None of them hangs there, in a loop that nobody wakes."""

    async def call() -> None:
        with pytest.raises(WrongThreadError, match="belongs to the event loop of thread"):
            await ASYNC_CALLS[name](engine)

    async with FakeEngine() as engine, engine.stream("hello") as stream:
        await anyio.to_thread.run_sync(lambda: anyio.run(call, backend=backend_there))
        assert "".join([delta.text async for delta in stream]) == "hello"
        assert (await engine.generate("b")).text == "b"


@pytest.mark.anyio
async def test_a_stream_is_read_in_its_own_event_loop(anyio_backend: str) -> None:
    async def read() -> None:
        await stream.__anext__()

    async with FakeEngine(stream_buffer=2) as engine, engine.stream("hello") as stream:
        with pytest.raises(WrongThreadError, match="belongs to the event loop of thread"):
            await anyio.to_thread.run_sync(lambda: anyio.run(read))
        assert "".join([delta.text async for delta in stream]) == "hello"


@pytest.mark.anyio
async def test_another_thread_has_a_way_in_and_may_look(anyio_backend: str) -> None:
    async with FakeEngine() as engine:

        def look() -> tuple[str, str, int]:
            text = anyio.from_thread.run(engine.generate, "hello").text
            return text, engine.health().status, engine.statistics().n_output_tokens

        assert await anyio.to_thread.run_sync(look) == ("hello", "ready", 6)


@pytest.mark.parametrize("backend_there", ["asyncio", "trio"])
def test_an_engine_does_not_move_to_the_next_event_loop_of_its_thread(backend_there: str) -> None:
    engines = [FakeEngine()]

    async def leave() -> None:
        await engines[0].__aenter__()

    async def call() -> None:
        for async_call in ASYNC_CALLS.values():  # while the thread has not heard of the end
            with pytest.raises(WrongThreadError, match="another event loop than this one"):
                await async_call(engines[0])

    anyio.run(leave)
    anyio.run(call, backend=backend_there)
    inference = engines[0]._parts.thread
    with pytest.warns(ResourceWarning, match="dropped without being closed"):  # noqa: PT031
        engines.clear()
        gc.collect()
    inference.join(10)


@pytest.mark.anyio
async def test_a_stream_may_be_made_in_a_callback_of_the_loop(anyio_backend: str) -> None:
    async with FakeEngine() as engine:
        made: list[Any] = []
        called = anyio.Event()

        def callback(_: None) -> None:
            made.append(engine.stream("hello"))
            called.set()

        Outbox(callback).post(None)
        await called.wait()
        assert "".join([delta.text async for delta in made[0]]) == "hello"


@pytest.mark.anyio
async def test_an_engine_that_was_closed_before_it_was_entered_is_closed(
    anyio_backend: str,
) -> None:
    engine = FakeEngine()
    await engine.aclose()
    await engine.aclose()
    assert engine.health().status is EngineStatus.CLOSED
    assert engine.statistics() == EngineStatistics()
    with pytest.raises(ClosedError, match="not been entered"):
        engine.model  # noqa: B018
    with pytest.raises(ClosedError):
        await engine.generate("a")
    with pytest.raises(ClosedError, match="can be entered once"):
        await engine.__aenter__()


@pytest.mark.anyio
async def test_an_engine_is_started_and_closed_without_a_block(anyio_backend: str) -> None:
    engine = FakeEngine()
    with pytest.raises(ClosedError, match="await `start`"):
        await engine.generate("a")
    assert await engine.start() is engine
    assert (await engine.generate("hello")).text == "hello"
    with pytest.raises(ClosedError, match="can be entered once"):
        await engine.start()
    async with anyio.create_task_group() as tasks:  # another task may close it
        tasks.start_soon(engine.aclose)
    assert engine.health().status is EngineStatus.CLOSED


@pytest.mark.anyio
async def test_a_dropped_engine_warns_and_its_threads_end(anyio_backend: str) -> None:
    engine = await FakeEngine().__aenter__()
    assert (await engine.generate("hello")).text == "hello"
    inference, tokenizer = engine._parts.thread, engine._parts.input_processor.texts.worker._thread
    with pytest.warns(ResourceWarning, match="dropped without being closed: use `async with`"):  # noqa: PT031
        del engine
        gc.collect()
    inference.join(10)
    assert not inference.is_alive
    assert not tokenizer.is_alive()


@pytest.mark.anyio
async def test_a_stream_that_is_still_held_does_not_keep_a_dropped_engine(
    anyio_backend: str,
) -> None:
    engine = await FakeEngine().__aenter__()
    stream = engine.stream("hello", max_tokens=4)
    async with stream:
        assert (await stream.completion()).text
    inference = engine._parts.thread
    with pytest.warns(ResourceWarning, match="dropped without being closed"):  # noqa: PT031
        del engine
        gc.collect()
    inference.join(10)
    assert not inference.is_alive
    with pytest.raises(ClosedError):
        await stream.rewind(1)


@pytest.mark.full
@pytest.mark.anyio
@pytest.mark.parametrize("has_failed", [False, True])
async def test_the_error_of_a_request_does_not_keep_a_dropped_engine(
    anyio_backend: str, has_failed: bool
) -> None:
    """An error knows the frames it passed through, and they know the engine."""
    engine = await FakeEngine().__aenter__()
    if has_failed:
        engine.decoder.poison = lambda run: -3
    else:
        engine.fail_next_decode("nan")
    with pytest.raises(EngineFailedError if has_failed else GenerationError):
        await engine.generate("hello")
    inference, reference = engine._parts.thread, weakref.ref(engine)
    with (  # noqa: PT031
        pytest.warns(ResourceWarning, match="dropped without being closed"),
        anyio.fail_after(10),
    ):
        del engine
        while reference() is not None:  # the thread may be about to let go of it
            gc.collect()
            await anyio.lowlevel.checkpoint()
    inference.join(10)
    assert not inference.is_alive


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["aclose", "drop"])
async def test_nothing_is_freed_while_a_text_is_tokenized(anyio_backend: str, how: str) -> None:
    """Its caller has given up; the vocabulary is used all the same."""
    engines = [await FakeEngine().__aenter__()]
    inference, worker = engines[0]._parts.thread, engines[0]._parts.input_processor.texts.worker
    begun, may_go_on, seen = threading.Event(), threading.Event(), list[bool]()

    def tokenize() -> None:
        begun.set()
        assert may_go_on.wait(10)
        seen.append(inference.vocabulary is not None and inference.is_alive)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run, tokenize)
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
    if how == "drop":
        with pytest.warns(ResourceWarning, match="dropped without"):  # noqa: PT031
            engines.clear()
            gc.collect()
        may_go_on.set()
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].aclose)
            await anyio.lowlevel.checkpoint()
            may_go_on.set()
    inference.join(10)
    assert seen == [True]
    with pytest.raises(ClosedError):
        await worker.run(tokenize)


@pytest.mark.anyio
async def test_closing_while_it_loads_ends_the_loading_with_an_error(anyio_backend: str) -> None:
    engine = FakeEngine()

    async def enter() -> None:
        with pytest.raises(ClosedError, match="closed while it was loading"):
            await engine.__aenter__()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        while engine.health().status is not EngineStatus.STARTING or not engine._entered:
            await anyio.lowlevel.checkpoint()
        await engine.aclose()
    assert engine.health().status is EngineStatus.CLOSED
    with anyio.fail_after(10):
        await engine.aclose()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_interrupted_close_ends_the_engine_all_the_same(backend: str) -> None:
    """Such as by a generator that is collected after its event loop."""
    engines: list[FakeEngine] = []

    async def enter() -> None:
        engines.append(await FakeEngine().__aenter__())

    anyio.run(enter, backend=backend)
    closing = engines[0].aclose()
    with contextlib.suppress(RuntimeError):
        closing.send(None)
    closing.close()
    engines[0]._parts.thread.join(10)
    assert our_threads() == []
    assert engines[0].health().status is EngineStatus.CLOSED


@pytest.mark.anyio
async def test_everybody_who_closes_waits_for_the_end(anyio_backend: str) -> None:
    async with FakeEngine() as engine:

        async def close() -> None:
            await engine.aclose()
            assert not engine._parts.thread.is_alive

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(close)


@pytest.mark.full
@pytest.mark.anyio
async def test_the_process_that_tries_grammars_ends_with_a_dropped_engine(
    anyio_backend: str,
) -> None:
    engine = await Engine(n_ctx=512, n_seq_max=2, **QUIET).__aenter__()
    assert (await engine.generate("1+1=", grammar='root ::= "2"')).text == "2"
    trial = engine._parts.input_processor._constraints._trial  # type: ignore[attr-defined]
    process, inference = trial._child._process, engine._parts.thread
    assert process is not None
    with pytest.warns(ResourceWarning, match="dropped without being closed"):  # noqa: PT031
        del engine, trial
        gc.collect()
    assert await anyio.to_thread.run_sync(process.wait) != 0
    await anyio.to_thread.run_sync(inference.join)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_engine_whose_event_loop_has_ended_is_closed_to_those_who_look(backend: str) -> None:
    async def leave() -> tuple[FakeEngine, str]:
        engine = await FakeEngine(latency_s=0.01).__aenter__()
        stream = engine.stream("x" * 200)
        await stream.__anext__()
        assert stream._finalizer is not None
        stream._finalizer.detach()
        return engine, stream.request_id

    engine, request_id = anyio.run(leave, backend=backend)
    engine._parts.inbox.put(Read(request_id, 64))  # it may wait for its reader by now
    engine._parts.thread.join(10)  # it hears that nobody listens with its next token
    assert engine.health().status is EngineStatus.CLOSED
    assert " closed " in repr(engine)
    assert engine._finalizer is not None
    engine._finalizer.detach()  # it would warn: nobody has closed it


def test_a_stream_is_not_read_in_the_next_event_loop_of_its_thread() -> None:
    streams: list[Any] = []

    async def leave() -> None:
        engine = await FakeEngine(latency_s=60.0).__aenter__()
        streams.extend([engine, engine.stream("hello")])
        await streams[1].__aenter__()

    async def read() -> None:
        with pytest.raises(WrongThreadError, match="another event loop than this one"):
            await streams[1].__anext__()

    anyio.run(leave)
    anyio.run(read)
    engine, stream = streams
    stream._abandon()
    engine._parts.thread.request_stop()
    engine._parts.thread.join(10)
    assert engine._finalizer is not None
    engine._finalizer.detach()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["cllm-inference", "cllm-tokenizer"])
async def test_a_thread_that_cannot_be_started_leaves_none_behind(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await engine.__aenter__()
    assert our_threads() == []
    assert engine.health().status is EngineStatus.CLOSED
    await engine.aclose()


@pytest.mark.parametrize("error", [RuntimeError("closed"), OSError(9, "Bad file descriptor")])
def test_an_event_loop_that_is_gone_is_told_from_one_that_listens(error: Exception) -> None:
    async def make() -> Outbox[None]:
        return Outbox(lambda _: None)

    def refuse(deliver: object, value: None) -> None:
        raise error

    outbox = anyio.run(make)
    outbox._call_soon = refuse
    assert not outbox.post(None)
