"""TokenStream: one request as its caller sees it, on the event loop.

A `Channel` is the loop's side of a running request; the engine fills it, the stream empties it.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from cllm.engine.core.messages import CancelRequest, Finished, Read
from cllm.engine.loop.loop_guard import LoopGuard
from cllm.engine.loop.output_channels import OutputChannels
from cllm.engine.request import Completion, TokenDelta
from cllm.engine.thread.mailbox import Inbox
from cllm.errors import ClosedError, EngineFailedError, GenerationError

logger = logging.getLogger("cllm.engine")


class Channel:
    """The deltas of one request that its reader has not read yet.  Event loop only.

    At most `capacity` deltas and the last one are ever held: the inference thread computes no more
    than the reader has told it to have read.
    """

    def __init__(
        self,
        request_id: str,
        inbox: Inbox,
        loop_guard: LoopGuard,
        capacity: int,
        channels: OutputChannels | None = None,
    ) -> None:
        self._channels = channels
        self.request_id = request_id
        self._inbox = inbox
        # Half of the buffer is read before the thread is told: it goes on computing meanwhile.
        self._n_told_at_once = max(1, capacity // 2)
        self._n_read = 0
        self._deltas: deque[TokenDelta] = deque()
        self._waiter: anyio.Event | None = None
        self._loop_guard = loop_guard
        self.completion: Completion | None = None
        self.error: ClosedError | GenerationError | EngineFailedError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the last delta has arrived."""
        return self.completion is not None or self.error is not None

    def push(self, delta: TokenDelta) -> None:
        """A delta has arrived."""
        if self._channels is not None:
            try:
                delta = self._channels.split(delta)
            except Exception:
                self._give_up_channels()
        self._deltas.append(delta)
        self.wake()

    def finish(self, event: Finished) -> None:
        """The last delta has arrived."""
        self.completion = event.completion
        self.error = event.error
        delta = event.delta
        if self._channels is not None:
            try:
                delta, self.completion = self._channels.finish(delta, event.completion)
            except Exception:
                self._give_up_channels()
            if isinstance(self.error, GenerationError):
                self.error.completion = self.completion
        self._deltas.append(delta)
        self.wake()

    def _give_up_channels(self) -> None:
        """A fault of the parser's is nobody else's, and ends no stream: all is text from here on."""
        logger.exception("the answer of %s cannot be split into channels", self.request_id)
        self._channels = None

    def cancel(self) -> None:
        """Nobody wants the rest."""
        if not self.is_finished:
            self._inbox.put(CancelRequest(self.request_id))

    def fail(self, error: ClosedError | EngineFailedError) -> None:
        """Nothing more will arrive."""
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the waiting reader look again."""
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None

    async def next(self) -> TokenDelta | None:
        """The next delta, or None after the last.

        Raises
        ------
        WrongThreadError
        """
        self._loop_guard.check_thread()
        if self._deltas or self.is_finished:
            await anyio.lowlevel.checkpoint()
        while not self._deltas:
            if self.is_finished:
                return None
            if self._waiter is not None:
                raise anyio.BusyResourceError("reading from")
            self._loop_guard.check()
            self._waiter = self._loop_guard.event()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None
        self._n_read += 1
        if self._n_read == self._n_told_at_once:
            if not self.is_finished:
                self._inbox.put(Read(self.request_id, self._n_read))
            self._n_read = 0
        return self._deltas.popleft()


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
