"""Calls of the bindings, right and wrong, end as documented; what would not is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cllm.bindings import Context, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import CllmError, InvalidArgumentError
from tests.reliability.bindings_fuzz import Fuzz
from tests.reliability.bindings_fuzz_calls import N_BATCH, N_SEQ_MAX, Bench, Call
from tests.reliability.fuzzing import CHECK_EVERY, Findings, in_child

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("n_examples", "time_limit_s"),
    [(2000, 120), pytest.param(50_000, 1200, marks=pytest.mark.exhaustive)],
)
@pytest.mark.timeout(1200)
def test_any_call_is_answered_or_refused_and_changes_nothing_else(
    n_examples: int, time_limit_s: float
) -> None:
    found = in_child("bindings_fuzz", n_examples, time_limit_s)
    assert found.faults(n_examples) == []


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    """In this process, with nothing found yet."""
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(
            model, n_ctx=64, n_seq_max=N_SEQ_MAX, n_batch=N_BATCH, n_threads=1, n_threads_batch=1
        ) as context,
    ):
        yield Fuzz(Bench(model, context))


def raising(error: Exception) -> Callable[..., object]:
    def method(*_: object) -> object:
        raise error

    return method


CALL = Call("context", "seq_pos_min", (0,))


@pytest.mark.parametrize("error", [TypeError("x"), OverflowError("x"), CllmError("x")], ids=repr)
def test_an_error_that_is_not_documented_is_found(
    fuzz: Fuzz, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "seq_pos_min", raising(error))
    fuzz.example(CALL)
    assert fuzz.found.wrong == [f"{CALL!r} raised {error!r}"]


def test_a_documented_error_and_an_answer_are_not_found(
    fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz.example(CALL)
    monkeypatch.setattr(
        Context, "seq_pos_min", raising(InvalidArgumentError("seq_id", 9, "0 to 3"))
    )
    fuzz.example(CALL)
    assert fuzz.found == Findings(
        2, {"seq_pos_min": 1}, {"InvalidArgumentError": 1}, {"seq_pos_min": 1}
    )


def test_other_logits_than_in_the_beginning_are_found(fuzz: Fuzz) -> None:
    for _ in range(CHECK_EVERY):
        fuzz.example(CALL)
    assert (fuzz.found.n_checks, fuzz.found.wrong) == (1, [])
    fuzz._known = fuzz._known + 1e-6
    fuzz.check()
    assert fuzz.found.wrong == [f"after {CHECK_EVERY} examples: other logits"]
