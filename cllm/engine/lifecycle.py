"""Lifecycle: how an engine starts, what state it is in, and how it ends.

Everything here runs on the event loop and never blocks it.  The inference thread is told what to do
through the inbox, and what it did arrives in the dispatcher, once per tick.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, Unpack

import anyio

from cllm.bindings import fork_generation
from cllm.engine.config import EngineConfig, EngineOptions, config_from
from cllm.engine.core.messages import ClearPrefixCache, Event, SlotInfo
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.health import EngineStatus, Health, Restart, check_serving, health_of
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.loop.input_processor import InputProcessor
from cllm.engine.loop.loop_guard import LoopGuard
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.request import ModelInfo
from cllm.engine.sampling_params import SamplingOptions
from cllm.engine.thread.backend import Backend
from cllm.engine.thread.host import EngineHost
from cllm.engine.thread.inference_thread import InferenceThread
from cllm.engine.thread.interrupter import Interrupter
from cllm.engine.thread.mailbox import Inbox, Outbox
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import (
    ClosedError,
    EngineFailedError,
    InvalidArgumentError,
    WrongProcessError,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine has from the moment it is entered on."""

    loop_guard: LoopGuard
    inbox: Inbox
    dispatcher: Dispatcher
    interrupter: Interrupter
    thread: EngineHost
    input_processor: InputProcessor


