"""The check of the engine: identical requests with others between."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cllm import EngineConfig
from cllm.doctor import Plan, Shape, Status
from cllm.doctor.engine_check import check_times, engine_check

PLAN = Plan(Shape(n_prompt=8, n_output=4), n_requests=8, n_seq_ids=4, estimated_s=0.0)


def test_requests_of_equal_time_are_well_whatever_the_cache_holds() -> None:
    check = check_times([0.01] * 8, [100, 200, 300, 400, 500, 600, 700, 1800])
    assert check.status is Status.OK
    assert "8 identical requests" in check.text
    assert "100 → 1,800" in check.text
    assert "×1.00" in check.text


@pytest.mark.parametrize(("last_s", "status"), [(0.012, Status.OK), (0.02, Status.WARNING)])
def test_requests_that_take_longer_are_a_warning(last_s: float, status: Status) -> None:
    check = check_times([0.01] * 6 + [last_s] * 2, [100] * 8)
    assert (check.name, check.status) == ("engine", status)
    assert ("quiet machine" in check.text) == (status is Status.WARNING)


def test_the_embedded_model_is_checked_with_a_cache_that_fills() -> None:
    check = engine_check(EngineConfig().model_path, PLAN, n_threads=1)
    assert check.name == "engine"
    assert check.text.startswith("8 identical requests to the engine, with others between")
    cells = re.search(r"requests ([\d,]+) → ([\d,]+);", check.text)
    assert cells is not None
    first, last = (int(number.replace(",", "")) for number in cells.groups())
    assert 0 < first < last


def test_an_engine_that_does_not_load_is_a_failed_check(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    check = engine_check(path, PLAN, n_threads=1)
    assert (check.name, check.status) == ("engine", Status.FAILED)
    assert "no.gguf" in check.text
