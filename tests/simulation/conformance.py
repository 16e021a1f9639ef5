"""The promises of `Decoder`, as assertions.

`check_decoder` defines how a decoder behaves.  The context of llama.cpp and the fake decoder must both
pass it.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.core.decoder import Decoder
from cllm.errors import InvalidArgumentError, NoKVSlotError, PositionError
from tests.simulation import conformance_sharing
from tests.simulation.conformance_steps import (
    N_BATCH,
    N_CTX,
    N_SEQ_MAX,
    Promise,
    decode,
    expect_calls_refused,
    expect_refused,
    expect_row_of,
    fill,
    make_tokens,
    not_refused,
    spans,
)
from tests.simulation.expect import expect

MakeDecoder = Callable[..., Decoder]


def check_decoder(make: MakeDecoder) -> None:
    """Check every promise, in both layouts of the KV cache.

    Parameters
    ----------
    make : callable
        Called as `make(n_ctx=…, n_seq_max=…, n_batch=…, kv_unified=…)` for each check; returns an
        empty decoder with exactly these limits and a vocabulary of at least 64 tokens.  The caller
        frees what it made.

    Raises
    ------
    AssertionError
        Names the promise that is not kept.
    """
    for kv_unified, checks in ((True, _UNIFIED), (False, _PER_SEQUENCE)):
        for check in checks:
            decoder = make(n_ctx=N_CTX, n_seq_max=N_SEQ_MAX, n_batch=N_BATCH, kv_unified=kv_unified)
            try:
                check(decoder)
            except Exception as error:  # one of a decoder's own breaks a promise too
                layout = "unified" if kv_unified else "per-sequence"
                promise = check.__name__.removeprefix("_").replace("_", " ")
                what = error if isinstance(error, AssertionError) else repr(error)
                raise AssertionError(f"{promise} ({layout} layout): {what}") from error


# --- Promises ---------------------------------------------------------------------------------
def _a_new_decoder_is_empty(decoder: Decoder) -> None:
    expect(spans(decoder), [(None, None)] * N_SEQ_MAX, "positions")
    expect(decoder.n_batch, N_BATCH, "n_batch")


def _decode_stores_consecutive_positions(decoder: Decoder) -> None:
    decode(decoder, 0, make_tokens(0, 5), 0)
    expect(spans(decoder), [(0, 4), (None, None)], "positions after 5 tokens")
    decode(decoder, 0, make_tokens(1, 1), 5)
    decode(decoder, 1, make_tokens(1, 3), 0)
    expect(spans(decoder), [(0, 5), (0, 2)], "positions after two more runs")


def _adding_stores_nothing_and_clear_forgets_the_rows(decoder: Decoder) -> None:
    decoder.clear()
    expect(decoder.add(0, make_tokens(0, 4), 0, n_outputs=1), range(1), "output rows")
    expect(spans(decoder), [(None, None)] * N_SEQ_MAX, "positions before the decode")
    decode(decoder, 1, make_tokens(1, 2), 0)
    expect(spans(decoder), [(None, None), (0, 1)], "positions after clear")


def _output_rows_are_in_the_order_of_the_batch(decoder: Decoder) -> None:
    first, second = make_tokens(0, 6), make_tokens(5, 4)
    alone = [decode(decoder, 0, first, 0), decode(decoder, 1, second, 0)]
    expect(decoder.seq_rm(0) and decoder.seq_rm(1), True, "seq_rm")
    decoder.clear()
    expect(decoder.add(1, second, 0, n_outputs=1), range(1), "output rows of the first run")
    expect(decoder.add(0, first, 0, n_outputs=1), range(1, 2), "output rows of the second run")
    logits = decoder.decode().copy()
    expect(len(logits), 2, "output rows")
    expect_row_of(logits[0], alone[1], alone[0])
    expect_row_of(logits[1], alone[0], alone[1])


def _only_output_rows_have_logits(decoder: Decoder) -> None:
    tokens = make_tokens(3, 5)
    whole = decode(decoder, 0, tokens, 0)
    shorter = decode(decoder, 1, tokens[:4], 0)
    decoder.seq_rm(0)
    decoder.seq_rm(1)
    decoder.clear()
    expect(decoder.add(1, make_tokens(4, 2), 0, n_outputs=0), range(0), "output rows of a run")
    expect(decoder.add(0, tokens, 0, n_outputs=2), range(2), "output rows of the other")
    logits = decoder.decode().copy()
    expect(len(logits), 2, "output rows")
    expect_row_of(logits[0], shorter, whole)
    expect_row_of(logits[1], whole, shorter)
    decoder.clear()
    decoder.add(0, make_tokens(3, 1), 5, n_outputs=0)
    expect(len(decoder.decode()), 0, "output rows of a batch without any")


def _chunks_give_what_one_batch_gives(decoder: Decoder) -> None:
    tokens = make_tokens(2, 9)
    whole = decode(decoder, 0, tokens, 0)
    other = decode(decoder, 1, tokens[:4], 0)
    expect_row_of(decode(decoder, 1, tokens[4:], 4), whole, other)
    expect(spans(decoder), [(0, 8), (0, 8)], "positions")
    decoder.seq_rm(1)
    decoder.clear()
    decoder.add(1, tokens[:3], 0, n_outputs=0)
    decoder.add(1, tokens[3:], 3, n_outputs=1)
    expect_row_of(decoder.decode()[0].copy(), whole, other)


def _gaps_and_repeats_are_refused(decoder: Decoder) -> None:
    fill(decoder, 0, 4)
    for what, p0 in (("a gap", 5), ("a repeat", 3), ("a start over", 0)):
        expect_refused(decoder, PositionError, what, [(0, make_tokens(0, 2), p0)])
        good = (1, make_tokens(1, 2), 0)
        expect_refused(decoder, PositionError, f"{what} after a good run", [good, (0, [1], p0)])
    expect_refused(decoder, PositionError, "a start past 0", [(1, make_tokens(1, 2), 1)])
    expect_refused(decoder, PositionError, "a gap within", [(0, [1, 2], 4), (0, [3], 7)])
    expect_refused(decoder, PositionError, "a repeat within", [(0, [1, 2], 4), (0, [3], 5)])
    decode(decoder, 0, make_tokens(0, 2), 4)
    expect(spans(decoder)[0], (0, 5), "positions after the right continuation")


def _a_refused_run_leaves_the_batch_unchanged(decoder: Decoder) -> None:
    decoder.clear()
    decoder.add(0, make_tokens(0, 2), 0, n_outputs=1)
    for tokens, p0, n_outputs in (([1], 5, 0), ([], 2, 0), ([1], 2, 2), ([-1], 2, 0)):
        try:
            decoder.add(0, tokens, p0, n_outputs=n_outputs)
        except InvalidArgumentError:
            continue
        not_refused(f"a run of {tokens} at {p0} with {n_outputs} output rows")
    expect(decoder.add(1, make_tokens(1, 3), 0, n_outputs=1), range(1, 2), "output rows")
    expect(len(decoder.decode()), 2, "output rows")
    expect(spans(decoder), [(0, 1), (0, 2)], "positions")


def _what_a_context_cannot_take_is_refused(decoder: Decoder) -> None:
    n_vocab = len(decode(decoder, 0, make_tokens(0, 3), 0))
    refused: list[tuple[str, list[tuple[int, list[int], int]]]] = [
        ("a batch without rows", []),
        ("a run without tokens", [(0, [], 3)]),
        ("a batch too long", [(0, [1] * N_BATCH, 3), (1, [1], 0)]),
        ("a seq_id below 0", [(-1, [1], 0)]),
        ("a seq_id too high", [(N_SEQ_MAX, [1], 0)]),
        ("a token outside the vocabulary", [(0, [n_vocab], 3)]),
        ("a token below 0", [(0, [-1], 3)]),
        ("a position below 0", [(1, [1], -1)]),
    ]
    for what, runs in refused:
        expect_refused(decoder, InvalidArgumentError, what, runs)
    decoder.clear()
    decoder.add(0, [1] * (N_SEQ_MAX + 1), 3, n_outputs=N_SEQ_MAX + 1)
    try:
        decoder.decode()
    except InvalidArgumentError:
        expect(spans(decoder)[0], (0, 2), "positions after too many output rows")
    else:
        not_refused("more output rows than sequences")


def _seq_rm_empties_a_sequence_and_no_other(decoder: Decoder) -> None:
    fill(decoder, 0, 4)
    fill(decoder, 1, 6)
    first = decode(decoder, 0, [9], 4)
    expect(decoder.seq_rm(0), True, "seq_rm")
    expect(spans(decoder), [(None, None), (0, 5)], "positions")
    expect(decoder.seq_rm(0), True, "seq_rm of an empty sequence")
    expect_refused(decoder, PositionError, "a continuation of nothing", [(0, [9], 5)])
    fill(decoder, 0, 4)
    expect_row_of(decode(decoder, 0, [9], 4), first)


def _seq_rm_of_a_tail_keeps_the_head(decoder: Decoder) -> None:
    tokens = make_tokens(6, 7)
    whole = decode(decoder, 0, tokens, 0)
    decode(decoder, 1, tokens[:2], 0)
    expect(decoder.seq_rm(0, 3), True, "seq_rm")
    expect(spans(decoder), [(0, 2), (0, 1)], "positions")
    other = decode(decoder, 0, make_tokens(8, 4), 3)
    expect(decoder.seq_rm(0, 3, 7), True, "seq_rm")
    expect_row_of(decode(decoder, 0, tokens[3:], 3), whole, other)


def _seq_rm_of_a_head_or_a_middle_moves_nothing(decoder: Decoder) -> None:
    fill(decoder, 0, 8)
    expect(decoder.seq_rm(0, 3, 5), True, "seq_rm of a middle")
    expect(spans(decoder)[0], (0, 7), "positions")
    expect(decoder.seq_rm(0, None, 5), True, "seq_rm of a head")
    expect(spans(decoder)[0], (5, 7), "positions")
    expect(decoder.seq_rm(0, 20), True, "seq_rm past the end")
    decode(decoder, 0, [1], 8)
    expect(spans(decoder)[0], (5, 8), "positions")


def _a_wrong_range_or_seq_id_is_refused(decoder: Decoder) -> None:
    fill(decoder, 0, 3)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("an empty range", lambda: decoder.seq_rm(0, 2, 2)),
        ("a negative position", lambda: decoder.seq_rm(0, -1)),
        ("seq_rm of a seq_id too high", lambda: decoder.seq_rm(N_SEQ_MAX)),
        ("seq_pos_min of a seq_id too high", lambda: decoder.seq_pos_min(N_SEQ_MAX)),
        ("seq_pos_max of a seq_id below 0", lambda: decoder.seq_pos_max(-1)),
    ]
    expect_calls_refused(decoder, calls)


def _a_full_cache_refuses_a_batch_and_stores_nothing(decoder: Decoder) -> None:
    fill(decoder, 0, N_CTX - 10)
    fill(decoder, 1, 6)
    expect_refused(decoder, NoKVSlotError, "a run of 5 into 4 cells", [(1, [1] * 5, 6)])
    expect_refused(
        decoder, NoKVSlotError, "two runs into 4 cells", [(0, [1], N_CTX - 10), (1, [1] * 4, 6)]
    )
    decode(decoder, 1, [1] * 4, 6)
    expect(spans(decoder), [(0, N_CTX - 11), (0, 9)], "positions of a full cache")
    expect_refused(decoder, NoKVSlotError, "a run into no cell", [(1, [1], 10)])
    decoder.seq_rm(1)
    decode(decoder, 0, [1] * 10, N_CTX - 10)
    expect(spans(decoder)[0], (0, N_CTX - 1), "positions of one sequence in every cell")
    past = [(0, [1], N_CTX)]
    expect_refused(decoder, InvalidArgumentError, "a position past the context", past)


def _each_sequence_has_its_own_share_in_the_per_sequence_layout(decoder: Decoder) -> None:
    share = N_CTX // N_SEQ_MAX
    for seq_id in range(N_SEQ_MAX):
        fill(decoder, seq_id, share)
    expect(spans(decoder), [(0, share - 1)] * N_SEQ_MAX, "positions")
    past = [(0, [1], share)]
    expect_refused(decoder, InvalidArgumentError, "a position past the share", past)


# --- Rebuilding -------------------------------------------------------------------------------
def _rebuild_empties_everything_and_works_on(decoder: Decoder) -> None:
    decoder.rebuild()
    expect(spans(decoder), [(None, None)] * N_SEQ_MAX, "positions of an empty one rebuilt")
    tokens = make_tokens(2, 9)
    own = decode(decoder, 0, tokens, 0)
    other = decode(decoder, 0, tokens[:1], 9)
    data = decoder.state_seq_get_data(0)
    decoder.seq_cp(0, 1)
    decoder.rebuild()
    expect(spans(decoder), [(None, None)] * N_SEQ_MAX, "positions")
    expect(decoder.n_batch, N_BATCH, "n_batch")
    expect([decoder.state_seq_get_data(s) for s in range(N_SEQ_MAX)], [b""] * N_SEQ_MAX, "states")
    expect_refused(decoder, PositionError, "a continuation of nothing", [(0, [1], 10)])
    expect_row_of(decode(decoder, 0, tokens, 0), own, other)
    decoder.state_seq_set_data(data, 1, n_positions=10)
    decoder.seq_rm(1, 8)
    expect_row_of(decode(decoder, 1, tokens[8:], 8), own, other)


def _rebuild_keeps_the_limits_in_the_unified_layout(decoder: Decoder) -> None:
    fill(decoder, 0, N_CTX)
    decoder.rebuild()
    fill(decoder, 1, N_CTX - 2)
    expect_refused(decoder, NoKVSlotError, "a run of 3 into 2 cells", [(0, [1] * 3, 0)])
    expect_refused(decoder, InvalidArgumentError, "a seq_id too high", [(N_SEQ_MAX, [1], 0)])
    decode(decoder, 0, [1] * 2, 0)
    expect(spans(decoder), [(0, 1), (0, N_CTX - 3)], "positions of a full cache")


def _rebuild_keeps_the_limits_in_the_per_sequence_layout(decoder: Decoder) -> None:
    share = N_CTX // N_SEQ_MAX
    for seq_id in range(N_SEQ_MAX):
        fill(decoder, seq_id, share)
    decoder.rebuild()
    for seq_id in range(N_SEQ_MAX):
        fill(decoder, seq_id, share)
    past = [(0, [1], share)]
    expect_refused(decoder, InvalidArgumentError, "a position past the share", past)
    expect_calls_refused(decoder, [("a copy onto a sequence", lambda: decoder.seq_cp(0, 1))])


_BOTH: tuple[Promise, ...] = (
    _a_new_decoder_is_empty,
    _decode_stores_consecutive_positions,
    _adding_stores_nothing_and_clear_forgets_the_rows,
    _output_rows_are_in_the_order_of_the_batch,
    _only_output_rows_have_logits,
    _chunks_give_what_one_batch_gives,
    _gaps_and_repeats_are_refused,
    _a_refused_run_leaves_the_batch_unchanged,
    _what_a_context_cannot_take_is_refused,
    _seq_rm_empties_a_sequence_and_no_other,
    _seq_rm_of_a_tail_keeps_the_head,
    _seq_rm_of_a_head_or_a_middle_moves_nothing,
    _a_wrong_range_or_seq_id_is_refused,
    *conformance_sharing.BOTH,
    _rebuild_empties_everything_and_works_on,
)
_UNIFIED = (
    *_BOTH,
    _a_full_cache_refuses_a_batch_and_stores_nothing,
    _rebuild_keeps_the_limits_in_the_unified_layout,
    *conformance_sharing.UNIFIED,
)
_PER_SEQUENCE = (
    *_BOTH,
    _each_sequence_has_its_own_share_in_the_per_sequence_layout,
    _rebuild_keeps_the_limits_in_the_per_sequence_layout,
    *conformance_sharing.PER_SEQUENCE,
)
