"""What a decode of so many rows takes: how it is measured, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.doctor import RowCosts, has_matplotlib, measure_rows, save_rows_plot
from cllm.engine.config import EMBEDDED_MODEL


def costs_of(*milliseconds: float) -> RowCosts:
    """Of one row, two rows …"""
    return RowCosts({rows: ms / 1000 for rows, ms in enumerate(milliseconds, start=1)})


def test_what_takes_less_time_with_more_rows_is_told() -> None:
    costs = costs_of(10, 20, 30, 24, 31, 23)
    assert costs.cheaper_with_more == {3: 6, 5: 6}
    assert costs.best == 6
    assert costs.tokens_per_s(4) == pytest.approx(4 / 0.024)


def test_a_step_is_one_row_more_for_much_more_time_but_not_the_second() -> None:
    assert costs_of(10, 20, 21, 22, 44, 45).steps == {5: 2.0}


def test_a_straight_line_has_nothing_to_tell() -> None:
    costs = costs_of(*range(10, 30))
    assert costs.cheaper_with_more == {}
    assert costs.steps == {}


def test_each_number_of_rows_is_measured_in_turns_up_and_down_and_the_median_counts() -> None:
    # A clock that stands still but while something is measured: then it says what it is told.
    spans = [1.0, 2.0, 3.0, *(9.0, 2.5, 1.5), *(2.0, 1.0, 4.0)]
    times = [0.0]
    for span in spans:
        times += [times[-1], times[-1] + span]
    clock = iter(times[1:])
    turns: list[int] = []
    costs = measure_rows(
        EMBEDDED_MODEL,
        n_threads=1,
        n_turns=3,
        n_rows_max=3,
        clock=lambda: next(clock),
        on_turn=turns.append,
    )
    assert turns == [0, 1, 2]
    # Up 1, 2, 3; down 9 (of three rows), 2.5, 1.5; up 2, 1, 4.
    assert costs.seconds == {1: 1.5, 2: 2.0, 3: 4.0}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.skipif(not has_matplotlib(), reason="needs the extra plot")
def test_the_curve_can_be_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    save_rows_plot(costs_of(10, 20, 30, 24), path, title="Rows")
    assert path.stat().st_size > 5_000
