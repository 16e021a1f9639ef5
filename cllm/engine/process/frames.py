"""Frames on a stream of bytes: each with its length before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def framed(frame: bytes) -> bytes:
    """A frame as it is sent."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """The frames of the bytes that have come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[bytes]:
        """More bytes: the frames that are complete with them."""
        self._buffer += data
        start, n_bytes = 0, len(self._buffer)
        while n_bytes - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if end > n_bytes:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
