"""Layers on GPUs, with any backend; `make test-vulkan` runs it on a GPU that is a program (lavapipe).

The answers of the embedded model are known; those of others are compared with the CPU's.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import Engine, EngineConfig, Image, InvalidArgumentError, ModelLoadError, SavedGeneration
from cllm.bindings import Context, Device, Model, devices
from cllm.bindings._library import captured_log
from cllm.doctor.installation import check_gpus
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama.fit import HOST, ModelOnDevices, room_of
from cllm.engine.llama.memory import MIB
from cllm.engine.llama.placement import gpus_of, placement_of
from cllm.errors import LibraryError
from tests.conftest import QUIET
from tests.engine.test_process import send
from tests.lora_files import make_lora
from tools import make_model, make_projector

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

# Small batches: a GPU that is a program takes 20 ms for each row.
SMALL: dict[str, Any] = {"n_batch": 64, "n_ubatch": 64, "n_threads": 1, **QUIET}
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, **SMALL}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
ANSWERS = {
    "37+58=": "95",
    "count:1..12": " ".join(map(str, range(1, 13))),
    "repeat:你好 🙂": "你好 🙂",
    "reverse:streams": "smaerts",
    "count:98..104": " ".join(map(str, range(98, 105))),
    "9+9=": "18",
}
N_LAYERS = 5  # of the embedded model, with its output


@pytest.fixture
def anyio_backend() -> str:
    """What a GPU computes does not depend on the event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
def gpus() -> Sequence[Device]:
    found = [device for device in devices() if device.is_gpu]
    assert found, "this library finds no GPU: is GGML_VK_VISIBLE_DEVICES set?"
    return found


async def check_answers(engine: Engine) -> None:
    """All answers at once are right, and nothing is left of them."""
    completions = await engine.generate_all([*ANSWERS], **GREEDY)
    assert [c.text for c in completions] == [*ANSWERS.values()]
    assert await engine.audit() == []
    assert engine.statistics().n_kv_cells_used == 0


