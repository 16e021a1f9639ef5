"""Lifecycle: `python -m tests.reliability.lifecycle [--tries N] [--save]`.

The program starts and ends engines under load: closed, forgotten, forked, interrupted, side by side.  Every
try is a child process (`lifecycle_cases`) in development mode with warnings as errors.  It must end in time
with the right exit code, and without warnings or tracebacks on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.reliability.lifecycle_requests import OVER_PROCESS
from tests.reliability.record import ROOT, Cell, Record, Table, conclude

NAME = "lifecycle"
CLAIM = (
    "However an engine is ended, the process goes on or ends as it should: nothing crashes, hangs, "
    "is left behind or complained of."
)
LOOPS = ("asyncio", "trio")
LIMIT_S = 60.0
END_S = 5.0  # from a signal to the end of the process, in a run whose record is kept
BUSY_END_S = 25.0  # in every other run: its machine may be busy
COMPLAINTS = ("Exception ignored", "ResourceWarning", "Fatal Python error", "Traceback", "never awaited")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Case to try, number of tries with each event loop, and how they must end.

    Attributes
    ----------
    is_timed : bool
        True: the time from the signal, or from the line "running", to the end of the process is limited.
    signal : Signals, optional
        Signal that is sent up to 0.3 s after the line "running".
    allowed : tuple of str
        Complaints that cllm does not cause, under the event loops of `allowed_under`.
    max_growth_mib : mapping
        Largest growth from the first loads to the last, in MiB: of "rss", and of "malloc".
    """

    what: str
    case: str
    tries: int
    returncode: int = 0
    signal: signal.Signals | None = None
    is_timed: bool = False
    first_seed: int = 0
    step: int = 1
    allowed: tuple[str, ...] = ()
    allowed_under: tuple[str, ...] = LOOPS
    environment: Mapping[str, str] = field(default_factory=dict)
    max_growth_mib: Mapping[str, float] = field(default_factory=dict)


PLANS = (
    Plan("closed during a decode, a tokenization or a compilation", "close_during", 20),
    Plan("closed by two tasks at once, and again", "close_twice", 10, step=7),
    Plan("every method after the end", "methods_after_close", 1),
    Plan("collected without being closed", "collected", 5),
    # The interpreter may warn about open streams and about the event loop that did not end.
    Plan("the program ends with a live engine", "exit_with_live_engine", 10, is_timed=True,
         allowed=("Exception ignored", "ResourceWarning", "never awaited")),
    Plan("SIGINT under eight streams", "under_load", 20, 130, signal.SIGINT, is_timed=True),
    Plan("SIGTERM under eight streams, listened to", "stopped_by_sigterm", 20, 143, signal.SIGTERM, is_timed=True),
    Plan("forked under eight streams", "fork_under_load", 10, step=11),
    Plan("in a process that multiprocessing spawns", "spawn", 3),
    Plan("two engines in one event loop", "two_engines", 5),
    Plan("an engine in each of two event loops", "two_loops", 10),
    # Every load has new threads, which take random arenas of glibc, and each arena keeps some MiB.  With one
    # arena, only memory of cllm and llama.cpp remains, and one step of the heap of 5 MiB at a random time.
    # In 250 loads no second step was seen.
    Plan("loaded 50 times in one process, with one malloc arena", "reload", 1, first_seed=50,
         environment={"MALLOC_ARENA_MAX": "1"}, max_growth_mib={"rss": 12.0, "malloc": 0.1}),
    Plan("loaded 50 times in one process", "reload", 1, first_seed=50,
         max_growth_mib={"rss": 32.0, "malloc": 0.1}),
    # `sys.exit` in a task ends asyncio's loop at once, with warnings about all unfinished tasks.  This is the
    # same without cllm.
    Plan("sys.exit in on_progress", "exit_in_callback", 10, 7,
         allowed=("Exception ignored", "Traceback", "never awaited"), allowed_under=("asyncio",)),
    Plan("an exception in the body of `async with`", "body_raises", 8),
    Plan("a start that is cancelled", "cancelled_start", 10),
)  # fmt: skip


@dataclass
class Outcome:
    """Results of the tries of a plan.

    Attributes
    ----------
    wrong : list of str
        A description for each try that did not end as planned.
    seconds : list of float
        Time to the end of the process from its start.  For a timed plan: from the signal if there is one,
        otherwise from the line "running".
    figures : list of dict
        Measurements of the tries.
    """

    plan: Plan
    n_tries: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def measured(self, name: str) -> list[float]:
        """Return the measurements with this name, of the tries that have one."""
        return [figures[name] for figures in self.figures if name in figures]


