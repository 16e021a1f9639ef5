"""docs/reliability.md says what the records say, and nothing else."""

from __future__ import annotations

import re

import pytest

from tests.reliability.page import (
    ARCHITECTURES,
    ARCHITECTURES_PAGE,
    BOUNDS,
    PAGE,
    PROOFS,
    architectures_page,
    page,
    saved,
    section,
)
from tests.reliability.record import ROOT, Record, Table, conclude, text_of


def test_the_page_is_the_one_of_the_records() -> None:
    assert PAGE.read_text() == page(saved()), "run python -m tests.reliability.page"


def test_the_page_of_architectures_is_the_one_of_their_record() -> None:
    (record,) = (record for record in saved() if record.name == ARCHITECTURES)
    assert ARCHITECTURES_PAGE.read_text() == architectures_page(record)


@pytest.mark.parametrize("test", [test for _, _, test in BOUNDS])
def test_every_bound_names_a_test_that_there_is(test: str) -> None:
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert not name or f"def {name}(" in text


def test_every_proof_has_its_record_and_its_place_on_the_page() -> None:
    assert {record.name for record in saved()} == {*PROOFS, ARCHITECTURES}
    for record in saved():
        program = re.search(r"tests\.reliability\.(\w+)", record.command)
        name = record.name if program is None else program[1]
        assert (ROOT / "tests" / "reliability" / f"{name}.py").is_file()


def test_a_record_is_shown_with_its_figures_its_command_and_where_it_comes_from() -> None:
    record = Record(
        "soak", "All is well.", "make soak MINUTES=10", {"requests": 12345, "slope, MiB/h": 0.25},
        [Table(("kind", "times"), [("a|b", 7)], "Kinds")], "one machine", "abc",
    )  # fmt: skip
    text = section("Soak", record)
    for part in (
        "## Soak",
        "make soak",
        "| requests | 12,345 |",
        "0.25",
        "| a\\|b | 7 |",
        "Kinds",
        "one machine; abc",
    ):
        assert part in text, part


def test_what_a_proof_found_decides_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    record = Record("soak", "All is well.", "x", {"n": 1}, [Table(("a", "b"), [("long", 7)], "T")])
    assert text_of(record) == "T\na     b\nlong  7\n\nn: 1\n"
    assert conclude(record, [], is_kept=False) == 0
    assert capsys.readouterr().out.endswith("n: 1\nholds\n")
    assert conclude(record, ["7 is not 8"], is_kept=False) == 1
    assert capsys.readouterr().out.endswith("WRONG 7 is not 8\nDOES NOT HOLD\n")
