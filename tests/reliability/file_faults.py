"""Faults of a disk: the k-th call of a file function in a directory fails with an error of a disk."""

from __future__ import annotations

import errno
import io
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

Real = Callable[..., Any]


def fails(number: int) -> Callable[[Real], Any]:
    """Return an outcome that raises `OSError` with an errno instead of making the call."""

    def act(_real: Real) -> Any:
        raise OSError(number, os.strerror(number))

    return act


@dataclass(frozen=True)
class FileFault:
    """The k-th call of a function has this outcome.

    Attributes
    ----------
    act : callable
        Called with the real call as its argument; its result replaces that of the call.
    """

    function: str
    k: int
    words: str
    act: Callable[[Real], Any]


ON_PATHS = ("glob", "mkdir", "open", "replace", "stat", "unlink")
FUNCTIONS = (
    *ON_PATHS, "close", "fdopen", "flush", "fstat", "fsync", "mkstemp", "read", "utime", "write",
)  # fmt: skip
# Errors of a disk; ENOENT is for a removed directory, EMFILE for too many open files.
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT, errno.EMFILE)


class FileFaults:
    """Every call for files under a directory, watched while this is entered.

    Attributes
    ----------
    n_calls : Counter
        Calls by function since `arm`.
    n_met : int
        Faults that have happened since `arm`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._lock = threading.Lock()
        self._patch = pytest.MonkeyPatch()
        self._handles: set[int] = set()
        self.n_calls: Counter[str] = Counter()
        self.n_met = 0
        self._fault: FileFault | None = None

    def __enter__(self) -> Self:
        patch = self._patch
        for name in ON_PATHS:
            patch.setattr(Path, name, self._on_path(name, getattr(Path, name)))
        patch.setattr(os, "utime", self._on_path("utime", os.utime))
        patch.setattr(tempfile, "mkstemp", self._mkstemp(tempfile.mkstemp))
        patch.setattr(os, "fdopen", self._fdopen(os.fdopen))
        for name in ("fsync", "fstat"):
            patch.setattr(os, name, self._on_handle(name, getattr(os, name)))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patch.undo()

    def arm(self, fault: FileFault | None) -> None:
        """Reset the counts, and arm a fault; None only watches."""
        with self._lock:
            self._fault, self.n_met = fault, 0
            self.n_calls.clear()

    def call(self, name: str, real: Real) -> Any:
        """Make a call, or return the outcome of the fault in its place."""
        with self._lock:
            self.n_calls[name] += 1
            fault = self._fault
            is_met = fault is not None and (fault.function, fault.k) == (name, self.n_calls[name])
            self.n_met += is_met
        return fault.act(real) if fault is not None and is_met else real()

    def _is_ours(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and Path(os.fspath(path)).is_relative_to(
            self._directory
        )

    def _on_path(self, name: str, real: Real) -> Real:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_ours(path):
                return real(path, *args, **kwargs)

            def make() -> Any:
                # Make a list: `glob` returns a generator, which would run later, outside the fault.
                found = real(path, *args, **kwargs)
                return list(found) if name == "glob" else found

            opened = self.call(name, make)
            return _WatchedFile(self, opened) if name == "open" else opened

        return watched

    def _mkstemp(self, real: Real) -> Real:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours(kwargs.get("dir")):
                return real(*args, **kwargs)
            made = self.call("mkstemp", lambda: real(*args, **kwargs))
            self._handles.add(made[0])
            return made

        return watched

    def _fdopen(self, real: Real) -> Real:
        def watched(handle: int, *args: Any, **kwargs: Any) -> Any:
            if handle not in self._handles:
                return real(handle, *args, **kwargs)
            try:
                return _WatchedFile(
                    self, self.call("fdopen", lambda: real(handle, *args, **kwargs))
                )
            except OSError:
                os.close(handle)  # a real `fdopen` does not fail here: the caller expects no error
                raise
            finally:
                self._handles.discard(handle)

        return watched

    def _on_handle(self, name: str, real: Real) -> Real:
        def watched(handle: Any) -> Any:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            return self.call(name, lambda: real(handle)) if self._is_ours(path) else real(handle)

        return watched


class _WatchedFile:
    """An open file whose reads, writes, flushes and close can be replaced by a fault."""

    def __init__(self, faults: FileFaults, file: io.BufferedIOBase) -> None:
        self._faults, self._file = faults, file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._faults.call("close", self._file.close)
        finally:
            self._file.close()  # after an injected fault the file is still open

    def flush(self) -> Any:
        return self._faults.call("flush", self._file.flush)

    def write(self, data: bytes) -> Any:
        return self._faults.call("write", lambda: self._file.write(data))

    def read(self, n_bytes: int = -1) -> Any:
        return self._faults.call("read", lambda: self._file.read(n_bytes))

    def readinto(self, buffer: Any) -> Any:
        return self._faults.call("read", lambda: self._file.readinto(buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