# --- Where layers are ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_gpu_layers": 2},
        {"n_gpu_layers": 0},
        {"devices": []},
        {"kv_offload": False},
        {"op_offload": False},
        {"n_gpu_layers": 0, "op_offload": True},
        {"override_tensor": [r"ffn_(up|down)=CPU"]},
        {"kv_unified": False},
        {"flash_attn": False},
        {"split_mode": "none"},
        {"load_mode": "none"},
        {"speculation": "ngram"},
        {"speculation": EMBEDDED_MODEL},
    ],
    ids=str,
)
async def test_answers_are_right_wherever_the_layers_are(
    gpus: Sequence[Device], options: dict[str, Any]
) -> None:
    async with Engine(**OPTIONS, **options) as engine:
        uses_gpu = options.get("n_gpu_layers") != 0 and options.get("devices") != []
        assert bool(engine.model.devices) == (uses_gpu or options.get("op_offload") is True)
        await check_answers(engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_split": [3, 1]}, {"main_gpu": 1, "split_mode": "none"}, {"kv_unified": False}],
    ids=str,
)
async def test_two_gpus_share_the_layers(gpus: Sequence[Device], options: dict[str, Any]) -> None:
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    async with Engine(**OPTIONS, **options) as engine:
        assert len(engine.model.devices) == (1 if "main_gpu" in options else 2)
        await check_answers(engine)
    last = gpus[1].name
    async with Engine(**OPTIONS, devices=[last]) as engine:
        assert [device.partition(":")[0] for device in engine.model.devices] == [last]
        await check_answers(engine)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_gpu_layers": 3},
        {"override_tensor": [r"blk\.[01]\.ffn=CPU"]},
        {"kv_offload": False},
        {"tensor_split": [1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["embedded", "tiny-llama", "tiny-qwen3"])
def test_bytes_are_where_llama_cpp_puts_them(
    gpus: Sequence[Device], name: str, options: dict[str, Any]
) -> None:
    path = EMBEDDED_MODEL if name == "embedded" else make_model.ensure(name, "Q8_0")
    config = EngineConfig(model=path, n_ctx=4096, load_mode="none", **options)
    used = gpus_of(config)
    foretold = ModelOnDevices(config, used).bytes(config)
    with captured_log() as lines:
        placement = placement_of(config)
        n_gpu_layers = config.n_gpu_layers
        with Model(path, n_gpu_layers=n_gpu_layers, placement=placement, load_mode="none") as model:
            Context(model, n_ctx=4096, offload_kqv=config.kv_offload).close()
    taken = dict.fromkeys([*(gpu.name for gpu in used), HOST], 0.0)
    for line in lines:
        if found := re.search(r"(\S+) (?:model|KV) buffer size = +([\d.]+) MiB", line):
            taken[found[1] if found[1] in taken else HOST] += float(found[2])
    for device, n_mib in taken.items():
        assert foretold[device] / MIB == pytest.approx(n_mib, rel=0.03, abs=0.3), device


# --- Memory --------------------------------------------------------------------------------------
async def test_a_context_that_no_gpu_holds_is_rejected_by_name_before_it_is_allocated(
    gpus: Sequence[Device],
) -> None:
    n_ctx = 1 << 26  # 128 GiB
    with pytest.raises(ModelLoadError, match=rf"MiB on {gpus[0].name}, and .* can be used: n_ctx="):
        async with Engine(n_ctx=n_ctx, n_gpu_layers=N_LAYERS, **QUIET):
            pass


async def test_the_context_is_what_the_gpus_hold(gpus: Sequence[Device]) -> None:
    assert all(0 < room_of(gpu) < gpu.n_free_bytes for gpu in gpus)
    async with Engine(n_ctx="auto", kv_unified=False, n_seq_max=2, **SMALL) as engine:
        assert engine.model.n_ctx == 2048
        assert (await engine.generate("9+9=", temperature=0)).text == "18"


def test_doctor_names_the_gpus_and_their_memory(gpus: Sequence[Device]) -> None:
    text = check_gpus(devices()).text
    for gpu in gpus:
        assert f"{gpu.name}: {gpu.description}, " in text
    assert "MiB free" in text


# --- What an engine does with KV cells -----------------------------------------------------------
async def test_prefixes_are_shared(gpus: Sequence[Device]) -> None:
    note = "note:" + "It was a bright cold day in April. " * 8 + "\n"
    async with Engine(**OPTIONS) as engine:
        for prompt, answer in ANSWERS.items():
            completion = await engine.generate(note + prompt, **GREEDY)
            assert completion.text == answer
        assert completion.usage.n_cached > 200
        assert await engine.audit() == []


@pytest.mark.parametrize("prefix_cache_bytes", [1 << 24, 0])
async def test_under_pressure_requests_are_preempted_and_right(
    gpus: Sequence[Device], prefix_cache_bytes: int
) -> None:
    asked = [f"count:{first}..{first + 29}" for first in range(100, 900, 100)]
    async with Engine(
        n_ctx=512, n_seq_max=8, prefix_cache_bytes=prefix_cache_bytes, **SMALL
    ) as engine:
        for completion, prompt in zip(
            await engine.generate_all(asked, temperature=0, max_tokens=200), asked, strict=True
        ):
            first, last = map(int, prompt.removeprefix("count:").split(".."))
            assert completion.text == " ".join(map(str, range(first, last + 1)))
        assert engine.statistics().n_preemptions > 0
        assert await engine.audit() == []


async def test_a_stream_is_suspended_saved_and_resumed(
    gpus: Sequence[Device], tmp_path: Path
) -> None:
    async with Engine(**OPTIONS, stream_buffer=2) as engine:
        async with engine.stream("count:1..30", temperature=0, max_tokens=200) as stream:
            first = await anext(stream)
            saved = await stream.suspend()
        saved.save(tmp_path / "a.state")
        again = SavedGeneration.load(tmp_path / "a.state")
        async with engine.resume(again) as stream:
            completion = await stream.completion()
        assert completion.text == " ".join(map(str, range(1, 31)))
        assert completion.text.startswith(first.text)
        assert await engine.audit() == []


async def test_a_stream_forks(gpus: Sequence[Device]) -> None:
    async with Engine(**OPTIONS, stream_buffer=2) as engine:
        async with engine.stream("count:1..20", temperature=0, max_tokens=200) as stream:
            await anext(stream)
            for fork in [*stream.fork(2), stream]:
                async with fork:
                    completion = await fork.completion()
                assert completion.text == " ".join(map(str, range(1, 21)))
        assert await engine.audit() == []


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
    texts = ["The quick brown fox", "jumps", "over the lazy dog " * 8]
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
        with anyio.move_on_after(0):
            await engine.generate("note:" + "x" * 2000 + "\n9+9=", temperature=0)
        before = engine.statistics().n_ticks
        while engine.statistics().n_running or engine.statistics().n_waiting:
            await engine.audit()
        assert engine.statistics().n_ticks - before <= 2
        assert await engine.audit() == []


async def test_to_the_bit_is_a_promise_of_processors_alone(gpus: Sequence[Device]) -> None:
    with pytest.raises(InvalidArgumentError, match="deterministic is True, must be False where"):
        async with Engine(**OPTIONS, deterministic=True):
            pass
    async with Engine(**OPTIONS, deterministic=True, n_gpu_layers=0) as engine:
        await check_answers(engine)


async def test_fingerprints_know_the_gpu(gpus: Sequence[Device]) -> None:
    found = []
    for n_gpu_layers in (-1, 2, 0):
        async with Engine(**OPTIONS, n_gpu_layers=n_gpu_layers) as engine:
            found.append((engine.model.fingerprint, engine.model.state_key))
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairwise(found))
