"""Engine: one model as a service of this event loop.

Everything here runs on the event loop and never blocks it.  The inference thread is told what to do
through the inbox, and what it did arrives in `_deliver`, once per tick.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import anyio

from cllm.bindings import Vocabulary, fork_generation
from cllm.engine.admission import QueueGate
from cllm.engine.config import EngineConfig, EngineOptions, config_from
from cllm.engine.dispatcher import Dispatcher
from cllm.engine.fan_out import run_all
from cllm.engine.handoff import Event, Inbox, Outbox, ResetPrefixCache
from cllm.engine.health import EngineStatus, Health, health_of
from cllm.engine.inference_thread import InferenceThread
from cllm.engine.intake import Intake
from cllm.engine.request import Completion, ModelInfo
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.engine.statistics import EngineStatistics
from cllm.engine.stream import Channel, TokenStream
from cllm.engine.submission import (
    Prompt,
    RequestCall,
    check_prompt,
    params_from,
)
from cllm.errors import (
    ClosedError,
    EngineFailedError,
    QueueFullError,
    WrongProcessError,
)


class Engine:
    """One llama.cpp model, many requests at once.

    Use it with `async with`: that loads the model, off the event loop, and frees everything at the
    end.  All methods belong to the event loop in which it was entered, except `statistics` and
    `health`, which any thread may call.

    Parameters
    ----------
    model : str or Path, optional
        A GGUF file; None is the embedded model.
    config : EngineConfig, optional
        All settings as one value; not together with the others.
    **options
        The fields of `EngineConfig`.

    Raises
    ------
    TypeError
        An unknown option.
    InvalidArgumentError
        An option with a value that cannot be used.
    """

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
        while self._dispatcher.n_channels:
            await self._gate.wait_left()

    # --- Requests ----------------------------------------------------------------------------
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """The output of one request, token by token.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.
        params : SamplingParams, optional
            Or its fields as keyword arguments, not both.
        priority : int
            Lower is more urgent; orders the queue and chooses whom to preempt.
        timeout : float, optional
            Seconds from submission; then the request ends with `deadline`.
        request_id : str, optional

        Raises
        ------
        InvalidRequestError
            Names the field, the value and the limit.  What needs the model to be known is raised
            when the stream is entered.
        """
        if params is not None and sampling:
            raise TypeError("params cannot be combined with single sampling fields")
        call = RequestCall(
            prompt=check_prompt(prompt),
            params=params_from(sampling) if params is None else params,
            priority=priority,
            timeout=timeout,
            request_id=secrets.token_hex(8) if request_id is None else request_id,
        )
        self._check_serving()

        async def open_channel() -> Channel:
            return await self._intake.open(call)

        return TokenStream(call.request_id, open_channel, self._inbox)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The whole output of one request; arguments as for `stream`.

        Raises
        ------
        RequestError
            The request cannot be served; a `GenerationError` carries the partial completion.
        ClosedError, EngineFailedError
            The engine does not serve requests.
        """
        stream = self.stream(
            prompt, params, priority=priority, timeout=timeout, request_id=request_id, **sampling
        )
        async with stream:
            return await stream.completion()

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        return_exceptions: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """The outputs of many requests, in the order of their prompts.

        Submits no more than the queue takes, and waits for room where others have filled it.

        Parameters
        ----------
        return_exceptions : bool
            Put what a request raised into the list instead of raising the first and cancelling
            the others (annotated as completions only, as in `asyncio.gather`).
        on_progress : callable, optional
            Called with `(n_done, n_total)`.
        """

        async def run(prompt: Prompt) -> Completion:
            while True:
                try:
                    return await self.generate(
                        prompt, params, priority=priority, timeout=timeout, **sampling
                    )
                except QueueFullError:
                    await self._gate.wait_left()

        return await run_all(
            run,
            prompts,
            n_at_once=2 * self.config.n_seq_max,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
        )

    # --- Tokens ------------------------------------------------------------------------------
    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Parameters
        ----------
        add_special : bool
            Add the beginning-of-sequence token where the model wants it.
        parse_special : bool
            Read the names of control tokens in the text as control tokens.

        Raises
        ------
        InvalidArgumentError
            Not a text, longer than 1 MiB, or with a lone surrogate.
        """
        self._check_serving()
        return await self._intake.tokenize(
            text, add_special=add_special, parse_special=parse_special
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; control tokens have none."""
        self._check_serving()
        return await self._intake.detokenize(token_ids)

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
            failure=None if self._status is None else self._thread.failure,
            stall_timeout_s=self.config.stall_timeout_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Forget what finished requests have left in the KV cache."""
        self._check_serving(draining=True)
        self._inbox.put(ResetPrefixCache())
        await self._dispatcher.audit()  # answered after it

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
        status = self._present_status
        if status is EngineStatus.FAILED:
            raise EngineFailedError("the engine has failed") from self._thread.failure
        if status is EngineStatus.DRAINING and not draining:
            raise ClosedError("the engine is draining: it takes no new requests")
        if status not in (EngineStatus.READY, EngineStatus.DRAINING):
            raise ClosedError("the engine is closed, or was not entered with `async with`")
        model = self._thread.model
        if model is None:  # it has failed, and its last event is on its way
            raise EngineFailedError("the engine has failed")
        return model.vocab

    @property
    def _present_status(self) -> EngineStatus | None:
        """The status, with what the thread did unasked."""
        if self._status in (None, EngineStatus.CLOSED) or self._thread.failure is None:
            return self._status
        return EngineStatus.FAILED

    def __repr__(self) -> str:
        status = "new" if self._status is None else self._status.value
        return f"<Engine {self.config.model_path.name} {status} open={self._gate.n_open}>"
