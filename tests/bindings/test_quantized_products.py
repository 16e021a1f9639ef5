"""Products with quantized matrices in the kernels of tools/native/change_llama.py equal those of llama.cpp."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache

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

is_x86 = platform.machine() in ("x86_64", "AMD64")


def logits_of(context: Context, seq_ids: range) -> NDArray[np.float32]:
    """Return the logits of the second tokens of these sequences, which are computed together."""
    context.memory_clear()
    for p0 in range(2):
        batch = Batch(len(seq_ids))
        for seq_id in seq_ids:
            batch.add(seq_id, [33 + 7 * p0 + seq_id], p0, n_outputs=1)
        rows: NDArray[np.float32] = context.decode(batch).rows.copy()
    return rows


@pytest.mark.skipif(
    not is_x86, reason="other processors multiply pairs of rows by other instructions"
)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_row_of_q6_k_has_the_same_bits_alone_and_beside_others(n_threads: int) -> None:
    n_most = N_TILE_ROWS if library().record.get("patched") else N_LLAMA_TILE_ROWS
    path = make_model.ensure("qwen3-wide", "Q6_K")
    with (
        Model(path, n_gpu_layers=0, use_extra_bufts=False) as model,
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


PROGRAM = """
import json, sys
import numpy as np
from cllm.bindings import Batch, Context, Model

def logits_of(model, n_tokens, n_threads):
    with Context(
        model, n_ctx=512, n_batch=512, n_ubatch=512, n_outputs_max=512, n_threads=n_threads,
        n_threads_batch=n_threads,
    ) as context:
        batch = Batch(n_tokens)
        batch.add(0, [32 + 7 * i % 90 for i in range(n_tokens)], 0, n_outputs=n_tokens)
        return context.decode(batch).rows.copy()

path, n_threads = sys.argv[1], int(sys.argv[2])
told = {}
with Model(path, n_gpu_layers=0) as rearranged:
    with Model(path, n_gpu_layers=0, use_extra_bufts=False) as plain:
        for n_tokens in map(int, sys.argv[3:]):
            one, other = (logits_of(model, n_tokens, n_threads) for model in (rearranged, plain))
            told[n_tokens] = float(np.abs(one - other).max())
print(json.dumps(told))
"""
LENGTHS = (N_TILE_ROWS - 1, N_TILE_ROWS, 33, 100, 256, 257, 300)


@cache
def differences(n_threads: int) -> dict[str, float]:
    """Return the largest difference of logits for each length of a prompt, of a process whose tiles are on."""
    path = make_model.ensure("qwen3-wide", "Q4_K_M")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(n_threads), *map(str, LENGTHS)],
        env={name: value for name, value in os.environ.items() if name != "GGML_CPU_TILED_MM"},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    told: dict[str, float] = json.loads(done.stdout)
    return told


# With 12 threads, a matrix of 1,024 rows is cut into parts so small that llama.cpp computes several blocks of a row
# at once.
@pytest.mark.parametrize("n_threads", [1, 2, 12])
def test_a_prompt_is_the_same_with_rearranged_weights_and_without(n_threads: int) -> None:
    found = differences(n_threads)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.skipif(not is_x86, reason="other processors have no tiles")
@pytest.mark.parametrize("n_threads", [1, 2, 12])
def test_a_prompt_of_tiles_has_the_same_bits_with_rearranged_weights_and_without(
    n_threads: int,
) -> None:
    record = library().record
    if not record.get("patched") or record.get("amx") == "works":
        pytest.skip("the library has no tiles for rearranged weights")
    found = differences(n_threads)
    assert found[str(N_TILE_ROWS - 1)] > 0, "rearranged weights are multiplied by another kernel"
    assert [found[str(n)] for n in LENGTHS[1:]] == [0] * len(LENGTHS[1:])
