"""SocketWatch: calls a function in the event loop when a socket has data to read.

The event loop reads from the socket itself.  A thread in between would add two wake-ups to the latency of
each token.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from anyio.lowlevel import current_token

from cllm.engine.thread.mailbox import Outbox


class SocketWatch:
    """Watches a socket, one at a time, in the event loop in which this object was made."""

    def __init__(self) -> None:
        loop = current_token().native_token
        self._asyncio_loop = loop if isinstance(loop, asyncio.AbstractEventLoop) else None
        self._calls: Outbox[Callable[[], None]] = Outbox(_call)
        self._watched: socket.socket | None = None

    # --- Any thread --------------------------------------------------------------------------
    def call_soon(self, call: Callable[[], None]) -> bool:
        """Call a function in the loop after earlier calls; return False if the loop is gone.  Never blocks."""
        return self._calls.post(call)

    def close(self, connection: socket.socket) -> None:
        """Close a socket, in the event loop if it still runs, since the loop may watch the socket."""
        if not self.call_soon(partial(self._close, connection)):
            connection.close()

    # --- Event loop --------------------------------------------------------------------------
    def start(self, connection: socket.socket, on_readable: Callable[[], bool]) -> None:
        """Call `on_readable` in the loop whenever there is data, until it returns False or the socket closes.

        Does nothing if this socket is watched already.
        """
        if self._watched is connection:
            return
        self._watched = connection
        if self._asyncio_loop is not None:
            self._asyncio_loop.add_reader(connection, self._on_readable, connection, on_readable)
        else:
            import trio

            trio.lowlevel.spawn_system_task(self._read, connection, on_readable)

    def _on_readable(self, connection: socket.socket, on_readable: Callable[[], bool]) -> None:
        if not on_readable():
            self._stop(connection)

    async def _read(self, connection: socket.socket, on_readable: Callable[[], bool]) -> None:
        import trio

        while self._watched is connection:
            try:
                await trio.lowlevel.wait_readable(connection)
            except trio.ClosedResourceError:
                return
            self._on_readable(connection, on_readable)

    def _stop(self, connection: socket.socket) -> None:
        if self._watched is not connection:
            return
        self._watched = None
        if self._asyncio_loop is not None:
            self._asyncio_loop.remove_reader(connection)

    def _close(self, connection: socket.socket) -> None:
        self._stop(connection)
        if self._asyncio_loop is None:
            import trio

            trio.lowlevel.notify_closing(connection)
        connection.close()


def _call(function: Callable[[], None]) -> None:
    function()
