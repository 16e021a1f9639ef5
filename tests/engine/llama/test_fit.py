"""Layers go to GPUs as far as their memory allows; the GPUs here exist in the tests alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cllm import EngineConfig, ModelLoadError
from cllm.bindings import Device, MemoryNeeds, Placement
from cllm.engine.llama import devices, memory
from cllm.engine.llama.decoder import make_context
from cllm.engine.llama.fit import (
    HOST,
    ModelOnDevices,
    check_placement,
    fitted,
    fitting_n_ctx,
    room_of,
)
from cllm.engine.llama.gguf_header import read_sizes
from cllm.engine.llama.memory import MIB, PlannedContext

N_BLOCKS = 8
# Sizes of the tensors of one layer, and of the rest, in MiB.
DENSE, EXPERT, EMBEDDING, OUTPUT = 10, 100, 30, 40


def gpu(name: str, n_free: int, n_total: int | None = None, kind: str = "gpu") -> Device:
    """A GPU with this memory, in MiB."""
    return Device(name, "a card", kind, n_free * MIB, (n_total or n_free) * MIB)


def write_model(
    path: Path, *, has_experts: bool, is_tied: bool = False, only: str | None = None
) -> Path:
    """Write the header of a model, and data of the right size that take no room on the disk."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = {
        "block_count": N_BLOCKS, "embedding_length": 1024, "attention.head_count": 8,
        "context_length": 1 << 17,
    }  # fmt: skip
    tensors = {"token_embd.weight": EMBEDDING, "output.weight": OUTPUT}
    if is_tied:
        del tensors["output.weight"]
    for block in range(N_BLOCKS):
        tensors[f"blk.{block}.attn_q.weight"] = DENSE
        if has_experts:
            tensors[f"blk.{block}.ffn_up_exps.weight"] = EXPERT
    if only is not None:
        tensors = {only: DENSE}
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values) + 1)
    data += text("general.architecture") + struct.pack("<I", 8) + text("a")
    for name, value in values.items():
        data += text(f"a.{name}") + struct.pack("<II", 4, value)
    offset = 0
    for name, n_mib in tensors.items():
        data += text(name) + struct.pack("<IQIQ", 1, n_mib * MIB // 2, 1, offset)
        offset += n_mib * MIB
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + offset)
    return path


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """8 layers of 10 MiB; a cell of the KV cache takes 32 KiB."""
    return write_model(tmp_path / "dense.gguf", has_experts=False)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """The same with experts of 100 MiB in each layer."""
    return write_model(tmp_path / "experts.gguf", has_experts=True)


def have(monkeypatch: pytest.MonkeyPatch, *gpus: Device) -> None:
    """These GPUs are in the machine."""
    monkeypatch.setattr(devices, "devices", lambda: (*gpus, gpu("CPU", 9999, kind="cpu")))


def room(n_mib: int) -> int:
    """Return the free MiB of a GPU on which a model may use `n_mib`."""
    return -(-n_mib * 8 // 7)


def configure(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": path, "n_ctx": 1024, **options})  # 32 MiB of cells


def test_the_bytes_of_tensors_are_read_from_the_file(dense: Path) -> None:
    sizes = read_sizes(dense)
    assert sizes["blk.3.attn_q.weight"] == DENSE * MIB
    assert sizes["token_embd.weight"] == EMBEDDING * MIB
    last = f"blk.{N_BLOCKS - 1}.attn_q.weight"
    assert 0 <= sizes[last] - DENSE * MIB < 4096  # the header counts with the last one


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # 8 layers of 10 + 4 MiB, the output of 40, the embedding of 30 on the host.
        ({}, {"A": 152, HOST: 30}),
        ({"n_gpu_layers": 0}, {HOST: 182}),
        ({"n_gpu_layers": 1}, {"A": 40, HOST: 142}),
        ({"n_gpu_layers": 3}, {"A": 68, HOST: 114}),
        ({"n_gpu_layers": 99}, {"A": 152, HOST: 30}),
        ({"kv_offload": False}, {"A": 120, HOST: 62}),
        ({"override_tensor": ["blk.[01]=CPU"]}, {"A": 132, HOST: 50}),
        ({"override_tensor": ["("]}, {"A": 152, HOST: 30}),
    ],
)
def test_tensors_count_where_llama_cpp_puts_them(
    options: dict[str, Any], wanted: dict[str, int], dense: Path
) -> None:
    if options.get("override_tensor") == ["("]:
        options = {"override_tensor": ["(=CPU"]}  # no expression: loading the model says so
    config = configure(dense, **options)
    found = ModelOnDevices(config, [gpu("A", 9999)]).bytes(config)
    assert {name: round(n / MIB) for name, n in found.items() if n} == wanted


