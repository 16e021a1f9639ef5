"""What a model will need is known before it is loaded, and so is what there is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from cllm import memory
from cllm.engine.config import EngineConfig
from cllm.engine.llama.gguf_header import read_header
from cllm.engine.llama.memory import kv_bytes
from tools import make_model


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
@pytest.mark.parametrize("type_kv", ["f16", "f32", "q8_0"])
def test_the_kv_cache_of_plain_attention_is_known_from_the_file(name: str, type_kv: str) -> None:
    path = make_model.ensure(name, "F16")
    config = EngineConfig(model=path, n_ctx=1024, type_k=type_kv, type_v=type_kv)
    shape, n_layer = make_model.MODELS[name].shape, len(make_model.MODELS[name].layers)
    n_numbers = 2 * 1024 * n_layer * shape.n_head_kv * shape.n_rot
    size = {"f16": 2, "f32": 4, "q8_0": 34 / 32}[type_kv]
    assert kv_bytes(config) == n_numbers * size


def header(**values: int | list[int] | str) -> bytes:
    """The beginning of a GGUF file."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values) + 1)
    data += text("general.architecture") + struct.pack("<I", 8) + text("a")
    for name, value in values.items():
        data += text(f"a.{name.replace('__', '.')}")
        match value:
            case int():
                data += struct.pack("<II", 4, value)
            case str():
                data += struct.pack("<I", 8) + text(value)
            case _:
                data += struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
    return data


PLAIN: dict[str, Any] = {
    "block_count": 2, "embedding_length": 64, "attention__head_count": 4, "context_length": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "n_numbers"),
    [
        (PLAIN, 2 * 100 * 64 * 2),
        (PLAIN | {"attention__head_count_kv": [1, 0]}, 100 * 16 * 2),
        (PLAIN | {"attention__sliding_window": 10}, 2 * 10 * 64 * 2),
        (PLAIN | {"attention__key_length": 8, "attention__value_length": 4}, 2 * 100 * 4 * 12),
        ({"name": "nothing"}, 0),
    ],
)
def test_layers_count_with_what_they_keep(
    values: dict[str, Any], n_numbers: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(**values))
    assert kv_bytes(EngineConfig(model=path, n_ctx=0)) == 2 * n_numbers


def test_of_a_damaged_file_what_can_be_read_is_read(tmp_path: Path) -> None:
    whole, path = header(**PLAIN), tmp_path / "model.gguf"
    for n_bytes in range(len(whole)):
        path.write_bytes(whole[:n_bytes])
        assert set(read_header(path)) <= {"general.architecture", "a.block_count",
                                          "a.embedding_length", "a.attention.head_count"}  # fmt: skip
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        read_header(path)


def put(path: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", path)


def test_a_container_has_no_more_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, meminfo="MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert memory.available_bytes() == 4096 * 1024
    statistics = "anon 5\ninactive_file 100\nactive_file 20\n"
    used = {"memory_current": "1000\n", "memory_stat": statistics}
    put(tmp_path, monkeypatch, memory_max="max\n", **used)
    assert memory.available_bytes() == 4096 * 1024
    put(tmp_path, monkeypatch, memory_max="1500\n", **used)
    assert memory.available_bytes() == 1500 - 1000 + 120


def test_where_nobody_says_it_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, monkeypatch)
    assert memory.available_bytes() is None
    put(tmp_path, monkeypatch, meminfo="MemAvailable:\n", memory_max="many")
    assert memory.available_bytes() is None
