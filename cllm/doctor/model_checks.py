"""Checks of a loaded model: its vocabulary, its template, a decode, and its KV cache."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from cllm.bindings import Batch, Context, Model, Vocabulary
from cllm.doctor.findings import Check, Status
from cllm.doctor.template_check import check_chat_template
from cllm.doctor.workload import TEXT, ProbeContext, prompt_tokens
from cllm.errors import CllmError, NoKVSlotError

N_CELLS = 256  # cells of the smallest KV cache of llama.cpp
N_PROMPT = 16


def model_checks(model: Model, *, n_threads: int) -> Iterator[Check]:
    """Yield checks of a model; if one has failed, experiments make no sense.  Use the model's thread."""
    yield Check(
        "model",
        Status.OK,
        f"{model.description}, {model.n_params:,} parameters, {model.n_layer} layers, trained on "
        f"{model.n_ctx_train:,} positions",
    )
    yield check_vocabulary(model.vocab)
    yield check_chat_template(model)
    yield Check("prefixes", Status.OK, shared_prefixes(model))
    try:
        with ProbeContext(
            model, n_ctx=N_CELLS, n_batch=N_CELLS // 2, n_ubatch=N_CELLS // 2, n_seq_max=3,
            n_threads=n_threads, n_threads_batch=n_threads,
        ) as context:  # fmt: skip
            yield _check_decode(context, prompt_tokens(model.vocab, N_PROMPT))
            yield _check_seq_rm(context, N_PROMPT)
            yield _check_cells(context, model)
    except CllmError as error:
        yield Check("decode", Status.FAILED, str(error))


def shared_prefixes(model: Model) -> str:
    """Return the parts of prompts that requests can share, in words."""
    if model.has_state:
        return (
            "shared where a state is kept: it has one for each sequence, not a cell for each token"
        )
    if model.n_swa:
        return f"shared where a window is kept: it attends to {model.n_swa:,} tokens"
    return "shared"


def check_vocabulary(vocab: Vocabulary) -> Check:
    """Check that a text survives tokenizing and joining, and that a token exists that ends an output."""
    try:
        tokens = vocab.tokenize(TEXT, add_special=False)
        text = vocab.join(tokens)
    except CllmError as error:
        return Check("vocabulary", Status.FAILED, str(error))
    found = f"{vocab.kind.name}, {vocab.n_tokens:,} tokens"
    if text.decode("utf-8", "replace").strip() != TEXT.strip():
        return Check("vocabulary", Status.WARNING, f"{found}; a text does not survive tokenizing")
    endings = [token for token in (vocab.eos, vocab.eot) if token is not None]
    if not any(vocab.is_eog(token) for token in endings):
        return Check("vocabulary", Status.WARNING, f"{found}; no token ends an output")
    names = ", ".join(dict.fromkeys(vocab.text(token) for token in endings))
    return Check("vocabulary", Status.OK, f"{found}; outputs end with {names}")


def _check_decode(context: Context, prompt: list[int]) -> Check:
    batch = Batch(len(prompt))
    batch.add(0, prompt, 0, n_outputs=1)
    context.decode(batch)  # not measured: the first decode touches new pages and buffers
    context.seq_rm(0)
    started_s = time.perf_counter()
    logits = context.decode(batch)
    elapsed_ms = (time.perf_counter() - started_s) * 1000
    if not np.isfinite(logits.rows).all():
        return Check("decode", Status.FAILED, "logits are not finite: damaged weights?")
    return Check("decode", Status.OK, f"{len(prompt)} tokens in {elapsed_ms:.1f} ms, logits finite")


def _check_seq_rm(context: Context, n_tokens: int) -> Check:
    before = context.seq_pos_max(0)
    is_removed = context.seq_rm(0)
    after = context.seq_pos_max(0)
    if before != n_tokens - 1:
        return Check("seq_rm", Status.FAILED, f"seq_pos_max is {before} after {n_tokens} tokens")
    if not is_removed or after is not None:
        return Check("seq_rm", Status.FAILED, f"returned {is_removed}, then seq_pos_max is {after}")
    return Check(
        "seq_rm", Status.OK, f"seq_pos_max {before}, seq_rm returned True, seq_pos_max -1: gone"
    )


def _check_cells(context: ProbeContext, model: Model) -> Check:
    """Fill the cache with two sequences, remove the first, and fill its cells with a third."""
    if model.has_state:
        return Check("KV cells", Status.OK, "the model keeps a state for each sequence")
    half = context.n_ctx // 2
    tokens = prompt_tokens(model.vocab, half)
    for seq_id in (0, 1):
        _fill(context, seq_id, tokens)
    if not _is_full(context):
        return Check("KV cells", Status.FAILED, f"more than n_ctx = {context.n_ctx} tokens fit")
    context.seq_rm(0)
    try:
        _fill(context, 2, tokens)
    except NoKVSlotError:
        return Check(
            "KV cells", Status.FAILED, f"the {half} cells that seq_rm freed cannot be used again"
        )
    if not _is_full(context):
        return Check("KV cells", Status.FAILED, f"more than n_ctx = {context.n_ctx} tokens fit")
    return Check(
        "KV cells",
        Status.OK,
        f"{context.n_ctx} of {context.n_ctx} used; {half} freed by seq_rm and used again, to the "
        "last",
    )


def _fill(context: Context, seq_id: int, tokens: list[int]) -> None:
    batch = Batch(context.n_batch)
    for start in range(0, len(tokens), context.n_batch):
        batch.clear()
        batch.add(seq_id, tokens[start : start + context.n_batch], start)
        context.decode(batch)


def _is_full(context: Context) -> bool:
    """Return True if there is no room for one more token."""
    batch = Batch(1)
    batch.add(1, [0], context.n_ctx // 2)
    try:
        context.decode(batch)
    except NoKVSlotError:
        return True
    return False
