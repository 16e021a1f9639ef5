"""Damaged files of images and audio: rejected by name, and other requests have their answers."""

from __future__ import annotations

import pytest

from tests.reliability.damaged_media import CUT, FLIPPED, FOREIGN, LARGE, SUBJECTS, examine, record


@pytest.mark.full
@pytest.mark.one_loop
@pytest.mark.one_loop
@pytest.mark.timeout(600)  # a process for each file
@pytest.mark.anyio
@pytest.mark.parametrize("kind", SUBJECTS)
async def test_damaged_files_are_rejected_by_name_or_answered(kind: str) -> None:
    subject = SUBJECTS[kind]
    found = await examine(subject, 60)
    assert found.wrong == []
    assert found.outcomes.total() == found.n_answers == 60
    assert {damage for damage, _ in found.outcomes} == {FLIPPED, CUT, LARGE, FOREIGN}
    assert record(subject, found).figures["other errors, or other answers"] == 0
