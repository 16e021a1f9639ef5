"""Limit of open connections, below the limit of file descriptors of this process.

Without this limit, idle clients take every descriptor.  The event loop then spends its time on failed
accepts, and streams stall.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

logger: logging.Logger = logging.getLogger("cllm.server")

# Descriptors for the engine, its next process, files, and what is accepted at once.
N_RESERVED = 32
N_MIN, N_DEFAULT = 8, 4096
N_DESCRIPTORS = 65536
# Connections that asyncio accepts in one pass of its loop; each fails if no descriptor is left.
N_AT_ONCE = 8


class Closable(Protocol):
    """Connection that can be closed while it waits for a request."""

    def close_idle(self) -> None:
        """Close the connection while it waits for a request."""


class Connections:
    """The connections of one server.  Event loop only.

    Parameters
    ----------
    n_max : int
        Most connections.  One more closes the connection that has been idle for longest.  If none is idle, the
        new one is rejected.
    """

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self._open: set[Closable] = set()
        self._idle: dict[Closable, None] = {}  # the oldest first
        self._has_warned = False

    def add(self, connection: Closable) -> bool:
        """Add a connection; return False if there is no room."""
        if len(self._open) >= self.n_max:
            self._warn()
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            self.discard(oldest)
            oldest.close_idle()
        self._open.add(connection)
        return True

    def discard(self, connection: Closable) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: Closable, is_idle: bool) -> None:
        """Mark a connection as idle, so that `add` may close it, or as busy."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d connections are open, the limit (--max-connections): new ones close idle ones",
                self.n_max,
            )


def n_connections_max(n_descriptors: int, wanted: int | None) -> int:
    """Return the limit of connections: as many as fit beside the open descriptors, but at least 8.

    Parameters
    ----------
    n_descriptors : int
        Limit of file descriptors of this process.
    wanted : int or None
        `ServerConfig.max_connections`; None: 4096.
    """
    n_fitting = n_descriptors - _n_open() - N_RESERVED
    return max(N_MIN, min(n_fitting, N_DEFAULT if wanted is None else wanted))


def _n_open() -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:  # not on macOS
        return N_RESERVED
