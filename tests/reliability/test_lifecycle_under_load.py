"""How engines begin and end under load, some tries of each; `lifecycle` has the full numbers."""

from __future__ import annotations

import signal
import subprocess

import pytest

from cllm import Engine
from tests.reliability.lifecycle import (
    LOOPS,
    PLANS,
    Outcome,
    Plan,
    complaint,
    examine,
    plan_of,
    record,
)
from tests.reliability.lifecycle_requests import METHODS

pytestmark = pytest.mark.full

# One try of each under one of the event loops; under both, one for each moment of `close_during`, and
# some moments of a signal.
TRIES = {
    "close_during": 4, "under_load": 2, "stopped_by_sigterm": 2, "cancelled_start": 2,
    "exit_with_live_engine": 4,
}  # fmt: skip
NAMES = [plan.what for plan in PLANS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "plan"), list(enumerate(PLANS)), ids=NAMES)
def test_an_engine_ends_as_it_should(number: int, plan: Plan) -> None:
    n_tries = TRIES.get(plan.case, 1)
    loops = LOOPS if n_tries > 1 else [LOOPS[number % 2]]
    assert examine(plan, tries=n_tries, loops=loops).wrong == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_an_engine_ends_as_it_should_every_time(plan: Plan) -> None:
    assert examine(plan).wrong == []


INTERRUPTED = plan_of("under_load", signal.SIGINT)


@pytest.mark.parametrize(
    ("returncode", "error", "seconds", "says"),
    [
        (-11, "", 1.0, "exit -11 instead of 130"),
        (0, "", 1.0, "exit 0 instead of 130"),
        (130, "Exception ignored in: <function f>", 1.0, "Exception ignored"),
        (130, "ResourceWarning: unclosed file", 1.0, "ResourceWarning"),
        (130, "Traceback (most recent call last):", 1.0, "Traceback"),
        (130, "", 5.1, "5.1 s until the end"),
    ],
)
def test_an_end_that_is_not_clean_is_found(
    returncode: int, error: str, seconds: float, says: str
) -> None:
    clean = subprocess.CompletedProcess([], 130, "running\n", "")
    assert complaint(INTERRUPTED, "trio", clean, 1.0) == ""
    done = subprocess.CompletedProcess([], returncode, "running\n", error)
    assert says in complaint(INTERRUPTED, "trio", done, seconds)


def test_no_method_of_an_engine_is_forgotten() -> None:
    """All but those that have an answer for an engine that has ended."""
    methods = {name for name, value in vars(Engine).items() if callable(value)}
    for base in Engine.__mro__[1:-1]:
        methods |= {name for name, value in vars(base).items() if callable(value)}
    public = {name for name in methods if not name.startswith("_")} | {"__aenter__"}
    answering = {
        "aclose",
        "check_memory",
        "fetch",
        "health",
        "is_open",
        "statistics",
        "wait_stopped",
    }
    assert public - answering == METHODS.keys()


def test_what_one_event_loop_says_is_not_allowed_under_the_other() -> None:
    plan = plan_of("exit_in_callback")
    done = subprocess.CompletedProcess([], 7, "", "Exception ignored in: <task>")
    assert complaint(plan, "asyncio", done, 1.0) == ""
    assert complaint(plan, "trio", done, 1.0) != ""


@pytest.mark.parametrize("what", ["rss", "malloc"])
def test_what_grows_is_found(what: str) -> None:
    plan = Plan("loaded", "reload", 1, first_seed=2, max_growth_mib={what: -1000.0})
    (said,) = (outcome := examine(plan, loops=["asyncio"])).wrong
    assert said.startswith(f"{what} grows by ")
    assert f"growth of {what}, MiB: loaded" in record([outcome]).figures


def test_a_case_that_fails_is_counted() -> None:
    """A callback that exits, where the program should end well."""
    plan = Plan("ends well", "exit_in_callback", 1)
    (said,) = (outcome := examine(plan, loops=["asyncio"])).wrong
    assert said.startswith("asyncio, seed 0: exit 7 instead of 0")
    outcomes = [outcome, Outcome(INTERRUPTED, n_tries=2, seconds=[0.1, 0.2])]
    figures = record(outcomes).figures
    assert (figures["tries"], figures["clean"]) == (3, 2)
    assert figures["seconds from a signal to the end, longest"] == 0.2
