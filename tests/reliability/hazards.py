"""`python -m tests.reliability.hazards [--save]`: whatever would abort, hang or mislead libllama.

The program runs the cases of all rows of `hazard_rows`, of the bindings and of the engine, each in its own
process.  A case must end with the documented error and without a signal, and must not disturb other requests.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, Protocol

from tests.bindings.hazards import CASES as BINDINGS_CASES
from tests.reliability.engine_hazards import CASES as ENGINE_CASES
from tests.reliability.hazard_rows import (
    ROWS,
    SECTIONS,
    bindings_sections,
    faults,
)
from tests.reliability.record import ROOT, Record, Table, conclude
from tools import make_model

CLAIM = (
    "Whatever would make libllama abort, hang or answer nonsense is refused with a typed error that "
    "names the field, the value and the limit; the process goes on, and so do its other requests."
)
COMMAND = "python -m tests.reliability.hazards --save"
Outcome = dict[str, str]
Runner = Callable[[int], Outcome]
ServerOfCases = Callable[[], AbstractContextManager[Runner]]
N_AT_ONCE = 2


class AnyCase(Protocol):
    """A case of the bindings or of the engine."""

    @property
    def claim(self) -> str: ...
    @property
    def says(self) -> tuple[str, ...]: ...
    @property
    def error(self) -> type[Exception] | None: ...


class Result(NamedTuple):
    """Result of one case; `complaint` is "" if it is as expected."""

    section: str
    is_signal: bool
    complaint: str


def complaint(case: AnyCase, outcome: Outcome) -> str:
    """Return what is wrong with the outcome of a case; "" if it is as expected."""
    if "died" in outcome:
        return f"died by {outcome['died']}"
    expected = "" if case.error is None else case.error.__name__
    if outcome["error"] != expected:
        wanted = expected or "an answer"
        return f"{outcome['error'] or 'no error'} instead of {wanted}: {outcome['message']}"
    for text in case.says:
        if text not in outcome["message"]:
            return f"{text!r} is not in {outcome['message']!r}"
    if "afterwards" in outcome:
        return f"afterwards: {outcome['afterwards']}"
    return ""


@contextmanager
def server(module: str, *arguments: str) -> Iterator[Runner]:
    """Start a server of cases; yield a function that runs the case of a number and returns its outcome."""
    environment = {
        **os.environ, "CLLM_AUDIT": "tick", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments, directory],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, bufsize=1,
        ) as process,
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(index: int) -> Outcome:
            requests.write(f"{index}\n")
            line = answers.readline()
            if not line:
                errors.seek(0)
                raise RuntimeError(f"the server of cases ended: {errors.read()}")
            outcome: Outcome = json.loads(line)
            return outcome

        yield run
        requests.close()
        if process.wait(timeout=30):
            raise RuntimeError(f"the server of cases ended with {process.returncode}")


def engine_server() -> AbstractContextManager[Runner]:
    """Return the server of the engine's cases."""
    return server("tests.reliability.engine_hazard_server")


def bindings_server() -> AbstractContextManager[Runner]:
    """Return the server of the cases of the bindings."""
    return server("tests.bindings.hazard_server", str(make_model.ensure("tiny-llama", "F16")))


@contextmanager
def in_advance(server: ServerOfCases, indices: Iterable[int]) -> Iterator[Runner]:
    """Yield a function that returns the outcome of a case; the cases run ahead in this order, two at once.

    Most of the time of a case is the start and the end of its process, which use one core.
    """
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    with ExitStack() as servers:
        for _ in range(N_AT_ONCE):
            idle.put(servers.enter_context(server()))

        def run_on_one(index: int) -> Outcome:
            run = idle.get()
            try:
                return run(index)
            finally:
                idle.put(run)

        executor = ThreadPoolExecutor(N_AT_ONCE)
        outcomes = {index: executor.submit(run_on_one, index) for index in indices}
        try:
            yield lambda index: outcomes[index].result()
        finally:
            executor.shutdown(cancel_futures=True)


def run_all(
    server: ServerOfCases, cases: Sequence[AnyCase], sections: Iterable[str]
) -> list[Result]:
    """Run all cases, and return their results; failures are written to standard error."""
    results = []
    with in_advance(server, range(len(cases))) as run:
        for index, (case, section) in enumerate(zip(cases, sections, strict=True)):
            outcome = run(index)
            fault = complaint(case, outcome)
            if fault:
                sys.stderr.write(f"{section} {case.claim}: {fault}\n")
            results.append(Result(section, outcome.get("died", "").startswith("SIG"), fault))
            if not (index + 1) % 100:
                sys.stderr.write(f"{index + 1} of {len(cases)} cases\n")
    return results


def n_answered(results: Sequence[Result], cases: Sequence[AnyCase]) -> int:
    """Return the number of legal cases that were answered."""
    pairs = zip(results, cases, strict=True)
    return sum(case.error is None and not result.complaint for result, case in pairs)


def tables(bindings: Sequence[Result], engine: Sequence[Result]) -> list[Table]:
    """Return two tables: counts of cases by hazard table, and all rows with their numbers of cases."""
    both = [*bindings, *engine]
    counts = [Counter(result.section for result in results) for results in (bindings, engine)]
    signals = Counter(result.section for result in both if result.is_signal)
    failures = Counter(result.section for result in both if result.complaint)
    summary = [
        (
            section, title, counts[0][section], counts[1][section],
            sum(row.section == section and row.is_met for row in ROWS),
            sum(row.section == section and not row.is_met for row in ROWS),
            signals[section], failures[section],
        )
        for section, title in SECTIONS.items()
    ]  # fmt: skip
    head = (
        "table", "of", "cases of the bindings", "cases of the engine", "rows met",
        "rows out of reach", "signals", "failures",
    )  # fmt: skip
    rows = [(row.name, len(row.bindings), row.n_engine_cases, row.unreachable) for row in ROWS]
    row_head = (
        "row",
        "named cases of the bindings",
        "cases of the engine",
        "why it is out of reach",
    )
    return [
        Table(head, summary, "Cases by table"),
        Table(row_head, rows, "Every row, and what meets it"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; 1 if one of them fails, or a row has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.hazards", description=CLAIM)
    parser.add_argument("--save", action="store_true", help="keep the record")
    options = parser.parse_args(arguments)
    wrong = faults()
    bindings = run_all(bindings_server, BINDINGS_CASES, bindings_sections())
    engine = run_all(engine_server, ENGINE_CASES, (c.row.split()[0] for c in ENGINE_CASES))
    found = tables(bindings, engine)
    both = [*bindings, *engine]
    figures = {
        "cases": len(both),
        "cases of the bindings": len(bindings),
        "cases of the engine": len(engine),
        "of the engine's: legal, and answered": n_answered(engine, ENGINE_CASES),
        "rows": len(ROWS),
        "rows met by cases": sum(row.is_met for row in ROWS),
        "signals": sum(result.is_signal for result in both),
        "failures": sum(bool(result.complaint) for result in both),
    }
    wrong += [f"{result.section}: {result.complaint}" for result in both if result.complaint]
    return conclude(Record("hazards", CLAIM, COMMAND, figures, found), wrong, is_kept=options.save)


if __name__ == "__main__":
    sys.exit(main())
