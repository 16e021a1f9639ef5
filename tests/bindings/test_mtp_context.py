"""The context for multi-token prediction: rows of tokens and hidden states, and errors before the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model, MtpContext, MtpRows
from cllm.bindings import _llama_ext_h as ext
from cllm.bindings._library import library
from cllm.errors import (
    ContextError,
    InvalidArgumentError,
    LibraryError,
    LlamaCallError,
    NoKVSlotError,
    PositionError,
    StaleLogitsError,
)
from tools import make_model

TOKENS = [65, 66, 67, 68, 69, 70, 71, 72]
SIZES: dict[str, Any] = {"n_batch": 32, "n_ubatch": 32, "n_seq_max": 2}


class Opened(NamedTuple):
    """A model, its context and that of its MTP layer."""

    model: Model
    context: Context
    mtp: MtpContext

    def hidden(self, tokens: list[int], seq_id: int = 0) -> NDArray[np.float32]:
        """Return the hidden state before each token, and that of the last one."""
        batch = Batch(32)
        batch.add(seq_id, tokens, 0, n_outputs=1)
        self.context.decode(batch)
        before = np.zeros((1, self.model.n_embd_out), np.float32)
        return np.concatenate([before, self.context.hidden_states()])


@pytest.fixture(params=["tiny-mtp", "tiny-qwen35-mtp", "tiny-step35-mtp"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    path = make_model.ensure(request.param, "F16")
    with (
        Model(path, n_gpu_layers=0, load_mtp=True) as model,
        Context(model, n_ctx=256, keeps_hidden=True, **SIZES) as context,
        MtpContext(model, n_ctx=256, **SIZES) as mtp,
    ):
        yield Opened(model, context, mtp)


def test_every_row_has_its_hidden_state_in_the_order_of_the_batch(opened: Opened) -> None:
    alone = [opened.hidden(TOKENS), opened.hidden(TOKENS[:5], 1)]
    opened.context.memory_clear()
    batch = Batch(32)
    for seq_id, n_tokens in ((1, 5), (0, 8)):
        batch.add(seq_id, TOKENS[:n_tokens], 0, n_outputs=seq_id)
    opened.context.decode(batch)
    together = opened.context.hidden_states()
    assert together.shape == (13, opened.model.n_embd_out)
    expected = np.concatenate([alone[1][1:], alone[0][1:]])
    assert np.abs(together - expected).max() < 0.02


def row(seq_id: int, p0: int, token: int, state: NDArray[np.float32]) -> MtpRows:
    return MtpRows(seq_id, p0, [token], state.reshape(1, -1))


def test_rows_in_parts_and_beside_others_give_what_they_give_alone(opened: Opened) -> None:
    hidden = opened.hidden(TOKENS)
    opened.mtp.compute([MtpRows(0, 0, TOKENS[:7], hidden[:7])])
    logits, states = opened.mtp.predict([row(0, 7, TOKENS[7], hidden[7])])
    assert logits.shape == (1, opened.model.vocab.n_tokens)
    assert states.shape == (1, opened.model.n_embd_out)
    assert np.isfinite(logits).all()
    whole, end = logits[0].copy(), states[0].copy()
    opened.mtp.memory_clear()
    opened.mtp.compute([MtpRows(0, 0, TOKENS[:4], hidden[:4])])
    opened.mtp.compute(
        [MtpRows(1, 0, TOKENS[:6], hidden[:6]), MtpRows(0, 4, TOKENS[4:7], hidden[4:7])]
    )
    logits, states = opened.mtp.predict(
        [row(1, 6, TOKENS[6], hidden[6]), row(0, 7, TOKENS[7], hidden[7])]
    )
    assert len(logits) == len(states) == 2
    assert np.abs(logits[1] - whole).max() < 0.02
    assert np.abs(states[1] - end).max() < 0.02


def test_the_token_and_the_hidden_state_both_count(opened: Opened) -> None:
    hidden = opened.hidden(TOKENS)
    found = []
    for token, state in ((72, hidden[7]), (99, hidden[7]), (72, 2 - hidden[7])):
        opened.mtp.memory_clear()
        opened.mtp.compute([MtpRows(0, 0, TOKENS[:7], hidden[:7])])
        logits, _ = opened.mtp.predict([row(0, 7, token, state)])
        found.append(logits[0].copy())
    assert all(np.abs(found[0] - other).max() > 0.1 for other in found[1:])


def test_a_sequence_begins_anywhere_and_is_shared_and_shortened(opened: Opened) -> None:
    hidden = opened.hidden(TOKENS)
    opened.mtp.compute([MtpRows(0, 3, TOKENS[3:7], hidden[3:7])])
    opened.mtp.seq_cp(0, 1, None, 6)
    assert (opened.mtp.seq_pos_min(1), opened.mtp.seq_pos_max(1)) == (3, 5)
    assert opened.mtp.seq_rm(0, 6)
    logits, _ = opened.mtp.predict([row(seq_id, 6, TOKENS[6], hidden[6]) for seq_id in (0, 1)])
    assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_rows_that_do_not_fit_are_rejected_and_nothing_is_stored(opened: Opened) -> None:
    mtp, zeros = opened.mtp, np.zeros((2, opened.model.n_embd_out), np.float32)
    good = MtpRows(0, 0, [65, 66], zeros)
    mtp.compute([good])
    n_vocab = opened.model.vocab.n_tokens
    rejected: list[tuple[type[Exception], list[MtpRows]]] = [
        (PositionError, [good]),
        (PositionError, [good._replace(p0=3)]),
        (PositionError, [good._replace(seq_id=1)] * 2),
        (InvalidArgumentError, []),
        (InvalidArgumentError, [good._replace(seq_id=1, tokens=[], hidden=zeros[:0])]),
        (InvalidArgumentError, [good._replace(seq_id=2)]),
        (InvalidArgumentError, [good._replace(p0=2, tokens=[65, n_vocab])]),
        (InvalidArgumentError, [good._replace(p0=2, tokens=[-1, 65])]),
        (InvalidArgumentError, [good._replace(p0=2, hidden=zeros[:1])]),
        (InvalidArgumentError, [good._replace(p0=2, hidden=zeros[:, :-1])]),
        (InvalidArgumentError, [good._replace(p0=2, hidden=zeros.astype(np.float64))]),
        (InvalidArgumentError, [good._replace(seq_id=1, p0=mtp.n_ctx_seq - 1)]),
        (
            InvalidArgumentError,
            [good._replace(seq_id=1, tokens=[65] * 33, hidden=zeros.repeat(17, 0)[:33])],
        ),
    ]
    for error, rows in rejected:
        with pytest.raises(error):
            mtp.compute(rows)
        assert (mtp.seq_pos_max(0), mtp.seq_pos_max(1)) == (1, None)
    with pytest.raises(InvalidArgumentError, match="tokens of a sequence"):
        mtp.predict([good._replace(p0=2)])
    mtp.compute([good._replace(p0=2)])


def test_a_full_cache_is_an_error_that_stores_nothing(opened: Opened) -> None:
    zeros = np.zeros((32, opened.model.n_embd_out), np.float32)
    for start in range(0, 256, 32):
        opened.mtp.compute([MtpRows(0, start, [65] * 32, zeros)])
    with pytest.raises(NoKVSlotError):
        opened.mtp.predict([MtpRows(1, 0, [65], zeros[:1])])
    assert opened.mtp.seq_pos_max(1) is None


def test_only_a_model_with_one_such_layer_has_the_context() -> None:
    with Model(make_model.ensure("tiny-llama", "F16"), n_gpu_layers=0, load_mtp=True) as model:
        assert model.n_layer_nextn == 0
        with pytest.raises(ContextError, match="no multi-token prediction for llama"):
            MtpContext(model)
    with (
        Model(make_model.ensure("tiny-qwen35", "F16"), n_gpu_layers=0, load_mtp=True) as model,
        pytest.raises(ContextError, match="the model has 0"),
    ):
        MtpContext(model)
    with Model(make_model.ensure("tiny-mtp", "F16"), n_gpu_layers=0) as model:
        assert (model.n_layer, model.n_layer_nextn, model.has_mtp) == (2, 1, False)
        with pytest.raises(ContextError, match="without load_mtp"):
            MtpContext(model)


def test_hidden_states_exist_only_if_they_are_kept_and_only_after_a_decode() -> None:
    with Model(make_model.ensure("tiny-mtp", "F16"), n_gpu_layers=0) as model:
        batch = Batch(4)
        batch.add(0, [65, 66], 0, n_outputs=1)
        with Context(model, n_ctx=256, keeps_hidden=True) as context:
            with pytest.raises(StaleLogitsError):
                context.hidden_states()
            context.decode(batch)
            assert context.hidden_states().shape == (2, model.n_embd_out)
        with Context(model, n_ctx=256) as context:
            context.decode(batch)
            with pytest.raises(LlamaCallError, match="no hidden states"):
                context.hidden_states()
    with (
        Model(make_model.ensure("tiny-llama", "F16"), n_gpu_layers=0) as model,
        pytest.raises(ContextError, match="no hidden states for llama"),
    ):
        Context(model, n_ctx=256, keeps_hidden=True)


def test_hidden_states_change_no_logit() -> None:
    found = []
    with Model(make_model.ensure("tiny-mtp", "F16"), n_gpu_layers=0) as model:
        for keeps_hidden in (False, True):
            batch = Batch(8)
            batch.add(0, TOKENS, 0, n_outputs=1)
            with Context(model, n_ctx=256, keeps_hidden=keeps_hidden) as context:
                found.append(context.decode(batch).rows.copy())
    assert np.abs(found[0] - found[1]).max() < 0.02


def test_a_library_without_these_functions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ext, "GET_EMBEDDINGS_NEXTN", "_Z26llama_get_embeddings_nextnv")
    with pytest.raises(LibraryError, match="no functions for hidden states"):
        ext.HiddenStates(library().path)


def test_without_batches_of_hidden_states_the_context_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lib, freed = library(), list[object]()

    def absent(*_: object) -> None:
        raise LibraryError("no function llama_batch_ext_init")

    def free(pointer: object) -> None:
        freed.append(pointer)
        usual(pointer)

    usual = lib.llama_free
    monkeypatch.setattr(lib, "llama_batch_ext_init", absent)
    monkeypatch.setattr(lib, "llama_free", free)
    with Model(make_model.ensure("tiny-mtp", "F16"), n_gpu_layers=0, load_mtp=True) as model:
        with pytest.raises(LibraryError):
            MtpContext(model, n_ctx=256)
        assert len(freed) == 1


def plain(name: str) -> str:
    return "".join(filter(str.isalnum, name))


def test_the_architectures_are_those_of_llama_cpp(llama_cpp_source: Path) -> None:
    sources = (llama_cpp_source / "src" / "models").glob("*.cpp")
    found = {plain(file.stem) for file in sources if "GRAPH_TYPE_DECODER_MTP" in file.read_text()}
    assert {plain(name) for name in ext.ARCHITECTURES} == found
