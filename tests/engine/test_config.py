"""The settings of an engine: the bad are refused by field, value and limit; what the others mean."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cllm.checks import MAX_TEMPLATE_BYTES
from cllm.engine.config import EMBEDDED_MODEL, EngineConfig, config_from
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import InvalidArgumentError, InvalidRequestError
from cllm.processors import usable_processors
from cllm.testing import FakeEngine

NAN = float("nan")
A_PATH = "a path: not empty, without NUL characters"


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n_seq_max", 0, "1 to 255"),
        ("n_seq_max", 256, "1 to 255"),
        ("n_ctx", -1, "0 to 67108864"),
        ("n_ctx", 2**26 + 1, "0 to 67108864"),
        ("n_ctx", 15, "0 or at least n_seq_max (16)"),
        ("n_ctx", "4096", "an integer"),
        ("n_batch", 15, "16 to 1048576"),
        ("n_ubatch", 0, "1 to 1048576"),
        ("n_threads", 0, "1 to 512"),
        ("n_threads_batch", 513, "1 to 512"),
        ("n_gpu_layers", -2, "-1 to 2147483647"),
        ("kv_unified", 1, "True, False or 'auto'"),
        ("deterministic", 1, "True or False"),
        ("use_mmap", None, "True or False"),
        ("use_mlock", "yes", "True or False"),
        ("check_tensors", 0, "True or False"),
        ("flash_attn", 1, "True or False"),
        ("max_queue", -1, "0 to 1048576"),
        ("prefix_cache", 1, "True or False"),
        ("prefix_cache_tokens", 0, "1 to 67108864"),
        ("prefix_cache_bytes", -1, "0 to 1125899906842624"),
        ("trace", 5.5, A_PATH),
        ("trace", "", A_PATH),
        ("trace", "a\0b", A_PATH),
        ("model", 5, A_PATH),
        ("model", "", A_PATH),
        ("model", b"a.gguf", A_PATH),
        ("model", Path("a\0b"), A_PATH),
        ("lora", 5, "a sequence of (path, scale) or (name, path, scale)"),
        ("lora", None, "a sequence of (path, scale) or (name, path, scale)"),
        ("lora", "a.gguf", "a sequence of (path, scale) or (name, path, scale)"),
        ("lora", {"a.gguf": 1.0}, "a sequence of (path, scale) or (name, path, scale)"),
        ("n_prefill_chunk", 0, "1 to 1048576"),
        ("target_itl_ms", 0.0, "0.1 to 1e+06"),
        ("target_itl_ms", NAN, "finite"),
        ("stream_buffer", 0, "1 to 1048576"),
        ("stall_timeout_s", 0.0, "0.001 to 1e+06"),
        ("stall_timeout_s", NAN, "finite"),
        ("rpc", "127.0.0.1:50052", "a sequence of HOST:PORT"),
        ("rpc", 5, "a sequence of HOST:PORT"),
        ("rpc", [""] * 17, "at most 16 servers"),
        ("rpc", ["gpu:1", "gpu:1"], "each server once: a server has one client at a time"),
    ],
)
def test_a_bad_setting_is_refused_by_field_value_and_limit(
    field: str, value: object, limit: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(**cast(dict[str, Any], {field: value}))
    error = caught.value
    assert (error.field, error.limit) == (field, limit)
    assert error.value is value
    assert str(error) == f"{field} is {value!r}, must be {limit}"


@pytest.mark.parametrize(
    "address",
    [
        "", "gpu", "gpu:", ":50052", "gpu:0", "gpu:65536", "gpu:-1", "gpu:1e3", "gpu:\u0661", "gpu:1:2", "::1:50052", "a..b:1", ".gpu:1",
        f"{'g' * 64}:1",
        "http://gpu:1", "gp u:1", "g\xfc:1", "8.8.8.8:50052", "0.0.0.0:50052", "224.0.0.1:50052", 50052, None,
    ],
)  # fmt: skip
def test_an_rpc_server_has_a_private_address_and_a_port(address: object) -> None:
    with pytest.raises(InvalidArgumentError, match="must be HOST:PORT of a loopback or private"):
        EngineConfig(process=True, rpc=cast(Any, [address]))


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"process": False}, "left out without process=True"), ({"process": True, "deterministic": True}, "left out with deterministic")],
)  # fmt: skip
def test_rpc_servers_are_refused_where_they_cannot_be_had(
    options: dict[str, Any], limit: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=limit) as caught:
        EngineConfig(rpc=["127.0.0.1:50052"], **options)
    assert caught.value.field == "rpc"


def test_rpc_servers_survive_the_way_to_another_process() -> None:
    addresses = [
        "127.0.0.1:50052",
        "10.1.2.3:1",
        "192.168.0.7:65535",
        "100.64.0.1:80",
        "gpu-1.lan:7",
    ]
    config = EngineConfig(process=True, rpc=addresses)
    told = EngineConfig(**json.loads(config.to_json()))
    assert told.rpc == config.rpc == tuple(addresses)


@pytest.mark.parametrize(
    ("n_seq_max", "prefix_cache", "kv_unified", "n_seq_ids"),
    [
        (1, True, True, 2), (8, True, True, 16), (64, True, True, 80), (250, True, True, 256),
        (255, True, True, 256), (255, True, False, 255), (256, False, True, 256),
    ],
)  # fmt: skip
def test_the_prefix_cache_has_seq_ids_of_its_own_within_what_libllama_has(
    n_seq_max: int, prefix_cache: bool, kv_unified: bool, n_seq_ids: int
) -> None:
    config = EngineConfig(
        n_seq_max=n_seq_max, prefix_cache=prefix_cache, kv_unified=kv_unified, n_ctx=0
    )
    assert config.kv_layout(2048) == (kv_unified, n_seq_ids)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"n_ctx": 4096, "n_seq_max": 16}, (True, 32)),
        ({"n_ctx": 2048, "n_seq_max": 1}, (True, 2)),  # no room for a cached prefix
        ({"n_ctx": 2048, "n_seq_max": 1, "prefix_cache": False}, (False, 1)),
        ({"n_ctx": 4096, "n_seq_max": 1}, (False, 2)),
        ({"n_ctx": 8 * 2048, "n_seq_max": 8}, (True, 16)),
        ({"n_ctx": 9 * 2048, "n_seq_max": 8}, (False, 9)),
        ({"n_ctx": 40 * 2048, "n_seq_max": 8}, (False, 16)),
        ({"n_ctx": 9 * 2048, "n_seq_max": 8, "rope_scaling": "yarn"}, (True, 16)),
        ({"n_ctx": 9 * 2048, "n_seq_max": 8, "rope_freq_scale": 0.25}, (True, 16)),
        ({"n_ctx": 4096, "n_seq_max": 16, "deterministic": True}, (False, 16)),
        ({"n_ctx": 40 * 2048, "n_seq_max": 8, "deterministic": True}, (False, 8)),
        ({"n_ctx": 0, "n_seq_max": 1}, (True, 2)),
    ],
    ids=str,
)
def test_each_sequence_has_its_own_cells_where_that_refuses_no_request(
    options: dict[str, Any], layout: tuple[bool, int]
) -> None:
    assert EngineConfig(**options).kv_layout(2048) == layout
    state = EngineConfig(**options).kv_layout(2048, state_bytes=1000)
    is_unified, n_seq_max = not options.get("deterministic"), options["n_seq_max"]
    # Of each sequence several beginnings are kept: they cannot be shared in part.
    n_kept = {1: 4, 8: 16, 16: 16}[n_seq_max] if options.get("prefix_cache", is_unified) else 0
    assert state == (is_unified, n_seq_max + n_kept)


def test_states_that_are_kept_for_others_have_a_limit_in_bytes() -> None:
    config = EngineConfig(n_seq_max=8)
    assert config.kv_layout(2048, state_bytes=100 << 20).n_seq_ids == 8 + 5
    assert config.kv_layout(2048, state_bytes=1 << 30).n_seq_ids == 8 + 1


@pytest.mark.parametrize(
    ("options", "state_bytes", "n_states", "n_seq_ids"),
    [
        ({}, 1 << 20, 0, 8 + 16),
        ({"speculation": "ngram"}, 0, 0, 8 + 8),
        ({"speculation": "ngram"}, 1 << 20, 4, 8 + 16),
        ({"speculation": "ngram"}, 20 << 20, 4, 8 + 5),
        ({"speculation": "ngram"}, 50 << 20, 2, 8 + 3),
        ({"speculation": "ngram"}, 1 << 30, 0, 8 + 1),
        ({"speculation": "ngram", "n_ubatch": 5}, 1 << 20, 3, 8 + 16),
    ],
)
def test_drafts_get_as_many_states_of_a_sequence_as_there_is_memory_for(
    options: dict[str, Any], state_bytes: int, n_states: int, n_seq_ids: int
) -> None:
    config = EngineConfig(n_seq_max=8, **options)
    assert config.n_draft_states(state_bytes) == n_states
    layout = config.kv_layout(1 << 30, state_bytes=state_bytes, n_states=1 + n_states)
    assert layout.n_seq_ids == n_seq_ids


def test_sequences_that_cannot_be_copied_need_no_seq_ids_for_prefixes() -> None:
    layout = EngineConfig(n_seq_max=8).kv_layout(1 << 30, state_bytes=1000, can_copy=False)
    assert layout == (True, 8)


def test_the_prefix_cache_may_fill_the_context_unless_told_otherwise() -> None:
    assert EngineConfig().n_prefix_cache_tokens(1000) == 1000
    assert EngineConfig(prefix_cache_tokens=70).n_prefix_cache_tokens(1000) == 70
    assert EngineConfig(prefix_cache_tokens=70).n_prefix_cache_tokens(50) == 50
    assert EngineConfig(prefix_cache=False).n_prefix_cache_tokens(1000) == 0


@pytest.mark.parametrize("lora", ["a.gguf", ("a.gguf",), ("a", "a.gguf", 1.0, 2.0), 5, None])
def test_a_lora_is_a_path_and_a_scale_perhaps_with_a_name(lora: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(lora=[("a.gguf", 1.0), lora])
    assert (caught.value.field, caught.value.value) == ("lora", lora)
    assert caught.value.limit == "(path, scale) or (name, path, scale)"
    EngineConfig(lora=[["a.gguf", 1.0]])  # type: ignore[list-item]  # as JSON has it


def test_a_lora_has_the_name_that_it_is_given_or_that_of_its_file() -> None:
    config = EngineConfig(
        lora=[("x/a.gguf", 1.0), ("b", "a.gguf", 0), ("y/a.gguf", 2.0), ("a-2", "c", 1)]
    )
    assert [(lora.name, lora.path, lora.scale) for lora in config.loras] == [
        ("a", "x/a.gguf", 1.0), ("b", "a.gguf", 0.0), ("a-3", "y/a.gguf", 2.0), ("a-2", "c", 1.0)
    ]  # fmt: skip
    for bad in ("", "a\n", "x" * 257, 5):
        with pytest.raises(InvalidArgumentError, match="lora"):
            EngineConfig(lora=[(bad, "a.gguf", 1.0)])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="no other adapter"):
        EngineConfig(lora=[("a", "a.gguf", 1.0), ("a", "b.gguf", 1.0)])


def test_a_lora_path_is_a_path() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(lora=[(5, 1.0)])  # type: ignore[list-item]
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("lora", 5, A_PATH)


def test_a_bad_lora_scale_is_refused_by_its_path() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(lora=[("a.gguf", 1.0), ("b.gguf", 1e5)])
    assert (caught.value.field, caught.value.value) == ("scale of b.gguf", 1e5)


def test_an_unknown_setting_is_a_type_error_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match="'latenc_s'; did you mean 'latency_s'"):
        FakeEngine(latenc_s=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unknown engine option 'n_contx'; .*n_ctx"):
        config_from(None, cast(Any, {"n_contx": 1}))
    assert config_from("a.gguf", {"n_ctx": 64}).n_ctx == 64


def test_no_model_means_the_embedded_one() -> None:
    assert EngineConfig().model_path == EMBEDDED_MODEL
    assert EngineConfig(model="a.gguf").model_path == Path("a.gguf")


def test_threads_that_are_not_given_are_the_physical_cores() -> None:
    n_threads = usable_processors().n_threads
    assert EngineConfig(model="m").compute_threads == (n_threads, n_threads)
    assert EngineConfig(model="m", n_threads=3).compute_threads == (3, 3)
    assert EngineConfig(model="m", n_threads_batch=3).compute_threads == (n_threads, 3)


def test_the_embedded_model_has_one_thread_for_it_is_too_small_to_share() -> None:
    assert EngineConfig().compute_threads == (1, 1)
    assert EngineConfig(n_threads=3).compute_threads == (3, 3)


def test_only_flash_attention_reads_quantized_values() -> None:
    with pytest.raises(InvalidArgumentError, match=r"type_v is 'q8_0'.*flash_attn=False"):
        EngineConfig(flash_attn=False, type_v="q8_0")
    EngineConfig(flash_attn=False, type_k="q8_0")
    EngineConfig(type_v="q8_0")


ODD = {
    "array": np.array([1, 2]),
    "empty array": np.array([]),
    "number of numpy": np.array(3),
    "surrogate": "\ud800",
    "NUL": "a\0b",
    "bytes": b"a",
    "object": object(),
    "list": [object()],
}


KINDS: dict[type[Any], type[Exception]] = {
    EngineConfig: InvalidArgumentError,
    SamplingParams: InvalidRequestError,
}


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, each.name) for kind in KINDS for each in fields(kind)]
)
@pytest.mark.parametrize("value", ODD.values(), ids=list(ODD))
def test_no_value_of_any_type_is_an_error_without_its_field(
    kind: type[Any], field: str, value: Any
) -> None:
    """A value may be accepted; what is raised names the field."""
    found = ""
    try:
        kind(**{field: value})
    except KINDS[kind] as error:
        found = str(error)
    assert not found or field in found


def test_a_chat_template_that_never_ends_or_never_begins_is_rejected(tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large.jinja"
    os.mkfifo(fifo)
    large.write_text("x" * (MAX_TEMPLATE_BYTES + 1))
    for path in (fifo, large, "/dev/zero", tmp_path):
        with pytest.raises(InvalidArgumentError, match="chat_template"):
            EngineConfig(chat_template=path).read_chat_template()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_completion_tokens", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("response_format", "json_schema"),
        ("repetition_penalty", "repeat_penalty"),
        ("temprature", "temperature"),
    ],
)
def test_names_of_other_apis_are_told_like_misspelt_ones(given: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"must be called '{meant}'"):
        FakeEngine().stream("a", **dict[str, Any]({given: 1}))
