"""Caller: an engine's methods for threads that have no event loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

from cllm import Completion, TokenDelta, TokenStream

R = TypeVar("R")


class SyncStream:
    """A `TokenStream` for a thread that has no event loop."""

    def __init__(self, stream: TokenStream, caller: Caller) -> None:
        self._stream = stream
        self._caller = caller

    def __iter__(self) -> Iterator[TokenDelta]:
        while True:
            try:
                delta = self._caller.run(self._next)
            except _EndedError:
                return
            yield delta

    async def _next(self) -> TokenDelta:
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            raise _EndedError from None

    def completion(self) -> Completion:
        """See `TokenStream`."""
        return self._caller.run(self._stream.completion)


class _EndedError(Exception):
    """A stand-in for `StopAsyncIteration`, which cannot leave a coroutine."""


class Caller:
    """Caller of an engine from threads without an event loop.

    It remembers the event loop of the engine: the one that is running when the caller is made or first used.
    Libraries have each method twice, async and synchronous.  The synchronous methods work in worker threads.
    In the thread of the event loop they would wait forever, so `run` raises an error there.

    Parameters
    ----------
    token : EventLoopToken, optional
        Token of the engine's event loop; None: the running one.
    """

    def __init__(self, token: EventLoopToken | None = None) -> None:
        self._token = token
        self.remember()

    def remember(self) -> None:
        """Remember the running event loop as the engine's, unless one is remembered or none is running."""
        if self._token is None and _is_in_event_loop():
            self._token = current_token()

    def run(self, call: Callable[[], Awaitable[R]], instead: str = "the async method") -> R:
        """Run a call in the engine's event loop, and wait for its result.  Any thread without an event loop.

        Parameters
        ----------
        instead : str
            Name of the async method that does the same, for the error.

        Raises
        ------
        RuntimeError
            An event loop runs in this thread, or the engine's event loop is not known yet.
        """
        if _is_in_event_loop():
            raise RuntimeError(
                f"an event loop runs in this thread: use {instead} there, or call this in another thread"
            )
        if self._token is None:
            raise RuntimeError(f"the engine's event loop is not known yet: await {instead} first")

        async def run() -> R:
            return await call()

        return from_thread.run(run, token=self._token)

    @contextmanager
    def stream(
        self, make: Callable[[], TokenStream], instead: str = "the async method"
    ) -> Iterator[SyncStream]:
        """Yield a stream that is opened in the engine's event loop, and close it after the block; see `run`."""

        async def enter() -> TokenStream:
            return await make().__aenter__()

        stream = self.run(enter, instead)
        try:
            yield SyncStream(stream, self)
        finally:
            if not sys.is_finalizing():  # no loop runs any more
                self.run(lambda: stream.__aexit__(None, None, None))


def _is_in_event_loop() -> bool:
    try:
        anyio.get_current_task()
    except anyio.NoEventLoopError:
        return False
    return True


def whole_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a tool call; None if their JSON was cut off: no program may run half a call."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None
