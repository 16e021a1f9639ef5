"""TokenStream: one request as its caller sees it, on the event loop."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from cllm.engine.loop.channel import Channel
from cllm.engine.request import Completion, TokenDelta


class TokenStream:
    """The output of one request, token by token.

    An async iterator of `TokenDelta`, and an async context manager, which is the better way: it
    cancels what was not read to the end.  Entering it, or the first step of the iteration, submits
    the request.

    Attributes
    ----------
    request_id : str

    Raises
    ------
    PromptTooLongError, QueueFullError, InvalidRequestError, ClosedError, EngineFailedError
        When the request is submitted.
    GenerationError
        After the last delta of a request that failed; `.completion` has what there was.
    """

    def __init__(self, request_id: str, open_channel: Callable[[], Awaitable[Channel]]) -> None:
        self.request_id = request_id
        self._open_channel: Callable[[], Awaitable[Channel]] | None = open_channel
        self._channel: Channel | None = None
        self._is_closed = False
        self._finalizer: weakref.finalize[[Channel], TokenStream] | None = None

    async def __aenter__(self) -> Self:
        await self._submit()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        channel = await self._submit()
        if self._is_closed:
            raise StopAsyncIteration
        try:
            delta = await channel.next()
        except anyio.get_cancelled_exc_class():
            self._abandon()
            raise
        if delta is not None:
            return delta
        self._abandon()
        if channel.error is not None:
            raise channel.error
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Read to the end and return all of the output, what was read before included.

        Raises
        ------
        GenerationError, EngineFailedError
            The request failed; `.completion` has what there was.
        """
        async for _ in self:
            pass
        channel = self._channel
        assert channel is not None
        if channel.error is not None:
            raise channel.error
        # Closed before its end: what was cancelled has a completion as soon as the thread says so.
        while channel.completion is None:
            await channel.next()
            if channel.error is not None:
                raise channel.error
        return channel.completion

    async def cancel(self) -> None:
        """Give up the request; the stream then ends with `finish_reason="cancelled"`.

        Its cells are free before the second tick after this.  Cancelling again, or after the end,
        does nothing.
        """
        if self._channel is not None:
            self._channel.cancel()
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended, and stop iterating."""
        self._abandon()
        await anyio.lowlevel.checkpoint()

    async def _submit(self) -> Channel:
        """Submit once; later calls return the same channel."""
        if self._channel is None:
            if self._open_channel is None:
                raise anyio.BusyResourceError("submitting")
            open_channel, self._open_channel = self._open_channel, None
            try:
                self._channel = channel = await open_channel()
            except BaseException:
                self._open_channel = open_channel  # nothing was submitted: it may be tried again
                raise
            if not channel.is_finished:
                self._finalizer = weakref.finalize(self, _drop, channel)
                self._finalizer.atexit = False
        return self._channel

    def _abandon(self) -> None:
        """Cancel unless finished, without waiting.  Idempotent."""
        self._is_closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._channel is not None:
            self._channel.cancel()


def _drop(channel: Channel) -> None:
    """A stream was collected without being closed or read to its end."""
    if not channel.is_finished:
        channel.cancel()
        warnings.warn(
            f"TokenStream {channel.request_id} was dropped without being closed",
            ResourceWarning,
            stacklevel=2,
        )
