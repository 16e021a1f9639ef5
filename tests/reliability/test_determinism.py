"""The proof of `deterministic`, in a few schedules; each in a process of its own.

llama.cpp reads one of the settings once in a process, and the tests' has computed without it.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tools.real_model import MODEL

pytestmark = pytest.mark.full

SAYS = re.compile(
    r"(\d+) answers, (\d+) differ from the answer alone; \d+ preemptions, (\d+) tokens from"
)


def proof(*arguments: str) -> tuple[int, int, int]:
    """Answers, those that differed, tokens from the prefix cache."""
    command = [sys.executable, "-m", "tests.reliability.determinism", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = SAYS.search(done.stdout)
    assert said is not None, done.stdout + done.stderr
    n_answers, n_differing, n_cached = map(int, said.groups())
    assert done.returncode == int(n_differing > 0 and "--without" not in arguments), done.stdout
    return n_answers, n_differing, n_cached


@pytest.mark.parametrize(
    "model", ["embedded", *(f"qwen3-wide/{t}" for t in ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K"))]
)
def test_no_answer_is_another_than_alone(model: str) -> None:
    n_schedules = 2 if model in ("embedded", "qwen3-wide/Q4_K_M") else 1
    n_answers, n_differing, _ = proof("--schedules", f"{n_schedules}", model)
    assert (n_answers, n_differing) == (7 * n_schedules, 0)


def test_without_the_settings_answers_differ() -> None:
    n_answers, n_differing, _ = proof("--schedules", "1", "--without", "qwen3-wide/Q6_K")
    assert 0 < n_differing <= n_answers == 7


@pytest.mark.real
@pytest.mark.skipif(not MODEL.is_file(), reason="not in the cache: make test-real fetches it")
def test_no_answer_of_a_real_model_is_another_than_alone() -> None:
    n_answers, n_differing, n_cached = proof("--schedules", "6", "SmolLM2")
    assert (n_answers, n_differing) == (42, 0)
    assert n_cached > 0
