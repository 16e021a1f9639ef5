"""Cases of hazard table 1.9 for the engine: closed, dropped and forked engines, threads, repeated calls."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from cllm import Completion, Engine, EngineStatus, FinishReason, QueueFullError
from cllm.errors import ClosedError, InvalidRequestError, WrongProcessError
from tests.reliability.engine_hazard_case import (
    ANSWER,
    OPTIONS,
    QUESTION,
    Scene,
    Topic,
    WrongAnswerError,
)

CLOSED = "1.9 use after free"
FREED = "1.9 freed twice"
BUSY = "1.9 freed while a decode runs"
FORKED = "1.9 a forked child"
ELSEWHERE = "1.9 from another thread"
TOPIC = Topic(CLOSED)
LONG = "count:100..200"

Calls = dict[str, Callable[[Engine], Awaitable[Any]]]


async def read_stream(engine: Engine) -> Completion:
    async with engine.stream(QUESTION) as stream:
        return await stream.completion()


async def read_chat_stream(engine: Engine) -> Completion:
    async with engine.stream_chat([{"role": "user", "content": QUESTION}]) as stream:
        return await stream.completion()


CALLS: Calls = {
    "generate": lambda e: e.generate(QUESTION),
    "generate_all": lambda e: e.generate_all([QUESTION]),
    "stream": read_stream,
    "chat": lambda e: e.chat([{"role": "user", "content": QUESTION}]),
    "stream_chat": read_chat_stream,
    "score": lambda e: e.score(QUESTION, ANSWER),
    "embed": lambda e: e.embed([QUESTION]),
    "embeddings": lambda e: e.embeddings([QUESTION]),
    "rerank": lambda e: e.rerank(QUESTION, [ANSWER], template="{query}{document}"),
    "classify": lambda e: e.classify([QUESTION]),
    "load_lora": lambda e: e.load_lora("a", "a.gguf"),
    "unload_lora": lambda e: e.unload_lora("a"),
    "tokenize": lambda e: e.tokenize("a"),
    "tokenize of a long text": lambda e: e.tokenize("a" * 5000),
    "detokenize": lambda e: e.detokenize([97]),
    "pieces": lambda e: e.pieces([97]),
    "audit": lambda e: e.audit(),
    "slots": lambda e: e.slots(),
    "live_view": lambda e: e.live_view(),
    "drain": lambda e: e.drain(),
    "reset_prefix_cache": lambda e: e.reset_prefix_cache(),
}


# --- Closed, and not open yet ----------------------------------------------------------------
async def use_closed(_: Scene, call: str) -> object:
    async with Engine(**OPTIONS) as engine:
        await engine.generate(QUESTION, max_tokens=1)
    await engine.aclose()  # twice is allowed
    return await CALLS[call](engine)


async def use_new(_: Scene, call: str) -> object:
    return await CALLS[call](Engine(**OPTIONS))


async def use_draining(_: Scene, call: str) -> object:
    async with Engine(**OPTIONS) as engine:
        await engine.drain()
        return await CALLS[call](engine)


ASKED_LATE = (
    "audit",
    "slots",
    "live_view",
    "reset_prefix_cache",
)  # calls that stay allowed while an engine drains
for name in CALLS:
    TOPIC.refuse(
        f"{name} of a closed engine", use_closed, "is closed", error=ClosedError, call=name
    )
    TOPIC.refuse(
        f"{name} before the engine is entered", use_new, "was not entered: use `async with`",
        error=ClosedError, call=name, in_full_only=name not in ("generate", "drain"),
    )  # fmt: skip
    if name not in ASKED_LATE:
        TOPIC.refuse(
            f"{name} of an engine that drains", use_draining, "is draining", error=ClosedError,
            call=name,
        )  # fmt: skip


async def model_of_new(_: Scene) -> object:
    return Engine(**OPTIONS).model


async def enter_again(_: Scene, close: bool) -> None:
    async with Engine(**OPTIONS) as engine:
        if close:
            await engine.aclose()
        await engine.__aenter__()


async def look_at_closed(_: Scene) -> None:
    """Check that health and statistics can be read before, and after, the engine runs."""
    engine = Engine(**OPTIONS)
    looked = [(engine.health().status, engine.statistics().n_ticks)]
    async with engine:
        await engine.generate(QUESTION, max_tokens=1)
    looked.append((engine.health().status, engine.statistics().n_ticks))
    if looked != [(EngineStatus.STARTING, 0), (EngineStatus.CLOSED, 1)]:
        raise WrongAnswerError(f"it said {looked}")


TOPIC.refuse("the model of an engine that was not entered", model_of_new, "has not been entered",
             error=ClosedError)  # fmt: skip
for is_closed in (False, True):
    TOPIC.refuse(
        f"entering an engine twice{', the first time closed' * is_closed}", enter_again,
        "an engine can be entered once", error=ClosedError, row=FREED, close=is_closed,
    )  # fmt: skip
TOPIC.accept("health and statistics of a closed engine", look_at_closed)


async def close_three_times_at_once(_: Scene) -> None:
    engine = await Engine(**OPTIONS).__aenter__()
    async with anyio.create_task_group() as tasks:
        for _n in range(3):
            tasks.start_soon(engine.aclose)
    await engine.aclose()


async def close_before_entering(_: Scene) -> None:
    engine = Engine(**OPTIONS)
    await engine.aclose()
    await engine.__aenter__()


TOPIC.accept("closing three times at once", close_three_times_at_once, row=FREED)
TOPIC.refuse("entering what was closed before", close_before_entering, "can be entered once",
             error=ClosedError, row=FREED)  # fmt: skip


# --- Closed while requests run ---------------------------------------------------------------
async def close_during(_: Scene, call: Callable[[Engine], Awaitable[Any]]) -> None:
    """Close an engine while calls run; each must end with an answer, a finish reason, or `ClosedError`."""
    engine = await Engine(**OPTIONS).__aenter__()
    begun = [asyncio.ensure_future(call(engine)) for _n in range(6)]
    async with engine.stream(LONG, temperature=0) as stream:
        await anext(stream)
        await engine.aclose()
        completion = await stream.completion()
        if completion.finish_reason is not FinishReason.CANCELLED:
            raise WrongAnswerError(f"the stream ended by {completion.finish_reason}")
    for result in await asyncio.gather(*begun, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, ClosedError):
            raise result


async def generate_long(engine: Engine) -> Completion:
    return await engine.generate(LONG, temperature=0)


TOPIC.accept("closing during generations", close_during, row=BUSY, call=generate_long)
for name in ("tokenize of a long text", "score", "audit", "chat", "generate_all"):
    TOPIC.accept(f"closing during {name}", close_during, row=BUSY, call=CALLS[name])
TOPIC.accept(
    "closing while a constraint is tried", close_during, row=BUSY,
    call=lambda e: e.generate(QUESTION, regex="[0-9]+"),
)  # fmt: skip


async def cancel_start(_: Scene) -> None:
    with anyio.move_on_after(0):
        async with Engine(**OPTIONS):
            raise WrongAnswerError("it was entered")


TOPIC.accept("a start that is cancelled", cancel_start, row=BUSY)


# --- Streams ---------------------------------------------------------------------------------
async def settled(scene: Scene, n_running: int = 1) -> None:
    """Wait for the cancellations, and check that at most `n_running` sequences run: the bystander."""
    for _n in range(3):
        await scene.engine.audit()
    if (found := scene.engine.statistics().n_running) > n_running:
        raise WrongAnswerError(f"{found} sequences run")


async def drop_stream(scene: Scene) -> None:
    stream = scene.engine.stream(LONG, temperature=0)
    await anext(stream)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del stream
        gc.collect()
    if "was dropped without being closed" not in "".join(str(w.message) for w in said):
        raise WrongAnswerError(f"it said {said}")
    await settled(scene)


async def close_stream_early(scene: Scene) -> None:
    async with scene.engine.stream(LONG, temperature=0) as stream:
        await anext(stream)
        await stream.cancel()
        await stream.cancel()
        await stream.aclose()
        await stream.aclose()
    with pytest.raises(ClosedError):
        await anext(stream)
    await settled(scene)


async def cancel_reader(scene: Scene) -> None:
    with anyio.CancelScope() as scope:
        async for _delta in scene.engine.stream(LONG, temperature=0):
            scope.cancel()
    await settled(scene)


async def read_twice(scene: Scene) -> None:
    """Read one stream twice at once: the second reader must be refused, the first one must not."""
    async with scene.engine.stream(LONG, temperature=0) as stream:
        readers = [asyncio.ensure_future(stream.completion()) for _n in range(2)]
        results = await asyncio.gather(*readers, return_exceptions=True)
    n_refused = sum(isinstance(result, anyio.BusyResourceError) for result in results)
    if n_refused != 1:
        raise WrongAnswerError(f"{results}")


async def reuse_id(scene: Scene) -> Completion:
    async with scene.engine.stream(LONG, request_id="mine", temperature=0) as stream:
        await anext(stream)
        return await scene.engine.generate(QUESTION, request_id="mine")


async def fill_queue(_: Scene) -> Completion:
    options = {**OPTIONS, "n_seq_max": 1, "max_queue": 0}
    async with Engine(**options) as engine, engine.stream(LONG, temperature=0) as stream:
        await anext(stream)
        return await engine.generate(QUESTION)


TOPIC.accept("a stream that is dropped", drop_stream, row=BUSY)
TOPIC.accept("a stream that is closed early, twice", close_stream_early, row=FREED)
TOPIC.accept("a reader that is cancelled", cancel_reader, row=BUSY)
TOPIC.accept("two readers of one stream", read_twice, row=ELSEWHERE)
TOPIC.refuse("an id that is in use", reuse_id, "request_id is 'mine', must be not in use",
             error=InvalidRequestError)  # fmt: skip
TOPIC.refuse("a request too many", fill_queue, "requests are waiting, retry after",
             error=QueueFullError, row="1.2 n_seq_max")  # fmt: skip


# --- Forks -----------------------------------------------------------------------------------
async def call_forked(scene: Scene, call: str) -> None:
    """Make a call in a forked child, which has no threads: it must raise before its first await."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            coroutine = CALLS[call](scene.engine)
            assert isinstance(coroutine, Coroutine)
            coroutine.send(None)
            said = "it went on"
        except WrongProcessError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    status = os.waitpid(pid, 0)[1]
    if status or "before a fork" not in said:
        raise WrongAnswerError(f"status {status}, {said!r}")
    raise WrongProcessError(said)


