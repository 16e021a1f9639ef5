"""Helpers of every benchmark: order statistics, memory, and a line about the machine."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cllm.processors import usable_processors

TEXT_TOKENS = range(1000, 9000)  # ordinary tokens of Qwen2's vocabulary, no control tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below or at which so many percent lie (nearest rank)."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def rss_mib() -> float:
    """Resident memory of this process, without the free pages that malloc keeps for later.

    The number of these pages depends on the threads that allocate, and on their order.  Engines were started
    and stopped for a minute: with these pages, memory grew by 4 to 17 MiB, and without them by 2 MiB at most.
    """
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        malloc_trim(0)
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def malloc_mib() -> float:
    """Return the MiB that malloc holds; NaN where the C library does not report it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return float("nan")
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return float(info.uordblks + info.hblkhd) / 2**20


def machine() -> str:
    """Return a line with the processor, the number of compute threads and Python's version."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((x for x in cpuinfo.splitlines() if x.startswith("model name")), ": unknown")
    n_threads = usable_processors().n_threads
    return (
        f"{model.split(': ')[1]}, {n_threads} compute threads, Python {platform.python_version()}"
    )
