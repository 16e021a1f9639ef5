"""The promises of `Decoder`, as assertions.

`check_decoder` is the only authority on how a decoder behaves: the context of llama.cpp passes it,
and the fake passes it or is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cllm.engine.tick import Decoder
from cllm.errors import CllmError, InvalidArgumentError, NoKVSlotError, PositionError

# llama.cpp rounds the context of a sequence up to 256: with these it has nothing to round.
N_SEQ_MAX = 2
N_CTX = 512
N_BATCH = 64

MakeDecoder = Callable[..., Decoder]
Spans = list[tuple[int | None, int | None]]


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
            except (AssertionError, CllmError) as error:
                layout = "unified" if kv_unified else "per-sequence"
                promise = check.__name__.removeprefix("_").replace("_", " ")
                raise AssertionError(f"{promise} ({layout} layout): {error}") from error


# --- Small steps ------------------------------------------------------------------------------
def _tokens(seed: int, n_tokens: int) -> list[int]:
    """Tokens that every vocabulary has and that differ by seed."""
    return [1 + (seed * 31 + 7 * i + i * i) % 60 for i in range(n_tokens)]


def _decode(decoder: Decoder, seq_id: int, tokens: list[int], p0: int) -> NDArray[np.float32]:
    """Decode one run alone; a copy of the logits of its last row."""
    decoder.clear()
    decoder.add(seq_id, tokens, p0, n_outputs=1)
    logits = decoder.decode()
    assert logits.dtype == np.float32, logits.dtype
    assert logits.ndim == 2, logits.shape
    assert len(logits) == 1, logits.shape
    row: NDArray[np.float32] = logits[0].copy()
    return row


def _fill(decoder: Decoder, seq_id: int, n_tokens: int) -> None:
    """Store positions `[0, n_tokens)`."""
    tokens = _tokens(seq_id, n_tokens)
    for p0 in range(0, n_tokens, decoder.n_batch):
        _decode(decoder, seq_id, tokens[p0 : p0 + decoder.n_batch], p0)


def _spans(decoder: Decoder) -> Spans:
    """The first and last position of each sequence: all that a decoder tells about its cache."""
    return [(decoder.seq_pos_min(s), decoder.seq_pos_max(s)) for s in range(N_SEQ_MAX)]


def _expect(actual: object, expected: object, what: str) -> None:
    assert actual == expected, f"{what}: {actual}, expected {expected}"


def _not_refused(what: str) -> NoReturn:
    raise AssertionError(f"{what} was not refused")


def _expect_refused(
    decoder: Decoder, error: type[Exception], what: str, runs: Iterable[tuple[int, list[int], int]]
) -> None:
    """Adding or decoding `runs` raises `error` and changes no sequence."""
    before = _spans(decoder)
    decoder.clear()
    try:
        for seq_id, tokens, p0 in runs:
            decoder.add(seq_id, tokens, p0, n_outputs=0)
        decoder.decode()
    except error:
        pass
    else:
        _not_refused(what)
    _expect(_spans(decoder), before, f"positions after {what}")
    decoder.clear()


def _expect_row_of(row: NDArray[np.float32], own: NDArray[np.float32], *others: object) -> None:
    """`row` is what `own` was, up to the rounding of another batch size, and none of `others`."""
    _expect(int(row.argmax()), int(own.argmax()), "best token")
    distance = float(np.abs(row - own).max())
    for other in others:
        to_other = float(np.abs(row - np.asarray(other)).max())
        assert distance < to_other, f"{distance} from its own logits, {to_other} from another's"


# --- Promises ---------------------------------------------------------------------------------
def _a_new_decoder_is_empty(decoder: Decoder) -> None:
    _expect(_spans(decoder), [(None, None)] * N_SEQ_MAX, "positions")
    _expect(decoder.n_batch, N_BATCH, "n_batch")


def _decode_stores_consecutive_positions(decoder: Decoder) -> None:
    _decode(decoder, 0, _tokens(0, 5), 0)
    _expect(_spans(decoder), [(0, 4), (None, None)], "positions after 5 tokens")
    _decode(decoder, 0, _tokens(1, 1), 5)
    _decode(decoder, 1, _tokens(1, 3), 0)
    _expect(_spans(decoder), [(0, 5), (0, 2)], "positions after two more runs")


def _adding_stores_nothing_and_clear_forgets_the_rows(decoder: Decoder) -> None:
    decoder.clear()
    _expect(decoder.add(0, _tokens(0, 4), 0, n_outputs=1), range(1), "output rows")
    _expect(_spans(decoder), [(None, None)] * N_SEQ_MAX, "positions before the decode")
    _decode(decoder, 1, _tokens(1, 2), 0)
    _expect(_spans(decoder), [(None, None), (0, 1)], "positions after clear")


def _output_rows_are_in_the_order_of_the_batch(decoder: Decoder) -> None:
    first, second = _tokens(0, 6), _tokens(5, 4)
    alone = [_decode(decoder, 0, first, 0), _decode(decoder, 1, second, 0)]
    _expect(decoder.seq_rm(0) and decoder.seq_rm(1), True, "seq_rm")
    decoder.clear()
    _expect(decoder.add(1, second, 0, n_outputs=1), range(1), "output rows of the first run")
    _expect(decoder.add(0, first, 0, n_outputs=1), range(1, 2), "output rows of the second run")
    logits = decoder.decode().copy()
    _expect(len(logits), 2, "output rows")
    _expect_row_of(logits[0], alone[1], alone[0])
    _expect_row_of(logits[1], alone[0], alone[1])


def _only_output_rows_have_logits(decoder: Decoder) -> None:
    tokens = _tokens(3, 5)
    whole = _decode(decoder, 0, tokens, 0)
    shorter = _decode(decoder, 1, tokens[:4], 0)
    decoder.seq_rm(0)
    decoder.seq_rm(1)
    decoder.clear()
    _expect(decoder.add(1, _tokens(4, 2), 0, n_outputs=0), range(0), "output rows of a run")
    _expect(decoder.add(0, tokens, 0, n_outputs=2), range(2), "output rows of the other")
    logits = decoder.decode().copy()
    _expect(len(logits), 2, "output rows")
    _expect_row_of(logits[0], shorter, whole)
    _expect_row_of(logits[1], whole, shorter)
    decoder.clear()
    decoder.add(0, _tokens(3, 1), 5, n_outputs=0)
    _expect(len(decoder.decode()), 0, "output rows of a batch without any")


def _chunks_give_what_one_batch_gives(decoder: Decoder) -> None:
    tokens = _tokens(2, 9)
    whole = _decode(decoder, 0, tokens, 0)
    other = _decode(decoder, 1, tokens[:4], 0)
    _expect_row_of(_decode(decoder, 1, tokens[4:], 4), whole, other)
    _expect(_spans(decoder), [(0, 8), (0, 8)], "positions")
    decoder.seq_rm(1)
    decoder.clear()
    decoder.add(1, tokens[:3], 0, n_outputs=0)
    decoder.add(1, tokens[3:], 3, n_outputs=1)
    _expect_row_of(decoder.decode()[0].copy(), whole, other)


def _gaps_and_repeats_are_refused(decoder: Decoder) -> None:
    _fill(decoder, 0, 4)
    for what, p0 in (("a gap", 5), ("a repeat", 3), ("a start over", 0)):
        _expect_refused(decoder, PositionError, what, [(0, _tokens(0, 2), p0)])
        good = (1, _tokens(1, 2), 0)
        _expect_refused(decoder, PositionError, f"{what} after a good run", [good, (0, [1], p0)])
    _expect_refused(decoder, PositionError, "a start past 0", [(1, _tokens(1, 2), 1)])
    _expect_refused(decoder, PositionError, "a gap within", [(0, [1, 2], 4), (0, [3], 7)])
    _expect_refused(decoder, PositionError, "a repeat within", [(0, [1, 2], 4), (0, [3], 5)])
    _decode(decoder, 0, _tokens(0, 2), 4)
    _expect(_spans(decoder)[0], (0, 5), "positions after the right continuation")


def _a_refused_run_leaves_the_batch_unchanged(decoder: Decoder) -> None:
    decoder.clear()
    decoder.add(0, _tokens(0, 2), 0, n_outputs=1)
    for tokens, p0, n_outputs in (([1], 5, 0), ([], 2, 0), ([1], 2, 2), ([-1], 2, 0)):
        try:
            decoder.add(0, tokens, p0, n_outputs=n_outputs)
        except InvalidArgumentError:
            continue
        _not_refused(f"a run of {tokens} at {p0} with {n_outputs} output rows")
    _expect(decoder.add(1, _tokens(1, 3), 0, n_outputs=1), range(1, 2), "output rows")
    _expect(len(decoder.decode()), 2, "output rows")
    _expect(_spans(decoder), [(0, 1), (0, 2)], "positions")


def _what_a_context_cannot_take_is_refused(decoder: Decoder) -> None:
    n_vocab = len(_decode(decoder, 0, _tokens(0, 3), 0))
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
        _expect_refused(decoder, InvalidArgumentError, what, runs)
    decoder.clear()
    decoder.add(0, [1] * (N_SEQ_MAX + 1), 3, n_outputs=N_SEQ_MAX + 1)
    try:
        decoder.decode()
    except InvalidArgumentError:
        _expect(_spans(decoder)[0], (0, 2), "positions after too many output rows")
    else:
        _not_refused("more output rows than sequences")


def _seq_rm_empties_a_sequence_and_no_other(decoder: Decoder) -> None:
    _fill(decoder, 0, 4)
    _fill(decoder, 1, 6)
    first = _decode(decoder, 0, [9], 4)
    _expect(decoder.seq_rm(0), True, "seq_rm")
    _expect(_spans(decoder), [(None, None), (0, 5)], "positions")
    _expect(decoder.seq_rm(0), True, "seq_rm of an empty sequence")
    _expect_refused(decoder, PositionError, "a continuation of nothing", [(0, [9], 5)])
    _fill(decoder, 0, 4)
    _expect_row_of(_decode(decoder, 0, [9], 4), first)


def _seq_rm_of_a_tail_keeps_the_head(decoder: Decoder) -> None:
    tokens = _tokens(6, 7)
    whole = _decode(decoder, 0, tokens, 0)
    _decode(decoder, 1, tokens[:2], 0)
    _expect(decoder.seq_rm(0, 3), True, "seq_rm")
    _expect(_spans(decoder), [(0, 2), (0, 1)], "positions")
    other = _decode(decoder, 0, _tokens(8, 4), 3)
    _expect(decoder.seq_rm(0, 3, 7), True, "seq_rm")
    _expect_row_of(_decode(decoder, 0, tokens[3:], 3), whole, other)


def _seq_rm_of_a_head_or_a_middle_moves_nothing(decoder: Decoder) -> None:
    _fill(decoder, 0, 8)
    _expect(decoder.seq_rm(0, 3, 5), True, "seq_rm of a middle")
    _expect(_spans(decoder)[0], (0, 7), "positions")
    _expect(decoder.seq_rm(0, None, 5), True, "seq_rm of a head")
    _expect(_spans(decoder)[0], (5, 7), "positions")
    _expect(decoder.seq_rm(0, 20), True, "seq_rm past the end")
    _decode(decoder, 0, [1], 8)
    _expect(_spans(decoder)[0], (5, 8), "positions")


def _a_wrong_range_or_seq_id_is_refused(decoder: Decoder) -> None:
    _fill(decoder, 0, 3)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("an empty range", lambda: decoder.seq_rm(0, 2, 2)),
        ("a negative position", lambda: decoder.seq_rm(0, -1)),
        ("seq_rm of a seq_id too high", lambda: decoder.seq_rm(N_SEQ_MAX)),
        ("seq_pos_min of a seq_id too high", lambda: decoder.seq_pos_min(N_SEQ_MAX)),
        ("seq_pos_max of a seq_id below 0", lambda: decoder.seq_pos_max(-1)),
    ]
    for what, call in calls:
        try:
            call()
        except InvalidArgumentError:
            continue
        _not_refused(what)
    _expect(_spans(decoder), [(0, 2), (None, None)], "positions")


def _a_full_cache_refuses_a_batch_and_stores_nothing(decoder: Decoder) -> None:
    _fill(decoder, 0, N_CTX - 10)
    _fill(decoder, 1, 6)
    _expect_refused(decoder, NoKVSlotError, "a run of 5 into 4 cells", [(1, [1] * 5, 6)])
    _expect_refused(
        decoder, NoKVSlotError, "two runs into 4 cells", [(0, [1], N_CTX - 10), (1, [1] * 4, 6)]
    )
    _decode(decoder, 1, [1] * 4, 6)
    _expect(_spans(decoder), [(0, N_CTX - 11), (0, 9)], "positions of a full cache")
    _expect_refused(decoder, NoKVSlotError, "a run into no cell", [(1, [1], 10)])
    decoder.seq_rm(1)
    _decode(decoder, 0, [1] * 10, N_CTX - 10)
    _expect(_spans(decoder)[0], (0, N_CTX - 1), "positions of one sequence in every cell")
    past = [(0, [1], N_CTX)]
    _expect_refused(decoder, InvalidArgumentError, "a position past the context", past)


def _each_sequence_has_its_own_share_in_the_per_sequence_layout(decoder: Decoder) -> None:
    share = N_CTX // N_SEQ_MAX
    for seq_id in range(N_SEQ_MAX):
        _fill(decoder, seq_id, share)
    _expect(_spans(decoder), [(0, share - 1)] * N_SEQ_MAX, "positions")
    past = [(0, [1], share)]
    _expect_refused(decoder, InvalidArgumentError, "a position past the share", past)


_BOTH: tuple[Callable[[Decoder], None], ...] = (
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
)
_UNIFIED = (*_BOTH, _a_full_cache_refuses_a_batch_and_stores_nothing)
_PER_SEQUENCE = (*_BOTH, _each_sequence_has_its_own_share_in_the_per_sequence_layout)
