"""The page of results says everything that was measured, what was not, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.side_by_side import page
from benchmarks.side_by_side.peers import ROOT
from benchmarks.side_by_side.records import (
    BATCHED_BENCH,
    CLLM,
    CLLM_SERVE,
    LLAMA_SERVER,
    XLLAMACPP,
    Record,
)
from benchmarks.side_by_side.targets import TARGETS, judge
from tests.benchmarks.conftest import TARGET, beside, turns

ENVIRONMENT = page.Environment(
    date="2026-01-31",
    options="3 turns",
    machine="a machine of two cores",
    commit="0123456789",
    record={"commit": "c0ffee000", "compiler": "c++ 12", "amx": "faults", "flags": ["-DX=ON"]},
    missing={CLLM: "", XLLAMACPP: ""},
)
NO_PEER = dataclasses.replace(ENVIRONMENT, missing={XLLAMACPP: "No module named 'xllamacpp'"})
NOTES = ROOT / "benchmarks" / "results" / page.NOTES


def text_of(records: list[Record], notes: dict[str, str] | None = None) -> str:
    return page.page(records, ENVIRONMENT, notes or {}, {})


def line_of(text: str, *starts: str) -> list[str]:
    """The cells of the one line of a table whose first cells are these."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (found,) = [row for row in rows if row[: len(starts)] == list(starts)]
    return found


def test_every_target_has_a_line() -> None:
    text = text_of([])

    for target in TARGETS:
        assert line_of(text, target.key, target.text)[-1] == "not measured"
    assert f"Of {len(TARGETS)}: 0 reached, 0 not reached, {len(TARGETS)} not measured." in text


def test_a_target_shows_its_bound_and_what_was_measured() -> None:
    text = text_of(beside(TARGET["a8"], [10, 100, 11], [20, 50, 5]))

    assert line_of(text, "a8")[2:] == [
        "≥ 0.98 × llama-batched-bench", "2.000 [0.500–2.200]", "3", "reached",
    ]  # fmt: skip


def test_a_bound_without_a_rival_has_a_unit() -> None:
    text = text_of(turns(TARGET["ii"], CLLM, 0.31))

    assert line_of(text, "ii")[2:] == ["≤ 0.25 s", "0.310", "1", "not reached"]


def test_rounding_does_not_contradict_the_verdict() -> None:
    text = text_of(beside(TARGET["a1"], [0.98996], [1.0]))

    assert line_of(text, "a1")[3:] == ["0.98996", "1", "not reached"]


def test_what_is_not_reached_is_explained() -> None:
    records = [
        record
        for key in ("a8", "a16", "a32")
        for record in beside(TARGET[key], [1.0 if key == "a32" else 0.5], [1.0])
    ]
    text = text_of(records, {"a16": "Memory is slow.", "a32": "Not asked for."})

    assert "**a8**: Not explained." in text
    assert "**a16**: Memory is slow." in text
    assert "Not asked for." not in text


def test_a_note_may_be_for_several_targets() -> None:
    notes = page.notes_of(
        "# Notes\n\nFor people.\n\n## a16, a32\n\nSlow.\n\nVery.\n\n## e\n\nNo.\n"
    )

    assert notes == {"a16": "Slow.\n\nVery.", "a32": "Slow.\n\nVery.", "e": "No."}


def test_notes_that_are_there_are_about_targets() -> None:
    notes = page.notes_of(NOTES.read_text()) if NOTES.exists() else {}

    assert set(notes) <= {target.key for target in TARGETS}


def test_a_missing_peer_is_named_with_the_reason() -> None:
    text = page.page([], NO_PEER, {}, {})

    assert "not measured: xllamacpp (No module named 'xllamacpp')" in text


def test_xllamacpp_is_said_to_run_another_build() -> None:
    assert "no AVX-512" in text_of([])
    assert "no AVX-512" not in page.page([], NO_PEER, {}, {})


def test_machine_commits_and_flags_are_stated() -> None:
    text = text_of([])

    for fact in (
        "2026-01-31",
        "3 turns",
        "two cores",
        "0123456789",
        "c0ffee000",
        "faults",
        "-DX=ON",
    ):
        assert fact in text