@pytest.mark.parametrize(
    ("free", "options", "wanted"),
    [
        ((3000, 1000), {}, {"A": 98, "B": 54}),  # 7 layers, and 1 with the output
        ((1000, 1000), {"tensor_split": [3, 1]}, {"A": 98, "B": 54}),
        ((1000, 1000), {"tensor_split": [1]}, {"A": 152}),
        ((1000, 1000), {"tensor_split": [0, 1]}, {"B": 152}),
    ],
)
def test_layers_are_divided_by_free_memory_or_as_asked(
    free: tuple[int, int], options: dict[str, Any], wanted: dict[str, int], dense: Path
) -> None:
    config = configure(dense, **options)
    gpus = [gpu(name, n) for name, n in zip("AB", free, strict=True)]
    found = ModelOnDevices(config, gpus).bytes(config)
    on_gpus = {name: round(n / MIB) for name, n in found.items() if n and name != HOST}
    assert on_gpus == wanted


@pytest.mark.parametrize(
    ("n_mib", "n_gpu_layers"), [(160, -1), (152, -1), (150, 8), (70, 3), (41, 1), (39, 0)]
)
def test_as_many_layers_as_fit_are_on_the_gpu(
    n_mib: int, n_gpu_layers: int, dense: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    have(monkeypatch, gpu("A", room(n_mib)))
    caplog.set_level("INFO", "cllm.engine")
    assert fitted(configure(dense), []).n_gpu_layers == n_gpu_layers
    n_layers = N_BLOCKS + 1 if n_gpu_layers < 0 else n_gpu_layers
    told = f"{n_layers} of {N_BLOCKS + 1} layers on GPUs: A " if n_layers else "no layer fits"
    assert told in caplog.text


@pytest.mark.parametrize(
    ("n_mib", "n_cpu_moe", "n_gpu_layers"),
    [(960, 0, -1), (800, 2, -1), (170, 8, -1), (150, 8, 8), (20, 0, 0)],
)
def test_experts_leave_a_full_gpu_before_layers_do(
    n_mib: int, n_cpu_moe: int, n_gpu_layers: int, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", room(n_mib)))
    found = fitted(configure(experts), [])
    assert (found.n_cpu_moe, found.n_gpu_layers) == (n_cpu_moe, n_gpu_layers)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"n_gpu_layers": 9}, "n_gpu_layers=3 would fit"),
        ({"n_gpu_layers": 2, "n_ctx": 1 << 16}, "n_ctx=.* or n_gpu_layers=1 would fit"),
        ({"tensor_split": [1.0]}, "n_gpu_layers=3 would fit"),
    ],
)
def test_explicit_settings_that_do_not_fit_are_rejected_with_settings_that_do(
    options: dict[str, Any], advice: str, dense: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    have(monkeypatch, gpu("A", room(70)))
    config = configure(dense, **options)
    with pytest.raises(
        ModelLoadError, match=f"MiB on A, where 70 MiB can be used .80 MiB are free.; {advice}"
    ):
        fitted(config, [])
    assert fitted(replace(config, allow_overcommit=True), []).n_gpu_layers == config.n_gpu_layers
    assert "MiB on A" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        ([], {}),
        ([gpu("A", 0)], {}),  # a backend that does not know its memory
        ([gpu("A", 1)], {"n_gpu_layers": 0}),
        ([gpu("A", 1)], {"devices": []}),
        ([gpu("A", 1)], {"split_mode": "row"}),
        ([gpu("A", 1)], {"rpc": ["127.0.0.1:1"], "process": True}),
    ],
)
def test_without_a_gpu_whose_memory_is_known_nothing_changes(
    gpus: Sequence[Device], options: dict[str, Any], dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, *gpus)
    config = configure(dense, **options)
    assert fitted(config, []) is config


def test_integrated_gpus_count_only_alone_or_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own, shared = gpu("A", 100), gpu("B", 100, kind="igpu")
    have(monkeypatch, own, shared)
    assert devices.gpus_of(EngineConfig()) == (own,)
    assert devices.gpus_of(EngineConfig(devices=["B", "A"])) == (shared, own)
    assert devices.gpus_of(EngineConfig(n_gpu_layers=0)) == ()
    have(monkeypatch, shared)
    assert devices.gpus_of(EngineConfig()) == (shared,)


def test_some_memory_stays_free() -> None:
    assert room_of(gpu("A", 800)) == 700 * MIB
    assert room_of(gpu("A", 80_000)) == (80_000 - 1024) * MIB
    assert room_of(gpu("A", 500, 1600)) == 300 * MIB


