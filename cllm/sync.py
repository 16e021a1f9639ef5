"""Engine and TokenStream for programs without an event loop: Flask, Django, scripts, the REPL.

    with cllm.sync.Engine("model.gguf") as engine:
        print(engine.generate("1+1=", max_tokens=8).text)

The engine is that of `cllm`, in an event loop in a thread of its own.  Any threads may call it at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import anyio
from anyio.from_thread import BlockingPortal

from cllm.engine.config import EngineConfig, EngineOptions
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.engine import Engine as AsyncEngine
from cllm.engine.health import Health
from cllm.engine.loop.stream import TokenStream as AsyncStream
from cllm.engine.output import TokenDelta
from cllm.engine.request import ModelInfo
from cllm.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")


def _waits(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that waits for the result of an asynchronous one."""

    @functools.wraps(method)
    def wait(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._wait(functools.partial(method, self._asynchronous, *args, **kwargs))
        return result

    return wait


def _streams(
    method: Callable[Concatenate[AsyncEngine, P], AsyncStream],
) -> Callable[Concatenate[Engine, P], TokenStream]:
    """Return a method that returns the stream of an asynchronous one, to be read without `await`."""

    @functools.wraps(method)
    def stream(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> TokenStream:
        async def opened() -> AsyncStream:
            return method(self._asynchronous, *args, **kwargs)

        return TokenStream(self._wait, self._wait(opened))

    return stream


class Engine:
    """`cllm.Engine` for programs without an event loop: the same parameters, methods and errors.

    Use it with `with`, or call `start` and `close`.  An interrupted call (Ctrl-C) cancels its request.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._asynchronous = AsyncEngine(model, config=config, **options)
        self._portal: BlockingPortal | None = None

    def start(self) -> Self:
        """Load the model, and return this engine."""
        if self._portal is None:
            self._portal, self._thread = _new_loop()
            self._end_loop = weakref.finalize(self, _end, self._portal)
        try:
            self._wait(self._asynchronous.start)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Cancel all requests, free everything, end the thread.  Closing twice is allowed."""
        if self._portal is not None:
            self._wait(self._asynchronous.aclose)
            self._portal = None
            self._end_loop()
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function in the event loop and return its result; cancel it if the wait is interrupted."""
        if self._portal is None:
            raise ClosedError("the engine does not run: use it with `with`, or call `start`")
        future = self._portal.start_task_soon(function)
        try:
            return future.result()
        finally:
            future.cancel()

    generate = _waits(AsyncEngine.generate)
    generate_all = _waits(AsyncEngine.generate_all)
    chat = _waits(AsyncEngine.chat)
    stream = _streams(AsyncEngine.stream)
    stream_chat = _streams(AsyncEngine.stream_chat)
    score = _waits(AsyncEngine.score)
    tokenize = _waits(AsyncEngine.tokenize)
    detokenize = _waits(AsyncEngine.detokenize)
    embed = _waits(AsyncEngine.embed)
    rerank = _waits(AsyncEngine.rerank)
    classify = _waits(AsyncEngine.classify)
    load_lora = _waits(AsyncEngine.load_lora)
    unload_lora = _waits(AsyncEngine.unload_lora)
    reload = _waits(AsyncEngine.reload)
    drain = _waits(AsyncEngine.drain)

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._asynchronous.model

    def statistics(self) -> EngineStatistics:
        """Return the counters after the last tick."""
        return self._asynchronous.statistics()

    def health(self) -> Health:
        """Return the status of the engine, with the reason if it serves no requests."""
        return self._asynchronous.health()


class TokenStream:
    """Iterator of `TokenDelta`, and context manager: leaving its block cancels the request."""

    def __init__(self, wait: Callable[..., Any], stream: AsyncStream) -> None:
        self._wait, self._asynchronous = wait, stream
        self.request_id: str = stream.request_id

    completion = _waits(AsyncStream.completion)
    cancel = _waits(AsyncStream.cancel)
    close = _waits(AsyncStream.aclose)

    def __enter__(self) -> Self:
        self._wait(self._asynchronous.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenDelta:
        async def step() -> TokenDelta | None:
            return await anext(self._asynchronous, None)

        delta: TokenDelta | None = self._wait(step)
        if delta is None:
            raise StopIteration
        return delta


def _new_loop() -> tuple[BlockingPortal, threading.Thread]:
    """Return the way into a new event loop, and its thread, which lets the program end."""
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    thread = threading.Thread(target=anyio.run, args=(serve,), name="cllm-sync", daemon=True)
    thread.start()
    return started.result(), thread


def _end(portal: BlockingPortal) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended
        portal.start_task_soon(portal.stop)
