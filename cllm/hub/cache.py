"""Downloaded models, in the cache that huggingface_hub and llama.cpp's own programs use too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cllm.hub.names import ModelName, choose_files, choose_projector, models_of, name_of

REPO = "models--"  # beginning of a repository's directory: `models--user--name`
INCOMPLETE = ".incomplete"
ANEW = ".anew"  # after the name of a part: an answer that begins the file again
# Those of huggingface_hub have a random part more: another program may be writing them.
_OWN_PART = re.compile(f"[0-9a-f]{{64}}{re.escape(INCOMPLETE)}")


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


def cached_files(name: ModelName) -> list[Path] | None:
    """Return the files of a model; None if no snapshot has them all.

    The snapshot of the main branch comes first, then the newest ones: a new commit does not hide models that
    are here.  A name without a quantization takes Q4_K_M if the snapshot has it, otherwise any: the hub is
    not queried.
    """
    for snapshot in _snapshots(repo_directory(name.repo)):
        with suppress(FileNotFoundError):
            return [snapshot / file for file in choose_files(name, _files_of(snapshot))]
    return None


def cached_projector(name: ModelName) -> Path | None:
    """Return the projector of a model; None if no snapshot has it.  It may be in a newer one than the model."""
    snapshots = _snapshots(repo_directory(name.repo))
    files = {file: snapshot for snapshot in reversed(snapshots) for file in _files_of(snapshot)}
    with suppress(FileNotFoundError):
        for file in choose_projector(name, files):
            return files[file] / file
    return None


def cached_models() -> list[CachedModel]:
    """Return all complete models of the cache, sorted by name."""
    return sorted(_cached_models(), key=lambda model: str(model.name))


def incomplete_files() -> list[Path]:
    """Return the files of unfinished downloads of cllm."""
    found = cache_directory().glob(f"{REPO}*/blobs/*{INCOMPLETE}")
    return sorted(path for path in found if _OWN_PART.fullmatch(path.name))


def remove_incomplete(path: Path) -> int | None:
    """Remove the file of an unfinished download, and return its size; None if a download is writing it."""
    try:
        import filelock
    except ModuleNotFoundError:  # cllm cannot download without it
        return _removed(path)
    lock = Path(f"{path}.lock")
    try:
        with filelock.FileLock(lock, timeout=0):
            n_bytes = _removed(path)
            lock.unlink(missing_ok=True)
    except filelock.Timeout:
        return None
    return n_bytes


def _removed(path: Path) -> int:
    n_bytes = 0
    for each in (path, Path(f"{path}{ANEW}")):
        with suppress(FileNotFoundError):  # the download has ended meanwhile
            n_bytes += each.stat().st_size
            each.unlink()
    return n_bytes


def remove_model(model: CachedModel) -> int:
    """Remove a model from the cache, and return the number of bytes freed.

    All snapshots lose its files, and those that they share with it.  A file in the store that huggingface_hub
    shares between repositories stays, and counts as nothing.
    """
    directory = repo_directory(model.name.repo)
    snapshot = next(path for path in model.paths[0].parents if path.parent.name == "snapshots")
    names = [path.relative_to(snapshot) for path in model.paths]
    versions = [each / name for each in _snapshots(directory) for name in names]
    blobs = {_blob_of(path) for path in versions if path.exists()}
    for pointer in list(directory.glob("snapshots/*/**/*.gguf")):
        if _blob_of(pointer) in blobs:
            pointer.unlink()
    n_freed = sum(blob.stat().st_size for blob in blobs if blob.is_file() and not blob.is_symlink())
    for blob in blobs:
        blob.unlink(missing_ok=True)
    return n_freed


def _blob_of(path: Path) -> Path:
    """Return the file of the repository that a name in a snapshot links to; it may itself be a link."""
    blob = path.parent / path.readlink() if path.is_symlink() else path
    return blob.parent.resolve() / blob.name


def _cached_models() -> Iterator[CachedModel]:
    for directory in cache_directory().glob(f"{REPO}*--*"):
        user, _, name = directory.name.removeprefix(REPO).partition("--")
        known: set[ModelName] = set()  # in a newer snapshot
        for snapshot in _snapshots(directory):
            present = _files_of(snapshot)
            for files in models_of(present, drafters=True).values():
                paths = [snapshot / file for file in files]
                model = name_of(f"{user}/{name}", files, present)
                if model not in known:
                    known.add(model)
                    yield CachedModel(model, paths, sum(path.stat().st_size for path in paths))


def _snapshots(directory: Path) -> list[Path]:
    """Return the snapshots of a repository: that of the main branch, then the newest ones."""
    snapshots = [path for path in directory.glob("snapshots/*") if path.is_dir()]
    main = ""
    with suppress(OSError, ValueError):
        main = (directory / "refs" / "main").read_text().strip()
    return sorted(
        snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True
    )


def _files_of(snapshot: Path) -> list[str]:
    """Return the files of a snapshot that exist: a link may point to a deleted file."""
    paths = snapshot.rglob("*.gguf")
    return [path.relative_to(snapshot).as_posix() for path in paths if path.exists()]
