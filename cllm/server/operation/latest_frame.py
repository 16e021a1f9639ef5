"""LatestFrame: one frame of `/live`, shared by all its readers.  Event loop only."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

PERIOD_S = 0.1
N_TICKS_KEPT = 512


class LatestFrame:
    """Cache of the latest frame; a reader that finds it too old makes a new one for all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = anyio.Lock()
        self._frame: dict[str, Any] = {}
        self._made_at = -math.inf
        self._n_frames = 0
        self._ticks: deque[Any] = deque(maxlen=N_TICKS_KEPT)

    def with_history(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return a frame for a new reader: with the ticks of earlier frames, too."""
        return {**frame, "ticks": list(self._ticks)} if "ticks" in frame else frame

    async def get(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Return a frame that is at most half a period (0.05 s) old; `make` makes a new one if needed."""
        async with self._lock:
            if self._clock() - self._made_at >= PERIOD_S / 2:
                self._n_frames += 1
                self._frame = {"number": self._n_frames, **await make()}
                self._ticks.extend(self._frame.get("ticks", ()))
                self._made_at = self._clock()
            return self._frame
