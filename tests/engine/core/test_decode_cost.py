"""DecodeCost learns from each tick what that tick can tell, and nothing else."""

from __future__ import annotations

import pytest

from cllm.engine.core.decode_cost import DecodeCost, TickShape
from cllm.engine.core.row_cost import N_TRUSTED, RowCost
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.tick_shares import TickShares
from tests.engine.core.test_scheduler import running, sequence_of


def cost(*, is_unified: bool = True) -> DecodeCost:
    return DecodeCost(RowCost(), TickShares(), is_unified=is_unified)


def shape(n_decoding: int, n_prompts: int = 0, *, is_even: bool = True) -> TickShape:
    n_chunks = n_decoding + n_prompts
    return TickShape(n_decoding + 10 * n_prompts, 100, n_chunks, n_decoding, is_even)


def test_the_shape_of_a_tick_is_that_of_its_chunks() -> None:
    prompt, first, second = running(sequence_of(40, 1), sequence_of(1, 2), sequence_of(1, 3))
    chunks = [Chunk(prompt, 32), Chunk(first, 1), Chunk(second, 1, drafts=(7, 8))]
    assert TickShape.of(chunks) == TickShape(
        n_rows=36, n_attended=32 * 33 // 2 + 1 + 6, n_chunks=3, n_decoding=2, is_even=False
    )
    assert not TickShape.of(chunks).is_decoding_only
    assert TickShape.of(chunks[1:]).is_decoding_only


def test_rows_are_learned_from_the_decode_of_ticks_without_prompts() -> None:
    known = cost()
    for _ in range(N_TRUSTED):
        known.observe(shape(2), 0, total_s=0.5, planned_s=0.25)
        known.observe(shape(2, 1), 0, total_s=8.0, planned_s=0.25)
    assert known.rows.table == {2: 0.25}


@pytest.mark.parametrize(("is_unified", "learns"), [(True, True), (False, False)])
def test_sequences_of_unequal_rows_are_computed_apart_in_the_other_layout(
    is_unified: bool, learns: bool
) -> None:
    known = cost(is_unified=is_unified)
    for _ in range(N_TRUSTED):
        known.observe(shape(2, is_even=False), 0, total_s=0.5, planned_s=0.0)
    assert bool(known.rows.table) == learns


def test_the_next_tick_takes_what_the_last_ones_of_its_kinds_have_taken() -> None:
    known = cost()
    assert known.next_tick_s(2, 1, 1) == 0.0, "nothing is known"
    known.observe(shape(0, 1), 0, total_s=2.0, planned_s=0.0)
    assert known.next_tick_s(2, 1, 1) == 2.0
    for _ in range(N_TRUSTED):
        known.observe(shape(2), 0, total_s=0.5, planned_s=0.0)
    assert known.next_tick_s(2, 0, 1) == 0.5
    assert known.next_tick_s(2, 1, 1) == 2.5
    assert known.next_tick_s(4, 0, 2) == 1.0, "one decode for each set of adapters"


def test_prompts_go_on_while_their_turn_is_shorter_than_a_decode_and_tiles_are_dear() -> None:
    known = cost()
    short = TickShape(n_rows=32, n_attended=0, n_chunks=1, n_decoding=0, is_even=True)
    known.observe(short, 0, total_s=0.01, planned_s=0.0)
    known.prompts.observe(128, 0, 2, 0, 0.1)
    known.observe(shape(4), 0, total_s=0.025, planned_s=0.0)
    assert known.goes_on(0)
    for goes_on in (True, False):  # a third one would make the turn longer than the decode
        known.observe(short, 0, total_s=0.01, planned_s=0.0)
        assert known.prompts.are_tiles_dear(0)
        assert known.goes_on(0) == goes_on
    known.observe(shape(4), 0, total_s=0.025, planned_s=0.0)
    assert known.goes_on(0)
    known.prompts.observe(128, 0, 2, 0, 0.02)
    assert not known.goes_on(0), "tiles are cheap"
