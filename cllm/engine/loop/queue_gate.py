"""QueueGate: how many requests an engine has taken, and when it can take more.  Event loop only."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from cllm.engine.media import MediaInput
from cllm.errors import QueueFullError

N_TIMES = 64


class QueueGate:
    """Counter of open requests: those being tokenized, waiting and running.

    Attributes
    ----------
    n_open : int
    n_media_bytes : int
        Bytes of the pixels and samples of open requests; what several share counts once.
    """

    def __init__(
        self,
        *,
        n_seq_max: int,
        max_queue: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._n_seq_max = n_seq_max
        self._max_queue = max_queue
        self._clock = clock
        # Seconds between the ends of two requests, without the time in which no request was open.
        self._gaps: deque[float] = deque(maxlen=N_TIMES)
        self._since = 0.0
        self._left: anyio.Event | None = None  # set when a request ends; None: no task waits
        self._on_empty: Callable[[], None] | None = None
        self._n_visits = 0
        self.n_open: int = 0
        self.n_media_bytes: int = 0
        self._n_users: Counter[int] = Counter()  # by the id of the pixels or samples

    def enter(self, *, is_known: bool = False) -> None:
        """Take one more request.

        Parameters
        ----------
        is_known : bool
            True if the request continues one that has just ended: it is never rejected.

        Raises
        ------
        QueueFullError
            `max_queue` requests are waiting.  `retry_after_s` is the mean time between the ends of the last
            64 requests, after which one place should be free.
        """
        n_waiting = self.n_open - self._n_seq_max
        if n_waiting >= self._max_queue and not is_known:
            raise QueueFullError(max(0, n_waiting), self._seconds_per_request())
        if self.n_open == 0:
            self._since = self._clock()
        self.n_open += 1

    def hold_media(self, media: Sequence[MediaInput]) -> None:
        """Count the pixels and samples of a request that has been submitted, until it leaves."""
        for each in media:
            self.n_media_bytes += len(each.data) if not self._n_users[id(each.data)] else 0
            self._n_users[id(each.data)] += 1

    def stop(self) -> None:
        """Forget all pixels and samples, and wake the tasks that wait: no request is served any more."""
        self.n_media_bytes = 0
        self._n_users.clear()
        self.wake()

    def leave(self, *, is_served: bool = True, media: Sequence[MediaInput] = ()) -> None:
        """Remove a request; with `is_served=False` it does not count for `retry_after_s`."""
        for each in media:
            self._n_users[id(each.data)] -= 1
            if not self._n_users[id(each.data)]:
                del self._n_users[id(each.data)]
                self.n_media_bytes -= len(each.data)
        if is_served:
            now = self._clock()
            self._gaps.append(now - self._since)
            self._since = now
        self.n_open -= 1
        self.wake()
        self._look()

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Keep the model open during the block, for a call that does not count as a request."""
        self._n_visits += 1
        try:
            yield
        finally:
            self._n_visits -= 1
            self.wake()
            self._look()

    @property
    def is_empty(self) -> bool:
        """True if there is no open request and no visit."""
        return not (self.n_open or self._n_visits)

    def when_empty(self, call: Callable[[], None]) -> None:
        """Call a function as soon as there is no open request and no visit."""
        self._on_empty = call
        self._look()

    def _look(self) -> None:
        if self._on_empty is not None and self.is_empty:
            self._on_empty()

    def wake(self) -> None:
        """Wake the tasks that wait for room."""
        if self._left is not None:
            self._left.set()
            self._left = None

    async def wait_left(self) -> None:
        """Wait until some request has left."""
        if self._left is None:
            self._left = anyio.Event()
        await self._left.wait()

    def _seconds_per_request(self) -> float:
        if not self._gaps:
            # No request has left yet: it takes at least as long again as it has taken so far.
            return max(1.0, self._clock() - self._since)
        return max(0.01, sum(self._gaps) / len(self._gaps))
