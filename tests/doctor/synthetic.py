"""Measurements of requests that show each cause of growing latency."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cllm.doctor import (
    Cause,
    Check,
    Diagnosis,
    Experiment,
    Measurement,
    Plan,
    Report,
    Shape,
    Status,
)

N_ROWS = 10
N_IDS = 4


def flat(number: int) -> Measurement:
    """Measurement of a request whose sequence is cleared when it ends."""
    return Measurement(
        seq_id=0, n_rows=N_ROWS, pos_max=N_ROWS - 1, n_cells=N_ROWS, cleared_seq_id=0,
        pos_left=None, n_cells_left=0, n_ahead=0, decode_s=1.0, latency_s=1.0,
    )  # fmt: skip


def not_cleared(number: int) -> Measurement:
    """Measurement of a request that is not cleared: the next one continues behind its positions."""
    n_cells = N_ROWS * (number + 1)
    return dataclasses.replace(
        flat(number), cleared_seq_id=None, pos_max=n_cells - 1, n_cells=n_cells,
        pos_left=n_cells - 1, n_cells_left=n_cells,
    )  # fmt: skip


def new_id_each_time(number: int) -> Measurement:
    """Measurement of a request with a new seq_id that is never cleared."""
    n_cells = N_ROWS * (number + 1)
    return dataclasses.replace(
        flat(number), seq_id=number, cleared_seq_id=None, n_cells=n_cells, pos_left=N_ROWS - 1,
        n_cells_left=n_cells,
    )  # fmt: skip


def wrong_id(number: int) -> Measurement:
    """Measurement of a request in seq_id 0 after which `seq_rm` clears seq_id 1."""
    return dataclasses.replace(not_cleared(number), cleared_seq_id=1)


def cleared_on_reuse(number: int) -> Measurement:
    """Measurement of a request that reuses one of four seq_ids, and clears it only then."""
    n_cells = N_ROWS * min(number + 1, N_IDS)
    return dataclasses.replace(
        flat(number), seq_id=number % N_IDS, cleared_seq_id=None, n_cells=n_cells,
        pos_left=N_ROWS - 1, n_cells_left=n_cells,
    )  # fmt: skip


def resent(number: int) -> Measurement:
    """Measurement of a request whose prompt repeats all earlier ones."""
    n_rows = N_ROWS * (number + 1)
    return dataclasses.replace(flat(number), n_rows=n_rows, pos_max=n_rows - 1, n_cells=n_rows)


def queued(number: int) -> Measurement:
    """Measurement of a request behind `number` waiting ones."""
    return dataclasses.replace(flat(number), n_ahead=number, latency_s=1.0 + number)


PATTERNS: dict[Callable[[int], Measurement], Cause] = {
    flat: Cause.FLAT,
    not_cleared: Cause.NOT_CLEARED,
    new_id_each_time: Cause.NOT_CLEARED,
    wrong_id: Cause.WRONG_SEQ_ID,
    cleared_on_reuse: Cause.CLEARED_ON_REUSE,
    resent: Cause.HISTORY_RESENT,
    queued: Cause.QUEUEING,
}


def requests(pattern: Callable[[int], Measurement], n_requests: int = 12) -> list[Measurement]:
    """Return the measurements of `n_requests` requests of a pattern."""
    return [pattern(number) for number in range(n_requests)]


def experiment(
    pattern: Callable[[int], Measurement], cause: Cause = Cause.FLAT, expected: Cause = Cause.FLAT
) -> Experiment:
    """An experiment that was diagnosed with this cause."""
    return Experiment(
        pattern.__name__, "?", expected, tuple(requests(pattern)), None, Diagnosis(cause, "text")
    )


def report(*experiments: Experiment, status: Status = Status.OK) -> Report:
    """A report with one check of this status."""
    plan = Plan(Shape(8, 3), 12, N_IDS, 1.0)
    return Report((Check("check", status, "text"), plan, *experiments))
