"""Settings under which the logits of a row do not depend on the rows beside it, and the proof at load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import Engine, EngineConfig, InvalidArgumentError
from cllm.bindings import Model, library
from cllm.engine.llama import determinism
from cllm.engine.llama.decoder import LlamaDecoder, make_context
from cllm.engine.llama.determinism import TILED_PRODUCTS, deterministic_decoder, without_tiles
from cllm.engine.llama.gguf_header import has_plain_matrix, has_tiled_matrix
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.llama.padded_decoder import PaddedDecoder, Rows, has_lone_rows
from cllm.engine.llama.shapes import are_equal, shapes_that_differ
from cllm.errors import PositionError
from tests.conftest import QUIET
from tests.lora_files import make_lora
from tools import make_model

ROOT = Path(__file__).parents[3]
ASKED = ("deterministic", True)
CONFIG = EngineConfig(deterministic=True, n_ctx=2048, n_seq_max=8, n_batch=64, n_threads=1)


@contextmanager
def decoder_of(path: Path, *adapters: Path) -> Iterator[LlamaDecoder]:
    with Model(path, use_extra_bufts=False) as model, closing(LlamaLoras(model)) as loras:
        for adapter in adapters:
            loras.load(adapter.name, str(adapter), 1.0)
        with without_tiles(has_tiled_matrix(path), ASKED):
            decoder = deterministic_decoder(
                model,
                lambda: make_context(model, CONFIG),
                CONFIG.n_batch,
                loras,
                needs_padding=any(map(has_plain_matrix, [path, *adapters])),
            )
        with closing(decoder):
            yield decoder


def row(seq_id: int, n_tokens: int = 1, n_outputs: int = 1) -> Rows:
    return Rows(seq_id, [1] * n_tokens, 0, n_outputs)


@pytest.mark.parametrize(
    ("rows", "is_lone"),
    [
        ([row(0)], True),
        ([row(0), row(1)], False),
        ([row(1), row(2), row(5), row(6)], False),
        ([row(0), row(2)], True),
        ([row(0), row(1), row(3)], True),
        ([row(0, 5)], True),
        ([row(0), row(1, 9)], True),
        ([row(0), row(1, 1, 0)], True),
    ],
)
def test_rows_without_a_neighbour_are_found(rows: list[Rows], is_lone: bool) -> None:
    assert has_lone_rows(rows) is is_lone


@pytest.mark.parametrize(
    ("file_type", "kind"), [("F16", PaddedDecoder), ("Q8_0", LlamaDecoder), ("Q4_0", LlamaDecoder)]
)
def test_only_weights_that_need_it_are_padded(
    file_type: make_model.FileType, kind: type[LlamaDecoder]
) -> None:
    with decoder_of(make_model.ensure("tiny-llama", file_type)) as decoder:
        assert type(decoder) is kind
        assert shapes_that_differ(decoder, are_equal) == []


def test_an_adapter_of_plain_matrices_needs_padding_whatever_the_model_is(tmp_path: Path) -> None:
    path = make_model.ensure("tiny-llama", "Q8_0")
    adapter = make_lora(tmp_path / "lora.gguf", path, seed=1)
    assert not has_plain_matrix(path)
    assert has_plain_matrix(adapter)
    with decoder_of(path, adapter) as decoder:
        assert type(decoder) is PaddedDecoder
        assert shapes_that_differ(decoder, are_equal) == []


def test_without_the_settings_the_trial_says_which_shapes_differ() -> None:
    config = EngineConfig(n_ctx=2048, n_seq_max=8, n_batch=64, n_threads=1)
    with (
        Model(make_model.ensure("tiny-llama", "F16")) as model,
        closing(LlamaDecoder(lambda: make_context(model, config), config.n_batch)) as plain,
    ):
        assert "beside many others" in shapes_that_differ(plain, are_equal)


def test_padding_leaves_nothing_behind_and_gives_the_rows_that_were_asked_for() -> None:
    with decoder_of(make_model.ensure("tiny-llama", "F16")) as decoder:
        decoder.clear()
        assert decoder.add(0, [5, 6, 7], 0, n_outputs=1) == range(1)
        assert decoder.add(3, [5, 6, 7, 8], 0, n_outputs=4) == range(1, 5)
        assert decoder.add(4, [5], 0, n_outputs=0) == range(5, 5)
        together = decoder.decode()
        assert together.shape == (5, decoder.n_vocab)
        assert [decoder.seq_pos_max(seq_id) for seq_id in (0, 3, 4)] == [2, 3, 0]
        # The third token of the second says what the third of the first says.
        assert np.array_equal(together[0], together[3])


def test_a_refused_batch_leaves_no_padding() -> None:
    with decoder_of(make_model.ensure("tiny-llama", "F16")) as decoder:
        decoder.clear()
        decoder.add(0, [5, 6], 3, n_outputs=1)
        with pytest.raises(PositionError):
            decoder.decode()
        assert decoder.seq_pos_max(0) is None
        decoder.clear()
        decoder.add(0, [5, 6], 0, n_outputs=1)
        assert decoder.decode().shape == (1, decoder.n_vocab)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_unified": True}, "kv_unified"),
        ({"flash_attn": False}, "flash_attn"),
        ({"type_k": "f32"}, "type_k"),
        ({"type_v": "f32"}, "type_v"),
        ({"n_ubatch": 8, "n_seq_max": 8}, "n_ubatch"),
    ],
)
def test_settings_that_exclude_it_are_refused_by_name(
    options: dict[str, bool | str | int], field: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        EngineConfig(deterministic=True, **options)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_model_for_which_it_does_not_hold_is_refused(anyio_backend: str) -> None:
    # Single rows of F16 weights are computed otherwise than two, and a state cannot be padded.
    path = make_model.ensure("tiny-recurrent", "F16")
    with pytest.raises(InvalidArgumentError, match=r"deterministic .*logits of a row differ"):
        async with Engine(path, deterministic=True, n_ctx=512, n_seq_max=4, **QUIET):
            pass


@pytest.mark.anyio
async def test_a_padded_sequence_may_fill_all_but_one_of_its_positions(anyio_backend: str) -> None:
    async with Engine(deterministic=True, n_ctx=512, n_seq_max=2, **QUIET) as engine:
        assert engine.model is not None
        assert engine.model.n_ctx == 255
        completion = await engine.generate([65] * 200, ignore_eos=True, temperature=0.0)
        assert completion.stop_reason == "context"
        assert len(completion.token_ids) == 256 - 200
        assert await engine.audit() == []


@pytest.mark.anyio
async def test_padding_past_a_sliding_window_changes_no_bit(anyio_backend: str) -> None:
    path = make_model.ensure("tiny-swa", "F16")
    prompts = [list(range(5, 5 + n)) for n in (3, 40, 90)]
    answers = []
    for n_seq_max in (1, 4):
        options: dict[str, Any] = {"n_ctx": 256 * n_seq_max, "n_seq_max": n_seq_max}
        options |= {"deterministic": True, "prefix_cache": n_seq_max > 1}
        async with Engine(path, **options, **QUIET) as engine:
            found = await engine.generate_all(
                prompts, max_tokens=60, temperature=0.0, logprobs=2, ignore_eos=True
            )
            assert await engine.audit() == []
        answers.append([(each.token_ids, each.logprobs) for each in found])
    assert answers[0] == answers[1]


def test_k_quants_after_another_engine_are_refused_and_not_left_to_a_lucky_trial() -> None:
    code = """
