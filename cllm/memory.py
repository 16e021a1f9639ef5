"""How much memory there is for more."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can be had without swapping, a container's limit included; None: nobody says.

    Of a container (cgroup version 2) what it may still have, its page cache given up.
    """
    told = [_of_machine(), _of_container()]
    return min((n_bytes for n_bytes in told if n_bytes is not None), default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_container() -> int | None:
    with suppress(OSError, ValueError, IndexError, KeyError):
        limit = int((CGROUP / "memory.max").read_text())  # "max": there is none
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
        return limit - used + int(statistics["inactive_file"]) + int(statistics["active_file"])
    return None
