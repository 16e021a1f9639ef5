"""Each cause is recognised by its rows, positions and cells, whatever the times are."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

import pytest

from cllm.doctor import Cause, Measurement, Refusal, Status, conclude, diagnose, growth
from tests.doctor import synthetic

REFUSAL = Refusal(
    seq_id=0, last_pos=9, first_pos=0, error="p0 is 0", code=-1, message="Y = X + 1",
    is_unchanged=True,
)  # fmt: skip


@pytest.mark.parametrize("pattern", synthetic.PATTERNS)
def test_each_cause_is_recognised(pattern: Callable[[int], Measurement]) -> None:
    assert diagnose(synthetic.requests(pattern)).cause is synthetic.PATTERNS[pattern]


@pytest.mark.parametrize("pattern", synthetic.PATTERNS)
def test_times_have_no_part_in_a_diagnosis(pattern: Callable[[int], Measurement]) -> None:
    rng = random.Random(5)
    noisy = [
        dataclasses.replace(request, decode_s=rng.random() * 9, latency_s=rng.random() * 9)
        for request in synthetic.requests(pattern)
    ]
    assert diagnose(noisy) == diagnose(synthetic.requests(pattern))


def test_positions_that_restart_are_recognised_by_the_refusal() -> None:
    found = diagnose(synthetic.requests(synthetic.flat, 2), REFUSAL)
    assert found.cause is Cause.POSITIONS_RESTARTED
    assert "returns -1" in found.text
    assert "X = 9" in found.text
    assert "Y = 0" in found.text


@pytest.mark.parametrize("change", [{"code": 0}, {"is_unchanged": False}], ids=str)
def test_a_refusal_that_is_none_is_not_explained_away(change: dict[str, int | bool]) -> None:
    refusal = dataclasses.replace(REFUSAL, **change)  # type: ignore[arg-type]  # by name
    assert diagnose(synthetic.requests(synthetic.flat), refusal).cause is Cause.UNKNOWN


def test_a_verdict_names_its_numbers() -> None:
    texts = {p: diagnose(synthetic.requests(p)).text for p in synthetic.PATTERNS}
    assert "rows flat (10), pos_max flat (9)" in texts[synthetic.flat]
    assert "pos_max grows (9 → 119)" in texts[synthetic.not_cleared]
    assert "does not clear the sequence" in texts[synthetic.not_cleared]
    assert "called for seq_id 1, the requests are in seq_id 0" in texts[synthetic.wrong_id]
    assert "cells grow (10 → 40) over the first 4" in texts[synthetic.cleared_on_reuse]
    assert "rows grow (10 → 120)" in texts[synthetic.resent]
    assert "up to 11 requests ahead" in texts[synthetic.queued]


def test_a_pattern_that_fits_no_cause_is_unknown() -> None:
    flat = synthetic.requests(synthetic.flat)
    replace = dataclasses.replace
    strange = {
        "too few": flat[:2],
        "rows go up and down": [*flat, replace(flat[0], n_rows=99), flat[0]],
        "positions go up and down": [*flat, replace(flat[0], pos_max=99), flat[0]],
        "cells stay after seq_rm": [replace(request, n_cells_left=3) for request in flat],
        "positions grow after seq_rm": [
            replace(synthetic.not_cleared(number), cleared_seq_id=0) for number in range(12)
        ],
        "cells never settle": [
            replace(synthetic.cleared_on_reuse(number), n_cells=10 * (number + 1))
            for number in range(12)
        ],
    }
    assert {name: diagnose(requests).cause for name, requests in strange.items()} == dict.fromkeys(
        strange, Cause.UNKNOWN
    )


def test_growth_is_the_last_quarter_over_the_first_and_one_outlier_does_not_count() -> None:
    assert growth([1.0, 1.0, 50.0, 3, 3, 3, 3, 3, 3, 2.0, 70.0, 2.0]) == 2.0
    assert growth([4.0]) == 1.0
    assert growth([]) == 1.0
    assert growth([0.0, 5.0]) == 1.0


def test_the_answer_is_no_when_rows_positions_and_cells_are_flat() -> None:
    subject = synthetic.experiment(synthetic.flat)
    answer = conclude([subject], subject)
    assert not answer.grows
    assert answer.text.startswith("No. 12 identical requests")
    assert "10 rows each time, positions 0 to 9" in answer.text
    assert "×1.00" in answer.text


def test_equal_work_in_unequal_time_is_still_no_and_said_to_be_the_machine() -> None:
    subject = synthetic.experiment(synthetic.flat)
    slower = tuple(
        dataclasses.replace(request, decode_s=1.0 + number)
        for number, request in enumerate(subject.requests)
    )
    answer = conclude([subject], dataclasses.replace(subject, requests=slower))
    assert not answer.grows
    assert "what changed is the machine" in answer.text


def test_the_answer_is_yes_with_the_cause_when_clearing_on_finish_is_not_flat() -> None:
    subject = synthetic.experiment(synthetic.not_cleared, Cause.NOT_CLEARED)
    answer = conclude([subject], subject)
    assert answer.grows
    assert answer.text.startswith("Yes: text.")
    assert "Not as expected: not_cleared." in answer.text


def test_a_report_is_healthy_if_nothing_failed_and_nothing_is_strange() -> None:
    sound = synthetic.experiment(synthetic.flat)
    strange = synthetic.experiment(synthetic.flat, Cause.UNKNOWN)
    assert synthetic.report(sound).is_healthy
    assert synthetic.report(sound, status=Status.WARNING).is_healthy
    assert not synthetic.report(sound, status=Status.FAILED).is_healthy
    assert not synthetic.report(strange).is_healthy


def test_a_report_becomes_json_with_all_its_numbers() -> None:
    report = synthetic.report(synthetic.experiment(synthetic.cleared_on_reuse))
    told = json.loads(json.dumps(report.as_dict()))
    assert told["checks"] == [{"name": "check", "status": "ok", "text": "text"}]
    assert told["plan"]["shape"] == {"n_prompt": 8, "n_output": 3}
    assert told["experiments"][0]["diagnosis"] == {"cause": "flat", "text": "text"}
    assert [r["n_cells"] for r in told["experiments"][0]["requests"]][:5] == [10, 20, 30, 40, 40]
    assert told["conclusion"] is None
