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
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from cllm.engine.config import EngineConfig, EngineOptions
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.engine import Engine as AsyncEngine
from cllm.engine.health import Health
from cllm.engine.loop.loop_thread import LoopThread
from cllm.engine.loop.stream import TokenStream as AsyncStream
from cllm.engine.output import TokenDelta
from cllm.engine.request import ModelInfo
from cllm.engine.sampling_params import SamplingOptions
from cllm.errors import ClosedError, WrongThreadError

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
    """`cllm.Engine` for programs without an event loop.

    Use it with `with`, or call `start` and `close`.  An interrupted call (Ctrl-C) cancels its request.  A call
    blocks its thread: in a program with an event loop use `cllm.Engine`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._asynchronous = AsyncEngine(model, config=config, **options)
        self._lock = threading.Lock()  # of `start` and `close`
        self._loop: LoopThread | None = None
        self._started: LoopThread | None = None  # the same, also after `close`

    def start(self) -> Self:
        """Load the model, and return this engine; raise `ClosedError` if it was started before."""
        with self._lock:
            if self._loop is not None:
                raise ClosedError("an engine can be started once")
            loop = LoopThread()
            try:
                loop.wait(self._asynchronous.start)
            except BaseException:
                loop.end()
                raise
            self._loop = self._started = loop
            self._finalizer = weakref.finalize(self, loop.stop)
            self._finalizer.atexit = False  # a program may end without `close`
        return self

    def close(self) -> None:
        """Cancel all requests, free the model, end the thread.  Closing twice is allowed.

        Raises
        ------
        WrongThreadError
            A callback of the engine calls it, in the engine's own thread.
        """
        if self._started is not None and self._started.is_current:
            raise WrongThreadError("an engine cannot be closed by one of its callbacks")
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None and self._finalizer.detach() and loop.is_own:
                try:
                    loop.wait(self._asynchronous.aclose)
                finally:
                    loop.end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._asynchronous)

    def _wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function in the event loop and return its result."""
        if (loop := self._loop) is None:
            raise ClosedError(
                "the engine is closed, or was not started: use `with`, or call `start`"
            )
        self._asynchronous._check_process()
        return loop.wait(function)

    generate = _waits(AsyncEngine.generate)
    generate_all = _waits(AsyncEngine.generate_all)
    chat = _waits(AsyncEngine.chat)
    stream = _streams(AsyncEngine.stream)
    stream_chat = _streams(AsyncEngine.stream_chat)
    resume = _streams(AsyncEngine.resume)
    score = _waits(AsyncEngine.score)
    tokenize = _waits(AsyncEngine.tokenize)
    detokenize = _waits(AsyncEngine.detokenize)
    pieces = _waits(AsyncEngine.pieces)
    render_chat = _waits(AsyncEngine.render_chat)
    template_abilities = _waits(AsyncEngine.template_abilities)
    embed = _waits(AsyncEngine.embed)
    embeddings = _waits(AsyncEngine.embeddings)
    rerank = _waits(AsyncEngine.rerank)
    classify = _waits(AsyncEngine.classify)
    load_lora = _waits(AsyncEngine.load_lora)
    unload_lora = _waits(AsyncEngine.unload_lora)
    reload = _waits(AsyncEngine.reload)
    drain = _waits(AsyncEngine.drain)
    reset_prefix_cache = _waits(AsyncEngine.reset_prefix_cache)
    slots = _waits(AsyncEngine.slots)
    audit = _waits(AsyncEngine.audit)

    @property
    def config(self) -> EngineConfig:
        """The settings in use."""
        return self._asynchronous.config

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        return self._asynchronous.model

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """Sampling fields that a call without them has."""
        return self._asynchronous.sampling_defaults

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
    suspend = _waits(AsyncStream.suspend)
    cancel = _waits(AsyncStream.cancel)

    def close(self) -> None:
        """Cancel the request if it has not ended.  A closed engine has closed its streams."""
        with contextlib.suppress(ClosedError):
            self._wait(self._asynchronous.aclose)

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
