"""Common parts of the fuzzers: drawing calls in a child process, and counting their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.reliability.record import ROOT, Cell, Record, Table, conclude

T = TypeVar("T")
CHECK_EVERY = 100
MIN_SHARE = 0.2
MAX_WRONG = 20


@dataclass
class Findings:
    """Counts of the examples, and what was wrong.

    Attributes
    ----------
    n_refused : dict
        Refused calls by type of error.
    wrong : list of str
        Calls with an undocumented end, and faults that a check found afterwards.
    """

    n_examples: int = 0
    n_answered: dict[str, int] = field(default_factory=dict)
    n_refused: dict[str, int] = field(default_factory=dict)
    refused_methods: dict[str, int] = field(default_factory=dict)
    n_checks: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def count(self, method: str, error: Exception | None) -> None:
        """Count an example: refused with this error, or answered if that is None."""
        self.n_examples += 1
        if error is None:
            self.n_answered[method] = self.n_answered.get(method, 0) + 1
            return
        name = type(error).__name__
        self.n_refused[name] = self.n_refused.get(name, 0) + 1
        self.refused_methods[method] = self.refused_methods.get(method, 0) + 1

    def add(self, other: Findings) -> None:
        """Add the counts of other examples."""
        self.n_examples += other.n_examples
        self.n_checks += other.n_checks
        self.seconds += other.seconds
        self.wrong += other.wrong
        for name in ("n_answered", "n_refused", "refused_methods"):
            counts = getattr(self, name)
            for key, n in getattr(other, name).items():
                counts[key] = counts.get(key, 0) + n

    @property
    def share_answered(self) -> float:
        """Share of answered examples, 0 to 1."""
        return sum(self.n_answered.values()) / max(1, self.n_examples)

    @property
    def share_refused(self) -> float:
        """Share of refused examples, 0 to 1."""
        return sum(self.n_refused.values()) / max(1, self.n_examples)

    def faults(self, n_examples: int) -> list[str]:
        """Return the contradictions to the claim."""
        found = list(self.wrong)
        if self.n_examples < n_examples:
            found.append(f"{self.n_examples} examples of {n_examples}")
        if self.n_checks < n_examples // CHECK_EVERY:
            found.append(f"{self.n_checks} checks")
        for what, share in (("answered", self.share_answered), ("refused", self.share_refused)):
            if share < MIN_SHARE:
                found.append(f"only {share:.0%} were {what}")
        return found


def draw(
    calls: st.SearchStrategy[T],
    n_examples: int,
    example: Callable[[T], None],
    found: Findings,
    *,
    seed: int = 0,
) -> None:
    """Draw `n_examples` calls, the same in every run with a seed, and pass each to `example`."""
    started = time.perf_counter()

    @hypothesis.seed(seed)
    @settings(
        max_examples=n_examples, derandomize=False, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(call=calls)
    def run(call: T) -> None:
        example(call)
        if len(found.wrong) > MAX_WRONG:
            raise RuntimeError("\n".join(found.wrong))

    run()
    found.seconds = time.perf_counter() - started


def in_child(name: str, n_examples: int, time_limit_s: float) -> Findings:
    """Run a fuzzer in a child process; an exit code, a signal or a timeout is a finding."""
    environment = {**os.environ, "CLLM_AUDIT": "tick", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.reliability.{name}", "--child", str(n_examples)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=time_limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Findings(wrong=[f"no end within {time_limit_s:g} s"])
    if done.returncode:
        return Findings(wrong=[f"it ended with {done.returncode}: {done.stderr[-3000:]}"])
    return Findings(**json.loads(done.stdout))


def main(name: str, claim: str, methods: Sequence[str], fuzz: Callable[[int], Findings]) -> int:
    """The program of a fuzzer; 1 if its claim does not hold."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.reliability.{name}", description=claim)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--save", action="store_true", help="keep the record")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        warnings.simplefilter("error")
        sys.stdout.write(json.dumps(asdict(fuzz(options.child))))
        return 0
    found = in_child(name, options.examples, 60 + options.examples / 50)
    faults = found.faults(options.examples)
    figures: dict[str, Cell] = {
        "examples": found.n_examples,
        "answered": sum(found.n_answered.values()),
        "refused": sum(found.n_refused.values()),
        "checks of what they left": found.n_checks,
        "findings": len(faults),
        "seconds": round(found.seconds, 1),
    }
    by_method = [
        (method, found.n_answered.get(method, 0), found.refused_methods.get(method, 0))
        for method in methods
    ]
    tables = [
        Table(("method", "answered", "refused"), by_method, "Calls"),
        Table(("error", "calls"), sorted(found.n_refused.items()), "Refused with"),
    ]
    command = f"python -m tests.reliability.{name} --save"
    return conclude(Record(name, claim, command, figures, tables), faults, is_kept=options.save)
