"""Layers and memory of GPUs: answers are right wherever the layers are, and bytes are where cllm says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig, ModelLoadError
from cllm.bindings import Context, Device, Model, devices, library
from cllm.bindings._library import captured_log
from cllm.doctor.installation import check_gpus
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama.devices import gpus_of, placement_of
from cllm.engine.llama.fit import HOST, ModelOnDevices, room_of
from cllm.engine.llama.memory import MIB
from tests.conftest import QUIET
from tests.gpu.answers import N_LAYERS, OPTIONS, SMALL, check_answers
from tools import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


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


# What a library says about each layer, each tensor that is placed by its name, and each buffer.
PLACED = re.compile(
    r"layer +\d+ assigned to device \w+|tensor \S+ .*buffer type overridden to \w+"
    r"|\S+ (?:model|KV) buffer size = +[\d.]+ MiB"
)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, "-ngl 99"),
        ({"n_gpu_layers": 0}, "-ngl 0"),
        ({"n_gpu_layers": 2}, "-ngl 2"),
        ({"tensor_split": [3, 1]}, "-ngl 99 -ts 3,1"),
        ({"split_mode": "none"}, "-ngl 99 -sm none"),
        ({"split_mode": "none", "main_gpu": 1}, "-ngl 99 -sm none -mg 1"),
        ({"devices": ["Vulkan1"]}, "-ngl 99 -dev Vulkan1"),
        ({"devices": []}, "-dev none"),
        ({"kv_offload": False}, "-ngl 99 -nkvo"),
        ({"override_tensor": ["attn_(q|k)=CPU"]}, "-ngl 99 -ot attn_(q|k)=CPU"),
        ({"n_cpu_moe": 1}, "-ngl 99 -ncmoe 1"),
        ({"load_mode": "none"}, "-ngl 99 -lm none"),
    ],
    ids=str,
)
def test_tensors_are_where_llama_server_puts_them(
    gpus: Sequence[Device], options: dict[str, Any], flags: str
) -> None:
    server = Path(library().path).resolve().parents[1] / "bin" / "llama-server"
    if not server.exists():
        pytest.skip("this library was built without --tools")
    if "Vulkan1" in flags and gpus[-1].name != "Vulkan1":
        pytest.skip("these GPUs have other names")
    path = make_model.ensure("tiny-moe", "Q8_0")
    settings = ["-c", "1024", "-np", "1", "-fit", "off", "--no-warmup", "--port", "0", "-v"]
    theirs = set[str]()
    with subprocess.Popen(
        [server, "-m", path, *settings, *flags.split()], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                theirs |= {found[0] for found in PLACED.finditer(line)}
                if "listening on" in line:
                    break
            else:
                pytest.fail(f"llama-server does not take {flags}")
        finally:
            process.kill()
    config = EngineConfig(model=path, n_ctx=1024, **options)
    with (
        captured_log() as lines,
        Model(
            path,
            n_gpu_layers=config.n_gpu_layers,
            placement=placement_of(config),
            load_mode=config.load_mode,
        ) as model,
    ):
        Context(model, n_ctx=1024, offload_kqv=config.kv_offload).close()
    ours = {found[0] for line in lines for found in PLACED.finditer(line)}
    assert ours == theirs
    assert any("model buffer size" in line for line in ours)


# --- Memory --------------------------------------------------------------------------------------
async def test_a_context_that_no_gpu_holds_is_rejected_by_name_before_it_is_allocated(
    gpus: Sequence[Device],
) -> None:
    n_ctx = 1 << 26
    kinds: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}  # 256 GiB for each GPU
    with pytest.raises(
        ModelLoadError, match=rf"MiB on {gpus[0].name}, where .* can be used.*; n_ctx="
    ):
        async with Engine(
            n_ctx=n_ctx, n_gpu_layers=N_LAYERS, devices=[gpus[0].name], **kinds, **QUIET
        ):
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
