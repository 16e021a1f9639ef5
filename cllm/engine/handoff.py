"""The border between the event loop and the inference thread: commands in, events out.

Values cross it, objects do not.  Neither side ever waits for the other: a command is put into a
queue, and the events of a tick reach the loop by one non-blocking call.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio.lowlevel

from cllm.engine.request import Completion, GenerationRequest, ModelInfo, TokenDelta
from cllm.engine.statistics import EngineStatistics
from cllm.errors import EngineFailedError, GenerationError

if TYPE_CHECKING:
    from cllm.engine.slots import SlotInfo


# --- Commands: event loop → inference thread --------------------------------------------------
@dataclass(frozen=True, slots=True)
class Submit:
    """Start this request.  Answered by events with its `request_id`, the last a `Finished`."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop working on this request.  Unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Read:
    """The reader of this request has taken so many deltas more: as many may be computed."""

    request_id: str
    n_deltas: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget what finished requests have left in the KV cache."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Compare the books with llama.cpp's.  Answered by `Audited` with the same `call_id`."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """Say who holds which seq_id.  Answered by `Inspected` with the same `call_id`."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Cancel everything and end the thread.  Answered by `Stopped` and `Ended`."""


Command = Submit | Cancel | Read | ResetPrefixCache | Audit | Inspect | Shutdown


# --- Events: inference thread → event loop ----------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and requests are served."""

    model: ModelInfo
    statistics: EngineStatistics


@dataclass(frozen=True, slots=True)
class Progressed:
    """One more token of a request."""

    request_id: str
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class Finished:
    """The last of a request: exactly one for each `Submit`."""

    request_id: str
    delta: TokenDelta
    completion: Completion
    error: GenerationError | EngineFailedError | None = None


@dataclass(frozen=True, slots=True)
class Audited:
    """The answer to `Audit`."""

    call_id: int
    discrepancies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    """The answer to `Inspect`."""

    call_id: int
    slots: tuple[SlotInfo, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing more is served.  With an error: the thread has failed, or never started."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The thread has freed everything and ends: the last event of all."""


Event = Ready | Progressed | Finished | Audited | Inspected | Stopped | Ended

T = TypeVar("T")


class Inbox:
    """Commands on their way to the inference thread.  `put` from any thread.

    Attributes
    ----------
    on_cancel : callable
        Called with the request id when a `Cancel` has been put, in the thread that put it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.on_cancel: Callable[[str], None] = lambda request_id: None

    def put(self, command: Command) -> None:
        """Never blocks."""
        self._queue.put(command)
        if isinstance(command, Cancel):
            self.on_cancel(command.request_id)

    def drain(self, *, wait: bool, until: float | None = None) -> list[Command]:
        """All commands there are.  Inference thread only.

        Parameters
        ----------
        wait : bool
            Wait for at least one …
        until : float, optional
            … but not past this time of `time.perf_counter`.
        """
        commands: list[Command] = []
        if wait:
            timeout = None if until is None else max(0.0, until - time.perf_counter())
            try:
                commands.append(self._queue.get(timeout=timeout))
            except queue.Empty:
                return commands
        while True:
            try:
                commands.append(self._queue.get_nowait())
            except queue.Empty:
                return commands


class Outbox(Generic[T]):
    """Values on their way to the event loop in which the outbox was made.

    `anyio.from_thread.run_sync` would wait for the loop once per tick; the native calls of the two
    backends do not.
    """

    def __init__(self, deliver: Callable[[T], None]) -> None:
        token = anyio.lowlevel.current_token().native_token
        call_soon = getattr(token, "call_soon_threadsafe", None)  # an asyncio event loop
        self._call_soon = call_soon or token.run_sync_soon  # type: ignore[attr-defined]  # trio
        self._deliver = deliver

    def post(self, value: T) -> bool:
        """Deliver `value` soon; False if the event loop is gone.  Any thread; never blocks."""
        try:
            self._call_soon(self._deliver, value)
        except (RuntimeError, OSError):  # closed; trio.RunFinishedError is a RuntimeError too
            return False
        return True
