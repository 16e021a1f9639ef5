"""Processors that this process may use, by its affinity and the quotas of its cgroups, and their name."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cllm.checks import MAX_THREADS
from cllm.system import allowed_processors

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
TOPOLOGY = Path("/sys/devices/system/cpu")


class Processors(NamedTuple):
    """Processors that a process may use.

    Attributes
    ----------
    n_allowed : int
        Processors in its CPU affinity.
    n_cores : int
        Physical cores of these processors.  Hyper-threads share a core and slow each other.
    quota : float or None
        Processors that its cgroups allow at once, on average; None: no limit.
    """

    n_allowed: int
    n_cores: int
    quota: float | None

    @property
    def n_threads(self) -> int:
        """Number of compute threads to use: one for each core, at most the quota and 512, at least 1."""
        n_threads = min(self.n_cores, MAX_THREADS)
        # With more threads than the quota, all of them stand still for a part of each period.
        return max(1, n_threads if self.quota is None else min(n_threads, math.floor(self.quota)))


def cpu_name() -> str:
    """Return the name of the processor, of ARM its part number; empty on macOS and Windows."""
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    names = (line for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, "").partition(":")[2].strip()


def usable_processors(within: Collection[int] | None = None) -> Processors:
    """Return the processors that this process may use; on macOS and Windows, all of them, each counted as a core.

    Parameters
    ----------
    within : collection of int, optional
        Only those with these numbers, if there are any.
    """
    allowed = allowed_processors()
    if allowed is None:
        n_processors = os.cpu_count() or 1
        return Processors(n_processors, n_processors, None)
    allowed = allowed.intersection(within or allowed) or allowed
    siblings = set()
    for processor in allowed:
        path = TOPOLOGY / f"cpu{processor}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text().strip())
        except OSError:
            siblings.add(str(processor))
    return Processors(len(allowed), len(siblings), min(_quotas(), default=None))


def cgroup_directories(controller: str) -> Iterator[Path]:
    """Yield the directories of the cgroups of this process, from its own to the root.

    Parameters
    ----------
    controller : str
        Controller in cgroup version 1, such as "cpu".  Version 2 has one hierarchy for all controllers.
    """
    with suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for root in (
                (CGROUPS / controllers, CGROUPS / controller) if controllers else (CGROUPS,)
            ):
                place = Path(path.lstrip("/"))
                # In a container the path may be the host's, and only the root is there.
                for part in (place, *place.parents):
                    if (root / part).is_dir():
                        yield root / part


def _quotas() -> Iterator[float]:
    for directory in cgroup_directories("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (directory / "cpu.max").read_text().split()  # quota "max": no limit
            yield int(quota) / int(period)
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota_us = int((directory / "cpu.cfs_quota_us").read_text())
            period_us = int((directory / "cpu.cfs_period_us").read_text())
            if quota_us > 0:
                yield quota_us / period_us
