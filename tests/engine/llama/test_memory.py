"""What a model will need is known before it is loaded, and so is what there is."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, cast

import pytest

from cllm import Engine, memory, processors
from cllm.checks import INT32_MAX
from cllm.engine.config import EMBEDDED_MODEL, N_CTX, EngineConfig
from cllm.engine.llama import gguf_header
from cllm.engine.llama.gguf_header import read_header
from cllm.engine.llama.memory import choose_n_ctx, kv_bytes
from tests.conftest import QUIET
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


def header(**values: float | list[int] | str) -> bytes:
    """The beginning of a GGUF file."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values) + 1)
    data += text("general.architecture") + struct.pack("<I", 8) + text("a")
    for name, value in values.items():
        data += text(f"a.{name.replace('__', '.')}")
        match value:
            case float():
                data += struct.pack("<If", 6, value)
            case int():
                data += struct.pack("<IQ", 10, value % (1 << 64))
            case str():
                data += struct.pack("<I", 8) + text(value)
            case _:
                numbers = [number % (1 << 64) for number in value]
                data += struct.pack(f"<IIQ{len(value)}Q", 9, 10, len(value), *numbers)
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
    assert kv_bytes(EngineConfig(model=path, n_ctx=0), is_windowed=True) == 2 * n_numbers


@pytest.mark.parametrize("name", ["block_count", "embedding_length", "attention__head_count",
    "attention__head_count_kv", "attention__key_length", "attention__sliding_window", "context_length"])  # fmt: skip
@pytest.mark.parametrize(
    "value", ["x", math.nan, math.inf, -math.inf, -1, (1 << 64) - 1, [-1, 5], []], ids=str
)
def test_a_number_of_a_header_that_is_none_is_no_error(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(**{**PLAIN, name: value}))
    for n_available in (None, 1, 1 << 40):
        monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda n=n_available: n)
        for n_ctx in ("auto", 0, 512):
            config = EngineConfig(model=path, n_ctx=cast(Any, n_ctx))
            assert kv_bytes(config if n_ctx != "auto" else EngineConfig(model=path, n_ctx=0)) >= 0
            if n_ctx == "auto":
                assert N_CTX <= choose_n_ctx(config)[0] <= INT32_MAX


def test_a_model_without_heads_has_a_context_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(**PLAIN, attention__head_count_kv=0) + bytes(1 << 16))
    monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda: 1)
    assert choose_n_ctx(EngineConfig(model=path, n_ctx="auto"))[0] == N_CTX


def test_a_header_that_states_endless_values_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n_read = tmp_path / "model.gguf", 0
    unpack = gguf_header._unpack

    def counted(file: Any, layout: str) -> Any:
        nonlocal n_read
        n_read += 1
        return unpack(file, layout)

    monkeypatch.setattr(gguf_header, "_unpack", counted)
    many = 1 << 62
    for data in (
        b"GGUF" + struct.pack("<IQQ", 3, 1, many),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, many),
        b"GGUF" + struct.pack("<IQQ", 3, many, 0),
    ):
        path.write_bytes(data + bytes(1 << 22))
        for read in (gguf_header.read_header, gguf_header.read_shapes, gguf_header.read_types):
            n_read = 0
            read(path)
            assert n_read <= 4 * gguf_header.MAX_VALUES
    lists = b"".join(
        struct.pack("<Q8sIIQ", 8, b"%08d" % i, 9, 10, 1 << 16) + bytes(8 << 16) for i in range(64)
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 64) + lists)
    n_kept = sum(len(cast(Any, value)) for value in gguf_header.read_header(path).values())
    assert 8 * n_kept <= 2 * gguf_header.MAX_READ


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        ("m-00000-of-00002.gguf", ["m-00000-of-00002.gguf"]),
        ("m-00003-of-00002.gguf", ["m-00003-of-00002.gguf"]),
        ("m-٠٠٠٠١-of-٠٠٠٠٢.gguf", ["m-٠٠٠٠١-of-٠٠٠٠٢.gguf"]),
        ("x-00001-of-99999.gguf", ["x-00001-of-99999.gguf"]),
        ("m.gguf", ["m.gguf"]),
    ],
)
def test_every_model_has_the_file_that_it_is_named_by(
    name: str, parts: list[str], tmp_path: Path
) -> None:
    for each in {*parts, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}:
        (tmp_path / each).write_bytes(b"")
    assert gguf_header.model_parts(tmp_path / name) == [tmp_path / part for part in parts]
    assert gguf_header.model_parts(tmp_path / "none" / name) == [tmp_path / "none" / name]


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
    (path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(processors, "OWN_CGROUPS", path / "cgroup")
    monkeypatch.setattr(processors, "CGROUPS", path)


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


# --- How many cells ------------------------------------------------------------------------------
N_TRAINED = 2048  # the embedded model


def with_memory(monkeypatch: pytest.MonkeyPatch, n_cells: float | None) -> None:
    """So much is available as the KV cache of so many cells may be half of."""
    config = EngineConfig(n_ctx=1024)
    n_bytes = None
    if n_cells is not None:
        n_weights = EMBEDDED_MODEL.stat().st_size
        n_bytes = n_weights + 2 * int(kv_bytes(config) / 1024 * n_cells)
    monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda: n_bytes)


