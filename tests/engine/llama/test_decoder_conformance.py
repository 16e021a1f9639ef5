"""The fake and llama.cpp keep the same promises: what passes on one holds for the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Context, Model
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.errors import (
    DecodeFailedError,
    InvalidArgumentError,
    InvalidBatchError,
    LlamaCallError,
    NoKVSlotError,
)
from cllm.testing import FakeDecoder, FakeVocabulary
from cllm.testing.fake_decoder import Fault
from tests.simulation.conformance import check_decoder


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_fake_keeps_the_promises_of_a_decoder() -> None:
    check_decoder(FakeDecoder)


def test_llama_cpp_keeps_the_promises_of_a_decoder(tiny_model_path: Path, owned: ExitStack) -> None:
    model = owned.enter_context(Model(tiny_model_path))

    def make(*, n_ctx: int, n_seq_max: int, n_batch: int, kv_unified: bool) -> LlamaDecoder:
        def make_context() -> Context:
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
            return context

        return LlamaDecoder(make_context, n_batch)

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


class _Miscopying(FakeDecoder):
    """Does something else than it should once it has copied."""

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, *span: int | None, **_: Any) -> None:
        super().seq_cp(seq_id_src, seq_id_dst, *span)
        if seq_id_dst in self._held:
            self.spoil(seq_id_src, seq_id_dst)

    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        raise NotImplementedError


class _OneTooMany(_Miscopying):
    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        source, copied = self._held[seq_id_src], self._held[seq_id_dst]
        copied += source[len(copied) : len(copied) + 1]


class _Unshared(_Miscopying):
    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        self._held[seq_id_dst] = [cell and replace(cell) for cell in self._held[seq_id_dst]]


class _Aliasing(_Miscopying):
    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        self._held[seq_id_dst] = self._held[seq_id_src]


class _Misread(_Miscopying):
    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        copied = self._held[seq_id_dst]
        copied[-1] = copied[-1] and replace(copied[-1], token=0)


class _Hasty(_Miscopying):
    def spoil(self, seq_id_src: int, seq_id_dst: int) -> None:
        self._pending_copies.clear()


class _Overwriting(FakeDecoder):
    def seq_cp(self, seq_id_src: int, seq_id_dst: int, *span: int | None, **_: Any) -> None:
        if 0 <= seq_id_dst < self.n_seq_max:
            self.seq_rm(seq_id_dst)
        super().seq_cp(seq_id_src, seq_id_dst, *span)


class _Splitting(FakeDecoder):
    def seq_cp(self, seq_id_src: int, seq_id_dst: int, *span: int | None, **_: Any) -> None:
        kv_unified, self.kv_unified = self.kv_unified, True
        super().seq_cp(seq_id_src, seq_id_dst, *span)
        self.kv_unified = kv_unified


class _Possessive(FakeDecoder):
    """Removes the cells of a sequence from those that share them."""

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        before = set(self._held.get(seq_id, []))
        super().seq_rm(seq_id, p0, p1)
        removed = before - set(self._held.get(seq_id, []))
        for other in list(self._held):
            held = self._held.pop(other)
            self._hold(other, [None if cell in removed else cell for cell in held])
        return True


class _Twice(FakeDecoder):
    @property
    def n_cells_used(self) -> int:
        return sum(map(len, self.cells.values()))


class _Leaking(FakeDecoder):
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        if len(self._held) == 2 and self.seq_pos_max(0) == self.seq_pos_max(1):
            self.n_ctx -= 1
        return super().seq_rm(seq_id, p0, p1)


class _Credulous(FakeDecoder):
    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        with suppress(LlamaCallError):
            super().state_seq_set_data(data, seq_id, n_positions=n_positions)


class _Untidy(FakeDecoder):
    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        try:
            super().state_seq_set_data(data, seq_id, n_positions=n_positions)
        except LlamaCallError:
            self._hold(seq_id, list(self._held[1 - seq_id][:1]))
            raise


class _Stale(FakeDecoder):
    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        super().state_seq_set_data(data, seq_id, n_positions=n_positions)
        self._held[seq_id][0] = self._held[seq_id][-1]


class _Attached(FakeDecoder):
    def rebuild(self) -> None:
        kept = self._held.get(1)
        super().rebuild()
        self._hold(1, list(kept or ()))


class _Growing(FakeDecoder):
    def rebuild(self) -> None:
        super().rebuild()
        self.n_ctx, self.n_ctx_seq = 2 * self.n_ctx, 2 * self.n_ctx_seq


class _Pending(FakeDecoder):
    def rebuild(self) -> None:
        pending, self._pending_copies = self._pending_copies, set()
        super().rebuild()
        self._pending_copies = pending


@pytest.mark.parametrize(
    ("wrong", "promise"),
    [
        (_Forgetful, "output rows are in the order"),
        (_Reversed, "output rows are in the order"),
        (_Lenient, "gaps and repeats are refused"),
        (_OneTooMany, "any range can be copied"),
        (_Unshared, "shared cells count once"),
        (_Aliasing, "gives a sequence the positions of another"),
        (_Misread, "copied prefix gives the logits"),
        (_Overwriting, "wrong copy is refused"),
        (_Splitting, "part of a sequence is not copied"),
        (_Possessive, "gives a sequence the positions of another"),
        (_Twice, "shared cells count once"),
        (_Leaking, "shared cells count once"),
        (_Hasty, "copy has no state before a decode"),
        (_Credulous, "truncated state is refused"),
        (_Untidy, "truncated state is refused"),
        (_Stale, "restored sequence goes on like the saved one"),
        (_Attached, "rebuild empties everything"),
        (_Growing, "rebuild keeps the limits"),
        (_Pending, "rebuild empties everything"),
    ],
)
def test_a_decoder_that_breaks_a_promise_is_found(wrong: type[FakeDecoder], promise: str) -> None:
    with pytest.raises(AssertionError, match=rf"{promise}.* layout\)"):
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


def two_requests(decoder: FakeDecoder) -> None:
    """One row of sequence 0 and two of sequence 1, all of them output rows."""
    decoder.clear()
    decoder.add(0, [1], 0, n_outputs=1)
    decoder.add(1, [2, 3], 0, n_outputs=2)


def test_poison_happens_whenever_its_run_is_in_a_batch_and_to_no_other_run() -> None:
    decoder = FakeDecoder(faults={2: "nan"}, poison=lambda run: "nan" if 2 in run.tokens else None)
    for is_scripted in (False, True, False):
        two_requests(decoder)
        assert np.isnan(decoder.decode()).any(axis=1).tolist() == [is_scripted, True, True]
        decoder.rebuild()
    decoder.clear()
    decoder.add(0, [1], 0, n_outputs=1)
    assert not np.isnan(decoder.decode()).any()


@pytest.mark.parametrize(
    ("fault", "error"), [(-3, DecodeFailedError), (1, NoKVSlotError), (OSError("x"), OSError)]
)
def test_the_first_poison_that_is_answered_happens(fault: Fault, error: type[Exception]) -> None:
    decoder = FakeDecoder(faults={2: 2}, poison=lambda run: fault if run.seq_id == 1 else None)
    two_requests(decoder)
    with pytest.raises(error):
        decoder.decode()
    decoder.rebuild()
    with pytest.raises(DecodeFailedError) as caught:
        decoder.decode()
    assert caught.value.code == 2, "a scripted fault comes first"
    decoder.rebuild()
    with pytest.raises(error):
        decoder.decode()
    assert decoder.cells == ({0: [1], 1: [2]} if fault == -3 else {})


def test_a_scripted_call_fails_and_the_others_of_its_method_work() -> None:
    decoder = FakeDecoder(
        call_faults={
            ("seq_rm", 1): False,
            ("seq_cp", 1): RuntimeError("scripted"),
            ("state_seq_get_data", 1): False,
            ("state_seq_set_data", 1): False,
            ("rebuild", 1): RuntimeError("scripted"),
        }
    )
    two_requests(decoder)
    decoder.decode()
    assert [decoder.seq_rm(0), decoder.seq_rm(0)] == [False, True]
    for _ in range(2):
        with suppress(RuntimeError):
            decoder.seq_cp(1, 2)
            assert decoder.n_calls["seq_cp"] == 2
    data = [decoder.state_seq_get_data(2) for _ in range(2)]
    assert [bool(d) for d in data] == [False, True]
    with pytest.raises(LlamaCallError, match="llama_state_seq_set_data"):
        decoder.state_seq_set_data(data[1], 3, n_positions=2)
    decoder.state_seq_set_data(data[1], 3, n_positions=2)
    assert decoder.cells == {1: [2, 3], 2: [2, 3], 3: [2, 3]}
    assert decoder.n_cells_used == 4
    with pytest.raises(RuntimeError, match="scripted"):
        decoder.rebuild()
    assert (decoder.n_rebuilds, len(decoder.cells)) == (0, 3)
    decoder.rebuild()
    assert (decoder.n_rebuilds, decoder.cells) == (1, {})
    assert decoder.n_calls == dict.fromkeys(
        ("seq_rm", "seq_cp", "state_seq_get_data", "state_seq_set_data", "rebuild"), 2
    )


def test_any_damage_to_a_saved_sequence_is_found() -> None:
    decoder = FakeDecoder()
    two_requests(decoder)
    decoder.decode()
    data = decoder.state_seq_get_data(1)
    damaged = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    for wrong in (*damaged, data + b"x", bytes(4)):
        with pytest.raises(InvalidArgumentError, match="its checksum is wrong"):
            decoder.state_seq_set_data(wrong, 2, n_positions=2)
    assert decoder.cells == {0: [1], 1: [2, 3]}


def test_output_rows_are_limited_as_told() -> None:
    decoder = FakeDecoder(n_seq_max=2, n_outputs_max=3)
    two_requests(decoder)
    assert len(decoder.decode()) == 3
    decoder.add(0, [1], 1, n_outputs=1)
    with pytest.raises(InvalidArgumentError, match="output rows"):
        decoder.decode()
    with pytest.raises(InvalidArgumentError, match="n_outputs_max"):
        FakeDecoder(n_seq_max=4, n_outputs_max=3)


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
