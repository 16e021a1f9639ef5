"""Keep a listening socket and a worker behind it: llama.cpp can end a process, not a service.

While a worker is started again, new connections wait in the socket's queue.  A worker that a signal
killed is started anew, at most three times a minute; one that exits by itself is not.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cllm import EngineConfig
from cllm.server.config import ServerConfig
from cllm.server.worker import settings_line

logger = logging.getLogger("cllm.server")

MAX_RESTARTS, WINDOW_S = 3, 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that worker after worker inherits.

    Raises
    ------
    OSError
        The address is in use, or is not one.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=1024)
    listener.set_inheritable(True)
    return listener


class Supervisor:
    """Runs workers until one exits by itself, or too many are killed.

    Parameters
    ----------
    command : sequence of str
        Starts a worker.
    settings : bytes
        What the worker reads from its standard input.
    listener : socket
        What it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: bytes,
        listener: socket.socket,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = list(command)
        self._settings = settings
        self._listener = listener
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        self._worker: subprocess.Popen[bytes] | None = None
        self._unsent: list[int] = []  # signals for a worker that is being started
        self._is_stopping = False

    def run(self, announce: Callable[[], None] = lambda: None) -> int:
        """Supervise; the exit code.

        Parameters
        ----------
        announce : callable
            Called when signals are heard.
        """
        previous = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            announce()
            while True:
                worker = self._start_worker()
                code = 0 if worker is None else self._wait_for(worker)
                if code >= 0:
                    return code
                name = signal.Signals(-code).name
                if self._is_stopping:
                    logger.error("the worker was killed by %s while it was shutting down", name)
                    return 1
                self._deaths.append(self._clock())
                if self._is_looping():
                    logger.error(
                        "the worker was killed %d times within %.0f s, last by %s: giving up",
                        len(self._deaths), WINDOW_S, name,
                    )  # fmt: skip
                    return 1
                logger.error("the worker was killed by %s; starting another", name)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _is_looping(self) -> bool:
        is_full = len(self._deaths) == self._deaths.maxlen
        return is_full and self._deaths[-1] - self._deaths[0] < WINDOW_S

    def _start_worker(self) -> subprocess.Popen[bytes] | None:
        """A worker; none if this process was asked to stop."""
        if self._is_stopping:
            return None
        # The worker inherits the block and lifts it when it listens to signals itself: none can end
        # it before.  Here it stops nothing: the kernel hands a signal to any thread that takes it,
        # numpy's among them, and Python then calls the handler between any two steps of this.
        with _blocked(SIGNALS):
            # A session of its own: Ctrl-C reaches the worker once, through this process.
            worker = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,
            )
        self._worker = worker
        self._send()
        return worker

    def _wait_for(self, worker: subprocess.Popen[bytes]) -> int:
        """The exit code of a worker; below 0 the signal that killed it."""
        with worker:
            assert worker.stdin is not None
            try:
                worker.stdin.write(self._settings)
                worker.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended already: its exit code says why
            # Standard input stays open: its end tells the worker that its supervisor is gone.
            code = worker.wait()
        self._worker = None
        return code

    def _forward(self, number: int, _: FrameType | None) -> None:
        self._is_stopping = True
        self._unsent.append(number)
        self._send()

    def _send(self) -> None:
        """Forward what was heard, if there is a worker to have it."""
        if self._worker is None or not self._is_stopping:
            return
        # The worker stops to listen; a socket that stays open here would keep new clients waiting.
        self._listener.close()
        while self._unsent:
            self._worker.send_signal(self._unsent.pop(0))


@contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Put off these signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def supervise(
    engine: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[], None] = lambda: None,
) -> int:
    """Serve under a supervisor; the exit code.  `announce` is called when signals are heard."""
    command = [sys.executable, "-m", "cllm.server.worker", str(listener.fileno())]
    return Supervisor(command, settings_line(engine, config), listener).run(announce)
