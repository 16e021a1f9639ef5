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
from collections.abc import Callable, Sequence
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
        self._is_stopping = False

    def run(self) -> int:
        """Supervise; the exit code."""
        previous = {number: signal.signal(number, self._forward) for number in SIGNALS}
        try:
            while True:
                code = self._run_worker()
                if code >= 0 or self._is_stopping:
                    return max(code, 0) if self._is_stopping and code < 0 else code
                self._deaths.append(self._clock())
                name = signal.Signals(-code).name
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

    def _run_worker(self) -> int:
        # A session of its own: Ctrl-C reaches the worker once, through this process.
        with subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        ) as worker:
            self._worker = worker
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
        if self._worker is not None:
            self._worker.send_signal(number)


def supervise(engine: EngineConfig, config: ServerConfig, listener: socket.socket) -> int:
    """Serve under a supervisor; the exit code."""
    command = [sys.executable, "-m", "cllm.server.worker", str(listener.fileno())]
    return Supervisor(command, settings_line(engine, config), listener).run()
