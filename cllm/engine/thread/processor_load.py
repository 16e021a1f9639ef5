"""ProcessorReader: load of the processors that this process may use, from `/proc`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cllm.engine.core.thread_tuner import ProcessorLoad
from cllm.system import allowed_processors

PROC = Path("/proc")
# Columns of /proc/stat and of /proc/PID/stat, see proc(5).
IDLE_COLUMNS = (3, 4)  # idle, and idle while a disk is read
STOLEN_COLUMN = 7  # time that the host of a virtual machine took: no program here used it
SHORTEST_S = 0.1  # shortest time between two readings: the kernel counts in hundredths of a second
N_LOOKS, LOOK_S = 5, 0.0005  # at the threads that run, and seconds between two
TIME_COLUMNS = (11, 12)  # of a process, counted after its name: user time and system time


class _Reading(NamedTuple):
    """Cumulative seconds; `waited_s` by thread id."""

    at: float
    n_processors: int
    idle_s: float
    stolen_s: float
    own_s: float
    waited_s: dict[str, float]


class ProcessorReader:
    """Reads the load of the processors since the previous reading.

    Create and use it in the inference thread.  That thread and the threads that Python did not start count
    as compute threads.  A reading takes about 0.2 ms.

    Parameters
    ----------
    relatives : sequence of int
        Process ids whose time counts as this program's; for an engine's process, its parent.
    """

    def __init__(self, relatives: Sequence[int] = ()) -> None:
        self._relatives = relatives
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK") if PROC.exists() else 0.0
        self._last = self._reading()

    def read(self) -> ProcessorLoad | None:
        """Return the load since the last reading; None if it is not known, or less than 0.1 s has passed."""
        before, now = self._last, self._reading()
        if before is None or now is None or before.n_processors != now.n_processors:
            self._last = now
            return None
        if now.at - before.at < SHORTEST_S:
            return None
        self._last = now
        seconds = now.at - before.at
        idle = (now.idle_s - before.idle_s) / seconds
        stolen = (now.stolen_s - before.stolen_s) / seconds
        own = (now.own_s - before.own_s) / seconds
        # A thread that is new has waited since it began.
        waited_s = sum(s - before.waited_s.get(tid, 0.0) for tid, s in now.waited_s.items())
        return ProcessorLoad(
            waiting=waited_s / seconds,
            others=max(0.0, now.n_processors - idle - stolen - own),
            idle=max(0.0, idle),
            own=own,
        )

    def _reading(self) -> _Reading | None:
        with suppress(OSError, ValueError, LookupError):
            n_processors, idle_s, stolen_s = self._of_processors()
            own_s = time.process_time() + sum(map(self._of_process, self._relatives))
            waited_s = _waited_s()
            return _Reading(time.monotonic(), n_processors, idle_s, stolen_s, own_s, waited_s)
        return None

    def count_runnable(self) -> int:
        """Return the smallest number of other threads that run or are ready to run, of five looks within 2 ms.

        The event loop, and a client on this machine that has just sent a request, run for less.  All threads of
        the system count, also those of other containers.  0 where the system does not report it.
        """
        fewest = 0
        with suppress(OSError, ValueError, LookupError):
            fewest = _n_runnable()
            for _ in range(N_LOOKS - 1):
                if not fewest:
                    break
                time.sleep(LOOK_S)
                fewest = min(fewest, _n_runnable())
        return fewest

    def _of_processors(self) -> tuple[int, float, float]:
        lines = _system_times("cpu")
        # Processors of the main thread: an OpenMP runtime may bind a compute thread to one processor.
        numbers = allowed_processors(os.getpid()) or ()
        times = [lines[f"cpu{number}"] for number in numbers]
        idle = sum(of_one[column] for of_one in times for column in IDLE_COLUMNS)
        stolen = sum(of_one[STOLEN_COLUMN] for of_one in times)
        return len(times), idle * self._tick_s, stolen * self._tick_s

    def _of_process(self, pid: int) -> float:
        values = (PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
        return sum(int(values[column]) for column in TIME_COLUMNS) * self._tick_s


def _system_times(start: str) -> dict[str, list[int]]:
    """Return the numbers of the lines of `/proc/stat` whose names begin with `start`."""
    # Another line has a number for each interrupt of the system: only the wanted ones are split.
    lines = (PROC / "stat").read_text().splitlines()
    wanted = (line.split() for line in lines if line.startswith(start))
    return {name: [int(value) for value in values] for name, *values in wanted}


def _n_runnable() -> int:
    """Return how many threads of the system run or are ready to, without this one."""
    return max(0, _system_times("procs_running")["procs_running"][0] - 1)


def _waited_s() -> dict[str, float]:
    """Return the seconds that each compute thread has waited for a processor, by thread id.

    Raises
    ------
    OSError
        The system does not report the times of any thread.
    """
    others = {t.native_id for t in threading.enumerate()} - {threading.get_native_id()}
    waited_s = {}
    for thread in (PROC / "self" / "task").iterdir():
        if int(thread.name) not in others:
            with suppress(OSError):  # it has ended
                waited_s[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    if not waited_s:
        raise OSError("the system does not report how long a thread has waited for a processor")
    return waited_s
