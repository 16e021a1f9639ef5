"""Architectures of every kind of memory; `make test-archs` examines all, with more types of weights."""

from __future__ import annotations

import pytest

from tests.reliability.architectures import (
    WORKS,
    Cell,
    Verdict,
    examine,
    reasons,
    record,
    summary,
)
from tools import architecture_models

# Full attention, windows, states, both, latent and sparse attention, and what llama.cpp has one
# model of each for.
NAMES = (
    "llama", "qwen3moe", "gemma3", "gpt-oss", "mamba2", "jamba", "qwen35", "nemotron_h", "lfm2",
    "kimi-linear", "deepseek2", "glm-dsa", "dots3note", "deepseek4", "minimax-m3", "glm5-next",
)  # fmt: skip
UNIFIED, EXACT = Cell("unified", "Q8_0"), Cell("deterministic", "Q8_0")


@pytest.mark.sampled(3)
@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_gives_the_answers_of_alone_in_any_company(name: str) -> None:
    path = architecture_models.ensure(name)[0]
    unified, exact = examine(path, [UNIFIED, EXACT])
    assert unified.result == WORKS, unified.reason
    assert exact.is_right, exact.reason


@pytest.mark.full
def test_one_that_ends_its_process_is_rejected_with_preflight() -> None:
    path = architecture_models.ensure("kimi-linear")[0]
    (verdict,) = examine(path, [Cell("per-sequence", "Q8_0")])
    assert verdict.preflight
    assert verdict.result == "rejected"
    assert "ended with SIGABRT" in verdict.reason


@pytest.mark.full
@pytest.mark.parametrize("name", ["plamo2", "cogvlm"])
def test_one_that_llama_cpp_computes_wrongly_is_rejected_by_name(name: str) -> None:
    (path,) = architecture_models.ensure(name)
    (verdict,) = examine(path, [UNIFIED])
    assert not verdict.preflight
    assert verdict.result == "rejected"
    assert f"{name}: llama.cpp" in verdict.reason


def verdict(name: str, layout: str, file_type: str, result: str, reason: str = "") -> Verdict:
    return Verdict(name, layout, file_type, False, False, result, reason)


def test_the_record_has_a_row_for_each_file_that_does_not_work_everywhere() -> None:
    found = [
        verdict(name, layout, kind, WORKS)
        for name in ("a", "b")
        for layout in ("unified", "per-sequence", "deterministic")
        for kind in ("F32", "Q8_0", "Q4_K_M")
    ]
    path = "cannot load '/x/b.gguf': "
    found[-3] = verdict("b", "deterministic", "F32", "rejected", f"E: {path}no")
    assert summary(found).rows == [["a", "yes", "yes", "yes"], ["b", "yes", "yes", "Q8_0, Q4_K_M"]]
    assert reasons(found).rows == [("b", "deterministic", "E: no")]
    kept = record(found)
    assert kept.figures["n_files"] == 2
    assert kept.figures["n_files_that_work_in_every_way"] == 1
    assert kept.figures["n_files_that_work_deterministic"] == 2
    assert [row[0] for row in kept.tables[0].rows] == ["b"]
