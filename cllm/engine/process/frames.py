"""Frames on a stream of bytes: a message and what is attached to it, sent in packets.

The packets of a bulky frame may have those of other frames between them, so that an image of 100 MB does
not delay the next tokens.  A packet is one byte of flags, its number of bytes as 4 bytes, little-endian, and
its data.
"""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Iterable, Iterator

MAX_PACKET = 1 << 18  # bytes of data
_HEADER = struct.Struct("<BI")
_ENDS_PART, _ENDS_FRAME, _IS_BULKY = 1, 2, 4

# A message, and its attachments.
Frame = tuple[bytes, ...]


def packets(frame: Frame, *, is_bulky: bool) -> Iterator[bytes]:
    """Yield what is sent for a frame.  Only the packets of a bulky frame may have others between them."""
    lane = _IS_BULKY if is_bulky else 0
    for i, part in enumerate(frame):
        for start in range(0, max(len(part), 1), MAX_PACKET):
            data = part[start : start + MAX_PACKET]
            flags = lane
            if start + MAX_PACKET >= len(part):
                flags |= _ENDS_PART | (_ENDS_FRAME if i + 1 == len(frame) else 0)
            yield _HEADER.pack(flags, len(data)) + data


class Attachments:
    """Attachments of a message, by their index.  An object that occurs twice is attached once."""

    def __init__(self, given: Iterable[bytes] = ()) -> None:
        self._all = list(given)
        self._indices: dict[int, int] = {}

    def add(self, data: bytes) -> bytes:
        """Attach bytes, and return what stands for them in the message."""
        if (index := self._indices.get(id(data))) is None:
            index = self._indices[id(data)] = len(self._all)
            self._all.append(data)
        return index.to_bytes(4, "little")

    def get(self, reference: bytes) -> bytes:
        """Return the bytes for which `reference` stands."""
        return self._all[int.from_bytes(reference, "little")]

    def frame(self, message: bytes) -> Frame:
        """Return a message with its attachments."""
        return (message, *self._all)


class _Lane:
    """Frames whose packets come one after another."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.part = io.BytesIO()  # gives its bytes without a copy


class FrameReader:
    """Decoder from a stream of bytes to frames."""

    def __init__(self) -> None:
        # `recv` would allocate as much each time.
        self._received = memoryview(bytearray(MAX_PACKET))
        self._header = b""
        self._n_missing = 0
        self._lanes = (_Lane(), _Lane())

    def receive(self, connection: socket.socket) -> list[Frame] | None:
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
        return self.add(self._received[:n_bytes]) if n_bytes else None

    def add(self, data: bytes | memoryview) -> list[Frame]:
        """Add bytes, and return the frames that they complete."""
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            if (n_bytes := _HEADER.size - len(self._header)) > 0:
                self._header += view[:n_bytes]
                view = view[n_bytes:]
                if len(self._header) < _HEADER.size:
                    break
                self._n_missing = _HEADER.unpack(self._header)[1]
            flags = self._header[0]
            lane = self._lanes[bool(flags & _IS_BULKY)]
            n_bytes = lane.part.write(view[: self._n_missing])
            self._n_missing -= n_bytes
            view = view[n_bytes:]
            if self._n_missing:
                break
            self._header = b""
            if flags & _ENDS_PART:
                lane.parts.append(lane.part.getvalue())
                lane.part = io.BytesIO()
            if flags & _ENDS_FRAME:
                frames.append(tuple(lane.parts))
                lane.parts.clear()
        return frames
