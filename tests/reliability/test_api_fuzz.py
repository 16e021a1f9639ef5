"""Whatever the public API is called with, it answers or refuses, and stays as it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.errors import GenerationError, InvalidRequestError, QueueFullError
from tests.reliability.api_fuzz import DOCUMENTED, Fuzz
from tests.reliability.api_fuzz_calls import Call
from tests.reliability.fuzzing import CHECK_EVERY, Findings, in_child

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("n_examples", "time_limit_s"),
    [(2000, 240), pytest.param(50_000, 1000, marks=pytest.mark.exhaustive)],
)
@pytest.mark.timeout(1100)
def test_any_call_is_answered_or_refused_and_leaves_nothing(
    n_examples: int, time_limit_s: float
) -> None:
    findings = in_child("api_fuzz", n_examples, time_limit_s)
    assert findings.faults(n_examples) == []
    never = set(DOCUMENTED) - set(findings.n_answered)
    assert not never, "these were never answered"


# --- What would be found ---------------------------------------------------------------------
GOOD = Findings(
    n_examples=CHECK_EVERY, n_answered={"generate": 60}, n_refused={"TypeError": 40}, n_checks=1
)


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        (replace(GOOD, wrong=["it raised KeyError"]), "it raised KeyError"),
        (replace(GOOD, n_examples=99), "99 examples of 100"),
        (replace(GOOD, n_checks=0), "0 checks"),
        (replace(GOOD, n_refused={"TypeError": 19}), "only 19% were refused"),
        (replace(GOOD, n_answered={"generate": 19}), "only 19% were answered"),
    ],
)
def test_what_does_not_hold_is_a_fault(findings: Findings, says: str) -> None:
    assert findings.faults(CHECK_EVERY) == [says]
    assert GOOD.faults(CHECK_EVERY) == []


def findings_of(call: Call, outcome: object, n_examples: int = 1, audit: str = "") -> list[str]:
    """What the fuzzer says of calls that end so, in an engine whose audit says so."""

    async def answer(*_: Any, **__: Any) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def found() -> list[str]:
        return [audit] if audit else []

    engine: Any = SimpleNamespace(**{call.method: answer, "audit": found})
    fuzz = Fuzz(engine)

    async def run() -> None:
        for _ in range(n_examples):
            await fuzz.example(call)

    asyncio.run(run())
    return fuzz.found.wrong


ASK = Call("generate", ("1+1=",), {})
ASK_CONSTRAINED = Call("generate", ("1+1=",), {"regex": "x"})
FAILED = GenerationError("the constraint cannot be followed")
ASK_ALL = Call("generate_all", (["1+1="],), {"return_exceptions": True})


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        TypeError("x"),
        FAILED,
        QueueFullError(1, 1.0),
        ExceptionGroup("x", [OSError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_not_documented_is_found(error: Exception) -> None:
    (found,) = findings_of(ASK, error)
    assert found.endswith(f"gave {error!r}")
    (found,) = findings_of(ASK_ALL, [error])
    assert found.endswith(f"gave {error!r}")


def test_a_documented_error_and_an_answer_are_not_found() -> None:
    refusal = InvalidRequestError("top_k", -2, "-1 or more")
    assert findings_of(ASK, refusal) == []
    assert findings_of(ASK_ALL, [refusal]) == []
    assert findings_of(ASK_CONSTRAINED, FAILED) == []
    assert findings_of(ASK, None) == []


def test_a_wrong_answer_and_a_discrepancy_are_found() -> None:
    right, wrong = SimpleNamespace(text="42"), SimpleNamespace(text="43")
    assert findings_of(ASK, right, CHECK_EVERY) == []
    assert findings_of(ASK, wrong, CHECK_EVERY) == [f"after {CHECK_EVERY} examples: [], '43'"]
    assert findings_of(ASK, wrong, CHECK_EVERY - 1) == []
    (found,) = findings_of(ASK, right, CHECK_EVERY, audit="cells differ")
    assert "['cells differ'], '42'" in found
