"""Lifecycle: how an engine starts, what state it is in, and how it ends.

Everything here runs on the event loop and never blocks it.  The inference thread is told what to do
through the inbox, and what it did arrives in the dispatcher, once per tick.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import anyio

from cllm.bindings import Vocabulary, fork_generation
from cllm.engine.admission import QueueGate
from cllm.engine.config import EngineConfig, EngineOptions, config_from
from cllm.engine.dispatcher import Dispatcher
from cllm.engine.handoff import Event, Inbox, Outbox, ResetPrefixCache
from cllm.engine.health import EngineStatus, Health, check_serving, health_of
from cllm.engine.inference_thread import InferenceThread
from cllm.engine.intake import Intake
from cllm.engine.request import ModelInfo
from cllm.engine.slots import SlotInfo
from cllm.engine.statistics import EngineStatistics
from cllm.errors import ClosedError, EngineFailedError, WrongProcessError


class Lifecycle:
    """The part of `Engine` that serves no requests."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if config is not None and (model is not None or options):
            raise TypeError("config cannot be combined with model or other options")
        self.config = config_from(model, options) if config is None else config
        self._status: EngineStatus | None = None
        self._generation = fork_generation()
        self._gate = QueueGate(n_seq_max=self.config.n_seq_max, max_queue=self.config.max_queue)

    # --- Lifecycle ---------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._status is not None:
            raise ClosedError("an engine can be entered once")
        self._status = EngineStatus.STARTING
        self._inbox = Inbox()
        self._dispatcher = Dispatcher(self._inbox, self._gate)
        outbox: Outbox[list[Event]] = Outbox(self._dispatcher.deliver)
        self._thread = InferenceThread(self.config, self._inbox, outbox)
        self._intake = Intake(
            self._check_serving,
            self._gate,
            self._dispatcher,
            stream_buffer=self.config.stream_buffer,
            n_threads=self.config.compute_threads[1],
        )
        self._thread.start()
        try:
            await self._dispatcher.answered.wait()
        except BaseException:
            await self.aclose()
            raise
        if (failure := self._thread.failure) is not None:
            await self.aclose()
            raise failure
        self._status = EngineStatus.READY
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what runs, free everything, join the threads.  Closing twice is allowed."""
        was, self._status = self._status, EngineStatus.CLOSED
        if was in (None, EngineStatus.CLOSED):
            return
        self._dispatcher.cancel_all()
        with anyio.CancelScope(shield=True):
            # The vocabulary must outlive the tokenizer's last call, so its thread ends first.
            await self._intake.aclose()
            self._thread.request_stop()
            await self._dispatcher.stopped.wait()
            self._thread.join()

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
        self._dispatcher.cancel_all()
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        while self._gate.n_open:  # those that are still tokenized or compiled too
            await self._gate.wait_left()

    # --- Inspection --------------------------------------------------------------------------
    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        model = None if self._status is None else self._dispatcher.model
        if model is None:
            raise ClosedError("the engine has not been entered")
        return model

    def statistics(self) -> EngineStatistics:
        """A snapshot of the last tick.  Any thread, at any time."""
        return EngineStatistics() if self._status is None else self._thread.statistics

    def health(self) -> Health:
        """Whether requests are served.  Any thread, at any time."""
        return health_of(
            self._present_status,
            0.0 if self._status is None else self._thread.heartbeat_age_s,
            failure=self._failure,
            stall_timeout_s=self.config.stall_timeout_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Forget what finished requests have left in the KV cache."""
        self._check_serving(draining=True)
        self._inbox.put(ResetPrefixCache())
        await self._dispatcher.audit()  # answered after it

    async def slots(self) -> tuple[SlotInfo, ...]:
        """Every seq_id, and who holds it."""
        self._check_serving(draining=True)
        return await self._dispatcher.slots()

    async def audit(self) -> list[str]:
        """Discrepancies between the books and llama.cpp's own; empty means they agree."""
        self._check_serving(draining=True)
        return await self._dispatcher.audit()

    # --- Helpers -----------------------------------------------------------------------------
    def _check_serving(self, *, draining: bool = False) -> Vocabulary:
        """The vocabulary, if requests are served."""
        if self._generation != fork_generation():
            raise WrongProcessError(
                "the engine was made before a fork; make one in this process instead"
            )
        check_serving(self._present_status, self._failure, draining=draining)
        model = self._thread.model
        if model is None:  # it has failed, and its last event is on its way
            raise EngineFailedError("the engine has failed")
        return model.vocab

    @property
    def _present_status(self) -> EngineStatus | None:
        """The status, with what the thread did unasked."""
        if self._status in (None, EngineStatus.CLOSED) or self._failure is None:
            return self._status
        return EngineStatus.FAILED

    @property
    def _failure(self) -> BaseException | None:
        return None if self._status is None else self._thread.failure

    def __repr__(self) -> str:
        status = "new" if self._status is None else self._status.value
        return f"<Engine {self.config.model_path.name} {status} open={self._gate.n_open}>"
