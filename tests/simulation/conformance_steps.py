"""Small steps of the promises in `conformance` and `conformance_sharing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.decoder import Decoder
from cllm.errors import InvalidArgumentError
from tests.simulation.expect import demand, expect

# llama.cpp rounds the context of a sequence up to a multiple of 256; these numbers are not changed by that.
N_SEQ_MAX = 2
N_CTX = 512
N_BATCH = 64

Spans = list[tuple[int | None, int | None]]
Promise = Callable[[Decoder], None]


def make_tokens(seed: int, n_tokens: int) -> list[int]:
    """Return tokens that are in every vocabulary; another seed gives other tokens."""
    return [1 + (seed * 31 + 7 * i + i * i) % 60 for i in range(n_tokens)]


def decode(decoder: Decoder, seq_id: int, tokens: list[int], p0: int) -> NDArray[np.float32]:
    """Decode one run alone, and return a copy of the logits of its last row: float32, `(n_vocab,)`."""
    decoder.clear()
    decoder.add(seq_id, tokens, p0, n_outputs=1)
    logits = decoder.decode()
    expect(logits.dtype, np.dtype(np.float32), "type of logits")
    expect((logits.ndim, len(logits)), (2, 1), "dimensions and rows of logits")
    row: NDArray[np.float32] = logits[0].copy()
    return row


def fill(decoder: Decoder, seq_id: int, n_tokens: int) -> None:
    """Store positions `[0, n_tokens)`."""
    tokens = make_tokens(seq_id, n_tokens)
    for p0 in range(0, n_tokens, decoder.n_batch):
        decode(decoder, seq_id, tokens[p0 : p0 + decoder.n_batch], p0)


def spans(decoder: Decoder) -> Spans:
    """Return the first and last position of each sequence, the only state of a cache that can be read."""
    return [(decoder.seq_pos_min(s), decoder.seq_pos_max(s)) for s in range(N_SEQ_MAX)]


def not_refused(what: str) -> NoReturn:
    """Raise an `AssertionError`: a call that had to be refused was not."""
    raise AssertionError(f"{what} was not refused")


def expect_refused(
    decoder: Decoder, error: type[Exception], what: str, runs: Iterable[tuple[int, list[int], int]]
) -> None:
    """Check that adding or decoding `runs` raises `error` and changes no sequence."""
    before = spans(decoder)
    decoder.clear()
    try:
        for seq_id, tokens, p0 in runs:
            decoder.add(seq_id, tokens, p0, n_outputs=0)
        decoder.decode()
    except error:
        pass
    else:
        not_refused(what)
    expect(spans(decoder), before, f"positions after {what}")
    decoder.clear()


def expect_row_of(row: NDArray[np.float32], own: NDArray[np.float32], *others: object) -> None:
    """Check that `row` is nearer to `own` than to any of `others`, and has the best token of `own`."""
    expect(int(row.argmax()), int(own.argmax()), "best token")
    distance = float(np.abs(row - own).max())
    for other in others:
        to_other = float(np.abs(row - np.asarray(other)).max())
        demand(distance < to_other, f"{distance} from its own logits, {to_other} from another's")


def expect_calls_refused(
    decoder: Decoder,
    calls: Iterable[tuple[str, Callable[[], object]]],
    error: type[Exception] = InvalidArgumentError,
) -> None:
    """Check that each call raises `error` and changes no sequence."""
    before = spans(decoder)
    for what, call in calls:
        try:
            call()
        except error:
            pass
        else:
            not_refused(what)
        expect(spans(decoder), before, f"positions after {what}")
