"""Whatever would make libllama abort, hang or lie is refused by the engine, with a typed error.

One test for each case, each in a process of its own with an engine and a bystander on it; what is
refused is so beside a request that runs, which ends as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import indices_selected
from tests.reliability.engine_hazard_case import Case
from tests.reliability.engine_hazards import CASES
from tests.reliability.hazard_rows import ROWS, faults
from tests.reliability.hazards import Outcome, Runner, complaint, engine_server, in_advance

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def run_isolated(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """What happened to the case of this number in a child process of its own."""
    with in_advance(engine_server, indices_selected(request, test_engine)) as run:
        yield run


def claim_of(case: Case) -> str:
    return f"{'answers' if case.error is None else 'refuses'} {case.claim}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("index", "case"),
    [
        pytest.param(
            index, case, id=claim_of(case),
            marks=[pytest.mark.exhaustive] if case.in_full_only else [],
        )
        for index, case in enumerate(CASES)
    ],
)  # fmt: skip
def test_engine(run_isolated: Runner, index: int, case: Case) -> None:
    assert complaint(case, run_isolated(index)) == ""


def test_claims_are_distinct() -> None:
    claims = [case.claim for case in CASES]
    assert len(set(claims)) == len(claims), sorted({c for c in claims if claims.count(c) > 1})


def test_every_row_of_the_tables_is_met_or_out_of_reach() -> None:
    assert faults() == []
    assert sum(row.is_met for row in ROWS) >= 85


GOOD = {"error": "InvalidRequestError", "message": "top_k is -2, must be -1 to 2147483647"}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ({"died": "SIGABRT"}, "died by SIGABRT"),
        ({"error": "", "message": "returned 5"}, "no error instead of InvalidRequestError"),
        ({**GOOD, "error": "KeyError"}, "KeyError instead of"),
        ({**GOOD, "message": "no"}, "'top_k is -2, must be -1 to 2147483647' is not in"),
        ({**GOOD, "afterwards": "the audit found"}, "afterwards: the audit found"),
        (GOOD, ""),
    ],
)
def test_an_outcome_that_is_not_the_claimed_one_is_a_complaint(outcome: Outcome, says: str) -> None:
    case = next(case for case in CASES if case.claim == "top_k -2")
    assert complaint(case, outcome).startswith(says)
    assert bool(complaint(case, outcome)) == bool(says)
