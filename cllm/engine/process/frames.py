"""Frames on a stream of bytes: each with its length before it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

MAX_READ = 1 << 18
_LENGTH = struct.Struct("<I")


def framed(frame: bytes) -> bytes:
    """Return a frame with its length before it, as 4 bytes, little-endian."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Decoder from a stream of bytes to frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._received = memoryview(bytearray(MAX_READ))  # `recv` would allocate as much each time

    def receive(self, connection: socket.socket) -> list[bytes] | None:
        """Read once and return the frames that are complete, possibly none.

        None: the connection has ended or failed.

        Raises
        ------
        BlockingIOError
            The socket is non-blocking and has no data.
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
