"""Rows that share the decoding of a matrix of Q6_K have the bits that each has alone (tools/native/change_llama.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model, library
from tests.bindings.conftest import NewContext
from tools import make_model
from tools.native.change_llama import N_TILE_ROWS

# Rows from which an unchanged llama.cpp multiplies by tiles, which round otherwise.
N_LLAMA_TILE_ROWS = 8


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """A model whose matrices are of Q6_K, and are not rearranged on any CPU."""
    with Model(make_model.ensure("qwen3-wide", "Q6_K"), use_extra_bufts=False) as model:
        yield model


def logits_of(context: Context, seq_ids: range) -> NDArray[np.float32]:
    """Return the logits of the second tokens of these sequences, which are computed together."""
    context.memory_clear()
    for p0 in range(2):
        batch = Batch(len(seq_ids))
        for seq_id in seq_ids:
            batch.add(seq_id, [33 + 7 * p0 + seq_id], p0, n_outputs=1)
        rows: NDArray[np.float32] = context.decode(batch).rows.copy()
    return rows


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_alone_and_beside_others(
    new_context: NewContext, n_threads: int
) -> None:
    n_most = N_TILE_ROWS if library().record.get("patched") else N_LLAMA_TILE_ROWS
    context = new_context(n_seq_max=n_most, n_ctx=256, n_threads=n_threads, kv_unified=False)
    alone = np.concatenate(
        [logits_of(context, range(seq_id, seq_id + 1)) for seq_id in range(n_most - 1)]
    )
    for n_rows in range(2, n_most):
        assert np.array_equal(logits_of(context, range(n_rows)), alone[:n_rows]), n_rows