import anyio
from cllm import Engine, InvalidArgumentError
from tools import make_model

async def use(path, **options):
    async with Engine(path, n_ctx=512, n_seq_max=2, n_threads=1, n_threads_batch=1, **options) as engine:
        await engine.generate([5, 6, 7], max_tokens=2)

async def main(first, then):
    k_quant = make_model.ensure("qwen3-wide", "Q4_K_M")
    await use(k_quant, deterministic=first)
    try:
        await use(k_quant, deterministic=then)
    except InvalidArgumentError as error:
        print(error.limit)

import sys
anyio.run(main, *(argument == "True" for argument in sys.argv[1:]))
"""

    def told(*arguments: bool) -> str:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return done.stdout

    assert "after another engine of this process has computed" in told(False, True)
    assert told(True, True) == ""
    assert told(True, False) == ""


@pytest.mark.anyio
async def test_deterministic_engines_may_start_at_the_same_time(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TILED_PRODUCTS, raising=False)
    path = make_model.ensure("tiny-llama", "Q8_0")

    async def use() -> None:
        async with Engine(path, deterministic=True, n_ctx=512, n_seq_max=2, **QUIET) as engine:
            await engine.generate([5, 6, 7], max_tokens=2)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(use)
    assert TILED_PRODUCTS not in os.environ


def test_a_setting_that_was_not_read_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_are_tiles_off", None)
    monkeypatch.setattr(library(), "n_computed", 0)
    monkeypatch.delenv(TILED_PRODUCTS, raising=False)
    with pytest.raises(ValueError, match="it failed"), without_tiles(True, ASKED):
        raise ValueError("it failed")
    library().n_computed += 1  # of an engine without the setting
    with (
        pytest.raises(InvalidArgumentError, match="after another engine"),
        without_tiles(True, ASKED),
    ):
        pass
