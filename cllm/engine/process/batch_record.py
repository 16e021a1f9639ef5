"""BatchRecord: the present work of a process, in memory that outlives the process.

Over the socket, the record would wake the parent before each decode of another batch, and the parent needs
it only after a crash.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple

import msgspec

_LENGTH = struct.Struct("<I")
MAX_ID_BYTES = 4 * 256 + 5
DIGEST_BYTES = 32


class Underway(NamedTuple):
    """Work of a process when it ended.

    Attributes
    ----------
    request_ids : tuple of str
        Ids of the requests in the last batch that it began.
    media : bytes
        Digest of the image or audio that it was encoding; empty without one.
    """

    request_ids: tuple[str, ...] = ()
    media: bytes = b""


def memory_file() -> IO[bytes]:
    """Return an empty file without a name, in memory if the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("cllm-batch"), "w+b")
    return tempfile.TemporaryFile()


class BatchRecord:
    """Memory that two processes share.  One writes; the other reads when that one has ended.

    Parameters
    ----------
    fd : int
        Descriptor of the file that both processes map; empty at first.  It may be closed afterwards.
    n_seq_max : int
        Maximum number of requests in a batch.
    """

    def __init__(self, fd: int, n_seq_max: int) -> None:
        n_bytes = DIGEST_BYTES + _LENGTH.size + 5 + n_seq_max * MAX_ID_BYTES
        os.ftruncate(fd, n_bytes)
        self._memory = mmap.mmap(fd, n_bytes)

    def write(self, request_ids: Sequence[str]) -> None:
        """Record the requests of the next decode.  Inference thread."""
        data = msgspec.msgpack.encode(request_ids)
        start = DIGEST_BYTES + _LENGTH.size
        self._memory[DIGEST_BYTES : start + len(data)] = _LENGTH.pack(len(data)) + data

    def write_media(self, digest: bytes) -> None:
        """Record the image or audio that is encoded from now on; empty: none.  Encoder's thread."""
        self._memory[:DIGEST_BYTES] = digest.ljust(DIGEST_BYTES, b"\0")

    def read(self) -> Underway:
        """Return what was recorded last; no requests if there are none, or their record is incomplete."""
        media = self._memory[:DIGEST_BYTES]
        (n_bytes,) = _LENGTH.unpack_from(self._memory, DIGEST_BYTES)
        start = DIGEST_BYTES + _LENGTH.size
        data = self._memory[start : start + n_bytes]
        try:
            request_ids = msgspec.msgpack.decode(data, type=tuple[str, ...]) if data else ()
        except msgspec.MsgspecError:  # killed while it wrote
            request_ids = ()
        return Underway(request_ids, media if any(media) else b"")

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
