"""Connections: a limit of open connections, below the descriptors of this process.

Without it, idle clients take every descriptor.  The event loop then spends its time on failed accepts,
and streams stall.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Protocol

logger: logging.Logger = logging.getLogger("cllm.server")

# Descriptors for the engine, its next process, files, and what is accepted at once.
N_RESERVED = 32
N_MIN, N_DEFAULT = 8, 4096
N_DESCRIPTORS = 65536
# Accepted before the event loop does anything else; asyncio fails once for each beyond what there is.
N_AT_ONCE = 8


class Closable(Protocol):
    """A connection."""

    def close_idle(self) -> None:
        """Close the connection while it waits for a request."""


class Connections:
    """The connections of one server.  Event loop only.

    Parameters
    ----------
    n_max : int
        More than these close the one that has been idle for longest, or are closed at once.
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
        """Record whether a connection waits for a request."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d connections are open, which is all (--max-connections): idle ones are closed",
                self.n_max,
            )


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = N_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(N_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return N_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows fewer than it says
        return soft
    return wanted


def n_connections_max(n_descriptors: int, wanted: int | None) -> int:
    """Return the number of connections that fit beside the descriptors that are open now.

    Parameters
    ----------
    n_descriptors : int
        That this process may have.
    wanted : int or None
        Setting of the server.
    """
    n_fitting = n_descriptors - _n_open() - N_RESERVED
    return max(N_MIN, min(n_fitting, N_DEFAULT if wanted is None else wanted))


def _n_open() -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:  # not on macOS
        return N_RESERVED
