"""Downloaded models, in the cache that huggingface_hub and llama.cpp's own programs use too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cllm.hub.names import Choose, ModelName, choose_files, models_of, name_of

REPO = "models--"  # beginning of a repository's directory: `models--user--name`
INCOMPLETE = ".incomplete"


@dataclass(frozen=True)
class CachedModel:
    """Downloaded model with all of its files.

    Attributes
    ----------
    paths : list of Path
        In the order of its parts.
    n_bytes : int
    """

    name: ModelName
    paths: list[Path]
    n_bytes: int


def cache_directory() -> Path:
    """Return the directory of models: `HF_HUB_CACHE`, or `hub` in `HF_HOME` (`~/.cache/huggingface`)."""
    with suppress(ModuleNotFoundError):
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)
    given = os.environ.get
    home = given("HF_HOME") or f"{given('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    hub = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(hub)).expanduser()


def repo_directory(repo: str) -> Path:
    """Return the directory of a repository."""
    return cache_directory() / (REPO + repo.replace("/", "--"))


def cached_files(name: ModelName, choose: Choose = choose_files) -> list[Path] | None:
    """Return the files of a model; None if they are not all in its snapshot of the main branch.

    `choose` returns them among the files of the snapshot.

    Without such a snapshot the newest one is used.  A name without a quantization takes Q4_K_M if the
    snapshot has it, otherwise any: the hub is not queried.
    """
    snapshot = _newest_snapshot(repo_directory(name.repo))
    if snapshot is None:
        return None
    try:
        return [snapshot / file for file in choose(name, _files_of(snapshot))]
    except FileNotFoundError:
        return None


def cached_models() -> list[CachedModel]:
    """Return all complete models of the cache, sorted by name."""
    return sorted(_cached_models(), key=lambda model: str(model.name))


def incomplete_files() -> list[Path]:
    """Return the files of unfinished downloads."""
    return sorted(cache_directory().glob(f"{REPO}*/blobs/*{INCOMPLETE}"))


def remove_model(model: CachedModel) -> int:
    """Remove a model from the cache, and return the number of bytes freed.

    Other snapshots lose the files that they share with it.
    """
    directory = repo_directory(model.name.repo)
    blobs = {path.resolve() for path in model.paths}
    for pointer in list(directory.glob("snapshots/*/**/*.gguf")):
        if pointer.resolve() in blobs:
            pointer.unlink()
    n_freed = sum(blob.stat().st_size for blob in blobs if blob.exists())
    for blob in blobs:
        blob.unlink(missing_ok=True)
    return n_freed


def _cached_models() -> Iterator[CachedModel]:
    for directory in cache_directory().glob(f"{REPO}*--*"):
        user, _, name = directory.name.removeprefix(REPO).partition("--")
        if (snapshot := _newest_snapshot(directory)) is None:
            continue
        present = _files_of(snapshot)
        for files in models_of(present).values():
            paths = [snapshot / file for file in files]
            model = name_of(f"{user}/{name}", files, present)
            yield CachedModel(model, paths, sum(path.stat().st_size for path in paths))


def _newest_snapshot(directory: Path) -> Path | None:
    """Return the snapshot of the main branch, otherwise the newest one."""
    snapshots = sorted(directory.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    with suppress(OSError):
        main = (directory / "refs" / "main").read_text().strip()
        snapshots += [path for path in snapshots if path.name == main]
    return snapshots[-1] if snapshots else None


def _files_of(snapshot: Path) -> list[str]:
    """Return the files of a snapshot that exist: a link may point to a deleted file."""
    paths = snapshot.rglob("*.gguf")
    return [path.relative_to(snapshot).as_posix() for path in paths if path.exists()]