@pytest.mark.parametrize(
    ("n_mib", "n_ctx", "told"),
    [
        (20_000, 1 << 17, "131,072 tokens of context, on GPUs"),
        (1000, 8192, "131,072 do not fit on the GPUs"),
        (50, 4096, "131,072 do not fit on the GPUs"),
    ],
)
def test_the_context_is_as_long_as_the_gpus_have_room(
    n_mib: int, n_ctx: int, told: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", n_mib))
    found, why = fitting_n_ctx(configure(dense, n_ctx="auto"))
    assert n_ctx <= found <= max(n_ctx, 32 * n_mib)
    assert told in why


@pytest.mark.parametrize(("n_mib", "has_moved"), [(1500, False), (800, True)])
def test_the_context_takes_the_place_of_experts_only_if_they_do_not_fit(
    n_mib: int, has_moved: bool, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", n_mib))
    n_ctx = fitting_n_ctx(configure(experts, n_ctx="auto"))[0]
    config = fitted(configure(experts, n_ctx=n_ctx), [])
    assert n_ctx > 4096
    assert (config.n_gpu_layers, config.n_cpu_moe > 0) == (-1, has_moved)


def test_buffers_count_on_their_device(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, gpu("A", room(160)))
    needs = MemoryNeeds(0, 60 * MIB, {"A": 50 * MIB, "CPU": 10 * MIB})
    monkeypatch.setattr(memory, "memory_needs", lambda *_, **__: needs)
    planned = [PlannedContext(dense, make_context, generates=True)]
    assert fitted(configure(dense), []).n_gpu_layers == -1
    assert fitted(configure(dense), planned).n_gpu_layers == 6


def test_buffers_are_measured_again_for_what_is_chosen(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in host memory are copied to a GPU for large batches."""

    def needs(*_: object, placement: Placement, **__: object) -> MemoryNeeds:
        return MemoryNeeds(0, 0, {"A": (200 if placement.overrides else 10) * MIB})

    have(monkeypatch, gpu("A", room(800)))
    monkeypatch.setattr(memory, "memory_needs", needs)
    planned = [PlannedContext(experts, make_context, generates=True)]
    assert fitted(configure(experts), planned).n_cpu_moe == 4


def test_the_measured_cache_counts_more_than_the_header(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", room(160)))
    monkeypatch.setattr(memory, "memory_needs", lambda *_, **__: MemoryNeeds(64 * MIB, 0))
    planned = [PlannedContext(dense, make_context, generates=True)]
    config = configure(dense)  # 32 MiB of cells by the header
    assert fitted(config, planned).n_gpu_layers == 7
    drafts = [PlannedContext(Path("draft.gguf"), make_context)]
    assert fitted(config, drafts).n_gpu_layers == 5


@pytest.mark.parametrize("n_free", [0, 50])
def test_a_gpu_that_others_fill_gets_nothing(
    n_free: int, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", n_free, 24_000))
    monkeypatch.setattr(memory, "memory_needs", lambda *_, **__: MemoryNeeds(0, 0, {"A": 9 * MIB}))
    planned = [PlannedContext(dense, make_context, generates=True)]
    assert fitted(configure(dense), planned).n_gpu_layers == 0
    assert fitting_n_ctx(configure(dense, n_ctx="auto"))[0] == 4096


def test_a_model_without_an_output_has_its_embedding_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tied.gguf", has_experts=False, is_tied=True)
    config = configure(path)
    found = ModelOnDevices(config, [gpu("A", 9999)]).bytes(config)
    assert {name: round(n / MIB) for name, n in found.items()} == {"A": 142, HOST: 30}


@pytest.mark.parametrize("name", ["blk.999999999999.a", "blk.600.a", "nothing"])
def test_a_file_with_senseless_layers_is_left_to_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", 100))
    path = write_model(tmp_path / "odd.gguf", has_experts=False, only=name)
    assert fitted(configure(path), []).n_gpu_layers == -1
    assert fitting_n_ctx(configure(path, n_ctx="auto"))[0] >= 4096


def test_explicit_layers_are_checked_before_another_model_is_freed(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, gpu("A", room(70)))
    check_placement(configure(dense))
    check_placement(configure(dense, n_gpu_layers=3))
    with pytest.raises(ModelLoadError, match="n_gpu_layers=3 would fit"):
        check_placement(configure(dense, n_gpu_layers=9))


def test_a_model_that_is_shared_with_gpus_counts_their_memory(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 50 * MIB)
    have(monkeypatch)
    with pytest.raises(ModelLoadError, match="50 MiB are available"):
        memory.check_fits(configure(dense), None)
    have(monkeypatch, gpu("A", 200))
    memory.check_fits(configure(dense), None)
