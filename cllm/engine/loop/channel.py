"""Channel: the event loop's side of a running request; the engine fills it, a stream empties it."""

from __future__ import annotations

import logging
from collections import deque

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
