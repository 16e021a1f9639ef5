"""Free memory, and allocation of large pieces of it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

from cllm.processors import cgroup_directories
from cllm.shared_libraries import c_library

MEMINFO = Path("/proc/meminfo")
LARGE = 4 << 20

_make_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_make_bytes.restype, _make_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_madvise: Any = getattr(c_library(), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def new_bytes(n_bytes: int) -> tuple[bytes, int]:
    """Return uninitialized bytes and their address.  Fill them before any other code sees them.

    From 4 MiB on, huge pages are used where the system has them.  On a virtual machine, the first access to
    each page takes microseconds: 164 MiB took 0.5 s in small pages, and 0.02 s in huge ones.
    """
    made: bytes = _make_bytes(None, n_bytes)
    address = address_of(made)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if n_bytes >= LARGE and _madvise is not None and advice is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, address + n_bytes - start, advice)  # only advice: errors are ignored
    return made, address


def address_of(data: bytes) -> int:
    """Return the address of data, valid while the data is referenced."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return address


def available_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, within the limits of cgroups; None if unknown.

    In a cgroup, its page cache counts as available.
    """
    told = [_of_machine(), *map(_of_cgroup, cgroup_directories("memory"))]
    return min((n_bytes for n_bytes in told if n_bytes is not None), default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_cgroup(directory: Path) -> int | None:
    # Files of cgroup version 2, then of version 1.
    for maximum, current, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with suppress(OSError, ValueError, KeyError):
            limit = int((directory / maximum).read_text())  # ValueError for "max": no limit
            used = int((directory / current).read_text())
            lines = (directory / "memory.stat").read_text().splitlines()
            statistics = dict(line.split() for line in lines)
            cached = (int(statistics[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
            return limit - used + sum(cached)
    return None
