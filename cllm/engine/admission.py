"""QueueGate: how many requests an engine has taken, and when it can take more.  Event loop only."""

from __future__ import annotations

import time
from collections import deque

import anyio

from cllm.errors import QueueFullError

N_TIMES = 64


class QueueGate:
    """Counts open requests: those being tokenized, waiting and running.

    Attributes
    ----------
    n_open : int
    """

    def __init__(self, *, n_seq_max: int, max_queue: int) -> None:
        self._n_seq_max = n_seq_max
        self._max_queue = max_queue
        self._left_at: deque[float] = deque(maxlen=N_TIMES)
        self._left = anyio.Event()
        self.n_open = 0

    def enter(self) -> None:
        """Take one more request.

        Raises
        ------
        QueueFullError
            As many as `max_queue` are waiting; `retry_after_s` is the mean time in which one has
            been leaving lately.
        """
        n_waiting = self.n_open - self._n_seq_max
        if n_waiting >= self._max_queue:
            raise QueueFullError(max(0, n_waiting), self._seconds_per_request())
        self.n_open += 1

    def leave(self) -> None:
        """One request less."""
        self.n_open -= 1
        self._left_at.append(time.perf_counter())
        self.wake()

    def wake(self) -> None:
        """Let those who wait for room look again."""
        self._left.set()
        self._left = anyio.Event()

    async def wait_left(self) -> None:
        """Wait until some request has left."""
        await self._left.wait()

    def _seconds_per_request(self) -> float:
        times = self._left_at
        if len(times) < 2:
            return 1.0
        return max(0.01, (times[-1] - times[0]) / (len(times) - 1))
