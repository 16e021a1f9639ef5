"""EngineHost: base class of the threads that serve requests, in this process or by a child process."""

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

    Commands come through the inbox, events leave through the outbox.  The thread is a daemon, so that it
    cannot keep the interpreter alive.  An exit handler stops and joins it before the interpreter ends.

    Attributes
    ----------
    vocabulary, text_vocabulary : EngineVocabulary or None
        Vocabularies for generation and for embeddings; None before the model is loaded and after the end.
        Other threads may use them until `request_stop` is called.
    failure : BaseException or None
        Error that has ended the thread, or is about to end it.  Any thread.
    crash : str
        Cause of the child process's crash, until a new process serves; otherwise empty.  Any thread.
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
        """Start the thread, which loads the model and then serves requests.  Returns at once."""
        # A bound method as exit handler would keep the host alive until exit.
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
        """Seconds that the present tick has lasted so far; 0 while no tick runs.  Any thread."""

    def request_stop(self) -> None:
        """Cancel all requests, and a running load or decode; end the thread.  Any thread; returns at once."""
        self._stopping = True
        self._inbox.put(Shutdown())

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has freed everything and ended, for at most `timeout` seconds."""
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
                    # The engine may have been closed while it was loading: no traceback then.
                    is_unexpected = not (self._stopping or isinstance(error, ClosedError))
                    logger.debug("the engine ends: %s", error, exc_info=is_unexpected)
                    # Other threads may be using the vocabulary: free nothing before `request_stop`,
                    # unless the event loop, and with it every caller, is gone.
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
