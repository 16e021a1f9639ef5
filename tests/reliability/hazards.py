"""`python -m tests.reliability.hazards [--save]`: whatever would abort, hang or mislead libllama.

Every row of `hazard_rows`, through the bindings and through the engine, each case
in a process of its own: no signal, the documented error, and whoever was beside it unharmed.
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
    """What came of one case."""

    section: str
    is_signal: bool
    complaint: str


def complaint(case: AnyCase, outcome: Outcome) -> str:
    """What is wrong with the outcome of a case; nothing if it is as it should be."""
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
    """Runs the case of a number in a child of a process that has them, and says what happened."""
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
    """Runs the engine's cases."""
    return server("tests.reliability.engine_hazard_server")


def bindings_server() -> AbstractContextManager[Runner]:
    """Runs the cases of the bindings."""
    return server("tests.bindings.hazard_server", str(make_model.ensure("tiny-llama", "F16")))


@contextmanager
def in_advance(server: ServerOfCases, indices: Iterable[int]) -> Iterator[Runner]:
    """Gives the outcomes of these cases, which run in this order, two at once.

    A case is mostly the start and the end of a process, which keep one core busy.
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
    """Every case, and what came of it; those that fail are told on stderr."""
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
    """How many legal cases had their answer."""
    pairs = zip(results, cases, strict=True)
    return sum(case.error is None and not result.complaint for result, case in pairs)


def tables(bindings: Sequence[Result], engine: Sequence[Result]) -> list[Table]:
    """The cases by table of hazards, and every row with what meets it."""
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
    """Run everything; 1 if anything is not as it should be."""
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
