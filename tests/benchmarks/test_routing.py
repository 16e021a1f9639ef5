"""The simulation of routing: what begins alike is found by who chooses for it, and nobody is lost."""

from __future__ import annotations

import pytest

from benchmarks.routing import WAYS, run


@pytest.mark.full
def test_a_table_of_beginnings_finds_what_chance_does_not() -> None:
    found = {way: run(way, 4, 0.04, seed=1, dies=False).found for way in WAYS}
    assert found["prefix table"] > 0.95
    assert found["session hash"] > found["random"] + 0.1


@pytest.mark.full
def test_what_a_replica_had_that_dies_goes_on_on_the_others() -> None:
    whole, cut = (run("prefix table", 2, 0.12, seed=0, dies=dies) for dies in (False, True))
    assert cut.n_moved > 0
    assert len(cut.ttfts) == pytest.approx(len(whole.ttfts), rel=0.1)
