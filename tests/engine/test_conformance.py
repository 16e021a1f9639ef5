"""The fake and llama.cpp keep the same promises: what passes on one holds for the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Context, Model
from cllm.engine.inference_thread import LlamaDecoder
from cllm.engine.tick import Decoder
from cllm.errors import DecodeFailedError, InvalidBatchError, LlamaCallError, NoKVSlotError
from cllm.testing import FakeDecoder, FakeVocabulary, check_decoder
from cllm.testing.fake_decoder import Fault


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_fake_keeps_the_promises_of_a_decoder() -> None:
    check_decoder(FakeDecoder)


def test_llama_cpp_keeps_the_promises_of_a_decoder(tiny_model_path: Path, owned: ExitStack) -> None:
    model = owned.enter_context(Model(tiny_model_path))

    def make(*, n_ctx: int, n_seq_max: int, n_batch: int, kv_unified: bool) -> Decoder:
        context = owned.enter_context(
            Context(
                model,
                n_ctx=n_ctx,
                n_seq_max=n_seq_max,
                n_batch=n_batch,
                n_ubatch=n_batch,
                n_threads=1,
                n_threads_batch=1,
                kv_unified=kv_unified,
            )
        )
        assert context.n_ctx == n_ctx, "llama.cpp has rounded the context"
        return LlamaDecoder(context)

    check_decoder(make)


class _Forgetful(FakeDecoder):
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return p0 is None or super().seq_rm(seq_id, p0, p1)


class _Reversed(FakeDecoder):
    def decode(self) -> NDArray[np.float32]:
        return super().decode()[::-1]


class _Lenient(FakeDecoder):
    def add(self, seq_id: int, tokens: Sequence[int], p0: int, *, n_outputs: int = 0) -> range:
        last = self.seq_pos_max(seq_id) if 0 <= seq_id < self.n_seq_max else None
        p0 = p0 if last is None else last + 1
        return super().add(seq_id, tokens, p0, n_outputs=n_outputs)


@pytest.mark.parametrize("wrong", [_Forgetful, _Reversed, _Lenient])
def test_a_decoder_that_breaks_a_promise_is_found(wrong: type[FakeDecoder]) -> None:
    with pytest.raises(AssertionError, match="layout"):
        check_decoder(wrong)


@pytest.mark.parametrize(
    ("code", "error", "n_stored"),
    [
        (1, NoKVSlotError, 0),
        (-1, InvalidBatchError, 0),
        (2, DecodeFailedError, 3),
        (-2, DecodeFailedError, 3),
        (-3, DecodeFailedError, 3),
    ],
)
def test_a_scripted_code_raises_its_error_and_stores_what_llama_cpp_may_store(
    code: int, error: type[LlamaCallError], n_stored: int
) -> None:
    decoder = FakeDecoder(faults={2: code})
    decoder.add(0, [1, 2], 0, n_outputs=0)
    decoder.decode()
    decoder.clear()
    decoder.add(0, [3, 4], 2, n_outputs=1)
    decoder.add(1, [5, 6, 7], 0, n_outputs=1)
    with pytest.raises(error) as caught:
        decoder.decode()
    assert caught.value.code == code
    assert decoder.n_cells_used == 2 + n_stored
    assert decoder.cells == ({0: [1, 2, 3, 4], 1: [5]} if n_stored else {0: [1, 2]})


@pytest.mark.parametrize("fault", [RuntimeError("scripted"), "nan"])
def test_a_scripted_fault_happens_at_its_decode_and_at_no_other(fault: Fault) -> None:
    decoder = FakeDecoder(faults={1: fault})
    decoder.add(0, [1], 0, n_outputs=1)
    decoder.add(1, [2], 0, n_outputs=1)
    if isinstance(fault, Exception):
        with pytest.raises(RuntimeError, match="scripted"):
            decoder.decode()
        assert decoder.n_cells_used == 0
        decoder.decode()
    else:
        assert np.isnan(decoder.decode()).any(axis=1).tolist() == [True, False]
        decoder.seq_rm(0)
        decoder.seq_rm(1)
    decoder.clear()
    decoder.add(2, [1], 0, n_outputs=1)
    assert decoder.decode()[0].argmax() == decoder.answer([1])


def test_the_fakes_logits_are_worthless_after_the_next_decode() -> None:
    decoder = FakeDecoder()
    decoder.add(0, [1], 0, n_outputs=1)
    stale = decoder.decode()
    decoder.clear()
    decoder.add(0, [2], 1, n_outputs=1)
    decoder.decode()
    assert np.isnan(stale).all()


def test_every_byte_is_a_token_and_only_the_end_token_ends() -> None:
    vocabulary = FakeVocabulary()
    pieces = [vocabulary.piece(token) for token in range(vocabulary.n_tokens)]
    assert b"".join(pieces) == bytes(range(256))
    assert [t for t in range(vocabulary.n_tokens) if vocabulary.is_eog(t)] == [vocabulary.END]
