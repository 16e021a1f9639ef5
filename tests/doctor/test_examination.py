"""Findings come one by one, in order; leaving early frees what was opened."""

from __future__ import annotations

import pytest

from cllm import EngineConfig
from cllm.doctor import Check, Conclusion, Experiment, Plan, Report, Status, examine
from cllm.doctor.experiments import SETUPS

MODEL = EngineConfig().model_path


@pytest.mark.full
def test_an_examination_checks_then_plans_then_experiments_then_answers() -> None:
    found = list(examine(MODEL, n_threads=1, is_quick=True))
    kinds = [type(finding) for finding in found]
    n_checks = kinds.count(Check) - 1
    assert kinds[n_checks:] == [Plan, *[Experiment] * len(SETUPS), Check, Conclusion]
    report = Report(tuple(found))
    assert report.is_healthy
    assert report.conclusion is not None
    assert not report.conclusion.grows
    plan = found[n_checks]
    assert isinstance(plan, Plan)
    assert len(report.experiments[0].requests) == plan.n_requests


def test_an_examination_that_is_left_early_leaves_nothing_open() -> None:
    """An unclosed model or context would be a ResourceWarning, which is an error here."""
    findings = examine(MODEL, n_threads=1, is_quick=True)
    for finding in findings:
        if isinstance(finding, Experiment):
            break
    findings.close()


def test_after_a_failed_check_of_the_model_no_experiment_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = Check("decode", Status.FAILED, "logits are not finite")
    monkeypatch.setattr("cllm.doctor.examination.model_checks", lambda *_args, **_kwargs: [bad])
    found = list(examine(MODEL, n_threads=1, is_quick=True))
    assert found[-1] == bad
    assert not Report(tuple(found)).is_healthy
