"""Choose the number and size of requests, so that the experiments end in time with a slow model.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cllm.doctor.findings import Plan, Shape

# Large requests show their cost best; the others are for models that take a second per token.
SHAPES = (Shape(64, 16), Shape(32, 8), Shape(16, 4), Shape(8, 2))
N_SEQ_IDS = 4
# Two rounds of all seq_ids: the first shows cells growing, the second that they stay.
N_REQUESTS_MIN = 2 * N_SEQ_IDS
# Experiments of `n_requests` requests with the same rows; the check of the engine counts as two.
N_EQUAL = 7
N_OTHER = 23  # 2 requests of "restart at 0", and 3 requests of warm-up in each of 7 experiments
# Factor for attention over cells that are never cleared, and for other work on the machine.
MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for one row of a prompt, and for one output row."""

    prompt_row_s: float
    output_row_s: float


def estimate_s(shape: Shape, n_requests: int, pace: Pace) -> float:
    """Return the estimated seconds of all experiments, including a margin of 50 %."""
    prompt_s = shape.n_prompt * pace.prompt_row_s
    output_s = (shape.n_output - 1) * pace.output_row_s
    # The history that is sent again: one prompt more each time.
    n_resent = n_requests * (n_requests + 1) // 2
    n_whole = N_EQUAL * n_requests + N_OTHER
    return MARGIN * (n_whole * (prompt_s + output_s) + n_resent * prompt_s + n_requests * output_s)


def choose_plan(pace: Pace, *, budget_s: float, n_requests: int, n_ctx_train: int) -> Plan:
    """Return the largest plan within the budget and the model's context, otherwise the smallest plan.

    Parameters
    ----------
    pace : Pace
    budget_s : float
        Seconds for all experiments; the smallest plan may take longer.
    n_requests : int
        Largest number of requests of an experiment.
    n_ctx_train : int
        Positions that the model was trained for; 0 if unknown.
    """
    for shape in SHAPES:
        for n in range(n_requests, N_REQUESTS_MIN - 1, -1):
            plan = Plan(shape, n, N_SEQ_IDS, estimate_s(shape, n, pace))
            if plan.estimated_s <= budget_s and (not n_ctx_train or plan.n_ctx <= n_ctx_train):
                return plan
    shape = SHAPES[-1]
    return Plan(shape, N_REQUESTS_MIN, N_SEQ_IDS, estimate_s(shape, N_REQUESTS_MIN, pace))
