"""A soak: a seeded mix of everything that callers do, for minutes, on engines of several kinds.

Each round goes through all configurations.  Each configuration has a new engine, on which all phases of
`soak_phases` run.  Memory is read between two engines.  All answers and the bookkeeping must be right.  At
the end no descriptor or thread may be left.  Memory may grow by at most `MAX_GROWTH_MIB`.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import math
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from benchmarks.measure import malloc_mib, percentile, rss_mib
from cllm import Engine, EngineConfig
from cllm.testing.records import assert_books_agree
from tests.conftest import QUIET, n_threads
from tests.reliability.record import Cell, Record, Table, conclude
from tests.reliability.soak_answers import Answers
from tests.reliability.soak_phases import PHASES, Ledger, Soak
from tools import make_projector

# The small `stream_buffer` pauses long answers, so that they have not ended when their readers cancel them.
# Embeddings of one image fit into the cache of images.
COMMON: dict[str, Any] = {
    "max_queue": 32, "pooling": "mean", "stream_buffer": 32,
    "mmproj": make_projector.ensure("embedded"), "media_cache_bytes": 40_000, **QUIET,
}  # fmt: skip
TIMED, FILES = "roomy", "prefixes in files"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    TIMED: {"n_ctx": 4096, "n_seq_max": 16},
    "256 cells": {"n_ctx": 256, "n_seq_max": 8, "n_batch": 32},
    "per-sequence": {"n_ctx": 2048, "n_seq_max": 8, "kv_unified": False},
    "no prefix cache": {"n_ctx": 1024, "n_seq_max": 8, "prefix_cache": False},
    "buffer of one": {"n_ctx": 1024, "n_seq_max": 4, "stream_buffer": 1},
    # Host memory and directory are so small that they are always full.
    FILES: {
        "n_ctx": 512,
        "n_seq_max": 4,
        "prefix_cache_bytes": 2 << 20,
        "prefix_cache_dir_bytes": 8 << 20,
    },
}
# Largest growth after the first third of a soak.  Memory allocated by malloc goes up and down by some hundred
# KiB; a leak of 100 bytes per request, or of a context (2 to 8 MiB), exceeds its limit.  Resident memory
# also has free parts of pages: it went up and down by 2 MiB.
MAX_GROWTH_MIB = 16.0
MAX_MALLOC_GROWTH_MIB, MAX_MALLOC_GROWTH_PER_REQUEST = 1.0, 100.0
# Largest ratio of the median times of "one after another", last third to first.  It is checked if each third
# has at least `N_FOR_MEDIAN` of them.
MAX_SLOWER, N_FOR_MEDIAN = 2.0, 200
MINUTE_S = 60.0


def limit_arenas() -> None:
    """Let all threads share two arenas of malloc, where the C library is glibc.

    Otherwise there are up to eight arenas for each core, which never shrink.  A soak of some minutes would
    look like a leak until each arena has had its largest load.
    """
    if hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX


@dataclass(frozen=True)
class Sample:
    """Memory, descriptors and threads of the process between two engines."""

    at_s: float
    rss_mib: float
    malloc_mib: float
    n_descriptors: int
    n_threads: int
    n_requests: int

    @classmethod
    def now(cls, started_at: float, n_requests: int) -> Sample:
        """Take a sample after a garbage collection, which frees closed engines."""
        gc.collect()
        return cls(
            time.perf_counter() - started_at,
            rss_mib(),
            malloc_mib(),
            len([*Path("/proc/self/fd").iterdir()]),
            n_threads(),
            n_requests,
        )


@dataclass
class Outcome:
    """Results of a soak.

    Attributes
    ----------
    samples : list of Sample
        Samples before the first engine of the soak, and after each engine.
    n_rounds : int
        Number of complete rounds.
    """

    ledger: Ledger
    seconds: float = 0.0
    n_engines: int = 0
    n_rounds: int = 0
    samples: list[Sample] = field(default_factory=list)

    def minutes(self) -> list[Sample]:
        """The first sample after each minute, and the last one."""
        found: list[Sample] = []
        for sample in self.samples:
            if sample.at_s >= MINUTE_S * (len(found) + 1):
                found.append(sample)
        return found if found and found[-1] is self.samples[-1] else [*found, self.samples[-1]]

    @property
    def warmed_up(self) -> list[Sample]:
        """Samples after the first third of their number, or the last one."""
        return self.samples[math.ceil(len(self.samples) / 3) :] or self.samples[-1:]

    @property
    def growth_mib(self) -> float:
        """Resident memory at the end, less that after the first third."""
        return self.warmed_up[-1].rss_mib - self.warmed_up[0].rss_mib

    @property
    def malloc_growth_mib(self) -> float:
        """Memory allocated by malloc at the end, less that after the first third, in MiB."""
        return self.warmed_up[-1].malloc_mib - self.warmed_up[0].malloc_mib

    @property
    def times_slower(self) -> float | None:
        """Ratio of the median times of "one after another", last third to first; None with too few requests."""
        times, phase = self.ledger.total_s, "one after another"
        first, last = (times.get((phase, third), array("f")) for third in (0, 2))
        if min(len(first), len(last)) < N_FOR_MEDIAN:
            return None
        return percentile(last, 50) / percentile(first, 50)

    @property
    def slope_mib_per_h(self) -> float:
        """Slope of resident memory after the first third, by least squares."""
        return slope([(s.at_s / 3600.0, s.rss_mib) for s in self.warmed_up])

    def complaints(self) -> list[str]:
        """Return the contradictions to the claim; empty if it holds."""
        ledger, first, last = self.ledger, self.samples[0], self.samples[-1]
        found = list(ledger.wrong)
        if ledger.n_wrong > len(found):
            found.append(f"and {ledger.n_wrong - len(found)} more")
        if self.growth_mib > MAX_GROWTH_MIB:
            found.append(f"memory has grown by {self.growth_mib:.1f} MiB, not {MAX_GROWTH_MIB}")
        n_requests = ledger.ends.total() - self.warmed_up[0].n_requests
        allowed_mib = MAX_MALLOC_GROWTH_MIB + MAX_MALLOC_GROWTH_PER_REQUEST * n_requests / 2**20
        if self.malloc_growth_mib > allowed_mib:
            found.append(f"malloc has given out {self.malloc_growth_mib:.1f} MiB more")
        if (slower := self.times_slower) is not None and slower > MAX_SLOWER:
            found.append(f"one after another takes {slower:.1f} times as long in the last third")
        for what, before, after in (
            ("descriptors", first.n_descriptors, last.n_descriptors),
            ("threads", first.n_threads, last.n_threads),
        ):
            if after > before:
                found.append(f"{after} {what} at the end, {before} at the start")
        return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the points; 0 for one point."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0


async def soak(
    minutes: float, *, seed: int = 0, n_requests: int = 24, phase_s: float = 1.0
) -> Outcome:
    """Run a soak of `minutes` minutes, and at least one round.

    Parameters
    ----------
    n_requests : int
        Number of requests of each load.
    phase_s : float
        A phase is repeated until this many seconds have passed.
    """
    with tempfile.TemporaryDirectory() as directory:
        CONFIGURATIONS[FILES]["prefix_cache_dir"] = directory
        return await _soak(minutes, seed=seed, n_requests=n_requests, phase_s=phase_s)


async def _soak(minutes: float, *, seed: int, n_requests: int, phase_s: float) -> Outcome:
    limit_arenas()
    draw, ledger = random.Random(seed), Ledger()
    async with Engine(config=EngineConfig(**COMMON, n_ctx=4096, n_seq_max=8)) as engine:
        answers = await Answers.of(engine)
    started_at = time.perf_counter()
    outcome = Outcome(ledger)
    outcome.samples.append(Sample.now(started_at, 0))
    while outcome.n_rounds == 0 or time.perf_counter() - started_at < 60 * minutes:
        for name, options in CONFIGURATIONS.items():
            config = EngineConfig(**{**COMMON, **options})
            if outcome.n_rounds and time.perf_counter() - started_at >= 60 * minutes:
                break
            async with Engine(config=config) as engine:
                on_it = Soak(engine, answers, ledger, draw, n_requests)
                for phase in PHASES:
                    ledger.where, ledger.is_timed = f"{name}, {phase.__name__}", name == TIMED
                    until = time.perf_counter() + phase_s
                    while True:
                        elapsed = (time.perf_counter() - started_at) / max(1e-9, 60 * minutes)
                        ledger.third = min(2, int(3 * elapsed))
                        await phase(on_it)
                        try:
                            await assert_books_agree(engine)
                        except AssertionError as error:
                            ledger.note(str(error))
                        if time.perf_counter() >= until:
                            break
            outcome.n_engines += 1
            outcome.samples.append(Sample.now(started_at, ledger.ends.total()))
            report(outcome, name)
        else:
            outcome.n_rounds += 1
    outcome.seconds = time.perf_counter() - started_at
    # Threads of llguidance end some time after they were freed: wait up to 30 s.
    with anyio.move_on_after(30):
        while outcome.samples[-1].n_threads > outcome.samples[0].n_threads:
            await anyio.sleep(0.01)
            outcome.samples[-1] = Sample.now(started_at, ledger.ends.total())
    return outcome


def report(outcome: Outcome, name: str) -> None:
    """Print the progress to standard error."""
    ledger, sample = outcome.ledger, outcome.samples[-1]
    print(
        f"{sample.at_s:6.0f} s  {name:16} {ledger.ends.total():7} requests  "
        f"{ledger.n_tokens:8} tokens  {ledger.faults.total():4} faults  {ledger.n_wrong} wrong  "
        f"{sample.rss_mib:.1f} MiB, {sample.malloc_mib:.1f} of malloc",
        file=sys.stderr,
        flush=True,
    )


def tables_of(outcome: Outcome) -> list[Table]:
    """Return tables of the ends of requests, of memory by the minute, and of times by third."""
    ledger = outcome.ledger
    ends = [(end, n) for end, n in sorted(ledger.ends.items())]
    memory = [
        (
            f"{s.at_s / 60:.1f}",
            f"{s.rss_mib:.1f}",
            f"{s.malloc_mib:.1f}",
            s.n_descriptors,
            s.n_threads,
        )
        for s in (outcome.samples[0], *outcome.minutes())
    ]
    drift = []
    for phase in dict.fromkeys(phase for phase, _ in ledger.total_s):
        row: list[Cell] = []
        for percent, times in ((99, ledger.ttft_s), (50, ledger.total_s), (99, ledger.total_s)):
            for third in (0, 2):
                seconds = times.get((phase, third), array("f"))
                row.append(f"{1e3 * percentile(seconds, percent):.1f}" if seconds else "-")
        counts = (len(ledger.total_s.get((phase, third), ())) for third in (0, 2))
        drift.append((phase, *counts, *row))
    return [
        Table(("how they ended", "requests"), ends),
        Table(("minute", "RSS MiB", "malloc MiB", "descriptors", "threads"), memory,
              "Between two engines: no model is loaded."),
        Table(("phase", "requests", "last third", "first token p99 ms", "last third",
               "whole answer p50 ms", "last third", "whole answer p99 ms", "last third"),
              drift, f"The first third of the soak beside the last, on the engine called {TIMED}, "
              "without faults. Which prompts a load draws, and how long its readers wait, is chance."),
    ]  # fmt: skip


def record_of(outcome: Outcome, command: str) -> Record:
    """Return the record for docs/reliability.md."""
    ledger, last = outcome.ledger, outcome.samples[-1]
    return Record(
        name="soak",
        claim=(
            "For minutes, everything that callers do, on engines of every kind, decodes failing "
            "now and then: no answer is wrong, no book differs, no descriptor and no thread is "
            "left, what malloc has given out does not grow, and resident memory settles."
        ),
        command=command,
        figures={
            "minutes": round(outcome.seconds / 60, 2),
            "rounds": outcome.n_rounds,
            "engines": outcome.n_engines,
            "requests": ledger.ends.total(),
            "output tokens": ledger.n_tokens,
            "answers compared whole": ledger.n_whole,
            "beginnings of answers compared": ledger.n_begun,
            "wrong answers or bookkeeping": ledger.n_wrong,
            "wrong in all": len(outcome.complaints()),
            "injected faults, fatal": ledger.faults["fatal"] + ledger.faults["raises"],
            "injected faults, aborted": ledger.faults["aborted"],
            "RSS at the end, MiB": round(last.rss_mib, 1),
            "RSS growth after the first third, MiB": round(outcome.growth_mib, 1),
            "RSS slope after the first third, MiB/h": round(outcome.slope_mib_per_h, 1),
            "malloc's growth after the first third, MiB": round(outcome.malloc_growth_mib, 2),
            "times as slow, one after another, p50 of the last third": (
                "-" if outcome.times_slower is None else round(outcome.times_slower, 2)
            ),
            "descriptors, start and end": f"{outcome.samples[0].n_descriptors}, {last.n_descriptors}",
            "threads, start and end": f"{outcome.samples[0].n_threads}, {last.n_threads}",
        },
        tables=tables_of(outcome),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--save", action="store_true", help="keep the figures")
    options = parser.parse_args(arguments)
    faulthandler.enable()

    async def run() -> Outcome:
        return await soak(options.minutes, seed=options.seed)

    outcome = anyio.run(run, backend=options.backend)
    command = (
        f"python -m tests.reliability.soak --minutes {options.minutes:g} --seed {options.seed}"
    )
    return conclude(record_of(outcome, command), outcome.complaints(), is_kept=options.save)


if __name__ == "__main__":
    sys.exit(main())
