"""A proxy between a client and a server that cuts connections after a number of bytes of the answer."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class CuttingProxy:
    """A port of this machine that leads to a server.

    Attributes
    ----------
    url : str
    cuts : deque of int
        Bytes of the answer after which each of the next connections is cut.  While the deque is empty,
        connections are not cut.
    n_answered : int
        Bytes of the answer so far on the newest connection.
    """

    def __init__(self, server_url: str) -> None:
        where = urlsplit(server_url)
        self._server = (where.hostname or "", where.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts: deque[int] = deque()
        self.n_answered = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                cut = self.cuts.popleft() if self.cuts else None
                server = socket.create_connection(self._server)
                self._open += client, server
                for target, args in (
                    (_pump, (client, server)),
                    (self._answer, (server, client, cut)),
                ):
                    thread = threading.Thread(target=target, args=args, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _answer(self, server: socket.socket, client: socket.socket, left: int | None) -> None:
        self.n_answered = 0
        with suppress(OSError):
            while (left is None or left > 0) and (data := server.recv(1 << 16)):
                part = data if left is None else data[:left]
                self.n_answered += len(part)  # before the client can have it
                client.sendall(part)
                left = None if left is None else left - len(part)
        _end(client)
        _end(server)

    def close(self) -> None:
        """Close everything and wait for its threads."""
        _end(self._listener)
        self._listener.close()
        for each in self._open:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _end(target)


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting(server_url: str) -> Iterator[CuttingProxy]:
    """A proxy, closed at the end."""
    proxy = CuttingProxy(server_url)
    try:
        yield proxy
    finally:
        proxy.close()
