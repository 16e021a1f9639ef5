"""Products with quantized matrices in the kernels of tools/native/change_llama.py are those of llama.cpp's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model, library
from tools import make_model
from tools.native.change_llama import N_TILE_ROWS

# Rows from which an unchanged llama.cpp multiplies by tiles, which round otherwise.
N_LLAMA_TILE_ROWS = 8
# Difference of logits between two kernels, which round otherwise, is 0.1 at most.  The largest logit is 3.5 to 5.
TOLERANCE = 0.3


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
def test_a_row_of_q6_k_has_the_same_bits_alone_and_beside_others(n_threads: int) -> None:
    n_most = N_TILE_ROWS if library().record.get("patched") else N_LLAMA_TILE_ROWS
    with (
        Model(make_model.ensure("qwen3-wide", "Q6_K"), use_extra_bufts=False) as model,
        Context(
            model, n_seq_max=n_most, n_ctx=256, kv_unified=False, n_threads=n_threads,
            n_threads_batch=n_threads,
        ) as context,
    ):  # fmt: skip
        alone = np.concatenate(
            [logits_of(context, range(seq_id, seq_id + 1)) for seq_id in range(n_most - 1)]
        )
        for n_rows in range(2, n_most):
            assert np.array_equal(logits_of(context, range(n_rows)), alone[:n_rows]), n_rows


def prompt_logits(model: Model, n_tokens: int, n_threads: int) -> NDArray[np.float32]:
    """Return the logits of each token of a prompt, which is one batch."""
    with Context(
        model, n_ctx=512, n_batch=512, n_ubatch=512, n_outputs_max=512, n_threads=n_threads,
        n_threads_batch=n_threads,
    ) as context:  # fmt: skip
        batch = Batch(n_tokens)
        tokens = [32 + 7 * i % 90 for i in range(n_tokens)]
        batch.add(0, tokens, 0, n_outputs=n_tokens)
        rows: NDArray[np.float32] = context.decode(batch).rows.copy()
    return rows


# With 12 threads, a matrix of 1,024 rows is cut into parts so small that llama.cpp computes several blocks of a row
# at once.
@pytest.mark.parametrize("n_threads", [1, 2, 12])
@pytest.mark.parametrize("n_tokens", [N_TILE_ROWS - 1, N_TILE_ROWS, 33, 100, 256, 257, 300])
def test_a_prompt_is_the_same_with_rearranged_weights_and_without(
    n_tokens: int, n_threads: int
) -> None:
    path = make_model.ensure("qwen3-wide", "Q4_K_M")
    with Model(path) as rearranged, Model(path, use_extra_bufts=False) as plain:
        found = prompt_logits(rearranged, n_tokens, n_threads)
        expected = prompt_logits(plain, n_tokens, n_threads)
    assert np.abs(found - expected).max() < TOLERANCE
