"""Downloads from a hub, with huggingface_hub's addresses, tokens, environment variables and cache.

A file is written beside its final place, continues an earlier partial download, and is renamed when
its checksum is right.  Paths and sizes from the hub are checked by `_checked` before their use.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cllm.errors import DownloadError, InvalidArgumentError
from cllm.hub.cache import ANEW, INCOMPLETE, cached_files, cached_projector, repo_directory
from cllm.hub.names import Choose, ModelName, choose_files, choose_projector, parse_name

logger: logging.Logger = logging.getLogger("cllm.engine")
GIB = 1 << 30
LIST_S = 20.0  # seconds for each step of the request for the list of files
MAX_FILE_BYTES = 50 * 10**9  # of one download by huggingface_hub; larger models come in parts
_SHA256, _COMMIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


class _File(NamedTuple):
    """A file of a repository, at a commit."""

    path: str
    n_bytes: int
    sha256: str
    commit: str


def find_model(name: str) -> Path:
    """Return the first file of a model; download the model if the cache lacks it.  May block for minutes.

    Raises
    ------
    InvalidArgumentError
        `name` is not a name, or huggingface_hub is not installed, which cached models need too.
    DownloadError
    """
    model = parse_name(name)
    check_library(name)
    files = cached_files(model) or pull_model(model)
    return files[0]


def find_projector(name: str) -> Path | None:
    """Return the projector in the repository of a model; download it if the cache lacks it.  May block.

    Returns
    -------
    Path or None
        None if the repository has none, or if the cache has none and the hub does not answer, which is logged.

    Raises
    ------
    InvalidArgumentError
        `name` is not a name, or huggingface_hub is not installed.
    DownloadError
    """
    model = parse_name(name)
    check_library(name)
    if (cached := cached_projector(model)) is not None:
        return cached
    try:
        with _download_errors(model):
            listed = _files_of(model, choose_projector)
    except DownloadError as error:
        logger.warning("no projector is used: %s", error)
        return None
    with _download_errors(model):
        paths = _downloaded(model, listed)
    return paths[0] if paths else None


def check_library(name: str) -> None:
    """Raise an error with this name if huggingface_hub is not installed.

    Raises
    ------
    InvalidArgumentError
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        limit = "a file: names need the extra 'hub' (pip install 'cllm[hub]')"
        raise InvalidArgumentError("model", name, limit)


def pull_model(model: ModelName) -> list[Path]:
    """Return all files of a model; missing and outdated ones are downloaded.  Blocks.

    On a terminal, huggingface_hub shows a progress bar.

    Raises
    ------
    DownloadError
    """
    return Download(model).run()


