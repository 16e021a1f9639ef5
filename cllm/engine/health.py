"""Health: the state of an engine in a word."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineStatus(StrEnum):
    """The state of an engine, as `health()` tells it."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are served.

    Attributes
    ----------
    heartbeat_age_s : float
        Seconds that the inference thread has been in its present tick; 0 while it is idle.
    reason : str
        Why the status is not "ready"; empty otherwise.
    """

    status: EngineStatus
    heartbeat_age_s: float
    reason: str = ""
