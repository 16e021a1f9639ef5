"""Completion.fingerprint: the same while answers are, another when what they depend on is."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.file_content import content_of
from cllm.engine.llama.fingerprint import fingerprint
from tests.conftest import QUIET

EXACT = EngineConfig(deterministic=True)


def of(config: EngineConfig, files: list[Path] | None = None, n_ctx_seq: int = 256) -> str:
    kv_cache = KVCache(n_cells=4 * n_ctx_seq, n_seq_ids=4, n_ctx_seq=n_ctx_seq)
    contents = [content_of(file) for file in files or [EMBEDDED_MODEL]]
    return fingerprint(contents, config, kv_cache)


@pytest.mark.parametrize(
    "change",
    [
        {"n_batch": 64},
        {"n_seq_max": 3},
        {"n_threads": 1},
        {"prefix_cache": False},
        {"max_queue": 1},
    ],
    ids=str,
)
def test_what_exact_answers_do_not_depend_on_leaves_it_alone(change: dict[str, Any]) -> None:
    assert of(dataclasses.replace(EXACT, **change)) == of(EXACT)


@pytest.mark.parametrize(
    "change", [{"deterministic": False}, {"type_k": "q8_0"}, {"rope_freq_base": 1e5}], ids=str
)
def test_what_they_depend_on_changes_it(change: dict[str, Any]) -> None:
    assert of(dataclasses.replace(EXACT, **change)) != of(EXACT)
    assert of(EXACT, n_ctx_seq=512) != of(EXACT)


def test_without_deterministic_what_decides_about_batches_counts() -> None:
    plain = EngineConfig()
    assert of(dataclasses.replace(plain, n_batch=64)) != of(plain)
    assert of(dataclasses.replace(plain, max_queue=1)) == of(plain)


def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    copy = tmp_path / "another name.gguf"
    shutil.copy(EMBEDDED_MODEL, copy)
    assert of(EXACT, [copy]) == of(EXACT)
    with copy.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    assert of(EXACT, [copy]) != of(EXACT)


def test_a_file_smaller_than_a_block_counts_too(tmp_path: Path) -> None:
    names = []
    for text in (b"", b"a", b"b"):
        (tmp_path / "file").write_bytes(text)
        names.append(of(EXACT, [tmp_path / "file"]))
    assert len(set(names)) == 3


@pytest.mark.anyio
async def test_every_completion_says_it(anyio_backend: str) -> None:
    async with Engine(**QUIET) as engine:
        assert engine.model is not None
        said = (await engine.generate("1+1=")).fingerprint
        assert said == engine.model.fingerprint
        assert said.startswith("fp_")
        async with engine.stream("1+1=") as stream:
            await stream.cancel()
            assert (await stream.completion()).fingerprint == said
