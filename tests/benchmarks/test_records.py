"""Records: kept as lines of JSON, and compared within a turn."""

from __future__ import annotations

from pathlib import Path

from benchmarks.side_by_side.records import (
    CLLM,
    LLAMA_SERVER,
    Record,
    Spread,
    load,
    ratios,
    save,
    spread,
    values_of,
)

RECORDS = [
    Record("b", "m/F16", "8 clients", CLLM, 0, {"tokens_per_s": 10.0}),
    Record("b", "m/F16", "8 clients", CLLM, 2, {"tokens_per_s": 12.0, "ttft_p50_ms": 3.5}),
    Record("b", "m/F16", "8 clients", LLAMA_SERVER, 0, {"tokens_per_s": 9.0}),
    Record("b", "m/Q8_0", "8 clients", CLLM, 1, {"tokens_per_s": 11.0}),
]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(RECORDS, tmp_path / "records.jsonl")

    assert load(tmp_path / "records.jsonl") == RECORDS


def test_values_are_of_one_peer_model_case_and_metric() -> None:
    values = values_of(RECORDS, "b", "m/F16", "8 clients", CLLM, "tokens_per_s")

    assert values == {0: 10.0, 2: 12.0}
    assert values_of(RECORDS, "b", "m/F16", "8 clients", CLLM, "ttft_p50_ms") == {2: 3.5}
    assert values_of(RECORDS, "a", "m/F16", "8 clients", CLLM, "tokens_per_s") == {}


def test_a_ratio_needs_both_in_the_same_turn() -> None:
    assert ratios({0: 10.0, 1: 30.0, 3: 8.0}, {1: 10.0, 2: 10.0, 3: 4.0}) == [3.0, 2.0]


def test_nothing_is_put_in_relation_to_nothing() -> None:
    assert ratios({0: 10.0}, {0: 0.0}) == []


def test_a_spread_is_the_median_between_extremes() -> None:
    assert spread([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0, 3)
    assert spread([]) is None
