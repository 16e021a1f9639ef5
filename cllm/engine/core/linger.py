"""Decide how long to wait, after a tick that ended requests, for the next requests of their clients.

Clients in a closed loop send their next request as soon as the last one has ended.  It arrives
milliseconds after the next tick has begun, and waits for all of it.  A wait of a few percent of
that tick lets the request take part.  Pure: times come in as numbers.
"""

from __future__ import annotations

import math
from collections import deque

HORIZON_S = 0.02  # a client with a later request counts as not returned
MAX_TICK_SHARE = 0.5  # longest wait, as a part of the next tick
BUDGET_SHARE = 0.01  # time in all waits, as a part of the time in ticks
MIN_P_RETURN = 0.3  # share of clients that must return for a wait
# Number of last ends that count.  A wait is long enough for this share of the clients that returned.
N_REMEMBERED = 64
QUANTILE = 0.9
MARGIN = 1.25  # turnarounds scatter


class Linger:
    """Learns from ends and arrivals; one for each engine."""

    def __init__(self) -> None:
        # Ends whose clients may still return: the time, and the number of clients.
        self._ends: deque[list[float]] = deque()
        # The turnaround of each of the last ends; infinite for clients that did not come back.
        self._turnarounds: deque[float] = deque(maxlen=N_REMEMBERED)
        self._budget_s = 0.0

    def on_tick(self, seconds: float) -> None:
        """Note the seconds that a tick has taken."""
        self._budget_s = min(HORIZON_S, self._budget_s + BUDGET_SHARE * seconds)

    def on_wait(self, seconds: float) -> None:
        """Note that all clients have waited so long."""
        self._budget_s -= seconds

    def on_ends(self, n_requests: int, now: float) -> None:
        """Note that requests have ended, and that their clients hear of it now."""
        if n_requests:
            self._ends.append([now, n_requests])

    def on_arrival(self, at: float) -> None:
        """Note the time of a request; call in the order of times, and before `settle` of a later time."""
        self.settle(at)
        for end in reversed(self._ends):
            if end[0] <= at and end[1]:
                end[1] -= 1
                self._turnarounds.append(at - end[0])
                return

    def settle(self, now: float) -> None:
        """Note that all arrivals before `now` are known."""
        while self._ends and now - self._ends[0][0] > HORIZON_S:
            _, n_left = self._ends.popleft()
            self._turnarounds.extend([math.inf] * int(n_left))

    def seconds(self, n_ended: int, n_running: int, next_tick_s: float) -> float:
        """Return the seconds that are worth waiting; 0: do not wait.

        Parameters
        ----------
        n_ended : int
            Requests that the last tick ended.
        n_running : int
            Running requests, all of which are delayed by the wait.
        next_tick_s : float
            Expected seconds of the next tick, for which a late request would wait.
        """
        known = sorted(t for t in self._turnarounds if t < math.inf)
        if not (n_ended and known):
            return 0.0
        p_return = len(known) / len(self._turnarounds)
        wait_s = MARGIN * known[min(len(known) - 1, int(QUANTILE * len(known)))]
        # A shorter wait than they need would cost as much, and gain nothing.
        if p_return < MIN_P_RETURN or wait_s > min(MAX_TICK_SHARE * next_tick_s, self._budget_s):
            return 0.0
        return wait_s if p_return * n_ended * next_tick_s > wait_s * n_running else 0.0
