"""Context: decode, the KV cache, state of a sequence, abort, counters; in both layouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model
from cllm.errors import (
    DecodeFailedError,
    NoKVSlotError,
    PositionError,
    StaleLogitsError,
)
from tests.bindings.conftest import NewContext
from tools import make_model

TOLERANCE = 1e-2
TEXT = list(b"the quick brown fox")
OTHER = list(b"jumps over")


def decode(context: Context, seq_id: int, tokens: Sequence[int], p0: int) -> NDArray[np.float32]:
    """The logits of the last token."""
    batch = Batch(64)
    batch.add(seq_id, tokens, p0, n_outputs=1)
    row: NDArray[np.float32] = context.decode(batch).rows[0].copy()
    return row


def close_to(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    return bool(np.abs(one - other).max() < TOLERANCE)


# --- Decoding --------------------------------------------------------------------------------
def test_a_sequence_has_the_same_logits_alone_and_in_a_batch(context: Context) -> None:
    alone = decode(context, 0, TEXT, 0)
    other_alone = decode(context, 1, OTHER, 0)
    context.memory_clear()
    batch = Batch(64)
    batch.add(2, TEXT, 0, n_outputs=1)
    batch.add(3, OTHER, 0, n_outputs=1)
    rows = context.decode(batch).rows
    assert close_to(rows[0], alone)
    assert close_to(rows[1], other_alone)
    assert not close_to(rows[0], rows[1])


def test_a_sequence_has_the_same_logits_whole_and_in_pieces(context: Context) -> None:
    whole = decode(context, 0, TEXT, 0)
    for p0, token in enumerate(TEXT):
        stepwise = decode(context, 1, [token], p0)
    assert close_to(stepwise, whole)


def test_logits_have_one_row_for_each_output_in_batch_order(new_context: NewContext) -> None:
    context = new_context(n_outputs_max=8)
    batch = Batch(64)
    batch.add(0, TEXT[:3], 0, n_outputs=2)
    batch.add(1, TEXT[:2], 0)
    batch.add(2, TEXT[:1], 0, n_outputs=1)
    logits = context.decode(batch)
    rows = logits.rows.copy()
    assert rows.shape == (logits.n_rows, context.n_vocab) == (3, 260)
    for row, n_tokens in zip(rows, (2, 3, 1), strict=True):
        context.memory_clear()
        assert close_to(row, decode(context, 3, TEXT[:n_tokens], 0))


def test_a_batch_without_outputs_has_no_logits(context: Context) -> None:
    batch = Batch(8)
    batch.add(0, TEXT[:4], 0)
    assert context.decode(batch).rows.shape == (0, 260)
    assert context.seq_pos_max(0) == 3


def test_logits_are_stale_after_the_next_decode(context: Context) -> None:
    batch = Batch(8)
    batch.add(0, TEXT[:4], 0, n_outputs=1)
    logits = context.decode(batch)
    assert np.isfinite(logits.rows).all()
    decode(context, 0, TEXT[4:5], 4)
    with pytest.raises(StaleLogitsError):
        logits.rows  # noqa: B018


def test_a_refused_batch_leaves_the_last_logits_valid(context: Context) -> None:
    batch = Batch(8)
    batch.add(0, TEXT[:4], 0, n_outputs=1)
    logits = context.decode(batch)
    before = logits.rows.copy()
    with pytest.raises(PositionError):
        decode(context, 0, TEXT[:1], 9)
    assert np.array_equal(logits.rows, before)


def test_a_full_cache_stores_nothing_and_goes_on(new_context: NewContext) -> None:
    context = new_context(n_ctx=256)
    for seq_id in range(4):
        decode(context, seq_id, [97] * 63, 0)
    with pytest.raises(NoKVSlotError) as caught:
        decode(context, 0, [97] * 8, 63)
    assert (caught.value.function, caught.value.code) == ("llama_decode", 1)
    assert [context.seq_pos_max(seq_id) for seq_id in range(4)] == [62] * 4
    context.seq_rm(3)
    assert np.isfinite(decode(context, 0, [97] * 8, 63)).all()


@pytest.mark.parametrize(
    "parameters",
    [
        {"n_ubatch": 1}, {"n_ubatch": 3, "kv_unified": False}, {"n_batch": 4, "n_ubatch": 1},
        {"n_seq_max": 256, "n_ctx": 256, "n_batch": 256, "n_ubatch": 7}, {"n_ctx": 0},
        {"n_batch": 512, "n_outputs_max": 512, "n_ctx": 256}, {"flash_attn": True},
        {"flash_attn": False}, {"type_k": "q8_0", "type_v": "q8_0"}, {"type_k": "iq4_nl"},
        {"rope_scaling": "yarn", "yarn_ext_factor": 1.0, "yarn_beta_fast": -1.0},
        {"rope_freq_base": 1e12}, {"rope_freq_scale": 1e6}, {"yarn_attn_factor": 0.0},
        {"swa_full": False, "offload_kqv": False, "op_offload": False},
    ],
    ids=str,
)  # fmt: skip
def test_any_accepted_parameters_give_finite_logits(
    new_context: NewContext, parameters: dict[str, Any]
) -> None:
    context = new_context(**parameters)
    assert np.isfinite(decode(context, 0, TEXT[:4], 0)).all()
    assert context.n_ctx_seq <= context.n_ctx
    assert context.n_ubatch <= context.n_batch <= context.n_ctx


@pytest.mark.parametrize("type_", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_every_cache_type_works(new_context: NewContext, type_: str) -> None:
    context = new_context(type_k=type_, type_v=type_, n_ctx=256)
    assert np.isfinite(decode(context, 0, TEXT, 0)).all()


def test_the_layouts_share_the_cells_differently(new_context: NewContext) -> None:
    unified, split = new_context(n_ctx=1024), new_context(n_ctx=1024, kv_unified=False)
    assert (unified.n_ctx, unified.n_ctx_seq) == (1024, 1024)
    assert (split.n_ctx, split.n_ctx_seq) == (1024, 256)
    assert close_to(decode(unified, 3, TEXT, 0), decode(split, 3, TEXT, 0))


# --- KV cache --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "has_tiled_attention"),
    [
        ({}, True),
        ({"type_k": "f32", "type_v": "f32"}, True),
        ({"kv_unified": False}, False),
        ({"flash_attn": False}, False),
        ({"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}, False),
        ({"type_k": "bf16", "type_v": "bf16", "flash_attn": True}, False),
    ],
    ids=str,
)
def test_attention_goes_by_tiles_in_one_buffer_of_f16_or_f32(
    new_context: NewContext, options: dict[str, Any], has_tiled_attention: bool
) -> None:
    context = new_context(**{"n_ctx": 512, "n_seq_max": 2, "kv_unified": True, **options})
    assert context.has_tiled_attention == has_tiled_attention


def test_seq_rm_lets_a_sequence_start_anew(context: Context) -> None:
    first = decode(context, 0, TEXT, 0)
    decode(context, 1, OTHER, 0)
    assert context.seq_rm(0)
    assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (None, None)
    assert context.seq_pos_max(1) == len(OTHER) - 1
    assert close_to(decode(context, 0, TEXT, 0), first)


def test_seq_rm_of_the_end_lets_a_sequence_go_back(context: Context) -> None:
    whole = decode(context, 0, TEXT, 0)
    assert context.seq_rm(0, 5)
    assert context.seq_pos_max(0) == 4
    assert close_to(decode(context, 0, TEXT[5:], 5), whole)


def test_seq_cp_continues_like_the_source(context: Context) -> None:
    decode(context, 0, TEXT, 0)
    context.seq_cp(0, 2)
    batch = Batch(8)
    batch.add(0, [98], len(TEXT), n_outputs=1)
    batch.add(2, [98], len(TEXT), n_outputs=1)
    rows = context.decode(batch).rows
    assert close_to(rows[0], rows[1])
    assert context.seq_pos_max(2) == len(TEXT)


def test_seq_cp_of_a_prefix_shares_it(new_context: NewContext) -> None:
    context = new_context()
    whole = decode(context, 0, TEXT, 0)
    context.seq_cp(0, 1, 0, 5)
    assert (context.seq_pos_min(1), context.seq_pos_max(1)) == (0, 4)
    context.seq_rm(0)
    assert close_to(decode(context, 1, TEXT[5:], 5), whole)


def test_seq_add_shifts_positions(context: Context) -> None:
    decode(context, 0, TEXT, 0)
    context.seq_rm(0, 0, 5)
    context.seq_add(0, 5, None, -5)
    assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (0, len(TEXT) - 6)
    assert np.isfinite(decode(context, 0, [98], len(TEXT) - 5)).all()
    context.seq_add(3, 0, None, 1)  # an empty sequence has nothing to shift
    assert context.seq_pos_max(3) is None


@pytest.mark.parametrize("data", [True, False])
def test_memory_clear_empties_every_sequence(context: Context, data: bool) -> None:
    first = decode(context, 0, TEXT, 0)
    decode(context, 3, TEXT, 0)
    context.memory_clear(data=data)
    assert [context.seq_pos_max(seq_id) for seq_id in range(4)] == [None] * 4
    assert close_to(decode(context, 0, TEXT, 0), first)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-swa", "tiny-recurrent", "tiny-hybrid"])
def test_other_architectures_decode(new_context: NewContext, name: str) -> None:
    with Model(make_model.ensure(name, "F16")) as model:
        context = new_context(model=model)
        first = decode(context, 0, TEXT, 0)
        if model.is_recurrent or model.is_hybrid:
            assert not context.seq_rm(0, 5)
            assert context.seq_pos_max(0) == len(TEXT) - 1
        assert context.seq_rm(0)
        assert close_to(decode(context, 0, TEXT, 0), first)
        context.close()


# --- Abort, threads, counters ----------------------------------------------------------------
def test_an_aborted_decode_raises_code_2_and_the_context_goes_on(context: Context) -> None:
    first = decode(context, 0, TEXT, 0)
    context.set_abort(True)
    with pytest.raises(DecodeFailedError) as caught:
        decode(context, 1, OTHER, 0)
    assert (caught.value.function, caught.value.code) == ("llama_decode", 2)
    context.set_abort(False)
    assert context.seq_pos_max(1) is None
    assert context.seq_pos_max(0) == len(TEXT) - 1
    assert close_to(decode(context, 1, TEXT, 0), first)


def test_another_thread_can_abort(new_context: NewContext) -> None:
    context = new_context(n_ctx=2048, n_batch=1024, n_ubatch=8)
    batch = Batch(1024)
    batch.add(0, [97] * 1024, 0)
    started = threading.Event()

    def abort() -> None:
        started.wait()
        time.sleep(0.002)
        context.set_abort(True)

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(DecodeFailedError):  # noqa: PT012  # until the thread has come to it
        while True:
            started.set()
            context.decode(batch)
            context.seq_rm(0)
    thread.join()
    context.set_abort(False)
    context.seq_rm(0)
    assert np.isfinite(decode(context, 0, TEXT, 0)).all()


def test_context_counts_its_decodes(context: Context) -> None:
    decode(context, 0, TEXT, 0)
    decode(context, 0, [98], len(TEXT))
    assert context.n_decodes == 2
    assert "decodes=2" in repr(context)


def test_no_adapters_is_a_valid_set_of_adapters(context: Context) -> None:
    context.set_loras([])
    assert np.isfinite(decode(context, 0, TEXT, 0)).all()
