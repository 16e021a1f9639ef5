"""The suites of the bindings and of the engine with AddressSanitizer, UndefinedBehaviorSanitizer and
LeakSanitizer in libllama: no test fails, and nothing is reported.

`make test-asan` builds the library and runs this.  The sanitizers watch every process that a test starts, and
look for leaks at its exit.  Forked processes of the hazard tables end with `_exit` and are not searched for
leaks.  Leaks of libllama or ggml must not occur; leaks of Python and others are only counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.reliability import sanitized
from tests.reliability.memory_faults import LEAK
from tests.reliability.record import ROOT, Record, Table, conclude
from tests.reliability.sanitized import Expected, Findings, NotBuiltError, Report

TESTS = ("tests/bindings", "tests/engine")
CLAIM = (
    "With sanitizers in libllama, the suites of the bindings and of the engine pass, and nothing is "
    "reported: no access out of bounds or after a free, no undefined behaviour, no byte that libllama "
    "or ggml allocated and lost."
)
TEST_TIMEOUT_S = 1200  # the longest takes a minute on a quiet machine, four on a busy one
# Reports that tests cause on purpose, in processes that are expected to crash.  No other report is suppressed,
# since there was none.
EXPECTED = (
    Expected(
        ("stack-overflow",), "cllm.engine.llama.trial_child",
        "llama.cpp and llguidance read what they are given by recursion; tests nest it until a trial dies",
    ),
    Expected(
        ("allocator is out of memory", "internal allocator is out of memory", "out-of-memory"),
        "cllm.engine.llama.trial_child",
        "a trial may take 512 MiB; tests give it what takes more",
    ),
    Expected(
        ("allocator is out of memory", "internal allocator is out of memory", "out-of-memory"),
        "cllm.engine.chat.template_child",
        "a template may take 512 MiB; tests render templates that take more",
    ),
    Expected(
        ("load of value 99",), "",
        "a hazard's file has the pooling type 99, which llama.cpp prints before the file is rejected",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Results of a run of pytest.

    Attributes
    ----------
    n_failed : int
        Number of failures and errors; at least 1 if the exit code of pytest is not 0.
    excused : sequence of (str, str)
        Tests that were skipped or are expected to fail, and the reasons.
    """

    n_tests: int
    n_failed: int
    excused: Sequence[tuple[str, str]]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if tests have run, and none failed."""
        return self.n_tests > 0 and self.n_failed == 0


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    watched : Suite
        The tests that ran with sanitizers.
    """

    watched: Suite
    n_processes: int
    unseen_faults: Sequence[str]
    findings: Findings

    def complaints(self) -> list[str]:
        """Return unexpected reports, unseen faults and failed suites; empty if the claim holds."""
        found = [f"not expected: {line}" for line in describe(self.findings.wrong)]
        found += [f"not seen: {fault}" for fault in self.unseen_faults]
        if not self.watched.passed:
            found.append(f"{self.watched.n_failed} of {self.watched.n_tests} tests failed")
        return found

    @property
    def holds(self) -> bool:
        """True if all tests passed, no report was unexpected, and all faults on purpose were seen."""
        return not self.complaints()

    def figures(self) -> dict[str, str | int | float]:
        """Return the figures of the record."""
        leaks = [r for r in self.findings.wrong if r.sanitizer == LEAK]
        return {
            "tests": self.watched.n_tests,
            "failed": self.watched.n_failed,
            "skipped or expected to fail": len(self.watched.excused),
            "minutes": round(self.watched.seconds / 60, 1),
            "processes watched": self.n_processes,
            "reports": len(self.findings.wrong),
            "reports that tests provoke": sum(self.findings.expected.values()),
            "leaked by libllama and ggml, bytes": sum(report.n_bytes for report in leaks),
            "lost by Python and others at exit, bytes": sum(
                r.n_bytes for r in self.findings.foreign
            ),
            "faults made on purpose, seen": sanitized.said_of_faults(self.unseen_faults),
        }

    def tables(self) -> list[Table]:
        """Return a table of expected reports with their counts, and one of tests that did not count."""
        rows = [
            (one.module, " / ".join(one.kinds), count, one.reason)
            for one, count in self.findings.expected.items()
        ]
        expected = Table(("process", "report", "times", "why"), rows, "Reports that tests provoke")
        excused = Table(("test", "why"), self.watched.excused, "Tests skipped or expected to fail")
        return [expected, *([excused] if self.watched.excused else [])]


def run(tests: Sequence[str], directory: Path) -> Outcome:
    """Run these tests, with all reports in this directory.

    Raises
    ------
    NotBuiltError
        There is no library with sanitizers.
    """
    faults = directory / "faults"
    faults.mkdir()
    unseen_faults = sanitized.unseen_faults(sanitized.show_faults(faults))
    watched = run_pytest(tests, directory / "watched.xml", sanitized.environment(directory))
    return Outcome(
        watched,
        n_processes=sanitized.n_processes(directory),
        unseen_faults=unseen_faults,
        findings=sanitized.sort_out(sanitized.read(directory), EXPECTED),
    )


def run_pytest(tests: Sequence[str], junit: Path, environment: Mapping[str, str]) -> Suite:
    """Run tests in a child process with this environment; return the results that pytest wrote."""
    limit = f"--timeout={TEST_TIMEOUT_S}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not exhaustive",
        limit,
        f"--junitxml={junit}",
        *tests,
    ]
    start = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = time.perf_counter() - start
    return suite_of(junit.read_text() if junit.exists() else None, status, seconds)


def suite_of(junit: str | None, status: int, seconds: float) -> Suite:
    """Return the results in pytest's report; None is the missing report of a pytest that crashed."""
    suite = None if junit is None else ElementTree.fromstring(junit).find("testsuite")
    if suite is None:
        return Suite(0, 1, [], seconds)
    n_failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    excused = [
        (f"{case.get('classname')}::{case.get('name')}", mark.get("message", ""))
        for case in suite.iter("testcase")
        for mark in case.iter("skipped")
    ]
    # If pytest itself fails, no test of the report has failed.
    n_failed = n_failed or int(status != 0)
    return Suite(int(suite.get("tests", 0)), n_failed, excused, seconds)


def describe(reports: Sequence[Report]) -> list[str]:
    """Return a line for each kind and place of reports, with their number."""
    places = Counter((r.sanitizer, r.kind, r.place, r.command.strip()[-60:]) for r in reports)
    return [
        f"{count} × {sanitizer}: {kind} in {place} ({command or 'a forked process'})"
        for (sanitizer, kind, place, command), count in places.most_common()
    ]


def main() -> int:
    """Run the command line; 1 if the claim does not hold, 2 without a library with sanitizers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders")
    parser.add_argument("--reports", type=Path, help="a new directory, where the reports stay")
    parser.add_argument("--save", action="store_true", help="keep a record in results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.reports or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            outcome = run(options.tests, directory.resolve())
        except NotBuiltError as error:
            print(error, file=sys.stderr)
            return 2
        if outcome.findings.wrong and not options.reports:
            print("run it again with --reports DIR to read them whole", file=sys.stderr)
    record = Record("sanitizers", CLAIM, "make test-asan", outcome.figures(), outcome.tables())
    return conclude(record, outcome.complaints(), is_kept=options.save)


if __name__ == "__main__":
    sys.exit(main())
