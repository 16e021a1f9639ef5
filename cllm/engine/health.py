"""Health: the state of an engine in a word."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cllm.errors import ClosedError, EngineFailedError


class EngineStatus(StrEnum):
    """State of an engine, as reported by `health()`."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    """The present tick has lasted longer than `stall_timeout_s`."""
    RESTARTING = "restarting"
    """The engine's process has crashed; requests wait until a new process has loaded the model."""
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart of the engine's process after a crash (`process=True`).

    Attributes
    ----------
    cause : str
        Signal or exit status of the process, and the end of its standard error.
    n_requests : int
        Number of requests that continue.
    duration_s : float
        Seconds from the crash until the new process had loaded the model.
    """

    cause: str
    n_requests: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """Status of an engine, and the reason if it serves no requests.

    Attributes
    ----------
    heartbeat_age_s : float
        Seconds of the present tick so far; 0 while the engine is idle.
    reason : str
        Reason why the status is not "ready"; empty otherwise.
    """

    status: EngineStatus
    heartbeat_age_s: float
    reason: str = ""


def health_of(
    status: EngineStatus | None,
    heartbeat_age_s: float,
    *,
    failure: BaseException | None,
    crash: str,
    stall_timeout_s: float,
) -> Health:
    """Return the health of an engine; `status` is None before the engine is entered.

    `crash` is the cause of the last crash, and empty once a new process serves.
    """
    if status is None:
        return Health(EngineStatus.STARTING, 0.0, "not entered yet")
    if status is EngineStatus.FAILED:
        return Health(status, heartbeat_age_s, repr(failure))
    if status is EngineStatus.READY and crash:
        return Health(EngineStatus.RESTARTING, heartbeat_age_s, crash)
    if status is EngineStatus.READY and heartbeat_age_s > stall_timeout_s:
        reason = f"in one tick for {heartbeat_age_s:.1f} s"
        return Health(EngineStatus.STALLED, heartbeat_age_s, reason)
    return Health(status, heartbeat_age_s, "" if status is EngineStatus.READY else status)


def check_serving(
    status: EngineStatus | None, failure: BaseException | None, *, draining: bool
) -> None:
    """Raise an error unless requests are served; with `draining`, a draining engine is accepted.

    Raises
    ------
    ClosedError, EngineFailedError
    """
    if status is EngineStatus.FAILED:
        assert failure is not None
        raise EngineFailedError.of(failure)
    if status is EngineStatus.DRAINING and not draining:
        raise ClosedError("the engine is draining: it takes no new requests")
    if status is EngineStatus.STARTING:
        raise ClosedError("the engine is loading its model: wait until `async with` has entered it")
    if status not in (EngineStatus.READY, EngineStatus.DRAINING):
        raise ClosedError(
            "the engine is closed, or was not entered: use `async with`, or await `start`"
        )
