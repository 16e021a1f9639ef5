"""Whatever would make libllama abort, hang or lie is refused before the call, with a typed error.

One test for each row of the hazard table that a caller of the bindings can reach.  Each case runs
in a process of its own, so that a row which is not refused fails one test and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bindings.hazard_case import Case
from tests.bindings.hazards import CASES
from tests.conftest import indices_selected
from tests.reliability.hazards import Runner, bindings_server, complaint, in_advance


@pytest.fixture(scope="module")
def run_isolated(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """What happened to the case of this number in a child process of its own."""
    with in_advance(bindings_server, indices_selected(request, test_binding)) as run:
        yield run


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=[f"refuses {case.claim}" for case in CASES]
)
def test_binding(run_isolated: Runner, index: int, case: Case) -> None:
    assert complaint(case, run_isolated(index)) == ""


def test_claims_are_distinct() -> None:
    claims = [case.claim for case in CASES]
    assert len(set(claims)) == len(claims), sorted({c for c in claims if claims.count(c) > 1})