def test_a_section_has_medians_and_ratios_of_every_case() -> None:
    records = beside(TARGET["a1"], [10, 100, 11], [20, 50, 5]) + turns(TARGET["a4"], CLLM, 30.0)
    text = text_of(records)

    assert line_of(text, "tokens/s") == ["tokens/s", CLLM, BATCHED_BENCH, f"÷ {BATCHED_BENCH}"]
    assert line_of(text, "1 sequence") == [
        "1 sequence", "11 [10–100]", "20 [5–50]", "2 [0.50–2.20]",
    ]  # fmt: skip
    assert line_of(text, "4 sequences") == ["4 sequences", "30", "–", "–"]
    assert "Model: qwen3-0.6b/Q4_K_M." in text


def test_metrics_of_one_peer_share_a_table() -> None:
    place = ("i", "m/F16", "a fresh process", CLLM)
    records = [Record(*place, 0, {"rss_above_mib": 41.26, "import_s": 0.2})]

    assert line_of(text_of(records), "a fresh process") == ["a fresh process", "41.3", "0.20"]


def test_a_metric_without_a_title_is_shown_all_the_same() -> None:
    records = [Record("d", "m/F16", "x", CLLM_SERVE, 0, {"quite_new": 3.0})]

    assert line_of(text_of(records), CLLM_SERVE, "quite new")


@pytest.mark.parametrize(("n_failed", "is_shown"), [(0, False), (2, True)])
def test_failures_are_shown_where_there_are_some(n_failed: int, is_shown: bool) -> None:
    records = [
        Record("e", "m/F16", "x", CLLM_SERVE, 0, {"n_failed": 0}),
        Record("e", "m/F16", "x", LLAMA_SERVER, 0, {"n_failed": n_failed}),
    ]

    assert ("| failed" in text_of(records)) is is_shown


def test_a_section_says_where_else_it_was_measured_and_beside_what() -> None:
    records = [
        Record("e", "m/F16", "x", CLLM_SERVE, 0, {"total_s": 1.0}, 1.5, str(ENVIRONMENT)),
        Record("e", "m/F16", "x", CLLM_SERVE, 1, {"total_s": 1.0}, 1.1, "2026-01-30, cllm abc, b"),
        Record("e", "m/F16", "x", CLLM_SERVE, 2, {"total_s": 1.0}, 1.2, "2026-01-30, cllm abc, b"),
        Record("f", "m/F16", "x", CLLM_SERVE, 0, {"total_s": 1.0}, None, str(ENVIRONMENT)),
    ]
    text = text_of(records)

    assert text.count("Measured elsewhere: 2026-01-30, cllm abc, b.") == 1
    assert text.count("took 1.20 times as long as at its fastest, 1.50 at most.") == 1
    assert text.count("A loop beside each") == 1


def test_columns_stand_under_each_other() -> None:
    table = page.markdown(["", "what"], [["a1", "decode"], ["b", "÷ 2"]])

    assert table.splitlines() == [
        "|    | what   |",
        "| -- | ------ |",
        "| a1 | decode |",
        "| b  | ÷ 2    |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (99.96, "100.0"), (12.34, "12.3"), (3.14159, "3.14"), (0.0491, "0.049"),
     (7.0, "7"), (0.0, "0")],
)  # fmt: skip
def test_a_number_has_the_digits_that_say_something(value: float, text: str) -> None:
    assert page.number(value) == text


def test_a_page_is_written_with_its_pictures_and_notes(tmp_path: Path) -> None:
    records = [
        record
        for key in ("a1", "a4", "a8", "c8", "c32")
        for record in beside(TARGET[key], [0.5, 0.6], [1.0, 1.1])
    ] + turns(TARGET["im"], CLLM, 40.0)
    (tmp_path / page.NOTES).write_text("## a4\n\nMemory is slow.\n")

    text = page.write(records, ENVIRONMENT, tmp_path / "").read_text()

    assert "**a4**: Memory is slow." in text
    pictures = sorted(tmp_path.glob("*.png"))
    # One value of one peer is no picture.
    assert [path.name for path in pictures] == ["a.png", "c.png"]
    assert all(f"]({path.name})" in text for path in pictures)
    assert all(path.stat().st_size < 60_000 for path in pictures)


def test_every_verdict_can_be_shown() -> None:
    for target in TARGETS:
        verdict = judge(target, turns(target, target.peer, 1.0, 2.0))
        assert page.judged(verdict)
