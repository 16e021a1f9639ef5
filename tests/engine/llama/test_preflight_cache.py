"""Files that have passed a preflight are known until they change; the registry may be anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig, ModelLoadError
from cllm.engine.cache_directory import cache_file
from cllm.engine.llama import preflight, preflight_cache
from cllm.engine.llama.preflight import Preflight
from cllm.engine.llama.preflight_cache import FILE, are_seen, fingerprints, remember
from tests.conftest import QUIET

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {"preflight": "unseen", "n_ctx": 512, "n_seq_max": 2, **QUIET}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that does not exist yet.  The test models are in another."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


@pytest.fixture
def model(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A model that may be changed."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model_path.read_bytes())
    return path


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that a process was started for."""
    tried: list[str] = []
    real = Preflight._try

    def counted(self: Preflight, config: EngineConfig) -> None:
        tried.append(self._config.model_path.name)
        real(self, config)

    monkeypatch.setattr(Preflight, "_try", counted)
    return tried


async def enter(model: Path | None, **options: Any) -> None:
    async with Engine(model, **{**OPTIONS, **options}):
        pass


# --- The registry ----------------------------------------------------------------------------
def test_a_file_is_known_until_it_or_the_library_changes(model: Path) -> None:
    look: Callable[[str], Any] = lambda build: fingerprints([model], build)  # noqa: E731
    assert not are_seen(look("a"))
    remember(look("a"))
    assert are_seen(look("a"))
    assert not are_seen(look("b"))
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not are_seen(look("a"))
    remember(look("a"))
    with model.open("ab") as file:
        file.write(b"\0")
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not are_seen(look("a"))


def test_a_relative_path_is_the_file_it_means_here(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(fingerprints([model], "a"))
    monkeypatch.chdir(tmp_path)
    assert are_seen(fingerprints([Path(model.name)], "a"))


def test_all_files_of_a_model_must_be_known(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "\udcff adapter.gguf"  # no UTF-8
    adapter.write_bytes(b"GGUF")
    remember(fingerprints([model], "a"))
    assert not are_seen(fingerprints([model, adapter], "a"))
    remember(fingerprints([model, adapter], "a"))
    assert are_seen(fingerprints([model, adapter], "a"))


def test_the_files_that_passed_longest_ago_are_forgotten(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_cache, "MAX_FILES", 2)
    (fingerprint,) = fingerprints([model], "a").values()
    for name in "abac":
        remember({f"/{name}": fingerprint})
    assert [are_seen({f"/{name}": fingerprint}) for name in "abc"] == [True, False, True]


REGISTRIES = {
    "empty": b"",
    "half": b'{"/model.gguf": [1, 2',
    "another value": b"[1, 2]",
    "no text": b"\xff\xfe",
    "nested": b"[" * 200_000,
    "other entries": b'{"/model.gguf": {"n_bytes": 1}}',
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_a_registry_that_is_damaged_is_empty_and_is_replaced(name: str, model: Path) -> None:
    cache_file(FILE).parent.mkdir(parents=True)
    cache_file(FILE).write_bytes(REGISTRIES[name])
    files = fingerprints([model], "a")
    assert not are_seen(files)
    remember(files)
    assert are_seen(files)
    assert isinstance(json.loads(cache_file(FILE).read_text()), dict)


def a_file_in_place_of(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize("obstacle", ["the cache", "its directory", "the registry"])
def test_a_registry_that_cannot_be_written_is_left_and_leaves_nothing(
    obstacle: str, model: Path, cache: Path
) -> None:
    match obstacle:
        case "the cache":
            a_file_in_place_of(cache)
        case "its directory":
            a_file_in_place_of(cache / "cllm")
        case _:
            cache_file(FILE).mkdir(parents=True)
    files = fingerprints([model], "a")
    remember(files)
    assert not are_seen(files)
    assert [path.name for path in cache.glob("cllm/*")] in ([], [cache_file(FILE).name])


def test_without_a_home_nothing_is_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", homeless)
    files = fingerprints([model], "a")
    remember(files)
    assert not are_seen(files)


def test_a_relative_cache_directory_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_file(FILE) == tmp_path / ".cache" / "cllm" / "seen_models.json"


# --- The engine ------------------------------------------------------------------------------
@pytest.mark.anyio
async def test_an_unseen_file_is_tried_once_and_again_when_it_has_changed(
    model: Path, tried: list[str], anyio_backend: str
) -> None:
    for _ in range(3):
        await enter(model)
    assert len(tried) == 1
    os.utime(model)
    for _ in range(2):
        await enter(model)
    assert len(tried) == 2


@pytest.mark.anyio
async def test_a_file_that_does_not_pass_is_tried_every_time(
    deadly_model: Path, tried: list[str], anyio_backend: str
) -> None:
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="SIGABRT"):
            await enter(deadly_model)
    assert len(tried) == 2


@pytest.mark.anyio
async def test_a_file_that_this_process_cannot_use_is_not_remembered(
    model: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ModelLoadError(str(model), "out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("cllm.engine.llama.backend.Model", broken)
        with pytest.raises(ModelLoadError):
            await enter(model)
    await enter(model)
    assert len(tried) == 2


@pytest.mark.anyio
async def test_a_cache_that_cannot_be_written_costs_a_trial_and_nothing_else(
    model: Path, cache: Path, tried: list[str], anyio_backend: str
) -> None:
    cache.touch()
    for _ in range(2):
        await enter(model)
    assert len(tried) == 2


@pytest.mark.anyio
async def test_the_embedded_model_is_never_unseen_but_a_new_adapter_is(
    tried: list[str], tmp_path: Path, anyio_backend: str
) -> None:
    await enter(None)
    assert tried == []
    with pytest.raises(ModelLoadError, match="missing"):
        await enter(None, lora=[(tmp_path / "missing.gguf", 1.0)])
    assert tried == [EngineConfig().model_path.name]


@pytest.mark.anyio
async def test_true_tries_every_time_and_keeps_no_registry(
    model: Path, tried: list[str], anyio_backend: str
) -> None:
    await enter(model)
    cache_file(FILE).unlink()
    for _ in range(2):
        await enter(model, preflight=True)
    await enter(None, preflight=True)
    assert len(tried) == 4
    assert not cache_file(FILE).exists()


@pytest.mark.anyio
async def test_a_file_that_changes_while_it_is_tried_is_not_known(
    model: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    check = preflight._check

    def changed(*args: Any) -> None:
        check(*args)
        os.utime(model, ns=(1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(preflight, "_check", changed)
        await enter(model)
    await enter(model)
    assert len(tried) == 2