@pytest.mark.parametrize(
    ("n_allowed", "options", "n_ctx", "told"),
    [
        (1e6, {}, N_CTX, "4,096 tokens of context, "),
        (1e6, {"kv_unified": False, "n_seq_max": 8}, 8 * N_TRAINED, "16,384 tokens of context, "),
        (1e6, {"deterministic": True, "n_seq_max": 8}, 8 * N_TRAINED, "16,384 tokens of context, "),
        (9000, {"kv_unified": False, "n_seq_max": 8}, 8192, "16,384 would take 32 MiB"),
        (100, {"kv_unified": False, "n_seq_max": 8}, N_CTX, "16,384 would take 32 MiB"),
        (-100, {"kv_unified": False, "n_seq_max": 8}, N_CTX, "16,384 would take 32 MiB"),
        (None, {"kv_unified": False, "n_seq_max": 8}, N_CTX, "-c takes more"),
    ],
)
def test_auto_is_what_the_model_was_trained_for_where_memory_allows_it(
    n_allowed: float | None,
    options: Any,
    n_ctx: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_memory(monkeypatch, n_allowed)
    chosen, why = choose_n_ctx(EngineConfig(n_ctx="auto", **options))
    assert chosen == n_ctx
    assert told in why


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_auto_counts_all_cells_of_a_model_with_a_sliding_window(
    prefix_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(**PLAIN | {"attention__sliding_window": 10, "context_length": 100_000}))
    config = EngineConfig(model=path, n_ctx="auto", prefix_cache=prefix_cache)
    n_cell_bytes = 2 * 2 * 64 * 2  # two layers, keys and values, 64 numbers of F16
    monkeypatch.setattr(
        "cllm.engine.llama.memory.available_bytes", lambda: 2 * n_cell_bytes * 8192 + 1024
    )
    assert choose_n_ctx(config)[0] == 8192


def test_a_file_that_does_not_say_what_it_was_trained_for_gets_the_default(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"no model")
    assert choose_n_ctx(EngineConfig(model=path, n_ctx="auto"))[0] == N_CTX


@pytest.mark.anyio
async def test_an_engine_has_a_number_in_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_memory(monkeypatch, 9000)
    caplog.set_level("INFO", "cllm.engine")
    async with Engine(n_ctx="auto", kv_unified=False, n_seq_max=8, **QUIET) as engine:
        assert engine.config.n_ctx == engine.model.n_ctx * 8 == 8192
    assert "tokens of context: 16,384 would take" in caplog.text


def test_of_a_file_that_cannot_be_read_loading_tells(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        assert choose_n_ctx(EngineConfig(model=path, n_ctx="auto"))[0] == N_CTX
