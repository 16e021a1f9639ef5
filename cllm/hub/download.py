"""Downloads from a hub, by huggingface_hub: its addresses, tokens, environment variables and cache.

A file is written beside its place, goes on where an earlier download has ended, and gets its name when
its checksum is right.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from cllm.errors import DownloadError, InvalidArgumentError
from cllm.hub.cache import INCOMPLETE, cached_files, repo_directory
from cllm.hub.names import ModelName, choose_files, parse_name

GIB = 1 << 30


class _File(NamedTuple):
    """A file of a repository."""

    path: str
    n_bytes: int
    sha256: str


def find_model(name: str) -> Path:
    """The first file of a model, downloaded if it is not here.  Blocks: minutes, perhaps.

    Raises
    ------
    InvalidArgumentError
        It is no name, or huggingface_hub is not installed.
    DownloadError
    """
    model = parse_name(name)
    check_library(name)
    files = cached_files(model) or pull_model(model)
    return files[0]


def check_library(name: str) -> None:
    """That models can have names here.

    Raises
    ------
    InvalidArgumentError
    """
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        limit = f"a file without cllm[hub] ({error})"
        raise InvalidArgumentError("model", name, limit) from None


def pull_model(model: ModelName) -> list[Path]:
    """All files of a model, those that are not here or not the hub's newest downloaded.  Blocks.

    A bar of huggingface_hub's shows on a terminal how far it is.

    Raises
    ------
    DownloadError
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(model.repo, files_metadata=True)
        known = {file.rfilename: file for file in info.siblings or ()}
        chosen = [_file(known[path]) for path in choose_files(model, known)]
        _check_space(model, chosen)
        return [_download(model, file) for file in chosen]
    except FileNotFoundError as error:
        raise DownloadError(str(model), str(error)) from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # its HTTP library's
        raise DownloadError(str(model), _reason(error)) from error


def _file(sibling: Any) -> _File:
    """A file as the hub lists it."""
    if sibling.lfs is None:  # too small for a model
        raise FileNotFoundError(f"{sibling.rfilename} is no model")
    return _File(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256)


def _check_space(model: ModelName, files: list[_File]) -> None:
    directory = _blobs(model)
    n_missing = sum(
        file.n_bytes - _size(directory / f"{file.sha256}{INCOMPLETE}")
        for file in files
        if not (directory / file.sha256).exists()
    )
    n_free = shutil.disk_usage(directory).free
    if n_missing > n_free:
        reason = f"it needs {n_missing / GIB:.1f} GiB more, and the disk has {n_free / GIB:.1f}"
        raise DownloadError(str(model), reason)


def _download(model: ModelName, file: _File) -> Path:
    """One file, and its name in the cache."""
    import filelock
    import huggingface_hub

    blob = _blobs(model) / file.sha256
    part = blob.with_name(f"{blob.name}{INCOMPLETE}")
    with filelock.FileLock(f"{part}.lock"):  # whoever asks at the same time waits
        if not blob.exists():
            _fetch(model, file, part)
            part.replace(blob)
    path = Path(huggingface_hub.hf_hub_download(model.repo, file.path))
    if path.resolve().name != file.sha256:
        raise DownloadError(str(model), "the repository has changed meanwhile; ask again")
    return path


def _fetch(model: ModelName, file: _File, part: Path) -> None:
    """Write what is missing of a file, and compare the checksum of the whole."""
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if _size(part) > file.n_bytes:
        part.unlink()
    try:
        with part.open("ab") as output:
            file_download.http_get(
                hf_hub_url(model.repo, file.path),
                output,
                resume_size=output.tell(),
                headers=build_hf_headers(),
                expected_size=file.n_bytes,
                displayed_filename=file.path,
            )
    except OSError as error:
        if error.errno == errno.ENOSPC:  # it would keep the disk full
            part.unlink()
        raise
    with part.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != file.sha256:
        part.unlink()
        reason = f"the checksum of {file.path} is {found}, and should be {file.sha256}; ask again"
        raise DownloadError(str(model), reason)


def _blobs(model: ModelName) -> Path:
    directory = repo_directory(model.repo) / "blobs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    """Why, for who can do something about it; nothing of addresses, which may have secrets in them."""
    from huggingface_hub import errors

    match error:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, and it is not here"
        case errors.GatedRepoError():
            return "who wants it has to accept its terms on its page, and to set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "there is no such repository, or it is private and HF_TOKEN does not open it"
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return "HF_TOKEN does not open it"
        case errors.HfHubHTTPError():
            return f"the hub answers with status {error.response.status_code}"
        case errors.HTTPError():  # type: ignore[attr-defined]
            return f"the hub cannot be reached, or has gone ({type(error).__name__}); ask again to go on from there"
        case OSError(errno=errno.ENOSPC):
            return "the disk is full"
    return str(error)