class Download:
    """Files of a model, as the hub lists them now.  The calls block.

    Parameters
    ----------
    model : ModelName
    is_cancelled : callable
        Returns True to end `run` at the next bytes of the hub; the part that is here is kept.

    Attributes
    ----------
    n_bytes : int
        Size of all files.
    sha256 : str
        Checksum of the first file, in hexadecimal digits.

    Raises
    ------
    DownloadError
        The hub cannot be reached, or has no such model.
    """

    def __init__(self, model: ModelName, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self._model = model
        self._is_cancelled = is_cancelled
        with _download_errors(model):
            self._files = _files_of(model, choose_files)
        self.n_bytes: int = sum(file.n_bytes for file in self._files)
        self.sha256: str = self._files[0].sha256

    def run(self) -> list[Path]:
        """Return the files; missing and outdated ones are downloaded.

        Raises
        ------
        DownloadError
        """
        with _download_errors(self._model):
            return _downloaded(self._model, self._files, self._is_cancelled)

    def count(self) -> int:
        """Return the bytes that the cache has of these files.  Callable from any thread, also during `run`."""
        directory = repo_directory(self._model.repo) / "blobs"
        n_here = 0
        for file in self._files:
            # In this order: a part gets the name of the whole file when it is complete.
            n_part = _size(directory / f"{file.sha256}{INCOMPLETE}")
            n_here += file.n_bytes if _is_whole(directory / file.sha256, file) else n_part
        return n_here


def _downloaded(
    model: ModelName, files: list[_File], is_cancelled: Callable[[], bool] = lambda: False
) -> list[Path]:
    _check_space(model, files)

    def check(file: _File, n_bytes: int) -> None:
        """Raise an error if a file must not get `n_bytes` bytes."""
        if is_cancelled():
            raise DownloadError(str(model), "it was cancelled; ask again to continue it")
        if n_bytes > file.n_bytes:
            reason = (
                f"the hub sends more than the {file.n_bytes} bytes it has announced for {file.path}"
            )
            raise DownloadError(str(model), reason)

    return [_download(model, file, partial(check, file)) for file in files]


@contextmanager
def _download_errors(model: ModelName) -> Iterator[None]:
    """Raise `DownloadError` for errors of the hub, of the connection and of the disk."""
    from huggingface_hub import errors

    try:
        yield
    except FileNotFoundError as error:
        raise DownloadError(str(model), str(error)) from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # its HTTP library's
        raise DownloadError(str(model), _reason(error)) from error


def _check_addresses(model: ModelName) -> None:
    """Raise `DownloadError` if no request can be made: for an invalid `HF_ENDPOINT`, for example."""
    from huggingface_hub import constants, get_session

    try:
        get_session().build_request("GET", constants.ENDPOINT)
    except ImportError:
        raise DownloadError(str(model), "a SOCKS proxy needs the package socksio") from None
    except Exception as error:  # an invalid address is no HTTPError; the message has it
        reason = f"the proxy or HF_ENDPOINT cannot be used ({type(error).__name__})"
        raise DownloadError(str(model), reason) from None


def _files_of(model: ModelName, choose: Choose) -> list[_File]:
    """Return the files that `choose` takes from the hub's list; raise `DownloadError` if its answer cannot be read."""
    import huggingface_hub

    _check_addresses(model)
    try:
        info = huggingface_hub.HfApi().model_info(model.repo, files_metadata=True, timeout=LIST_S)
        known = {str(file.rfilename): file for file in info.siblings or ()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"the hub's answer cannot be read ({type(error).__name__}: {error})"
        raise DownloadError(str(model), reason) from error
    return [_checked(info.sha, known[path]) for path in choose(model, known)]


def _checked(commit: Any, sibling: Any) -> _File:
    """Return a file as the hub lists it.

    Raises
    ------
    FileNotFoundError
        The file is not in LFS, or the hub lists an invalid path, commit, checksum or size.
    """
    path, lfs = str(sibling.rfilename), sibling.lfs
    if lfs is None:
        raise FileNotFoundError(f"{path!r} is no model")
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise FileNotFoundError(f"the hub lists a file as {path!r}, which cannot be a name")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise FileNotFoundError(f"the hub says that the commit is {commit!r}, not 40 hex digits")
    if not isinstance(lfs.sha256, str) or not _SHA256.fullmatch(lfs.sha256):
        raise FileNotFoundError(f"the hub says that sha256 is {lfs.sha256!r}, not 64 hex digits")
    if not isinstance(lfs.size, int) or not 0 < lfs.size <= MAX_FILE_BYTES:
        raise FileNotFoundError(f"the hub says that {path} has {lfs.size!r} bytes")
    return _File(path, lfs.size, lfs.sha256, commit)


def _check_space(model: ModelName, files: list[_File]) -> None:
    directory = _blobs(model)
    n_missing = sum(
        file.n_bytes - _size(directory / f"{file.sha256}{INCOMPLETE}")
        for file in files
        if not _is_whole(directory / file.sha256, file)
    )
    n_free = shutil.disk_usage(directory).free
    if n_missing > n_free:
        reason = f"it needs {n_missing / GIB:.1f} GiB more, and the disk has {n_free / GIB:.1f}"
        raise DownloadError(str(model), reason)


def _download(model: ModelName, file: _File, check: Callable[[int], None]) -> Path:
    """Download a file, and return its name in the cache."""
    import filelock

    blob = _blobs(model) / file.sha256
    part = blob.with_name(f"{blob.name}{INCOMPLETE}")
    with filelock.FileLock(f"{part}.lock"):  # a second caller waits
        check(0)  # it may have been cancelled meanwhile
        if not _is_whole(blob, file):
            _fetch(model, file, part, check)
            check(0)  # it may have been cancelled meanwhile
            part.replace(blob)
    directory = repo_directory(model.repo)
    path = directory / "snapshots" / file.commit / file.path
    up = "../" * (len(PurePosixPath(file.path).parts) + 1)
    _put(path, partial(_link, blob, f"{up}blobs/{file.sha256}"))
    _put(directory / "refs" / "main", lambda new: new.write_text(file.commit))
    return path


def _is_whole(blob: Path, file: _File) -> bool:
    """True if a file is here; one of another size was cut off, for example when the power failed."""
    return _size(blob) == file.n_bytes


def _link(blob: Path, relative: str, new: Path) -> None:
    try:
        new.symlink_to(relative)
    except OSError:  # a file system without links
        shutil.copyfile(blob, new)


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then rename it: readers never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


class _BegunAnewError(Exception):
    """The hub answers a request for the rest of a file with a whole answer."""


class _Checked(io.BufferedWriter):
    """Writer to the end of a file that calls `check` with its size before each write.

    If it `keeps` what it has, it is not truncated: `truncate` raises `_BegunAnewError`.
    """

    def __init__(self, path: Path, check: Callable[[int], None], *, keeps: bool) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._check = check
        self._keeps = keeps

    def write(self, data: Any) -> int:
        """Write as `io.BufferedWriter` does; raise the error of the check."""
        self._check(self.tell() + len(data))
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        """Truncate as `io.BufferedWriter` does, unless bytes are to be kept."""
        self.flush()
        if self._keeps and os.fstat(self.fileno()).st_size:
            raise _BegunAnewError
        return super().truncate(size)


def _fetch(model: ModelName, file: _File, part: Path, check: Callable[[int], None]) -> None:
    """Download the missing part of a file, and check the checksum of the whole."""
    anew = Path(f"{part}{ANEW}")
    anew.unlink(missing_ok=True)
    if _size(part) > file.n_bytes:
        part.unlink()
    try:
        _receive(model, file, part, check)
    except _BegunAnewError:
        # This hub does not resume, or a gateway answers in its place: the part is kept until there is more.
        try:
            _receive(model, file, anew, check, keeps=False)
        finally:
            if _size(anew) > _size(part):
                anew.replace(part)
            anew.unlink(missing_ok=True)
    with part.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != file.sha256:
        part.unlink()
        reason = f"the checksum of {file.path} is {found}, and should be {file.sha256}; ask again"
        raise DownloadError(str(model), reason)


def _receive(
    model: ModelName,
    file: _File,
    part: Path,
    check: Callable[[int], None],
    *,
    keeps: bool = True,
) -> None:
    """Append the missing bytes of a file to its part.

    Raises
    ------
    _BegunAnewError
        The hub sends the whole file, but the part is not empty and `keeps` what it has.
    """
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    n_before = _size(part)
    try:
        with _Checked(part, check, keeps=keeps) as output:
            file_download.http_get(
                hf_hub_url(model.repo, file.path, revision=file.commit),
                output,
                resume_size=output.tell(),
                headers=build_hf_headers(),
                expected_size=file.n_bytes,
                displayed_filename=file.path,
            )
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        if error.errno == errno.ENOSPC:  # it would keep the disk full
            part.unlink()
        if error.errno is None and (n_bytes := _size(part)) != file.n_bytes:
            # A whole answer of another length: the page of a gateway, not the beginning of the file.
            os.truncate(part, min(n_before, n_bytes))
            reason = (
                f"the hub sent {n_bytes} bytes of {file.path}, which has {file.n_bytes}; ask again"
            )
            raise DownloadError(str(model), reason) from None
        raise
    except ValueError as error:
        reason = f"the hub's answer cannot be read ({type(error).__name__}: {error})"
        raise DownloadError(str(model), reason) from None


def _blobs(model: ModelName) -> Path:
    directory = repo_directory(model.repo) / "blobs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _reason(error: Exception) -> str:
    """Return the reason of a failure, without addresses, which may contain secrets."""
    from huggingface_hub import errors

    match error:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, and it is not here"
        case errors.GatedRepoError():
            return "accept its terms on its page, and set HF_TOKEN"
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
