"""How many rows of prompts go together, on machines whose costs are known."""

from __future__ import annotations

import pytest

from cllm.engine.core.prompt_cost import (
    DECODING_SHARE,
    FIXED_SHARE,
    N_TICKS_FORGOTTEN,
    PromptCost,
)
from cllm.engine.core.scheduler import ATTENTION_TILE

FIXED_S, ROW_S, TILE_ROW_S = 8e-3, 1e-3, 3e-3
BELOW_A_TILE = ATTENTION_TILE - 1


def learned(n_each: int = 20) -> PromptCost:
    """One that has seen single prompts of several lengths."""
    cost = PromptCost()
    for n_rows in (32, 64, 128, 256) * n_each:
        cost.observe(n_rows, n_rows * n_rows // 2, 1, n_rows, FIXED_S + ROW_S * n_rows)
    return cost


@pytest.mark.parametrize("decode_s", [0.0, 10e-3, 50e-3, 100e-3])
def test_as_many_rows_go_together_as_make_everything_else_a_small_share(decode_s: float) -> None:
    rows_s = max(FIXED_S / FIXED_SHARE, decode_s / DECODING_SHARE)
    assert learned().n_rows_together(decode_s, 0) == pytest.approx(rows_s / ROW_S, rel=0.05)


def test_before_there_was_a_tick_they_are_less_than_a_tile() -> None:
    assert PromptCost().n_rows_together(1.0, 0) < ATTENTION_TILE


def test_where_a_decode_costs_what_its_rows_do_a_tile_is_enough() -> None:
    cost = PromptCost()
    for n_rows in (32, 128) * 20:
        cost.observe(n_rows, 0, 1, 0, ROW_S * n_rows)
    assert cost.n_rows_together(0.0, 0) == ATTENTION_TILE


def test_where_rows_in_tiles_are_dear_prompts_stay_below_one_until_few_cells_are_left() -> None:
    cost = learned()
    cost.observe(22, 22 * 300, 1, 7000, ROW_S * 22)
    cost.observe(88, 88 * 300, 4, 7000, TILE_ROW_S * 88)
    assert cost.n_rows_together(0.0, 7000) == BELOW_A_TILE
    assert cost.n_rows_together(0.0, 3500) == BELOW_A_TILE
    assert cost.n_rows_together(0.0, 3499) >= ATTENTION_TILE


def test_one_dear_batch_is_forgotten_with_the_next_cheap_one() -> None:
    cost = learned()
    cost.observe(22, 22 * 300, 1, 7000, ROW_S * 22)
    for row_s, is_below in ((TILE_ROW_S, True), (ROW_S, False)):
        cost.observe(88, 88 * 300, 4, 7000, row_s * 88)
        assert (cost.n_rows_together(0.0, 7000) == BELOW_A_TILE) is is_below


def test_tiles_are_tried_again_after_a_while() -> None:
    cost = learned()
    cost.observe(22, 22 * 300, 1, 7000, ROW_S * 22)
    cost.observe(88, 88 * 300, 4, 7000, TILE_ROW_S * 88)
    for _ in range(N_TICKS_FORGOTTEN):
        assert cost.n_rows_together(0.0, 7000) == BELOW_A_TILE
        cost.observe(60, 60 * 300, 2, 7000, ROW_S * 60)
    assert cost.n_rows_together(0.0, 7000) >= ATTENTION_TILE


def test_a_long_prompt_by_itself_says_nothing_of_several() -> None:
    cost = learned()
    cost.observe(22, 22 * 300, 1, 7000, ROW_S * 22)
    cost.observe(256, 256 * 300, 1, 7000, TILE_ROW_S * 256)
    assert cost.n_rows_together(0.0, 7000) >= ATTENTION_TILE
