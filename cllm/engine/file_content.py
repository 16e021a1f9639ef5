"""FileContent: the contents of an engine's files, so that no later process computes with other weights.

A path does not identify a file: an update replaces it.  `content_of` reads a whole file once and keeps
its digest with the stamp of the file, in this process and in the cache directory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cllm.engine.cache_directory import keep_cached, read_cached
from cllm.errors import ModelChangedError, ModelLoadError

CACHE = "file_digests.json"
MAX_CACHED = 256
# A file's time is set when a write begins, and some file systems store full seconds only.  Two changes
# within this time may therefore leave the same file time.
SETTLED_NS = 2_000_000_000

Stamp = tuple[int, ...]
_digests: dict[Stamp, str] = {}  # of this process


@dataclass(frozen=True, slots=True)
class FileContent:
    """Content of a file when an engine opened it.

    Attributes
    ----------
    path : str
        Absolute.
    sha256 : str
        Digest of all bytes, in hexadecimal digits.
    n_bytes : int
    stamp : tuple of int
        Device, inode, size in bytes, and the times of the last write and of the last change (mtime, ctime)
        in nanoseconds.  A file with this stamp has this content.  Empty if the file changed less than 2 s ago.
    """

    path: str
    sha256: str
    n_bytes: int
    stamp: tuple[int, ...]


def content_of(path: str | Path) -> FileContent:
    """Return the description of a file's content.  The first call takes about a second per gigabyte.

    Raises
    ------
    ModelLoadError
        There is no such file, or it cannot be read.
    ModelChangedError
        The file is being written.
    """
    path = str(Path(path).absolute())
    try:
        return _content_of(path)
    except OSError as error:
        raise ModelLoadError(path, error.strerror or str(error)) from error


def _content_of(path: str) -> FileContent:
    with open_regular(path) as file:
        fd = file.fileno()
        stamp = _stamp(os.fstat(fd))
        is_settled = _is_settled(stamp)  # before it is read
        if (sha256 := _known(path, stamp)) is None:
            sha256 = _digest(fd)
            if _stamp(os.fstat(fd)) != stamp:
                raise ModelChangedError(path, "it is being written")
            if is_settled:
                _remember(path, stamp, sha256)
    return FileContent(path, sha256, stamp[2], stamp if is_settled else ())


def check_content(expected: FileContent) -> None:
    """Check that a file still has this content.

    Raises
    ------
    ModelChangedError
        The file has other content, or is gone.
    """
    try:
        if _stamp(Path(expected.path).stat()) == expected.stamp:
            return
        present = _content_of(expected.path)
    except OSError as error:
        reason = f"it existed when the engine started ({error.strerror or error})"
        raise ModelChangedError(expected.path, reason) from error
    if present.sha256 != expected.sha256:
        raise ModelChangedError(expected.path, _change(expected.n_bytes, present.n_bytes))


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a file for reading.

    Raises
    ------
    OSError
        The file cannot be opened, or is not a regular file: opening a FIFO would wait for a writer.
    """
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return path.open("rb")


@contextmanager
def loading(contents: Iterable[FileContent]) -> Iterator[None]:
    """Check after the block that files loaded by path still have these contents; not if the block raises.

    Raises
    ------
    ModelChangedError
        One of them has other content now, is being written, or is gone.
    """
    yield
    for content in contents:
        check_content(content)


class MappedFiles:
    """Mapped files of weights; detects writes to them.

    Each file stays open.  One thread at a time.
    """

    def __init__(self) -> None:
        self._held: list[tuple[int, FileContent, os.stat_result]] = []

    def hold(self, content: FileContent) -> None:
        """Add a file.  Call it within `loading`, which checks that the file is still the same.

        Raises
        ------
        OSError
            The file cannot be opened.
        """
        fd = os.open(content.path, os.O_RDONLY)
        self._held.append((fd, content, os.fstat(fd)))

    def check(self) -> None:
        """Check that no file has other content; takes about a microsecond if no file was touched.

        A file with a new change time may be read again, which takes about a second per gigabyte.

        Raises
        ------
        ModelChangedError
            A file has changed; results since the last call may be wrong.
        """
        for i, (fd, content, before) in enumerate(self._held):
            present = os.fstat(fd)
            if present.st_ctime_ns == before.st_ctime_ns:
                continue
            # If another file takes the name, only the number of links changes: the content is the same.
            is_renamed = present.st_nlink != before.st_nlink
            is_renamed = is_renamed and _written(present) == _written(before)
            is_settled = is_renamed or _is_settled(_stamp(present))
            if not is_renamed and _digest(fd) != content.sha256:
                raise ModelChangedError(content.path, _change(content.n_bytes, present.st_size))
            if is_settled:  # otherwise a write may still be going on: look again next time
                self._held[i] = fd, content, present

    def close(self) -> None:
        """Close all files."""
        while self._held:
            os.close(self._held.pop()[0])


def _change(n_before: int, n_bytes: int) -> str:
    """Describe the change of a file."""
    if n_before != n_bytes:
        return f"it has {n_bytes:,} bytes, and had {n_before:,} when the engine started"
    return f"its {n_bytes:,} bytes are others than when the engine started"


def _digest(fd: int) -> str:
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _known(path: str, stamp: Stamp) -> str | None:
    """Return the digest of a file with this stamp; None if it is not cached."""
    if (sha256 := _digests.get(stamp)) is not None:
        return sha256
    match read_cached(CACHE).get(path):
        case {"stamp": list(cached), "sha256": str(sha256)} if tuple(cached) == stamp:
            _digests[stamp] = sha256
            return sha256
    return None


def _is_settled(stamp: Stamp) -> bool:
    """Return True if the file last changed over 2 s ago, so that any later change gives another stamp."""
    return time.time_ns() - max(stamp[3:]) > SETTLED_NS


def _remember(path: str, stamp: Stamp, sha256: str) -> None:
    _digests[stamp] = sha256
    while len(_digests) > MAX_CACHED:
        _digests.pop(next(iter(_digests)), None)
    with suppress(OSError, RuntimeError):
        keep_cached(CACHE, {path: {"stamp": list(stamp), "sha256": sha256}}, MAX_CACHED)