# `generate_all` needs an event loop for its tasks.
FORKABLE = [name for name in CALLS if name != "generate_all"]
for name in FORKABLE:
    TOPIC.refuse(
        f"{name} in a forked child", call_forked, "made before a fork", "in this process",
        error=WrongProcessError, row=FORKED, call=name,
    )  # fmt: skip


# --- Threads and loops -----------------------------------------------------------------------
async def look_from_threads(scene: Scene) -> None:
    """Read health and statistics from four threads while sequences run."""

    def look() -> None:
        for _n in range(200):
            said.append((scene.engine.health().status, scene.engine.statistics().n_ticks))

    said: list[tuple[EngineStatus, int]] = []
    threads = [threading.Thread(target=look) for _n in range(4)]
    async with scene.engine.stream(LONG, temperature=0) as stream:
        await anext(stream)
        for thread in threads:
            thread.start()
        await stream.completion()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    if len(said) != 800 or any(status is not EngineStatus.READY for status, _n in said):
        raise WrongAnswerError(f"{len(said)} times, and not always ready")


async def engines_side_by_side(scene: Scene) -> None:
    """Run two more engines, one of them in the event loop of another thread."""

    def in_thread() -> str:
        return asyncio.run(scene.start()).text

    async with Engine(**OPTIONS) as engine:
        answers: list[Any] = await asyncio.gather(
            anyio.to_thread.run_sync(in_thread), *(e.generate(QUESTION, temperature=0)
            for e in (engine, scene.engine)),
        )  # fmt: skip
    texts = [a if isinstance(a, str) else a.text for a in answers]
    if texts != [ANSWER] * 3:
        raise WrongAnswerError(f"{texts}")


async def tokenize_beside_decodes(scene: Scene) -> None:
    """Tokenize long texts on the tokenizer's thread while sequences decode."""
    async with scene.engine.stream(LONG, temperature=0) as stream:
        lengths = await asyncio.gather(
            *(scene.engine.tokenize("a" * 2000, add_special=False) for _n in range(20))
        )
        text = (await stream.completion()).text
    if {len(tokens) for tokens in lengths} != {2000} or text != " ".join(map(str, range(100, 201))):
        raise WrongAnswerError(f"{text!r}")


TOPIC.accept("health and statistics from other threads", look_from_threads, row=ELSEWHERE)
TOPIC.accept("three engines in two threads", engines_side_by_side, row=ELSEWHERE)
TOPIC.accept("texts while sequences decode", tokenize_beside_decodes, row=ELSEWHERE)

CASES = TOPIC.cases
