"""Cases of hazard table 1.1: batches, output rows of a decode, and their logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from cllm.bindings import Batch, Context, Logits
from cllm.errors import LlamaCallError, NoKVSlotError, PositionError, StaleLogitsError
from tests.bindings.hazard_case import INF, INT_MAX, N_VOCAB, NAN, Scene, Topic

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variables of this file; some of their values have a wrong type.
bad_token: Any
bad_seq: Any
bad_p0: Any
bad_n: Any


# --- Batches and decode ----------------------------------------------------------------------
def add_tokens(scene: Scene, tokens: Any) -> None:
    scene.context  # noqa: B018  # made here, so that `check_alive` tests it afterwards
    scene.batch.add(0, tokens, 0)


def decode_token(scene: Scene, token: int) -> None:
    scene.batch.add(0, [5, token, 5], 0)
    scene.context.decode(scene.batch)


def add_row(scene: Scene, seq_id: Any = 0, p0: Any = 0, n_outputs: Any = 0) -> None:
    scene.context  # noqa: B018
    scene.batch.add(seq_id, [97], p0, n_outputs=n_outputs)


def decode_row(scene: Scene, seq_id: int, p0: int) -> None:
    scene.batch.add(seq_id, [97], p0)
    scene.context.decode(scene.batch)


def decode_at(scene: Scene, p0: int) -> None:
    """Decode two tokens at a position, after four tokens of sequence 0."""
    scene.decoded()
    scene.decode(2, p0=p0)


def add_runs(scene: Scene, runs: list[tuple[int, int, int]]) -> None:
    scene.context  # noqa: B018
    for seq_id, p0, n_tokens in runs:
        scene.batch.add(seq_id, [97] * n_tokens, p0)


def decode_rows(scene: Scene, n_rows: int, n_outputs: int) -> None:
    if n_rows:
        scene.batch.add(0, [97] * n_rows, 0, n_outputs=n_outputs)
    scene.context.decode(scene.batch)


def decode_outputs_of_two_sequences(scene: Scene) -> None:
    scene.batch.add(0, [97] * 3, 0, n_outputs=3)
    scene.batch.add(1, [97] * 3, 0, n_outputs=2)
    scene.context.decode(scene.batch)


def fill_sequence(scene: Scene, context: Context) -> None:
    for p0 in range(0, 256, 64):
        scene.decode(64, p0=p0, context=context)
    scene.decode(1, p0=256, context=context)


def fill_cells(scene: Scene) -> None:
    for seq_id in range(4):
        scene.decode(63, seq_id=seq_id)
    scene.decode(10, seq_id=3, p0=63)


ANY_TOKEN = f"must be 0 to {INT_MAX}"
refuse("a run of no tokens", add_tokens, "rows is 0, must be 1 to 128", tokens=[])
refuse("a run longer than the batch", add_tokens, "rows is 129, must be 1 to 128", tokens=[5] * 129)
refuse("a batch of no rows", decode_rows, "rows is 0, must be 1 to 64", n_rows=0, n_outputs=0)
refuse("rows over n_batch", decode_rows, "rows is 65, must be 1 to 64", n_rows=65, n_outputs=0)
for bad_token in (-1, -(2**31), -(2**40), 2**31, 2**40):
    refuse(f"token {bad_token}", add_tokens, f"is {bad_token}, {ANY_TOKEN}", tokens=[bad_token])
    refuse(
        f"token {bad_token} among good ones", add_tokens, f"is {bad_token}, {ANY_TOKEN}",
        tokens=[5, bad_token, 5],
    )  # fmt: skip
for bad_tokens in (
    [1.5], [1.0], ["5"], ["x"], "55", [None], [NAN], [2**63], [2**70], [[1, 2]], [b"5"], [True],
    np.array([1.5]),
):  # fmt: skip
    refuse(f"tokens {bad_tokens!r}", add_tokens, str(bad_tokens)[1:-1], tokens=bad_tokens)
for bad_token in (N_VOCAB, N_VOCAB + 1, INT_MAX):
    refuse(
        f"token {bad_token} of {N_VOCAB}", decode_token,
        f"token is {bad_token}, must be 0 to {N_VOCAB - 1}", token=bad_token,
    )  # fmt: skip
for bad_seq in (-1, 256, 2**31, 2**32, 1.0, "0", None):
    refuse(
        f"seq_id {bad_seq!r} of a run", add_row, f"seq_id is {bad_seq!r}, must be", seq_id=bad_seq
    )
for bad_seq in (4, 255):
    refuse(
        f"seq_id {bad_seq} of n_seq_max 4", decode_row, f"seq_id is {bad_seq}, must be 0 to 3",
        seq_id=bad_seq, p0=0,
    )  # fmt: skip
for bad_p0 in (-1, -(2**31), INT_MAX, 2**32, 0.0, "0", None):
    refuse(f"p0 {bad_p0!r}", add_row, f"p0 is {bad_p0!r}, must be", p0=bad_p0)
for bad_n in (-1, 2, "1"):
    refuse(
        f"n_outputs {bad_n!r} of one token", add_row, f"n_outputs is {bad_n!r}, must be",
        n_outputs=bad_n,
    )  # fmt: skip
refuse(
    "a position past n_ctx_seq", decode_row, "position is 256, must be 0 to 255", seq_id=0, p0=256
)
refuse(
    "a token for a full sequence", lambda s: fill_sequence(s, s.context),
    "position is 256, must be 0 to 255",
)  # fmt: skip
refuse(
    "a token for a full sequence of the per-sequence layout",
    lambda s: fill_sequence(s, s.split), "position is 256, must be 0 to 255",
)  # fmt: skip
refuse(
    "more tokens than cells", fill_cells, "llama_decode returned 1", "no room", error=NoKVSlotError
)
for what, bad_p0 in (("gap after", 5), ("repeat of", 3), ("step back from", 0)):
    refuse(
        f"a {what} the last position", decode_at, "X = 3", f"Y = {bad_p0}", "p0 is",
        error=PositionError, p0=bad_p0,
    )  # fmt: skip
refuse(
    "a first position other than 0", decode_row, "p0 is 7, must be 0", "X = -1", "Y = 7",
    error=PositionError, seq_id=0, p0=7,
)  # fmt: skip
for what, bad_runs in (
    ("a duplicate position", [(0, 0, 1), (0, 0, 1)]),
    ("an overlap", [(0, 0, 3), (0, 2, 2)]),
    ("a gap", [(0, 0, 1), (0, 2, 1)]),
    ("a gap behind another sequence", [(0, 0, 1), (1, 0, 1), (0, 2, 1)]),
):
    last = bad_runs[0][2] - 1
    refuse(
        f"{what} inside a batch", add_runs, f"X = {last}", f"Y = {bad_runs[-1][1]}",
        error=PositionError, runs=bad_runs,
    )  # fmt: skip
refuse(
    "outputs over n_outputs_max", decode_rows, "output rows is 5, must be 0 to 4", n_rows=5,
    n_outputs=5,
)  # fmt: skip
refuse(
    "outputs of two sequences over n_outputs_max", decode_outputs_of_two_sequences,
    "output rows is 5, must be 0 to 4",
)  # fmt: skip
for bad_n in (0, -1, 2**20 + 1, 2**40, 8.0, "8"):
    refuse(
        f"a batch for {bad_n!r} rows", lambda _, n: Batch(n), f"n_rows_max is {bad_n!r}, must be",
        n=bad_n,
    )  # fmt: skip


# --- Logits ----------------------------------------------------------------------------------
def rows_after_later_decode(scene: Scene) -> object:
    logits = scene.decode()
    scene.decode(1, p0=4)
    return logits.rows


def rows_after_refusal_by_llama(scene: Scene) -> object:
    logits = scene.decode(63)
    for seq_id in (1, 2, 3):
        logits = scene.decode(63, seq_id=seq_id)
    try:
        scene.decode(10, p0=63)
    except NoKVSlotError:
        return logits.rows
    return None


def abort_decode(scene: Scene) -> Logits:
    logits = scene.decode()
    scene.context.set_abort(True)
    try:
        scene.decode(1, p0=4)
    except LlamaCallError:
        scene.context.set_abort(False)
    return logits


def sample_row(scene: Scene, row: Any, n_tokens: int = 4) -> int:
    scene.chain.add_greedy()
    scene.decode(n_tokens)
    return scene.chain.sample(scene.context, row)


def sample_without_decode(scene: Scene) -> int:
    return scene.chain.add_greedy().sample(scene.context, 0)


def sample_after_abort(scene: Scene) -> int:
    scene.chain.add_greedy()
    abort_decode(scene)
    return scene.chain.sample(scene.context, 0)


def sample_row_of_refilled_batch(scene: Scene) -> int:
    """Sample a row that was added to the batch after the decode; only rows of the decode are valid."""
    scene.chain.add_greedy()
    scene.decode(1)
    scene.batch.clear()
    scene.batch.add(0, [97] * 4, 1, n_outputs=4)
    return scene.chain.sample(scene.context, 3)


def sample_poisoned_row(scene: Scene, value: float) -> int:
    scene.chain.add_dist(1)
    scene.decode().rows[:] = value
    return scene.chain.sample(scene.context, 3)


refuse(
    "logits of a decode before the last", rows_after_later_decode, "logits of decode 1",
    "decode 2", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "logits after a decode without room", rows_after_refusal_by_llama, "logits of decode 4",
    "decode 5", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "logits after an aborted decode", lambda s: abort_decode(s).rows, "logits of decode 1",
    "decode 2", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "sampling before the first decode", sample_without_decode, "no successful decode",
    error=StaleLogitsError,
)  # fmt: skip
refuse(
    "sampling after an aborted decode", sample_after_abort, "no successful decode",
    error=StaleLogitsError,
)  # fmt: skip
for bad_row in (-1, 4, INT_MAX, 3.0):
    refuse(f"sampling row {bad_row!r} of 4", sample_row, f"row is {bad_row!r}, must", row=bad_row)
refuse(
    "sampling a row without logits", sample_row, "must be a row of the last batch that was added", row=0,
)  # fmt: skip
refuse(
    "sampling a row that the batch got after the decode", sample_row_of_refilled_batch,
    "row is 3, must be 0 to 0",
)  # fmt: skip
for poison in (NAN, -INF, INF):
    refuse(
        f"sampling a row that is {poison}", sample_poisoned_row, f"logits is {poison}, must be",
        value=poison,
    )  # fmt: skip

CASES = TOPIC.cases