class Lifecycle:
    """The part of `Engine` that serves no requests."""

    # What serves in the process of `process=True`: a module and a `LlamaBackend` of it.
    _child_backend: ClassVar[str] = "cllm.engine.llama.backend:LlamaBackend"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        on_restart: Callable[[Restart], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if config is not None and (model is not None or options):
            raise TypeError("config cannot be combined with model or other options")
        if not isinstance(config, EngineConfig | None):
            raise InvalidArgumentError("config", config, "an EngineConfig")
        self.config = config_from(model, options) if config is None else config
        self._on_restart = on_restart
        self._status: EngineStatus | None = None
        self._entered: Parts | None = None
        self._finalizer: weakref.finalize[..., Lifecycle] | None = None
        self._generation = fork_generation()
        self._gate = QueueGate(n_seq_max=self.config.n_seq_max, max_queue=self.config.max_queue)

    # --- Lifecycle ---------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._status is not None:
            self._check_process()
            raise ClosedError("an engine can be entered once")
        self._status, self._generation = EngineStatus.STARTING, fork_generation()
        workers = WorkerThreads()
        try:
            parts = self._start(workers)
        except BaseException:  # as many threads as the system allows
            self._status = EngineStatus.CLOSED
            workers.end()
            raise
        try:
            await parts.dispatcher.answered.wait()
        except BaseException:
            await self.aclose()
            raise
        if (failure := parts.thread.failure) is not None:
            await self.aclose()
            raise failure
        if self._is_closed:
            raise ClosedError("the engine was closed while it was loading")
        self._status = EngineStatus.READY
        return self

    def _start(self, workers: WorkerThreads) -> Parts:
        """Make the parts, and start the threads."""
        loop_guard, interrupter = LoopGuard(), Interrupter()
        inbox = Inbox(interrupter.cancel)
        dispatcher = Dispatcher(inbox, self._gate, loop_guard, self._on_restart)
        outbox: Outbox[list[Event]] = Outbox(dispatcher.deliver)
        backend = self._make_backend()
        host: EngineHost
        if self.config.process:
            host = self._make_process(inbox, outbox, workers)
        else:
            host = InferenceThread(self.config, backend, inbox, outbox, workers, interrupter)
        input_processor = InputProcessor(
            self._check_serving,
            self._gate,
            dispatcher,
            stream_buffer=self.config.stream_buffer,
            constraints=backend.constraints(lambda: self._check_serving(draining=True), workers),
            workers=workers,
            can_speculate=self.config.speculation is not None,
        )
        host.start()
        parts = Parts(loop_guard, inbox, dispatcher, interrupter, host, input_processor)
        self._entered = parts
        self._finalizer = weakref.finalize(
            self, _stop_leaked, host, repr(self.config.model_path.name), self._generation
        )
        self._finalizer.atexit = False  # the host has an exit handler of its own
        return parts

    @property
    def _parts(self) -> Parts:
        if self._entered is None:
            raise ClosedError("the engine has not been entered")
        return self._entered

    def _make_process(
        self, inbox: Inbox, outbox: Outbox[list[Event]], workers: WorkerThreads
    ) -> EngineHost:
        try:
            from cllm.engine.process.engine_process import EngineProcess
        except ImportError as error:
            limit = f"False without cllm[process] ({error})"
            raise InvalidArgumentError("process", True, limit) from error
        open_vocabulary = LlamaBackend(self.config).open_vocabulary
        process = EngineProcess(
            self.config, inbox, outbox, workers, open_vocabulary, backend=self._child_backend
        )
        inbox.on_put = process.on_put
        return process

    def _make_backend(self) -> Backend:
        return LlamaBackend(self.config)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what runs, free everything, join the threads.  Closing twice is allowed.

        If this is interrupted, the engine ends all the same.  In a forked child, where none of it is,
        this only ends its use.

        Raises
        ------
        WrongThreadError
            Called from another event loop; nothing has changed.
        """
        parts = self._entered if self._generation == fork_generation() else None
        if parts is None or parts.dispatcher.ended.is_set():
            self._status = EngineStatus.CLOSED
            return
        parts.loop_guard.check()
        self._status = EngineStatus.CLOSED
        parts.thread.request_stop()
        assert self._finalizer is not None
        self._finalizer.detach()
        with anyio.CancelScope(shield=True):
            await parts.input_processor.aclose()
            await parts.dispatcher.ended.wait()
        parts.thread.join()

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests and wait until the present ones have ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds; what has not ended by then is cancelled.
        """
        self._check_serving()
        self._status = EngineStatus.DRAINING
        with anyio.move_on_after(timeout):
            await self._wait_idle()
        self._parts.dispatcher.cancel_all()
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        while self._gate.n_open:  # those that are still tokenized or compiled too
            await self._gate.wait_left()

    # --- Inspection --------------------------------------------------------------------------
    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        model = self._parts.dispatcher.model
        if model is None:
            raise ClosedError("the engine has not been entered")
        return model

    @property
    def sampling_defaults(self) -> SamplingOptions:
        """What of sampling the model's file says, for requests that leave it out."""
        model = None if self._entered is None else self._entered.dispatcher.model
        return SamplingOptions() if model is None else model.sampling

    def statistics(self) -> EngineStatistics:
        """A snapshot of the last tick.  Any thread, at any time."""
        return EngineStatistics() if self._entered is None else self._entered.thread.statistics

    def health(self) -> Health:
        """Whether requests are served.  Any thread, at any time."""
        return health_of(
            self._present_status,
            0.0 if self._entered is None else self._entered.thread.heartbeat_age_s,
            failure=self._failure,
            crash="" if self._entered is None else self._entered.thread.crash,
            stall_timeout_s=self.config.stall_timeout_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Forget what finished requests have left in the KV cache."""
        self._check_serving(draining=True)
        self._parts.inbox.put(ClearPrefixCache())
        await self._parts.dispatcher.audit()  # answered after it

    async def slots(self) -> tuple[SlotInfo, ...]:
        """Every seq_id, and who holds it."""
        self._check_serving(draining=True)
        return await self._parts.dispatcher.slots()

    async def audit(self) -> list[str]:
        """Discrepancies between the bookkeeping and llama.cpp's own; empty means they agree."""
        self._check_serving(draining=True)
        return await self._parts.dispatcher.audit()

    # --- Helpers -----------------------------------------------------------------------------
    def _check_serving(self, *, draining: bool = False) -> EngineVocabulary:
        """The vocabulary, if requests are served, and served to this caller."""
        self._check_process()
        check_serving(self._present_status, self._failure, draining=draining)
        self._parts.loop_guard.check()
        vocabulary = self._parts.thread.vocabulary
        if vocabulary is None:  # it has failed, and its last event is on its way
            raise EngineFailedError("the engine has failed")
        return vocabulary

    def _check_process(self) -> None:
        if self._generation != fork_generation():
            raise WrongProcessError(
                "the engine was made before a fork; make one in this process instead"
            )

    @property
    def _is_closed(self) -> bool:
        return self._status is EngineStatus.CLOSED

    @property
    def _present_status(self) -> EngineStatus | None:
        """The status, with what the thread did unasked."""
        if self._is_closed or self._entered is None:
            return self._status
        if self._failure is not None:
            return EngineStatus.FAILED
        # It ends when its event loop is gone.
        return self._status if self._entered.thread.is_alive else EngineStatus.CLOSED

    @property
    def _failure(self) -> BaseException | None:
        return None if self._entered is None else self._entered.thread.failure

    def __repr__(self) -> str:
        present = self._present_status
        status = "new" if present is None else present.value
        return f"<Engine {self.config.model_path.name} {status} open={self._gate.n_open}>"


def _stop_leaked(host: EngineHost, name: str, generation: int) -> None:
    """An engine was collected without being closed: its thread frees what it owns, and ends."""
    if generation == fork_generation():  # otherwise nothing of it is in this process
        host.request_stop()
        message = f"the engine of {name} was dropped without being closed: use `async with`"
        warnings.warn(message, ResourceWarning, stacklevel=2)
