"""What a model will need is known before it is loaded, and so is what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm import memory
from cllm.engine.config import EngineConfig
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
