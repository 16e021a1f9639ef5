"""Leaks: after a warm-up, a thousand more requests must not leak memory.

A child process serves requests of every kind under LeakSanitizer and AddressSanitizer.  It looks for leaks
after a warm-up, after the requests, and at the exit, when the engine is closed.  A block that no pointer
leads to is a leak of ours if libllama or ggml allocated it.  Blocks that pointers still lead to are counted
in bytes.

Python also has some small blocks that look lost, and more of them at its exit.  They are counted separately,
by the function that allocated them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio

from cllm import Engine
from cllm.bindings._library import library
from tests.reliability import sanitized
from tests.reliability.leak_workload import OPTIONS, Reading, serve
from tests.reliability.record import ROOT, Record, Table, conclude
from tests.reliability.sanitized import Findings, NotBuiltError
from tests.reliability.sanitizers import describe
from tests.time_limits import raise_time_limits
from tools import make_projector

# The engine keeps the times of its last 512 ticks.  The warm-up must be long enough to fill this list, and
# 200 requests are not.
N_WARM_UP = 400
# Largest growth in each thousand of requests.  glibc counts blocks in its per-thread caches as allocated, so its sum
# goes up and down.  A leak of over 32 bytes per request, or 320 per request of one kind, exceeds the limit.
MAX_MALLOC_BYTES = 32_000
MAX_PYTHON_BLOCKS, MAX_OBJECTS = 1_000, 50
# LeakSanitizer does not search the memory of Python's frames.  So an object that only a local variable of a
# running function refers to counts as lost, such as a float of 24 bytes.  If each request of one kind lost a
# float, this limit would be exceeded.  No block of libllama or ggml may be lost.
MAX_LOST_BYTES = 1_000
LOST_SAMPLERS = 100
TIMEOUT_S = 1200
AT_EXIT = "exit"


@dataclass(frozen=True)
class Served:
    """Readings and ends of the requests that a child process served.

    Attributes
    ----------
    readings : list of Reading
        Readings after the warm-up, and after all requests.
    ends : dict
        Number of requests by kind and end: "greedy: STOP".
    """

    readings: list[Reading]
    ends: dict[str, int]

    @property
    def growth(self) -> Reading:
        """Smallest growth from one reading to the next, of each number.

        A leak grows between any two readings.  A list that fills, or a cache of glibc, does not.
        """
        readings = [asdict(reading) for reading in self.readings]
        return Reading(
            **{
                name: min(later[name] - reading[name] for reading, later in pairwise(readings))
                for name in readings[0]
            }
        )

    def complaints(self) -> list[str]:
        """Return a line for each number that has grown beyond its limit."""
        growth = self.growth
        return [
            f"{what} have grown by {grown:,}, not at most {limit:,}"
            for what, grown, limit in (
                ("bytes of malloc", growth.malloc_bytes, MAX_MALLOC_BYTES),
                ("live bytes", growth.live_bytes, MAX_MALLOC_BYTES),
                ("blocks of Python", growth.python_blocks, MAX_PYTHON_BLOCKS),
                ("objects", growth.objects, MAX_OBJECTS),
                ("descriptors", growth.descriptors, 0),
                ("threads", growth.threads, 0),
            )
            if grown > limit
        ]


def serve_in_child(
    stops: Sequence[int],
    *,
    environment: Mapping[str, str] | None = None,
    loses_samplers: bool = False,
) -> Served:
    """Serve requests in a child process, with a reading at each number of requests in `stops`."""
    command = [sys.executable, "-m", "tests.reliability.leaks", "--stops", *map(str, stops)]
    if loses_samplers:
        command.append("--lose-samplers")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    said = json.loads(done.stdout)
    return Served([Reading(**reading) for reading in said["readings"]], said["ends"])


async def serve_here(stops: Sequence[int], *, loses_samplers: bool = False) -> Served:
    """Serve requests in this process, with a leak check and a reading at each number in `stops`."""
    ends: Counter[str] = Counter()
    readings = []
    n_served = 0
    async with Engine(**OPTIONS, mmproj=make_projector.ensure("embedded")) as engine:
        for stop in stops:
            await serve(engine, n_served, stop, ends)
            n_served = stop
            # The leak check comes before the reading, since it leaves the file of its report open.
            look_for_leaks(str(stop))
            readings.append(Reading.now(n_served, engine.statistics().n_prefix_bytes_host))
            if loses_samplers:
                lose_samplers()
    send_reports(AT_EXIT)
    return Served(readings, dict(sorted(ends.items())))


def lose_samplers() -> None:
    """Leak samplers on purpose, as a forgotten free would: no pointer leads to them."""
    for _ in range(LOST_SAMPLERS):
        library().llama_sampler_init_dist(0)


def look_for_leaks(name: str) -> None:
    """Report the present leaks into a directory of this name; do nothing without LeakSanitizer."""
    look = getattr(ctypes.CDLL(None), "__lsan_do_recoverable_leak_check", None)
    if look is not None:
        send_reports(name)
        look()


def send_reports(name: str) -> None:
    """Write further reports to a directory of this name; do nothing without a sanitizer."""
    if (root := os.environ.get("CLLM_SANITIZER_REPORTS")) is not None:
        directory = Path(root) / name
        directory.mkdir(exist_ok=True)
        ctypes.CDLL(None).__sanitizer_set_report_path(os.fsencode(directory / "asan"))


@dataclass(frozen=True)
class Outcome:
    """Reports of the sanitizers, and the readings of the child process.

    Attributes
    ----------
    looks : dict
        Findings of each leak check: after the warm-up, after all requests, and at the exit.
    others : Findings
        Findings of the engine's child processes, and of reports outside these checks.
    """

    served: Served
    looks: dict[str, Findings]
    others: Findings
    unseen_faults: Sequence[str]

    def complaints(self) -> list[str]:
        """Return the contradictions to the claim; empty if it holds."""
        found = self.served.complaints()
        found += [f"made on purpose and not seen: {fault}" for fault in self.unseen_faults]
        for name, findings in {**self.looks, "meanwhile": self.others}.items():
            found += [f"{name}: {line}" for line in describe(findings.wrong)]
        first, last = (lost_bytes(self.looks[str(r.n_requests)]) for r in self.served.readings)
        if last > first + MAX_LOST_BYTES:
            found.append(f"{last - first:,} bytes more are lost, not at most {MAX_LOST_BYTES:,}")
        return found

    def figures(self) -> dict[str, str | int | float]:
        """Return the figures of the record."""
        growth = self.served.growth
        # Blocks lost before one check are lost at the next, too, so the largest sum counts.
        native = [sum(r.n_bytes for r in findings.wrong) for findings in self.looks.values()]
        lost = {
            f"lost_by_others_{name}_bytes": sum(r.n_bytes for r in findings.foreign)
            for name, findings in self.looks.items()
        }
        return {
            "requests": growth.n_requests,
            "warm_up_requests": self.served.readings[0].n_requests,
            "leaked_by_libllama_bytes": max(native),
            "live_bytes_growth": growth.live_bytes,
            "python_objects_growth": growth.objects,
            "descriptors_growth": growth.descriptors,
            "threads_growth": growth.threads,
            **lost,
        }


def lost_bytes(findings: Findings) -> int:
    """Return the number of lost bytes, of all allocating modules."""
    return sum(report.n_bytes for report in [*findings.foreign, *findings.wrong])


def run(n_requests: int, directory: Path, *, loses_samplers: bool = False) -> Outcome:
    """Serve `n_requests` requests after the warm-up in a child process with sanitizers.

    Raises
    ------
    NotBuiltError
        There is no library with sanitizers.
    """
    faults = directory / "faults"
    faults.mkdir()
    unseen_faults = sanitized.unseen_faults(sanitized.show_faults(faults))
    stops = [N_WARM_UP, N_WARM_UP + n_requests]
    served = serve_in_child(
        stops, environment=sanitized.environment(directory), loses_samplers=loses_samplers
    )
    looks = {
        name: sanitized.sort_out(sanitized.read(directory / name))
        for name in (*map(str, stops), AT_EXIT)
    }
    others = sanitized.sort_out(sanitized.read(directory))
    return Outcome(served, looks, others, unseen_faults)


def main() -> int:
    """Run the command line; 1 if the claim does not hold, 2 without a library with sanitizers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=1000, help=f"after a warm-up of {N_WARM_UP}"
    )
    parser.add_argument("--save", action="store_true", help="keep a record in results/")
    parser.add_argument("--lose-samplers", action="store_true", help="leak on purpose")
    parser.add_argument("--stops", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stops:
        raise_time_limits()
        served = anyio.run(partial(serve_here, options.stops, loses_samplers=options.lose_samplers))
        json.dump(asdict(served), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            outcome = run(options.requests, Path(scratch), loses_samplers=options.lose_samplers)
        except NotBuiltError as error:
            print(error, file=sys.stderr)
            return 2
    ends = [(n, end) for end, n in outcome.served.ends.items()]
    record = Record(
        "leaks",
        f"{options.requests:,} more requests leak not one byte in libllama or ggml. Blocks that "
        f"are still pointed to grow by less than {MAX_MALLOC_BYTES:,} bytes in all, descriptors "
        "and threads by none.",
        "make test-leaks",
        outcome.figures(),
        [Table(("requests", "how they ended"), ends)],
    )
    return conclude(record, outcome.complaints(), is_kept=options.save)


if __name__ == "__main__":
    sys.exit(main())
