"""The MTP layer follows the cells of the model: shared, shortened, left out and restored."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from cllm.bindings import Context, Model, MtpContext, MtpRows
from cllm.engine.config import EngineConfig
from cllm.engine.core import sequence as core
from cllm.engine.core.decoder import MediaRows
from cllm.engine.core.speculation import Drafts
from cllm.engine.llama.decoder import LlamaDecoder
from cllm.engine.llama.mtp_drafter import N_WAITING, MtpDrafter, check_mtp_file
from cllm.errors import DecodeFailedError, ModelLoadError, NoKVSlotError
from tools import make_model

TEXT = [65 + n % 23 for n in range(40)]
N_BATCH = 32


class Slot:
    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id


class Running:
    """A sequence, as far as the drafter reads it: its seq_id and its tokens."""

    spans = ()

    def __init__(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.placement = self
        self.slot = Slot(seq_id)
        self.tokens = list(tokens)


class Layer:
    """A decoder with an MTP layer that follows it."""

    def __init__(self, model: Model) -> None:
        def make() -> Context:
            return Context(
                model, n_ctx=512, n_batch=N_BATCH, n_ubatch=N_BATCH, n_seq_max=3, n_rs_seq=4,
                n_outputs_max=8, keeps_hidden=True,
            )  # fmt: skip

        self.decoder = LlamaDecoder(make, N_BATCH)
        self.context = MtpContext(model, n_ctx=512, n_batch=N_BATCH, n_ubatch=N_BATCH, n_seq_max=3)
        self.drafter = MtpDrafter(self.context, clock=lambda: 0.0)
        self.decoder.follower = self.drafter

    def compute(self, seq_id: int, tokens: Sequence[int], p0: int, n_each: int = N_BATCH) -> None:
        """Compute tokens in decodes of `n_each` rows."""
        for start in range(0, len(tokens), n_each):
            self.decoder.clear()
            piece = list(tokens[start : start + n_each])
            self.decoder.add(seq_id, piece, p0 + start, n_outputs=1)
            self.decoder.decode()

    def drafts(self, *asked: tuple[int, Sequence[int]], n: int = 4) -> list[Drafts]:
        """Return drafts for sequences, each with its tokens."""
        wanted = [(cast("core.Sequence", Running(*each)), n) for each in asked]
        return self.drafter.draft(wanted)

    def close(self) -> None:
        self.drafter.close()
        self.decoder.close()


@pytest.fixture(params=["tiny-mtp", "tiny-qwen35-mtp", "tiny-step35-mtp"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    path = make_model.ensure(request.param, "F16")
    with Model(path, n_gpu_layers=0, load_mtp=True) as opened:
        yield opened


@pytest.fixture
def layer(model: Model) -> Iterator[Layer]:
    opened = Layer(model)
    yield opened
    opened.close()


@pytest.fixture
def usual(model: Model) -> list[Drafts]:
    """Drafts after `TEXT`, of which all tokens but the last are computed at once."""
    opened = Layer(model)
    opened.compute(0, TEXT[:-1], 0)
    drafts = opened.drafts((0, TEXT))
    opened.close()
    assert len(drafts[0]) == 4
    return drafts


@pytest.mark.parametrize("n_each", [1, 3, N_WAITING, N_BATCH])
def test_drafts_do_not_depend_on_the_parts_of_a_prompt(
    layer: Layer, usual: list[Drafts], n_each: int
) -> None:
    layer.compute(1, TEXT[:-1], 0, n_each)
    assert layer.drafts((1, TEXT)) == usual


def test_drafts_leave_nothing_behind(layer: Layer, usual: list[Drafts]) -> None:
    layer.compute(0, TEXT[:20], 0)
    for n_tokens in range(20, 39):
        layer.drafts((0, [*TEXT[:n_tokens], 99]), n=8)
        layer.drafts((0, TEXT[: n_tokens + 1]), n=1)
        layer.compute(0, TEXT[n_tokens : n_tokens + 1], n_tokens)
    assert layer.drafts((0, TEXT)) == usual


def test_rejected_drafts_are_forgotten(layer: Layer, usual: list[Drafts]) -> None:
    layer.compute(0, TEXT[:30], 0)
    for n_tokens in range(30, 39):  # each step computes the next token and three wrong drafts
        layer.drafts((0, TEXT[: n_tokens + 1]))
        layer.decoder.clear()
        layer.decoder.add(0, [TEXT[n_tokens], 97, 98, 99], n_tokens, n_outputs=4)
        layer.decoder.decode()
        assert layer.decoder.seq_rm(0, n_tokens + 1)
    assert layer.drafts((0, TEXT)) == usual


def test_a_copy_has_all_that_the_original_has(layer: Layer, usual: list[Drafts]) -> None:
    layer.compute(0, TEXT[:-1], 0)
    layer.decoder.seq_cp(0, 1)
    layer.decoder.seq_rm(0)
    assert layer.drafts((1, TEXT)) == usual
    assert layer.drafts((0, TEXT)) == [()]


# Recurrent memory shares whole sequences only.
@pytest.mark.parametrize("model", ["tiny-mtp"], indirect=True)
def test_sequences_with_one_beginning_draft_as_each_alone(layer: Layer) -> None:
    layer.compute(0, TEXT[:-1], 0)
    layer.decoder.seq_cp(0, 1, None, 24)
    other = [*TEXT[:24], *TEXT[3:12]]
    layer.compute(1, other[24:-1], 24)
    together = layer.drafts((0, TEXT), (1, other))
    assert together == [*layer.drafts((0, TEXT)), *layer.drafts((1, other))]
    assert all(len(drafts) == 4 for drafts in together)


def test_a_sequence_that_was_restored_begins_again_behind_the_gap(layer: Layer) -> None:
    layer.compute(0, TEXT[:-1], 0)
    copy = layer.decoder.state_seq_get_data(0)
    layer.decoder.seq_rm(0)
    layer.decoder.state_seq_set_data(copy, 0, n_positions=39)
    assert layer.drafts((0, TEXT)) == [()]
    more = [*TEXT, *TEXT[:5]]
    layer.compute(0, more[39:-1], 39)
    assert len(layer.drafts((0, more))[0]) == 4
    assert layer.context.seq_pos_min(0) == 39


def test_a_sequence_with_an_unknown_end_has_no_drafts(layer: Layer) -> None:
    layer.compute(0, TEXT[:-1], 0)
    assert layer.drafts((0, TEXT[:-1]), (0, [*TEXT, 70]), (2, TEXT)) == [(), (), ()]


def test_after_a_rebuild_the_layer_is_empty(layer: Layer, usual: list[Drafts]) -> None:
    layer.compute(0, TEXT[:-1], 0)
    layer.decoder.rebuild()
    assert layer.drafts((0, TEXT)) == [()]
    layer.compute(0, TEXT[:-1], 0)
    assert layer.drafts((0, TEXT)) == usual


@pytest.mark.parametrize("model", ["tiny-qwen35-mtp"], indirect=True)
def test_rows_of_an_image_end_what_the_layer_has(layer: Layer, model: Model) -> None:
    layer.compute(0, TEXT[:10], 0)
    rows = np.zeros((4, model.n_embd_inp), np.float32)
    positions = np.array([[10] * 4, [10, 10, 11, 11], [10, 11, 10, 11], [0] * 4], np.int32)
    layer.decoder.add_media(MediaRows(0, rows, positions, True, 0))
    layer.decoder.decode()
    layer.compute(0, TEXT[:5], 12)
    layer.drafts((0, [*TEXT[:17], 65]), n=1)
    assert layer.context.seq_pos_min(0) == 12


def test_many_waiting_rows_are_computed_in_batches_that_fit(
    layer: Layer, usual: list[Drafts]
) -> None:
    for n in range(39):
        for seq_id in range(3):
            layer.compute(seq_id, TEXT[n : n + 1], n)
    assert all(len(held.tokens) <= N_WAITING for held in layer.drafter._held.values())
    assert layer.drafts(*((seq_id, TEXT) for seq_id in range(3))) == usual * 3


def test_an_error_of_the_layer_ends_drafts_and_nothing_else(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_runs: Sequence[MtpRows]) -> None:
        raise DecodeFailedError("llama_decode", -3, "fatal error")

    layer.compute(0, TEXT[:-1], 0)
    monkeypatch.setattr(layer.context, "compute", failing)
    with caplog.at_level(logging.WARNING, "cllm.engine"):
        layer.compute(1, TEXT[:-1], 0)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "multi-token prediction failed and is not used any more"
    ]
    sequence = cast("core.Sequence", Running(0, TEXT))
    assert layer.drafter.expect(sequence, 4) == []
    assert layer.drafts((0, TEXT)) == [()]
    layer.decoder.seq_cp(0, 2)
    assert layer.decoder.seq_rm(0)


def test_full_cells_are_emptied_and_drafts_begin_again(
    layer: Layer, usual: list[Drafts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_runs: Sequence[MtpRows]) -> None:
        raise NoKVSlotError("llama_decode", 1, "no room in the KV cache")

    layer.compute(1, TEXT[:20], 0)
    layer.compute(0, TEXT[:-1], 0)
    with monkeypatch.context() as patch:
        patch.setattr(layer.context, "compute", full)
        assert layer.drafts((0, TEXT)) == [()]
    assert not layer.drafter.is_broken
    assert layer.drafts((1, TEXT[:21])) == [()]
    assert layer.decoder.seq_rm(0)
    layer.compute(0, TEXT[:-1], 0)
    assert layer.drafts((0, TEXT)) == usual


def test_copies_share_rows_that_waited(layer: Layer) -> None:
    layer.compute(0, TEXT[:30], 0)
    for n in range(200):  # more cells than there are, if each copy had its own
        layer.decoder.seq_rm(1 + n % 2)
        layer.decoder.seq_cp(0, 1 + n % 2)
        layer.drafts((1 + n % 2, TEXT[:31]), n=1)
    assert layer.drafts((0, TEXT[:31]))[0] == layer.drafts((1, TEXT[:31]))[0] != ()


def test_no_view_keeps_the_rows_of_a_prompt(layer: Layer) -> None:
    layer.compute(0, TEXT[:-1], 0)
    layer.decoder.seq_cp(0, 1)
    layer.drafts((0, TEXT))
    for held in layer.drafter._held.values():
        assert held.hidden.base is None
        assert len(held.hidden) == 1 + len(held.tokens)


def test_rows_that_may_be_wrong_wait_until_they_are_known(
    layer: Layer, usual: list[Drafts]
) -> None:
    """Without their hidden states, the row behind them would be computed from zeros."""
    layer.compute(0, TEXT[:20], 0)
    layer.decoder.clear()
    layer.decoder.add(0, [*TEXT[20:22], 97, 98, 99], 20, n_outputs=4)
    layer.compute(1, TEXT[:N_BATCH], 0)
    layer.decoder.clear()
    layer.decoder.add(0, [*TEXT[20:22], 97, 98, 99], 20, n_outputs=4)
    layer.decoder.decode()
    assert layer.decoder.seq_rm(0, 22)
    layer.compute(0, TEXT[22:-1], 22)
    assert layer.drafts((0, TEXT)) == usual


def test_a_file_without_the_layer_is_rejected_before_it_is_loaded() -> None:
    for name in ("tiny-llama", "tiny-qwen35"):
        path = make_model.ensure(name, "F16")
        with pytest.raises(ModelLoadError, match="speculation is 'mtp', but"):
            check_mtp_file(path)
    path = make_model.ensure("tiny-mtp", "F16")
    check_mtp_file(path)
    with pytest.raises(ModelLoadError, match="No such file"):
        check_mtp_file(path.with_name("missing.gguf"))
    assert EngineConfig(speculation="mtp").draft_model is None
