"""Files with a JSON header, bytes of data and a checksum.  They are written atomically."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

from cllm.engine.file_content import open_regular
from cllm.memory import available_bytes, new_bytes

MAX_HEADER_BYTES = 256 << 20
MAGIC = b"cllm state 1\n"
_LENGTHS = struct.Struct("<QQ")
_N_DIGEST = 32


class DamagedFileError(Exception):
    """The file is of another kind, or was changed."""


def write_state_file(path: Path, header: dict[str, Any], data: bytes) -> int:
    """Write a file atomically; return its size in bytes.

    Raises
    ------
    OSError
        The file cannot be written, or the path is a device or another special file; an older file of this
        name is unchanged.
    TypeError
        The header cannot be written as JSON.
    """
    # `replace` fails for a directory, and would put a file in the place of a device.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    head = json.dumps(header, separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(len(head), len(data))
    digest = _digest(lengths, head, data)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in (MAGIC, digest, lengths, head, data):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return len(MAGIC) + _N_DIGEST + len(lengths) + len(head) + len(data)


def read_state_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a file.

    Raises
    ------
    OSError
        The file cannot be read.
    DamagedFileError
        The file is of another kind, cut off or changed, or has more data than there is free memory.
    """
    with open_regular(path) as file:
        head, digest, lengths = _read_head(path, file)
        available = available_bytes()
        if available is not None and lengths[1] > available:  # a sparse file, for example
            raise DamagedFileError(f"{path} has {lengths[1]} bytes, more than there is memory")
        data, address = new_bytes(lengths[1])
        is_whole = not data or file.readinto(_view(address, len(data))) == len(data)
        is_whole = is_whole and not file.read(1)
    if not is_whole or _digest(_LENGTHS.pack(*lengths), head, data) != digest:
        raise DamagedFileError(f"{path} is cut off, or has been changed")
    return _header_of(path, head), data


def read_state_header(path: Path) -> dict[str, Any]:
    """Return the header of a file without reading its data or checking the checksum.

    Raises
    ------
    OSError, DamagedFileError
        As for `read_state_file`.
    """
    with open_regular(path) as file:
        head, _, lengths = _read_head(path, file)
        n_bytes = os.fstat(file.fileno()).st_size
    if n_bytes != len(MAGIC) + _N_DIGEST + _LENGTHS.size + sum(lengths):
        raise DamagedFileError(f"{path} is cut off")
    return _header_of(path, head)


def _view(address: int, n_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(address)).cast("B")


def _read_head(path: Path, file: Any) -> tuple[bytes, bytes, tuple[int, int]]:
    fixed = file.read(len(MAGIC) + _N_DIGEST + _LENGTHS.size)
    if not fixed.startswith(MAGIC) or len(fixed) < len(MAGIC) + _N_DIGEST + _LENGTHS.size:
        raise DamagedFileError(f"{path} was not written by cllm, or is cut off at its beginning")
    digest = fixed[len(MAGIC) : len(MAGIC) + _N_DIGEST]
    n_head, n_data = _LENGTHS.unpack_from(fixed, len(MAGIC) + _N_DIGEST)
    n_bytes = os.fstat(file.fileno()).st_size
    # Before that much memory is allocated.
    if n_head > MAX_HEADER_BYTES or n_head + n_data > n_bytes:
        raise DamagedFileError(f"{path} is cut off, or has been changed")
    return file.read(n_head), digest, (n_head, n_data)


def _header_of(path: Path, head: bytes) -> dict[str, Any]:
    try:
        header = json.loads(head)
    except (ValueError, RecursionError):
        raise DamagedFileError(f"{path} has been changed") from None
    if not isinstance(header, dict):
        raise DamagedFileError(f"{path} has been changed")
    return header


def _digest(lengths: bytes, head: bytes, data: bytes) -> bytes:
    # The data, perhaps a gigabyte, has only a CRC: it finds damage, and takes a third of the time.
    crc = zlib.crc32(data).to_bytes(4, "little")
    return hashlib.blake2b(lengths + head + crc, digest_size=_N_DIGEST).digest()
