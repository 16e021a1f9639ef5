"""EngineHost: where requests are served: an inference thread of this process, or another process."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import ExitStack

from cllm.engine.core.commands import Ended, Shutdown, Stopped
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.thread.mailbox import EventOutbox, Inbox
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import ClosedError

logger: logging.Logger = logging.getLogger("cllm.engine")

EXIT_TIMEOUT_S = 5.0


class EngineHost(ABC):
    """Thread that serves requests until it is stopped, or fails.

    Commands come through the inbox, events leave through the outbox.  It is a daemon so that it cannot
    keep an interpreter alive, and an exit handler stops and joins it first.

    Attributes
    ----------
    vocabulary : EngineVocabulary or None
        Once loaded; other threads may use it until it is told to stop.
    failure : BaseException or None
        The error with which it has ended, or is about to; None if it was closed.  Any thread.
    crash : str
        Why its process has ended, until there is another; otherwise empty.  Any thread.
    """

    def __init__(
        self, name: str, inbox: Inbox, outbox: EventOutbox, workers: WorkerThreads
    ) -> None:
        self._inbox, self._outbox, self._workers = inbox, outbox, workers
        self.vocabulary: EngineVocabulary | None = None
        self.text_vocabulary: EngineVocabulary | None = None
        self.failure: BaseException | None = None
        self.crash = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- Any thread --------------------------------------------------------------------------
    def start(self) -> None:
        """Load the model and begin to serve."""
        # A bound method would keep the engine alive for ever.
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        self._thread.start()
        # Registered after `weakref`'s own exit handler, and so run before it.
        atexit.register(self._at_exit)

    @property
    def is_alive(self) -> bool:
        """True if the host still runs."""
        return self._thread.is_alive()

    @property
    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Return the statistics after the last tick; any thread."""

    @property
    @abstractmethod
    def heartbeat_age_s(self) -> float:
        """Seconds since it last showed that it is not stuck; 0 while it is idle."""

    def request_stop(self) -> None:
        """Cancel everything, also a load or a decode that is running.  Any thread; returns at once."""
        self._stopping = True
        self._inbox.put(Shutdown())

    def join(self, timeout: float | None = None) -> None:
        """Wait for it to have freed everything and ended."""
        self._thread.join(timeout)
        atexit.unregister(self._at_exit)

    # --- The thread itself -------------------------------------------------------------------
    def _run(self) -> None:
        try:
            with ExitStack() as owned:
                try:
                    self._serve(owned)
                except BaseException as error:
                    self.failure = error
                    # Closed while it loaded: that is no failure.
                    is_unexpected = not (self._stopping or isinstance(error, ClosedError))
                    logger.debug("the engine ends: %s", error, exc_info=is_unexpected)
                    # Another thread may be inside a call of the vocabulary: free nothing before
                    # all requests have received it and ask for it, if any are left.
                    if self._outbox.post([Stopped(error)]):
                        while not self._stopping:
                            self._inbox.drain(wait=True)
                finally:
                    self._workers.end()
        finally:
            self.vocabulary = self.text_vocabulary = None
            self._outbox.post([Ended()] if self.failure else [Stopped(None), Ended()])

    @abstractmethod
    def _serve(self, owned: ExitStack) -> None:
        """Load everything into `owned`, and serve until `Shutdown`; an error ends the thread."""


def _stop_at_exit(reference: weakref.ref[EngineHost]) -> None:
    """Stop a live engine at exit: set the flags and join; objects of a stuck thread are not freed."""
    host = reference()
    if host is not None and host.is_alive:
        host.request_stop()
        host.join(EXIT_TIMEOUT_S)
