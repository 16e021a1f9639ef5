"""Damaged files of images: rejected by name, and other requests have their answers."""

from __future__ import annotations

import pytest

from tests.reliability.damaged_images import CUT, FLIPPED, FOREIGN, LARGE, examine, record


@pytest.mark.full
@pytest.mark.one_loop
@pytest.mark.timeout(600)  # a process for each file
@pytest.mark.anyio
async def test_damaged_images_are_rejected_by_name_or_answered() -> None:
    found = await examine(60)
    assert found.wrong == []
    assert found.outcomes.total() == found.n_answers == 60
    assert {damage for damage, _ in found.outcomes} == {FLIPPED, CUT, LARGE, FOREIGN}
    assert record(found).figures["other errors, or other answers"] == 0
