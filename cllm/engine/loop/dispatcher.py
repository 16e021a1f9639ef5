"""Dispatcher: delivers the events of the inference thread to the tasks that wait for them.  Event loop only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.commands import (
    AddEmbedding,
    AddRequest,
    Answered,
    Ask,
    Audit,
    CancelRequest,
    Command,
    Embedded,
    Ended,
    Event,
    Finished,
    Inspect,
    LayoutMedia,
    LiveView,
    LoadedLoras,
    Progressed,
    Question,
    Ready,
    Restarted,
    Stopped,
    Withdraw,
)
from cllm.engine.embedding import EmbeddingRequest
from cllm.engine.health import Restart
from cllm.engine.loop.channel import Channel
from cllm.engine.loop.loop_guard import LoopGuard
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.loop.request_call import RequestCall
from cllm.engine.request import GenerationRequest, ModelInfo
from cllm.engine.thread.mailbox import Inbox
from cllm.engine.thread.worker_thread import PendingCall
from cllm.errors import ClosedError, EngineFailedError, InvalidRequestError

logger: logging.Logger = logging.getLogger("cllm.engine")


class PendingEmbedding:
    """Texts that are being computed, for the tasks that wait for the vectors.  Event loop only."""

    def __init__(self, request_id: str, inbox: Inbox) -> None:
        self._request_id = request_id
        self._inbox = inbox
        self.reply: PendingCall[NDArray[np.float32]] = PendingCall()

    async def vectors(self) -> NDArray[np.float32]:
        """Wait for the vectors and return them: float32, `(n_texts, n_values)`.

        Raises
        ------
        EmbeddingError, DeadlineError, EngineFailedError, ClosedError
        """
        return await self.reply.wait()

    def cancel(self) -> None:
        """Cancel the request; does nothing after its end."""
        self._inbox.put(CancelRequest(self._request_id))


class Dispatcher:
    """Open requests and open questions, by id.

    Attributes
    ----------
    model : ModelInfo or None
        Loaded model; None until the inference thread is ready.
    answered, stopped, ended : anyio.Event
        Set when the thread is ready or has stopped, when it has stopped serving, and when it has freed
        everything.
    """

    def __init__(
        self,
        inbox: Inbox,
        gate: QueueGate,
        loop_guard: LoopGuard,
        on_restart: Callable[[Restart], None] | None = None,
    ) -> None:
        self._inbox = inbox
        self._on_restart = on_restart or (lambda restart: None)
        self._loop_guard = loop_guard
        self._gate = gate
        self._channels: dict[str, Channel] = {}
        self._kept: dict[str, Channel] = {}  # that another request is about to continue
        self._embeddings: dict[str, PendingEmbedding] = {}
        self._n_serial = 0
        self._is_cancelling = False
        self._questions: dict[int, PendingCall[Any]] = {}
        self._n_questions = 0
        self.model: ModelInfo | None = None
        self._end: ClosedError | EngineFailedError | None = None
        self.answered: anyio.Event = anyio.Event()
        self.stopped: anyio.Event = anyio.Event()
        self.ended: anyio.Event = anyio.Event()

    def loaded(self) -> ModelInfo:
        """Return the loaded model; call it only after the thread was ready."""
        assert self.model is not None
        return self.model

    def is_open(self, request_id: str) -> bool:
        """Return True if a request of this id is open, or about to continue."""
        return request_id in self._channels or request_id in self._kept

    @contextmanager
    def kept_id(self, channel: Channel) -> Iterator[None]:
        """Keep the id of a channel's request for another request that continues it.

        Raises
        ------
        InvalidRequestError
            The request has ended, and another one has its id.
        """
        request_id = channel.request_id
        if request_id in self._kept or self._channels.get(request_id, channel) is not channel:
            raise InvalidRequestError("request_id", request_id, "not in use")
        self._kept[request_id] = channel
        try:
            yield
        finally:
            del self._kept[request_id]

    async def wait_without(self, lora: str) -> None:
        """Wait until no request with this adapter is open, or about to continue.

        Raises
        ------
        ClosedError, EngineFailedError
            The engine has ended meanwhile.
        """
        while any(
            lora in c.request.lora.names for c in (*self._channels.values(), *self._kept.values())
        ):
            await self._gate.wait_left()
        if self._end is not None:
            raise self._end

    def channel(
        self, call: RequestCall, request: GenerationRequest, capacity: int, **options: Any
    ) -> Channel:
        """Return a channel of a request that is not submitted yet; see `Channel`."""
        return Channel(call, request, self._inbox, self._loop_guard, capacity, **options)

    def submit(self, channel: Channel) -> None:
        """Send the request of a channel to the thread; its deltas arrive in the channel.

        Raises
        ------
        ClosedError, EngineFailedError
            The engine has ended.
        """
        self._send(AddRequest(channel.request))  # first: it may raise an error
        self._channels[channel.request_id] = channel
        self._gate.hold_media(channel.request.media)
        self._cancel_if_late(channel.request_id)

    def embed(self, request: EmbeddingRequest) -> PendingEmbedding:
        """Send texts to the thread, and return their pending result."""
        waiting = PendingEmbedding(request.request_id, self._inbox)
        self._send(AddEmbedding(request))
        self._embeddings[request.request_id] = waiting
        self._cancel_if_late(request.request_id)
        return waiting

    def _send(self, command: Command) -> None:
        """Send a command that will be answered; raise the error of an engine that has ended."""
        if self._end is not None:
            raise self._end
        self._inbox.put(command)

    def _cancel_if_late(self, request_id: str) -> None:
        """Cancel a request that was still being prepared when all were cancelled."""
        if self._is_cancelling:
            self._inbox.put(CancelRequest(request_id))

    def next_serial(self) -> int:
        """Return the serial number for the next request, from 1."""
        self._n_serial += 1
        return self._n_serial

    def cancel_all(self) -> None:
        """Cancel every open request, and those that are still being prepared."""
        self._is_cancelling = True
        for request_id in (*self._channels, *self._embeddings):
            self._inbox.put(CancelRequest(request_id))

    async def audit(self) -> list[str]:
        """Return the differences between the thread's bookkeeping and llama.cpp's; empty if all is right."""
        return list(await self.ask(Audit()))

    async def live_view(self) -> LiveView:
        """Return the present state of the engine."""
        view: LiveView = await self.ask(Inspect())
        return view

    async def ask(self, question: Question) -> Any:
        """Return the answer of the inference thread: see each question.

        Raises
        ------
        CllmError
            The answer is an error, or the engine has ended.
        """
        self._n_questions += 1
        call_id, reply = self._n_questions, PendingCall[Any]()
        self._send(Ask(call_id, question))
        self._questions[call_id] = reply
        try:
            return await reply.wait()
        except anyio.get_cancelled_exc_class():
            if isinstance(question, LayoutMedia):  # others have effects
                self._inbox.put(Withdraw(call_id))
            raise
        finally:
            del self._questions[call_id]

    def deliver(self, events: Sequence[Event]) -> None:
        """Pass the events of one tick to the channels and calls that wait for them."""
        for event in events:
            match event:
                case Progressed(request_id, delta):
                    self._channels[request_id].push(delta)
                case Finished(request_id):
                    channel = self._channels.pop(request_id)
                    channel.finish(event)
                    self._gate.leave(media=channel.request.media)
                case Embedded(request_id, vectors, n_values, error):
                    waiting = self._embeddings.pop(request_id)
                    rows = np.frombuffer(vectors, np.float32).reshape(-1, n_values or 1)
                    waiting.reply.set(None if error else rows, error)
                case Answered(call_id, value, error):
                    if self.model is not None and isinstance(value, LoadedLoras):
                        self.model = replace(self.model, loras=value.loras)
                    if reply := self._questions.get(call_id):
                        reply.set(value, error)
                case Ready(model):
                    self.model = model
                    self.answered.set()
                case Restarted(restart):
                    self._tell_of_restart(restart)
                case Stopped(error):
                    self._on_stopped(error)
                case Ended():
                    self.ended.set()

    def _tell_of_restart(self, restart: Restart) -> None:
        try:
            self._on_restart(restart)
        except Exception:  # the events after this one must still be delivered
            logger.exception("on_restart has failed")

    def _on_stopped(self, error: BaseException | None) -> None:
        ended: ClosedError | EngineFailedError = ClosedError("the engine was closed")
        if error is not None:
            ended = EngineFailedError(f"the engine has stopped: {error!r}")
            ended.__cause__ = error
        self._end = ended
        for channel in self._channels.values():
            channel.fail(ended)
            self._gate.leave(is_served=False, media=channel.request.media)
        for waiting in self._embeddings.values():
            waiting.reply.set(None, ended)
        for reply in self._questions.values():
            reply.set(None, ended)
        self._channels.clear()
        self._embeddings.clear()
        self._gate.stop()
        self.answered.set()
        self.stopped.set()
