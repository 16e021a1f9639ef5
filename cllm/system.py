"""Calls of the operating system that macOS or Windows lacks, each with a fallback.

cllm is tested on Linux.  There, `tests/test_system.py` removes these functions and runs it
([docs/building.md](../docs/building.md#other-systems)).
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SIGKILL: int = getattr(signal, "SIGKILL", 9)


# --- Processes -----------------------------------------------------------------------------------
def call_in_forks(function: Callable[[], None]) -> None:
    """Call a function in each forked child of this process; Windows has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def can_pass_descriptors() -> bool:
    """Return True if a child process can inherit sockets and files by number, which `process=True` needs."""
    return os.name == "posix"


def is_stopped(pid: int) -> bool:
    """Return True if a signal such as SIGSTOP has paused a child; False if the system cannot tell."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    with suppress(OSError):
        flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, flags) is not None
    return False


# --- Limits --------------------------------------------------------------------------------------
def disable_core_files() -> None:
    """Write no core file if this process crashes."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(n_bytes: int) -> None:
    """Limit the growth of this process to `n_bytes` of address space; do nothing without `/proc`."""
    sizes = Path("/proc/self/statm")
    if resource is None or not sizes.exists():
        return
    present = int(sizes.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = present + n_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the limit of file descriptors towards `wanted`, and return it; `wanted` if there is none."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS allows fewer than it says
        return soft
    return most


def lockable_bytes() -> float | None:
    """Return the limit of locked memory in bytes, infinite if there is none; None if the system does not say."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft == resource.RLIM_INFINITY else soft


# --- Processors ----------------------------------------------------------------------------------
def allowed_processors(pid: int = 0) -> set[int] | None:
    """Return the numbers of the processors that a process may use; None if the system does not say.

    Parameters
    ----------
    pid : int
        0: those of the calling thread.
    """
    return os.sched_getaffinity(pid) if hasattr(os, "sched_getaffinity") else None


def lower_priority(nice: int) -> None:
    """Let other processes compute before this one, as far as the system allows."""
    if hasattr(os, "nice"):
        os.nice(nice)