def run_case(plan: Plan, backend: str, seed: int) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run one try; return its output and exit code, and its time in seconds."""
    command = [sys.executable, "-X", "dev", "-W", "error"]
    command += ["-m", "tests.reliability.lifecycle_cases", plan.case, backend, str(seed)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, **plan.environment},
    ) as process:  # fmt: skip
        started = time.perf_counter()
        if plan.is_timed:
            assert process.stdout is not None
            process.stdout.readline()
            started = time.perf_counter()
        if plan.signal is not None:
            # This sleep does not wait for anything: it chooses a random moment for the signal.
            time.sleep(random.Random(seed).random() * 0.3)
            started = time.perf_counter()
            process.send_signal(plan.signal)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\nTraceback: hangs for {LIMIT_S} s"
    seconds = time.perf_counter() - started
    return subprocess.CompletedProcess(command, process.returncode, out, err), seconds


def complaint(
    plan: Plan,
    backend: str,
    done: subprocess.CompletedProcess[str],
    seconds: float,
    end_s: float = END_S,
) -> str:
    """Return what is wrong with the end of a try; "" if it ended as planned, and in time if it is timed."""
    if done.returncode != plan.returncode:
        return f"exit {done.returncode} instead of {plan.returncode}: {done.stderr[-1500:]}"
    allowed = plan.allowed if backend in plan.allowed_under else ()
    for sign in COMPLAINTS:
        if sign in done.stderr and sign not in allowed:
            return done.stderr[-1500:]
    if plan.is_timed and seconds > end_s:
        return f"{seconds:.1f} s until the end"
    return ""


def examine(
    plan: Plan, *, tries: int | None = None, loops: Sequence[str] = LOOPS, end_s: float = BUSY_END_S
) -> Outcome:
    """Run a plan `tries` times with each event loop; None: as often as planned, which is also the limit."""
    outcome = Outcome(plan)
    for backend in loops:
        for i in range(plan.tries if tries is None else min(tries, plan.tries)):
            seed = plan.first_seed + i * plan.step
            done, seconds = run_case(plan, backend, seed)
            outcome.n_tries += 1
            outcome.seconds.append(seconds)
            if wrong := complaint(plan, backend, done, seconds, end_s):
                outcome.wrong.append(f"{backend}, seed {seed}: {wrong}")
            elif done.stdout.startswith("{"):
                outcome.figures.append(json.loads(done.stdout))
    for what, limit in plan.max_growth_mib.items():
        growth = max(outcome.measured(f"{what}_growth_mib"), default=0.0)
        if growth > limit:
            outcome.wrong.append(f"{what} grows by {growth} MiB")
    return outcome


def plan_of(case: str, number: signal.Signals | None = None) -> Plan:
    """The plan of a case, with this signal."""
    (plan,) = (p for p in PLANS if p.case == case and p.signal is number)
    return plan


def record(outcomes: Sequence[Outcome]) -> Record:
    """The figures and the table."""
    rows: list[list[Cell]] = [
        [o.plan.what, o.n_tries, o.n_tries - len(o.wrong), round(max(o.seconds), 2)]
        for o in outcomes
    ]
    signalled = [s for o in outcomes for s in o.seconds if o.plan.signal is not None]

    def measured(name: str) -> list[float]:
        return [value for o in outcomes for value in o.measured(name)]

    figures: dict[str, Cell] = {
        "tries": sum(o.n_tries for o in outcomes),
        "clean": sum(o.n_tries - len(o.wrong) for o in outcomes),
        "seconds from a signal to the end, longest": round(max(signalled, default=0.0), 2),
        "requests that a close has cut": int(sum(measured("n_cut"))),
        "of those, while tokenized or compiled": int(sum(measured("n_cut_before_submission"))),
        **{
            f"growth of {what}, MiB: {o.plan.what}": max(growth)
            for o in outcomes
            for what in o.plan.max_growth_mib
            if (growth := o.measured(f"{what}_growth_mib"))
        },
    }
    table = Table(
        ["what", "tries", "clean", "longest, s"], rows, "Half with asyncio, half with trio."
    )
    return Record(NAME, CLAIM, f"python -m tests.reliability.{NAME} --save", figures, [table])


def main(arguments: Sequence[str] | None = None) -> int:
    """Try everything; 1 if a try is not clean."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--tries", type=int, help="most tries of a case with each event loop")
    parser.add_argument("--only", metavar="CASE", help="run only this case")
    parser.add_argument(
        "--over-process", action="store_true", help="use engines with a process of their own"
    )
    parser.add_argument("--save", action="store_true", help="keep a record")
    given = parser.parse_args(arguments)
    if given.over_process:
        os.environ[OVER_PROCESS] = "1"
    end_s = END_S if given.save else BUSY_END_S
    outcomes = []
    for plan in PLANS:
        if given.only in (None, plan.case):
            sys.stderr.write(f"{plan.what}\n")
            outcomes.append(examine(plan, tries=given.tries, end_s=end_s))
    wrong = [f"{o.plan.what}: {line}" for o in outcomes for line in o.wrong]
    return conclude(record(outcomes), wrong, is_kept=given.save)


if __name__ == "__main__":
    sys.exit(main())
