"""The memory of a model is known before it is loaded; a model that does not fit is rejected."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig, ModelLoadError
from cllm.bindings import Model, memory_needs
from cllm.bindings._library import captured_log
from cllm.bindings.memory_needs import _COMPUTE, _MEMORY, MIB
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama import memory
from cllm.engine.llama.backend import planned_contexts
from cllm.engine.llama.decoder import make_context
from tests.conftest import QUIET
from tools import make_model, make_projector

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-swa", "tiny-recurrent", "tiny-hybrid")
N_CTX = re.compile(r"n_ctx=(\d+) fits")


def path_of(name: str) -> Path:
    return EMBEDDED_MODEL if name == "embedded" else make_model.ensure(name, "F16")


@pytest.mark.parametrize("n_ctx", [512, 8192])
@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("name", ["embedded", *MODELS])
def test_what_is_foretold_is_what_llama_cpp_takes(name: str, is_unified: bool, n_ctx: int) -> None:
    path = path_of(name)
    config = EngineConfig(
        model=path, n_ctx=n_ctx, n_seq_max=4, kv_unified=is_unified, n_gpu_layers=0, n_threads=1
    )
    needs = memory_needs(path, lambda model: make_context(model, config), n_gpu_layers=0)
    assert needs is not None
    with Model(path, n_gpu_layers=0) as model, captured_log() as lines:
        make_context(model, config).close()
    taken = {
        pattern: sum(
            float(found[found.re.groups]) for line in lines if (found := pattern.search(line))
        )
        for pattern in (_MEMORY, _COMPUTE)
    }
    assert needs.n_context == pytest.approx(taken[_MEMORY] * MIB, rel=0.01)
    assert needs.n_compute == pytest.approx(taken[_COMPUTE] * MIB, rel=0.1)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 MiB are there."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 80 * MIB)
    monkeypatch.setattr(memory, "_is_elsewhere", lambda config: False)


@pytest.mark.same_process("the memory that is available is another there")
@pytest.mark.anyio
async def test_what_does_not_fit_is_rejected_with_the_n_ctx_that_does(available: None) -> None:
    with pytest.raises(ModelLoadError, match=r"KV cache.*80 MiB are available") as caught:
        async with Engine(n_ctx=1 << 18, **QUIET):
            pass
    found = N_CTX.search(caught.value.reason)
    assert found is not None
    n_ctx = int(found[1])
    assert n_ctx > 16_000
    async with Engine(n_ctx=n_ctx, **QUIET) as engine:
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
    with pytest.raises(ModelLoadError):
        async with Engine(n_ctx=n_ctx + n_ctx // 10, **QUIET):
            pass


@pytest.mark.anyio
async def test_a_reload_is_rejected_alike_and_nothing_has_changed(available: None) -> None:
    async with Engine(n_ctx=512, **QUIET) as engine:
        with pytest.raises(ModelLoadError, match="80 MiB are available"):
            await engine.reload(n_ctx=1 << 18)
        assert (await engine.generate("1+1=", temperature=0)).text == "2"


@pytest.mark.same_process("the memory that is available is another there")
@pytest.mark.anyio
async def test_overcommit_loads_it_with_a_warning(
    available: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cllm.engine"):
        async with Engine(n_ctx=1 << 16, allow_overcommit=True, **QUIET) as engine:
            assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert any("the system may end the process" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("options", "n_contexts"),
    [
        ({}, 1),
        ({"speculation": str(EMBEDDED_MODEL)}, 2),
        ({"pooling": "mean"}, 2),
        (
            {
                "speculation": str(EMBEDDED_MODEL),
                "embedding_model": EMBEDDED_MODEL,
                "pooling": "mean",
            },
            3,
        ),
    ],
)
def test_the_contexts_of_models_that_draft_and_embed_count_too(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], n_contexts: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 * MIB)
    monkeypatch.setattr(memory, "_is_elsewhere", lambda config: False)
    config = EngineConfig(n_ctx=4096, n_gpu_layers=0, n_threads=1, **options)
    planned = planned_contexts(config)
    alone = [each.needs(config) for each in planned]
    assert len(alone) == n_contexts
    wanted = sum(needs.n_context for needs in alone if needs is not None) / MIB
    with pytest.raises(ModelLoadError) as caught:
        memory.check_room(config, planned)
    assert f"it needs {wanted:,.0f} MiB for the KV cache" in caught.value.reason


def test_the_projector_and_an_encode_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 * MIB)
    monkeypatch.setattr(memory, "_is_elsewhere", lambda config: False)
    mmproj = make_projector.ensure("llava")
    plain = EngineConfig(n_ctx=4096, n_gpu_layers=0, n_threads=1)
    config = replace(plain, mmproj=mmproj)
    n_patches, n_embd = 64, 32
    assert memory.encoder_bytes(plain) == 0
    assert memory.encoder_bytes(config) == memory.ENCODER_BYTES * n_embd * n_patches
    larger = replace(config, image_max_tokens=100, flash_attn=False)
    scores = 4 * 2 * 400**2
    assert memory.encoder_bytes(larger) == memory.ENCODER_BYTES * n_embd * 400 + scores
    large = replace(config, image_max_tokens=65_536)
    reasons = []
    for each in (plain, large):
        with pytest.raises(ModelLoadError) as caught:
            memory.check_room(each, planned_contexts(plain))
        reasons.append(caught.value.reason)
    found = [
        float(reason.partition(" MiB for weights")[0].split()[-1].replace(",", ""))
        for reason in reasons
    ]
    n_more = mmproj.stat().st_size + memory.encoder_bytes(large)
    assert found[1] - found[0] == pytest.approx(n_more / MIB, abs=2)
    assert n_more > 500 * MIB


def test_where_it_fits_many_times_llama_cpp_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(memory, "memory_needs", asked)
    memory.check_room(
        EngineConfig(n_ctx=4096), [memory.PlannedContext(EMBEDDED_MODEL, make_context)]
    )
