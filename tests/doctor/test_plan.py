"""A slow model gets fewer and smaller requests, never too few to show a pattern."""

from __future__ import annotations

import pytest

from cllm.doctor import Shape
from cllm.doctor.plan import N_REQUESTS_MIN, SHAPES, Pace, choose_plan, estimate_s


def test_a_fast_model_gets_all_requests_at_full_size() -> None:
    plan = choose_plan(Pace(1e-5, 1e-4), budget_s=60, n_requests=24, n_ctx_train=0)
    assert (plan.n_requests, plan.shape) == (24, SHAPES[0])


def test_the_slower_the_model_the_smaller_the_plan() -> None:
    sizes = []
    for row_s in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        plan = choose_plan(Pace(row_s / 4, row_s), budget_s=60, n_requests=24, n_ctx_train=0)
        sizes.append(plan.n_ctx)
        assert plan.n_requests >= N_REQUESTS_MIN
        smallest = (plan.shape, plan.n_requests) == (SHAPES[-1], N_REQUESTS_MIN)
        assert plan.estimated_s <= 60 or smallest
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize("n_ctx_train", [256, 512, 2048])
def test_all_requests_of_an_experiment_fit_the_positions_of_the_model(n_ctx_train: int) -> None:
    plan = choose_plan(Pace(1e-5, 1e-4), budget_s=60, n_requests=24, n_ctx_train=n_ctx_train)
    assert plan.n_ctx <= n_ctx_train
    assert plan.n_ctx == plan.n_requests * plan.shape.n_rows


def test_every_plan_goes_twice_through_all_seq_ids() -> None:
    plan = choose_plan(Pace(1.0, 1.0), budget_s=1, n_requests=24, n_ctx_train=64)
    assert plan.n_requests >= 2 * plan.n_seq_ids


def test_the_estimate_counts_the_history_that_is_sent_again() -> None:
    prompts_only = Pace(1.0, 0.0)
    few, many = (estimate_s(Shape(1, 1), n, prompts_only) for n in (8, 16))
    assert many - few == 1.5 * (7 * 8 + (16 * 17 - 8 * 9) / 2)
