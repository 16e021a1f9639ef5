"""BatchRecord: ids of the requests in a process's latest batch, in memory that outlives the process.

Over the socket, the record would wake the parent before each decode of another batch, and the parent needs
it only after a crash.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import IO

import msgspec

_LENGTH = struct.Struct("<I")
MAX_ID_BYTES = 4 * 256 + 5


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
        n_bytes = _LENGTH.size + 5 + n_seq_max * MAX_ID_BYTES
        os.ftruncate(fd, n_bytes)
        self._memory = mmap.mmap(fd, n_bytes)

    def write(self, request_ids: Sequence[str]) -> None:
        """Record the requests of the next decode."""
        data = msgspec.msgpack.encode(request_ids)
        self._memory[: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data

    def read(self) -> tuple[str, ...]:
        """Return the ids that were recorded last; empty if there are none, or the record is incomplete."""
        (n_bytes,) = _LENGTH.unpack_from(self._memory)
        data = self._memory[_LENGTH.size : _LENGTH.size + n_bytes]
        try:
            return msgspec.msgpack.decode(data, type=tuple[str, ...]) if data else ()
        except msgspec.MsgspecError:  # killed while it wrote
            return ()

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
