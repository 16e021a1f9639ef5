"""Damaged copies of sequences: refused, and without a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.reliability.damaged_states import (
    DAMAGED,
    FORGED,
    LAYOUTS,
    Counts,
    Findings,
    contradictions,
    examine,
)

pytestmark = pytest.mark.full


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_damaged_copy_of_a_sequence_is_restored(layout: str) -> None:
    """2,000 with bits flipped and 500 beginnings; with a forged checksum they stay harmless."""
    found = examine(layout)
    assert contradictions(layout, found) == []
    assert isinstance(found, Findings)
    damaged, forged = found.counts
    assert (damaged.way, damaged.flipped_refused, damaged.cut_refused) == (DAMAGED, 2000, 500)
    assert (forged.way, forged.cut_refused) == (FORGED, 500)
    assert forged.flipped_refused < 2000, "none of them reached llama.cpp"


SOUND = Counts(
    DAMAGED, "unified", flipped=9, flipped_refused=9, cut=5, cut_refused=5, sound_restored=True
)
FOREIGN = dict.fromkeys(
    ("another type of the cache", "without flash attention", "the other layout",
     "another architecture", "a hybrid model"), "refused",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flipped_refused": 8}, "restored damaged copies"),
        ({"cut_refused": 4}, "accepted beginnings of copies"),
        ({"left": 1}, "left: 1"),
        ({"stuck": 1}, "stuck: 1"),
        ({"changed": 1}, "changed: 1"),
        ({"poisoned": 1}, "poisoned: 1"),
        ({"sound_restored": False}, "a sound copy was not restored"),
    ],
)
def test_what_contradicts_the_claim_is_found(change: dict[str, Any], says: str) -> None:
    assert contradictions("unified", Findings([SOUND], FOREIGN)) == []
    said = contradictions("unified", Findings([replace(SOUND, **change)], FOREIGN))
    assert any(says in line for line in said)


def test_a_crash_and_a_foreign_copy_that_is_accepted_are_found() -> None:
    assert contradictions("unified", -11) == ["unified: the process ended with -11"]
    foreign = FOREIGN | {"the other layout": "accepted"}
    (said,) = contradictions("unified", Findings([SOUND], foreign))
    assert said == "unified: the other layout: accepted"
