"""Free memory, and allocation of large pieces of it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from cllm.processors import cgroup_directories

MEMINFO = Path("/proc/meminfo")

_make_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_make_bytes.restype, _make_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)


def new_bytes(n_bytes: int) -> tuple[bytes, int]:
    """Return uninitialized bytes and their address.  Fill them before any other code sees them.

    No huge pages are asked for.  What they cost depends on the machine: 164 MiB once took 0.02 s in huge pages and
    0.5 s in small ones.  Other virtual machines give free memory back to their host, in pieces of that size: 109 MB
    take 0.35 s in huge pages and 0.12 s in small ones, and what is computed next is slower.
    """
    made: bytes = _make_bytes(None, n_bytes)
    return made, address_of(made)


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
