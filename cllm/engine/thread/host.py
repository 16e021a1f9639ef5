"""EngineHost: where requests are served: an inference thread of this process, or another process."""

from __future__ import annotations

from typing import Protocol

from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.vocabulary import EngineVocabulary


class EngineHost(Protocol):
    """What the event loop knows of it.  Its commands come through an `Inbox`.

    Attributes
    ----------
    vocabulary : EngineVocabulary or None
        Once loaded; other threads may use it until it is told to stop.
    failure : BaseException or None
        Why it has ended, or is about to, if nobody asked it to; any thread.
    """

    vocabulary: EngineVocabulary | None
    failure: BaseException | None

    def start(self) -> None:
        """Load the model and begin to serve."""

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""

    @property
    def statistics(self) -> EngineStatistics:
        """What was so after the last tick; any thread."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since it last showed that it is not stuck; 0 while it is idle."""

    def request_stop(self) -> None:
        """Cancel everything, also a load or a decode that is running.  Any thread; returns at once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for it to have freed everything and ended."""
