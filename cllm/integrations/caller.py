"""Caller: an engine's methods for threads that have no event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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
    """Remembers the event loop that an engine belongs to: that in which it is made, or first used.

    Libraries have each method twice, async and not.  The other ones work in worker threads; in the
    thread of the event loop they would wait for themselves.

    Parameters
    ----------
    token : EventLoopToken, optional
        That of the engine's event loop, if it is another.
    """

    def __init__(self, token: EventLoopToken | None = None) -> None:
        self._token = token
        self.remember()

    def remember(self) -> None:
        """Remember the running event loop as the engine's."""
        if self._token is None and _is_in_event_loop():
            self._token = current_token()

    def run(self, call: Callable[[], Awaitable[R]], instead: str = "the async method") -> R:
        """Wait for a call in the engine's event loop.  Any other thread.

        Parameters
        ----------
        instead : str
            The async method that does the same.

        Raises
        ------
        RuntimeError
            This is an event loop, or none is known.
        """
        if _is_in_event_loop():
            raise RuntimeError(f"an event loop runs in this thread: await {instead} instead")
        if self._token is None:
            raise RuntimeError(f"the engine's event loop is not known yet: await {instead} first")

        async def run() -> R:
            return await call()

        return from_thread.run(run, token=self._token)

    @contextmanager
    def stream(
        self, make: Callable[[], TokenStream], instead: str = "the async method"
    ) -> Iterator[SyncStream]:
        """A stream that is made in the engine's event loop, delta by delta."""

        async def enter() -> TokenStream:
            return await make().__aenter__()

        stream = self.run(enter, instead)
        try:
            yield SyncStream(stream, self)
        finally:
            self.run(lambda: stream.__aexit__(None, None, None))


def _is_in_event_loop() -> bool:
    try:
        anyio.get_current_task()
    except anyio.NoEventLoopError:
        return False
    return True
