"""Cells of other sequences, which attention skips, change nothing, wherever they lie (tools/native/change_llama.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.bindings import Batch, Context
from tests.bindings.conftest import NewContext

OWN, OTHER = 0, 1
TOLERANCE = 1e-2
# With fewer cells, llama.cpp sums up one cell after another; the first rows of a prompt's tiles are 64.
N_CELLS, N_TILE = 256, 64


def decode(context: Context, seq_id: int, n_tokens: int, p0: int) -> NDArray[np.float32]:
    """Return the logits of the last of `n_tokens` tokens."""
    batch = Batch(128)
    batch.add(seq_id, [(7 * (p0 + i) + seq_id) % 90 + 32 for i in range(n_tokens)], p0, n_outputs=1)
    row: NDArray[np.float32] = context.decode(batch).rows[0].copy()
    return row


def logits_of(context: Context, runs: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
    """Return the logits after each piece of a sequence; runs are lengths of (cells of another one, piece)."""
    found, n_other, n_own = [], 0, 0
    for n_foreign, n_piece in runs:
        if n_foreign:
            decode(context, OTHER, n_foreign, n_other)
        found.append(decode(context, OWN, n_piece, n_own))
        n_other, n_own = n_other + n_foreign, n_own + n_piece
    return found


@pytest.fixture
def unified(new_context: NewContext) -> Context:
    return new_context(kv_unified=True, n_ctx=1024, n_batch=128, n_ubatch=128)


RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=12)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RUNS.filter(lambda runs: sum(map(sum, runs)) <= N_CELLS))
def test_no_bit_of_a_decode_depends_on_where_cells_of_others_lie(
    unified: Context, runs: list[tuple[int, int]]
) -> None:
    unified.memory_clear()
    alone = logits_of(unified, [(0, n_piece) for _, n_piece in runs])
    unified.memory_clear()
    for one, other in zip(logits_of(unified, runs), alone, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("n_foreign", [1, 15, 16, 17, 63, 64, 65, 127])
@pytest.mark.parametrize("n_tokens", [N_TILE, N_TILE + 37])
def test_a_prompt_of_whole_tiles_is_the_same_after_cells_of_others(
    unified: Context, n_foreign: int, n_tokens: int
) -> None:
    (alone,) = logits_of(unified, [(0, n_tokens)])
    unified.memory_clear()
    (beside,) = logits_of(unified, [(n_foreign, n_tokens)])
    assert np.abs(alone - beside).max() < TOLERANCE


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_token_is_the_same_where_threads_share_many_cells_of_others(
    new_context: NewContext, n_threads: int
) -> None:
    context = new_context(
        kv_unified=True, n_ctx=1024, n_batch=128, n_threads=n_threads, n_threads_batch=n_threads
    )
    alone = logits_of(context, [(0, 40), (0, 1)])
    context.memory_clear()
    for p0 in range(0, 600, 60):
        decode(context, OTHER, 60, p0)
    beside = logits_of(context, [(0, 40), (0, 1)])
    assert np.abs(alone[-1] - beside[-1]).max() < TOLERANCE
