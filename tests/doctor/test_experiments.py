"""What llama.cpp makes of each mistake: exact rows, positions and cells, on the embedded model."""

from __future__ import annotations

import pytest

from cllm.bindings import Model
from cllm.doctor import Cause, Experiment, Plan, Shape
from cllm.doctor.experiments import SETUPS, SUBJECT, run_experiment, run_experiments
from cllm.doctor.workload import open_context, prompt_tokens
from tools import make_model

N, N_IDS = 8, 4
PLAN = Plan(Shape(n_prompt=6, n_output=3), n_requests=N, n_seq_ids=N_IDS, estimated_s=0.0)
ROWS = 8
LAST = ROWS - 1


@pytest.fixture(scope="module")
def experiments(model: Model) -> dict[str, Experiment]:
    """All of them, by name."""
    return {e.name: e for e in run_experiments(model, PLAN, n_threads=1)}


def columns(experiment: Experiment) -> dict[str, list[int | None]]:
    """The exact numbers of all requests."""
    names = ("seq_id", "n_rows", "pos_max", "pos_left", "n_cells", "n_cells_left", "n_ahead")
    return {name: [getattr(r, name) for r in experiment.requests] for name in names}


def expected(**changed: list[int] | list[None]) -> dict[str, list[int] | list[None]]:
    """What clearing on finish shows, but for this."""
    flat: dict[str, list[int] | list[None]] = {
        "seq_id": [0] * N, "n_rows": [ROWS] * N, "pos_max": [LAST] * N, "pos_left": [None] * N,
        "n_cells": [ROWS] * N, "n_cells_left": [0] * N, "n_ahead": [0] * N,
    }  # fmt: skip
    return flat | changed


def test_every_experiment_shows_the_cause_it_was_made_for(
    experiments: dict[str, Experiment],
) -> None:
    assert list(experiments) == [setup.name for setup in SETUPS]
    causes = {name: experiment.diagnosis.cause for name, experiment in experiments.items()}
    assert causes == {setup.name: setup.expected for setup in SETUPS}
    assert {*causes.values()} == {*Cause} - {Cause.UNKNOWN}


def test_cleared_on_finish_nothing_grows_and_nothing_is_left(
    experiments: dict[str, Experiment],
) -> None:
    """O12, first: `seq_pos_max` after `seq_rm` is -1, every time."""
    assert columns(experiments["clear on finish"]) == expected()


def test_never_cleared_positions_and_cells_grow_by_the_rows_of_a_request(
    experiments: dict[str, Experiment],
) -> None:
    """O12, fourth: continue from the last position."""
    ends = [ROWS * n for n in range(1, N + 1)]
    last = [end - 1 for end in ends]
    grown = expected(pos_max=last, pos_left=last, n_cells=ends, n_cells_left=ends)
    assert columns(experiments["never clear"]) == grown
    assert columns(experiments["clear the wrong id"]) == grown
    assert {r.cleared_seq_id for r in experiments["never clear"].requests} == {None}
    assert {r.cleared_seq_id for r in experiments["clear the wrong id"].requests} == {1}


def test_cleared_on_reuse_cells_grow_until_every_id_was_used_once(
    experiments: dict[str, Experiment],
) -> None:
    """O12, second: a new seq_id each time."""
    cells = [ROWS * min(n, N_IDS) for n in range(1, N + 1)]
    assert columns(experiments["clear on reuse"]) == expected(
        seq_id=[n % N_IDS for n in range(N)], pos_left=[LAST] * N, n_cells=cells, n_cells_left=cells
    )


def test_restarted_positions_are_refused_with_minus_one_and_nothing_changes(
    experiments: dict[str, Experiment],
) -> None:
    """O12, third: continuity errors; and `seq_rm` is all that it takes."""
    experiment = experiments["restart at 0"]
    refusal = experiment.refusal
    assert refusal is not None
    assert (refusal.code, refusal.seq_id, refusal.last_pos, refusal.first_pos) == (-1, 0, LAST, 0)
    assert refusal.is_unchanged
    assert f"X = {LAST}" in refusal.error
    assert "inconsistent sequence positions" in refusal.message
    assert f"X = {LAST}" in refusal.message
    assert "Y = 0" in refusal.message
    before, after = experiment.requests
    assert (before.pos_left, before.n_cells_left) == (LAST, ROWS)
    assert (after.n_rows, after.pos_max, after.pos_left, after.n_cells_left) == (
        ROWS,
        LAST,
        None,
        0,
    )


def test_history_that_is_sent_again_makes_rows_grow_although_all_is_cleared(
    experiments: dict[str, Experiment],
) -> None:
    rows = [6 * n + 2 for n in range(1, N + 1)]
    assert columns(experiments["resend history"]) == expected(
        n_rows=rows, pos_max=[n - 1 for n in rows], n_cells=rows
    )


def test_behind_a_lock_the_work_stays_and_only_the_queue_grows(
    experiments: dict[str, Experiment],
) -> None:
    experiment = experiments["queue"]
    assert columns(experiment) == expected(n_ahead=list(range(N)))
    # All were submitted before the first was served, so each waited for those ahead of it.
    served_s = 0.0
    for request in experiment.requests:
        served_s += request.decode_s
        assert request.latency_s > served_s


def test_a_prompt_longer_than_a_batch_is_decoded_whole(model: Model) -> None:
    plan = Plan(Shape(n_prompt=300, n_output=2), n_requests=3, n_seq_ids=1, estimated_s=0.0)
    resend = next(setup for setup in SETUPS if setup.expected is Cause.HISTORY_RESENT)
    experiment = run_experiment(resend, model, plan, n_threads=1)
    assert [r.n_rows for r in experiment.requests] == [301, 601, 901]
    assert [r.pos_max for r in experiment.requests] == [300, 600, 900]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-swa", "tiny-recurrent", "tiny-hybrid"])
def test_the_causes_are_the_same_in_every_architecture(name: str) -> None:
    """A recurrent model has a state where others have cells; the patterns are the same."""
    with Model(make_model.ensure(name, "F16")) as model:
        found = list(run_experiments(model, PLAN, n_threads=1))
    assert [e.diagnosis.cause for e in found] == [setup.expected for setup in SETUPS]


def test_the_experiments_start_with_the_one_that_answers_the_question() -> None:
    assert SETUPS[0] is SUBJECT
    assert SUBJECT.expected is Cause.FLAT


@pytest.mark.parametrize("n_tokens", [1, 7, 500])
def test_a_prompt_has_exactly_the_tokens_that_were_asked_for(model: Model, n_tokens: int) -> None:
    assert len(prompt_tokens(model.vocab, n_tokens)) == n_tokens


def test_a_context_counts_the_cells_of_all_sequences(model: Model) -> None:
    with open_context(model, PLAN, n_threads=1) as context:
        assert context.n_cells == 0
