"""Frames on a stream of bytes: each with its length before it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

MAX_READ = 1 << 18
_LENGTH = struct.Struct("<I")


def framed(frame: bytes) -> bytes:
    """A frame as it is sent."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """The frames of the bytes that have come."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._received = memoryview(bytearray(MAX_READ))  # `recv` would allocate as much each time

    def receive(self, connection: socket.socket) -> list[bytes] | None:
        """The frames that come next; None at the end of the connection.

        Raises
        ------
        BlockingIOError
            Nothing has come, and the connection does not wait.
        """
        try:
            n_bytes = connection.recv_into(self._received)
        except BlockingIOError:
            raise
        except OSError:
            n_bytes = 0
        return list(self.add(self._received[:n_bytes])) if n_bytes else None

    def add(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Add bytes, and yield the frames that they complete."""
        self._buffer += data
        start, n_bytes = 0, len(self._buffer)
        while n_bytes - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if end > n_bytes:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
