"""The page of results says everything that was measured, what was not, and nothing else."""

from __future__ import annotations

from benchmarks.side_by_side import page
from benchmarks.side_by_side.peers import ROOT
from benchmarks.side_by_side.records import (
    ALONE,
    BARE_SERVER,
    CLLM,
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
        "≥ 0.98 × llama-batched-bench", "2.000 [0.500–2.200]", "", "", "3", "reached",
    ]  # fmt: skip


def test_a_target_shows_the_limits_that_were_measured_beside_it() -> None:
    target = TARGET["b8"]
    limits = turns(target, ALONE, 2.2, 2.4, 4.4) + turns(target, BARE_SERVER, 1.0, 2.0, 4.0)
    text = text_of([*beside(target, [1, 2, 3], [1, 2, 4]), *limits])

    assert line_of(text, "b8")[4:6] == ["1.20 [1.10–2.20]", "1"]


def test_a_bound_without_a_rival_has_a_unit() -> None:
    text = text_of(turns(TARGET["ii"], CLLM, 0.31))

    assert line_of(text, "ii")[2:] == ["≤ 0.25 s", "0.310", "", "", "1", "not reached"]


def test_rounding_does_not_contradict_the_verdict() -> None:
    text = text_of(beside(TARGET["a1"], [0.98996], [1.0]))

    assert line_of(text, "a1")[3:] == ["0.98996", "", "", "1", "not reached"]


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


def test_every_verdict_can_be_shown() -> None:
    for target in TARGETS:
        verdict = judge(target, turns(target, target.peer, 1.0, 2.0))
        assert page.judged(verdict)
