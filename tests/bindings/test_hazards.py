"""Whatever would make libllama abort, hang or lie is refused before the call, with a typed error.

One test for each row of the hazard table that a caller of the bindings can reach.  Each case runs
in a process of its own, so that a row which is not refused fails one test and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bindings.hazard_cases import CASES, Case

Runner = Callable[[int], dict[str, str]]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_isolated(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    """Runs the case of this number in a child process and says what happened there."""
    directory = tmp_path_factory.mktemp("hazards")
    errors = directory / "stderr.txt"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.bindings.hazard_cases", tiny_model_path, directory],
            cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
        ) as server,
    ):  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def run(index: int) -> dict[str, str]:
            requests.write(f"{index}\n")
            line = answers.readline()
            assert line, f"the server of cases ended: {errors.read_text()}"
            answer: dict[str, str] = json.loads(line)
            return answer

        yield run
        requests.close()
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=[f"refuses {case.claim}" for case in CASES]
)
def test_binding(run_isolated: Runner, index: int, case: Case) -> None:
    outcome = run_isolated(index)
    assert "died" not in outcome, f"died by {outcome['died']}"
    assert outcome["error"] == case.error.__name__, outcome["message"]
    for text in case.says:
        assert text in outcome["message"]
    assert "afterwards" not in outcome, f"no good decode afterwards: {outcome['afterwards']}"


def test_claims_are_distinct() -> None:
    claims = [case.claim for case in CASES]
    assert len(set(claims)) == len(claims), sorted({c for c in claims if claims.count(c) > 1})
