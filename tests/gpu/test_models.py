"""Adapters, vectors and images on GPUs; crashes, cancels and fingerprints."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import Engine, Image, InvalidArgumentError
from cllm.bindings import Context, Device, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import LibraryError
from tests.engine.test_process import send
from tests.gpu.answers import OPTIONS, SMALL, check_answers
from tests.lora_files import make_lora
from tools import make_model, make_projector

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


# --- Adapters, vectors, images -------------------------------------------------------------------
async def test_an_adapter_has_its_effect(gpus: Sequence[Device], tmp_path: Path) -> None:
    path = make_model.ensure("tiny-llama", "Q8_0")
    make_lora(tmp_path / "a.gguf", path, seed=1)
    said: list[list[str]] = []
    for n_gpu_layers in (0, -1):
        async with Engine(
            path, **OPTIONS, n_gpu_layers=n_gpu_layers, lora=[("a", tmp_path / "a.gguf", 0.0)]
        ) as engine:
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
            one = await engine.generate("The quick brown fox", **options)
            other = await engine.generate("The quick brown fox", **options, lora={"a": 1.0})
            again = await engine.generate("The quick brown fox", **options)
            assert one.token_ids == again.token_ids != other.token_ids
            said.append([one.text, other.text])
    assert said[0] == said[1]


async def test_vectors_are_those_of_a_processor(gpus: Sequence[Device]) -> None:
    texts = ["The quick brown fox", "jumps", "over the lazy dog " * 3]
    vectors: list[Any] = []
    for n_gpu_layers in (0, -1):
        async with Engine(**OPTIONS, pooling="mean", n_gpu_layers=n_gpu_layers) as engine:
            vectors.append(await engine.embed(texts))
            assert (await engine.generate("9+9=", temperature=0)).text == "18"
    np.testing.assert_allclose(vectors[0], vectors[1], atol=0.01)


async def test_an_image_is_encoded(gpus: Sequence[Device]) -> None:
    pixels = np.full((64, 64, 3), (200, 30, 30), np.uint8)
    path = make_model.ensure("tiny-llama", "Q8_0")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    try:
        async with Engine(path, **OPTIONS, mmproj=make_projector.ensure("llava")) as engine:
            first = await engine.generate(["What is ", Image(pixels), "?"], **options)
            again = await engine.generate(["What is ", Image(pixels), "?"], **options)
            assert first.token_ids == again.token_ids
            assert again.usage.n_cached > first.usage.n_cached
            assert await engine.audit() == []
    except LibraryError as error:
        pytest.skip(f"this library has no libmtmd: {error}")


# --- Ends ----------------------------------------------------------------------------------------
async def test_a_crash_costs_no_stream(gpus: Sequence[Device]) -> None:
    async with Engine(**OPTIONS, process=True, stream_buffer=2) as engine:
        async with engine.stream("count:1..30", temperature=0, max_tokens=200) as stream:
            await anext(stream)
            send(engine, signal.SIGKILL)
            completion = await stream.completion()
        assert completion.text == " ".join(map(str, range(1, 31)))
        assert engine.statistics().n_restarts == 1
        assert await engine.audit() == []


async def test_a_cancel_takes_effect_within_two_ticks(gpus: Sequence[Device]) -> None:
    """`abort` ends no decode on a GPU, so that a tick is short instead."""
    with Model(EMBEDDED_MODEL) as model, Context(model, n_ctx=256) as context:
        assert not context.can_abort
    async with Engine(n_ctx=4096, n_seq_max=2, **SMALL) as engine:
        async with anyio.create_task_group() as tasks:
            prompt = "note:" + "x" * 2000 + "\n9+9="
            tasks.start_soon(lambda: engine.generate(prompt, temperature=0))
            while not engine.statistics().n_prefill_tokens:
                await engine.audit()
            tasks.cancel_scope.cancel()
        before = engine.statistics().n_ticks
        while engine.statistics().n_running:
            await engine.audit()
        assert engine.statistics().n_ticks - before <= 2
        assert engine.statistics().n_prefill_tokens < 2000
        assert await engine.audit() == []


async def test_deterministic_is_rejected_on_gpus(gpus: Sequence[Device]) -> None:
    with pytest.raises(InvalidArgumentError, match="deterministic is True, must be False where"):
        async with Engine(**OPTIONS, deterministic=True):
            pass
    async with Engine(**OPTIONS, deterministic=True, n_gpu_layers=0) as engine:
        await check_answers(engine)


async def test_fingerprints_depend_on_the_placement(gpus: Sequence[Device]) -> None:
    found = []
    for n_gpu_layers in (-1, 2, 0):
        async with Engine(**OPTIONS, n_gpu_layers=n_gpu_layers) as engine:
            found.append((engine.model.fingerprint, engine.model.state_key))
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairwise(found))
