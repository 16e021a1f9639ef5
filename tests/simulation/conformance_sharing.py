"""The promises of `Decoder` about copied and saved sequences.

`conformance.check_decoder` checks them with the others.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.core.decoder import Decoder
from cllm.errors import InvalidArgumentError, LlamaCallError, NoKVSlotError, PositionError
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
    spans,
)
from tests.simulation.expect import expect


# --- Copies -----------------------------------------------------------------------------------
def _seq_cp_gives_a_sequence_the_positions_of_another(decoder: Decoder) -> None:
    decoder.seq_cp(0, 1)
    expect(spans(decoder), [(None, None)] * N_SEQ_MAX, "positions after a copy of nothing")
    decode(decoder, 0, make_tokens(0, 5), 0)
    decoder.seq_cp(0, 1, 0, 100)
    expect(spans(decoder), [(0, 4), (0, 4)], "positions after a copy")
    decode(decoder, 1, [1], 5)
    decoder.seq_rm(0)
    expect(spans(decoder), [(None, None), (0, 5)], "positions after removing the source")
    decoder.seq_cp(1, 0)
    decode(decoder, 0, [1], 6)
    decoder.seq_rm(0, 3)
    expect(spans(decoder), [(0, 2), (0, 5)], "positions after shortening a copy")


def _a_copied_prefix_gives_the_logits_of_the_original(decoder: Decoder) -> None:
    tokens = make_tokens(2, 9)
    other = decode(decoder, 1, tokens[6:], 0)
    whole = decode(decoder, 0, tokens, 0)
    decoder.seq_rm(0, 6)
    decoder.seq_rm(1)
    decoder.seq_cp(0, 1)
    expect_row_of(decode(decoder, 1, tokens[6:], 6), whole, other)
    expect_row_of(decode(decoder, 0, tokens[6:], 6), whole, other)
    decoder.seq_rm(0)
    decode(decoder, 0, make_tokens(5, 12), 0)
    decoder.seq_rm(1, 6)
    expect_row_of(decode(decoder, 1, tokens[6:], 6), whole, other)


def _a_copy_and_its_source_go_on_independently(decoder: Decoder) -> None:
    fill(decoder, 0, 6)
    tails = [9, 3, 17], [20, 5, 17]
    alone = []
    for tail in tails:
        alone.append(decode(decoder, 0, tail, 6))
        decoder.seq_rm(0, 6)
    for first in (0, 1):
        decoder.seq_cp(first, 1 - first)
        decoder.clear()
        for seq_id in (0, 1):
            decoder.add(seq_id, tails[seq_id], 6, n_outputs=1)
        logits = decoder.decode().copy()
        for seq_id in (0, 1):
            expect_row_of(logits[seq_id], alone[seq_id], alone[1 - seq_id])
            decoder.seq_rm(seq_id, 6)
        expect(spans(decoder), [(0, 5), (0, 5)], "positions without the tails")
        decoder.seq_rm(first)


def _a_copy_can_be_shortened_and_its_source_used_again_at_once(decoder: Decoder) -> None:
    """Check this in the per-sequence layout, too, where the next decode copies the data."""
    tokens = make_tokens(3, 9)
    whole = decode(decoder, 0, tokens, 0)
    other = decode(decoder, 1, make_tokens(8, 6), 0)
    decoder.seq_rm(1)
    decoder.seq_cp(0, 1)
    decoder.seq_rm(1, 6)
    decoder.seq_rm(0)
    decoder.clear()
    decoder.add(0, make_tokens(8, 6), 0, n_outputs=1)
    decoder.add(1, tokens[6:], 6, n_outputs=1)
    logits = decoder.decode().copy()
    expect_row_of(logits[0], other, whole)
    expect_row_of(logits[1], whole, other)
    expect(spans(decoder), [(0, 5), (0, 8)], "positions")


def _a_wrong_copy_is_refused(decoder: Decoder) -> None:
    decode(decoder, 0, make_tokens(0, 5), 0)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("a copy onto itself", lambda: decoder.seq_cp(0, 0)),
        ("a copy of an empty sequence onto itself", lambda: decoder.seq_cp(1, 1)),
        ("a copy onto an occupied sequence", lambda: decoder.seq_cp(1, 0)),
        ("a copy from a seq_id too high", lambda: decoder.seq_cp(N_SEQ_MAX, 1)),
        ("a copy to a seq_id too high", lambda: decoder.seq_cp(0, N_SEQ_MAX)),
        ("a copy to a seq_id below 0", lambda: decoder.seq_cp(0, -1)),
        ("a copy of an empty range", lambda: decoder.seq_cp(0, 1, 3, 3)),
        ("a copy from a position below 0", lambda: decoder.seq_cp(0, 1, -1)),
    ]
    expect_calls_refused(decoder, calls)
    decode(decoder, 1, make_tokens(1, 2), 0)
    calls = [("a copy onto another sequence", lambda: decoder.seq_cp(0, 1))]
    expect_calls_refused(decoder, calls)
    expect(decoder.state_seq_get_data(0) != b"", True, "state calls are possible")


def _any_range_can_be_copied_in_the_unified_layout(decoder: Decoder) -> None:
    tokens = make_tokens(4, 8)
    other = decode(decoder, 1, tokens[:4], 0)
    whole = decode(decoder, 0, tokens, 0)
    for p0, p1, span in (
        (2, 5, (2, 4)), (4, None, (4, 7)), (7, 100, (7, 7)), (8, None, (None, None)),
        (None, 1, (0, 0)), (0, 5, (0, 4)),
    ):  # fmt: skip
        decoder.seq_rm(1)
        decoder.seq_cp(0, 1, p0, p1)
        expect(spans(decoder), [(0, 7), span], f"positions after a copy of [{p0}, {p1})")
    expect_refused(decoder, PositionError, "a gap after a copy", [(1, [1], 8)])
    expect_row_of(decode(decoder, 1, tokens[5:], 5), whole, other)
    decoder.seq_rm(0, 7)
    expect_row_of(decode(decoder, 0, tokens[7:], 7), whole, other)


def _shared_cells_count_once_in_the_unified_layout(decoder: Decoder) -> None:
    n_full = N_CTX - 4
    fill(decoder, 0, n_full)
    decoder.seq_cp(0, 1)
    decoder.clear()
    for seq_id in (0, 1):
        decoder.add(seq_id, [1, 2], n_full, n_outputs=1)
    expect(len(decoder.decode()), 2, "output rows of a batch in the last 4 cells")
    for seq_id in (0, 1):
        run = (seq_id, [1], n_full + 2)
        expect_refused(decoder, NoKVSlotError, "a run into no cell", [run])
    # Of the last 8 positions of the copy 6 are shared: only 2 cells become free.
    decoder.seq_rm(1, n_full - 6)
    run = (1, [1] * 3, n_full - 6)
    expect_refused(decoder, NoKVSlotError, "a run into cells that the source holds", [run])
    decode(decoder, 1, [1] * 2, n_full - 6)
    # The source is now the only holder of 8 cells.
    decoder.seq_rm(0)
    run = (0, [1] * 9, 0)
    expect_refused(decoder, NoKVSlotError, "a run into cells that the copy holds", [run])
    decode(decoder, 0, [1] * 8, 0)
    decoder.seq_rm(0)
    decoder.seq_rm(1)
    fill(decoder, 0, N_CTX)
    expect(spans(decoder), [(0, N_CTX - 1), (None, None)], "positions of one in every cell")


def _part_of_a_sequence_is_not_copied_in_the_per_sequence_layout(decoder: Decoder) -> None:
    decode(decoder, 0, make_tokens(0, 5), 0)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("a copy of a head", lambda: decoder.seq_cp(0, 1, 0, 4)),
        ("a copy of a tail", lambda: decoder.seq_cp(0, 1, 1)),
        ("a copy of a middle", lambda: decoder.seq_cp(0, 1, 1, 4)),
    ]
    expect_calls_refused(decoder, calls)
    expect(decoder.state_seq_get_data(0) != b"", True, "state calls are possible")
    decoder.seq_cp(0, 1, 0, 5)
    expect(spans(decoder), [(0, 4), (0, 4)], "positions after a copy of everything")


def _a_copy_takes_its_own_share_in_the_per_sequence_layout(decoder: Decoder) -> None:
    share = N_CTX // N_SEQ_MAX
    tokens = make_tokens(0, share)
    fill(decoder, 0, share - 1)
    decoder.seq_cp(0, 1)
    full = decode(decoder, 1, tokens[-1:], share - 1)
    expect_row_of(decode(decoder, 0, tokens[-1:], share - 1), full)
    for seq_id in (0, 1):
        past = [(seq_id, [1], share)]
        expect_refused(decoder, InvalidArgumentError, "a position past the share", past)
    decoder.seq_rm(0)
    other = decode(decoder, 0, [1], 0)
    decoder.seq_rm(0)
    for p0 in range(0, share, N_BATCH):
        decode(decoder, 0, make_tokens(3, N_BATCH), p0)
    expect(spans(decoder), [(0, share - 1)] * N_SEQ_MAX, "positions")
    decoder.seq_rm(1, share - 1)
    expect_row_of(decode(decoder, 1, tokens[-1:], share - 1), full, other)


# --- States -----------------------------------------------------------------------------------
def _a_restored_sequence_goes_on_like_the_saved_one(decoder: Decoder) -> None:
    fill(decoder, 0, 7)
    expect(decoder.state_seq_get_data(1), b"", "the state of an empty sequence")
    data = decoder.state_seq_get_data(0)
    expect(type(data), bytes, "type of a state")
    own = decode(decoder, 0, [9], 7)
    other = decode(decoder, 0, [9], 8)
    decoder.state_seq_set_data(data, 1, n_positions=7)
    expect(spans(decoder), [(0, 8), (0, 6)], "positions after restoring")
    expect_row_of(decode(decoder, 1, [9], 7), own, other)
    expect_row_of(decode(decoder, 1, [9], 8), other, own)
    decoder.seq_rm(0)
    decoder.state_seq_set_data(data, 0, n_positions=7)
    expect_row_of(decode(decoder, 0, [9], 7), own, other)
    expect(spans(decoder), [(0, 7), (0, 8)], "positions after restoring once more")


def _a_copy_is_saved_like_its_source(decoder: Decoder) -> None:
    fill(decoder, 0, 7)
    decoder.seq_cp(0, 1)
    own = decode(decoder, 0, [9], 7)
    other = decode(decoder, 0, [9], 8)
    data = decoder.state_seq_get_data(1)
    decoder.seq_rm(0)
    decoder.seq_rm(1)
    decoder.state_seq_set_data(data, 0, n_positions=7)
    expect(spans(decoder), [(0, 6), (None, None)], "positions after restoring")
    expect_row_of(decode(decoder, 0, [9], 7), own, other)


def _a_truncated_state_is_refused_and_leaves_nothing(decoder: Decoder) -> None:
    fill(decoder, 0, 7)
    data = decoder.state_seq_get_data(0)
    own = decode(decoder, 0, [9], 7)
    other = decode(decoder, 0, [9], 8)

    def restore(n_bytes: int, n_positions: int = 7) -> None:
        decoder.state_seq_set_data(data[:n_bytes], 1, n_positions=n_positions)

    n = len(data)
    for n_bytes in (1, 4, 8, n // 4, n // 2, n - 4, n - 1):
        call = (f"a state cut from {n} to {n_bytes} bytes", lambda cut=n_bytes: restore(cut))
        expect_calls_refused(decoder, [call], InvalidArgumentError)
    for n_positions in (6, 8):
        call = (f"a state of 7 said to be {n_positions}", lambda k=n_positions: restore(n, k))
        expect_calls_refused(decoder, [call], LlamaCallError)
    restore(n)
    expect_row_of(decode(decoder, 1, [9], 7), own, other)


def _a_wrong_state_call_is_refused(decoder: Decoder) -> None:
    fill(decoder, 0, 3)
    data, restore = decoder.state_seq_get_data(0), decoder.state_seq_set_data
    calls: list[tuple[str, Callable[[], object]]] = [
        ("saving a seq_id too high", lambda: decoder.state_seq_get_data(N_SEQ_MAX)),
        ("saving a seq_id below 0", lambda: decoder.state_seq_get_data(-1)),
        ("restoring a seq_id too high", lambda: restore(data, N_SEQ_MAX, n_positions=3)),
        ("restoring onto an occupied sequence", lambda: restore(data, 0, n_positions=3)),
        ("restoring no positions", lambda: restore(data, 1, n_positions=0)),
        ("restoring too many positions", lambda: restore(data, 1, n_positions=N_CTX + 1)),
        ("restoring nothing", lambda: restore(b"", 1, n_positions=3)),
    ]
    expect_calls_refused(decoder, calls)


def _a_full_cache_refuses_a_state_in_the_unified_layout(decoder: Decoder) -> None:
    n_tokens = N_CTX // 2 + 1
    fill(decoder, 0, n_tokens)
    data = decoder.state_seq_get_data(0)
    own = decode(decoder, 0, [9], n_tokens)
    other = decode(decoder, 0, [9], n_tokens + 1)
    calls = [
        ("a state too big", lambda: decoder.state_seq_set_data(data, 1, n_positions=n_tokens)),
    ]
    expect_calls_refused(decoder, calls, LlamaCallError)
    decoder.seq_rm(0, n_tokens)
    expect_row_of(decode(decoder, 0, [9], n_tokens), own, other)
    decoder.seq_rm(0)
    decoder.state_seq_set_data(data, 1, n_positions=n_tokens)
    expect_row_of(decode(decoder, 1, [9], n_tokens), own, other)
    # Restored cells are cells like others.
    decode(decoder, 0, [1] * 63, 0)
    n_free = N_CTX - n_tokens - 1 - 63
    for p0 in range(63, 63 + n_free, N_BATCH):
        decode(decoder, 0, [1] * min(N_BATCH, 63 + n_free - p0), p0)
    run = (0, [1], 63 + n_free)
    expect_refused(decoder, NoKVSlotError, "a run into no cell", [run])


def _a_copy_has_no_state_before_a_decode_in_the_per_sequence_layout(decoder: Decoder) -> None:
    fill(decoder, 0, 5)
    data = decoder.state_seq_get_data(0)
    decoder.seq_cp(0, 1)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("saving the source of a copy", lambda: decoder.state_seq_get_data(0)),
        ("saving a copy", lambda: decoder.state_seq_get_data(1)),
    ]
    expect_calls_refused(decoder, calls)
    decoder.seq_rm(1)
    restore = ("restoring a copy", lambda: decoder.state_seq_set_data(data, 1, n_positions=5))
    expect_calls_refused(decoder, [restore])
    own = decode(decoder, 0, [9], 5)
    other = decode(decoder, 0, [9], 6)
    decoder.state_seq_set_data(data, 1, n_positions=5)
    expect_row_of(decode(decoder, 1, [9], 5), own, other)
    expect(decoder.state_seq_get_data(0) != b"", True, "saving after a decode")


BOTH: tuple[Promise, ...] = (
    _seq_cp_gives_a_sequence_the_positions_of_another,
    _a_copied_prefix_gives_the_logits_of_the_original,
    _a_copy_and_its_source_go_on_independently,
    _a_copy_can_be_shortened_and_its_source_used_again_at_once,
    _a_wrong_copy_is_refused,
    _a_restored_sequence_goes_on_like_the_saved_one,
    _a_copy_is_saved_like_its_source,
    _a_truncated_state_is_refused_and_leaves_nothing,
    _a_wrong_state_call_is_refused,
)
UNIFIED: tuple[Promise, ...] = (
    _any_range_can_be_copied_in_the_unified_layout,
    _shared_cells_count_once_in_the_unified_layout,
    _a_full_cache_refuses_a_state_in_the_unified_layout,
)
PER_SEQUENCE: tuple[Promise, ...] = (
    _part_of_a_sequence_is_not_copied_in_the_per_sequence_layout,
    _a_copy_takes_its_own_share_in_the_per_sequence_layout,
    _a_copy_has_no_state_before_a_decode_in_the_per_sequence_layout,
)
