"""PrefixFiles: files of prefixes in a directory; a separate thread reads and writes them.

Each prefix is a file with a checksum, written atomically.  The file's name is a hash of the tokens.  Its
folder is named after a hash of everything that a KV state depends on.  Engines of several processes may
use one directory: a file that another engine has removed or damaged is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cllm.engine.core.commands import PrefixesRemoved, PrefixLoaded
from cllm.engine.core.prefix_tiers import Tokens
from cllm.engine.request import SequenceState
from cllm.engine.state_file import (
    DamagedFileError,
    read_state_file,
    read_state_header,
    write_state_file,
)
from cllm.errors import InvalidArgumentError

logger: logging.Logger = logging.getLogger("cllm.engine")

KIND = "prefix 1"
SUFFIX = ".prefix"
STALE_S = 3600.0  # an unfinished file of this age was left by a killed process
READING, WRITING = 0, 1  # priorities of jobs: the lower one first
MAX_PENDING_BYTES = 512 << 20  # limit of states that wait to be written: a disk may be slow
CLOSE_S = 3.0  # time for writes at the end


class PrefixFiles:
    """Files of one engine's prefixes.  Inference thread, unless a method says otherwise.

    Parameters
    ----------
    directory : Path
        Created if it does not exist.
    key : str
        Name of the folder: a hash of everything that a KV state depends on (`ModelInfo.state_key`).
    n_bytes_max : int
        Limit of the bytes of all files in the directory, also those of other keys.
    post : callable
        Called in the thread of this object: with a `PrefixesRemoved` after each `clear`, and with a
        `PrefixLoaded` after each `load`.  The latter is without a state if a file could not be written, or
        was removed to make room.

    Attributes
    ----------
    stored, n_bytes
        See `PrefixStore`.

    Raises
    ------
    InvalidArgumentError
        The directory cannot be written to, or other users can write to it.
    """

    def __init__(
        self,
        directory: Path,
        key: str,
        n_bytes_max: int,
        post: Callable[[PrefixLoaded | PrefixesRemoved], None],
    ) -> None:
        self._directory = directory
        self._folder = directory / key
        self._n_bytes_max = n_bytes_max
        self._post = post
        try:
            for place in (directory, self._folder):
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
                _check_own(place)
            self._remove_stale()
            self.stored: Iterable[tuple[Tokens, str, int]] = list(self._scan())
            self.n_bytes: int = self._count()
        except OSError as error:
            limit = f"a directory to write in ({error})"
            raise InvalidArgumentError("prefix_cache_dir", str(directory), limit) from None
        # A sequence waits for a read: reads go before writes.
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]
        self._jobs = queue.PriorityQueue()
        self._n_jobs = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[str, SequenceState] = {}
        self._n_pending_bytes = 0
        self._n_clears = 0  # that are not done yet
        self._has_warned = False
        self._ends_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="cllm-prefix-files", daemon=True)
        self._thread.start()

    # --- The inference thread ----------------------------------------------------------------
    def write(self, tokens: Tokens, state: SequenceState) -> str | None:
        """See `PrefixStore`."""
        name = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest() + SUFFIX
        with self._lock:
            if not self.has_room or len(state.data) > self._n_bytes_max:
                return None
            self._pending[name] = state
            self._n_pending_bytes += len(state.data)
        self._put(WRITING, lambda: self._write(name, tokens, state))
        return name

    @property
    def has_room(self) -> bool:
        """See `PrefixStore`."""
        return self._n_pending_bytes < MAX_PENDING_BYTES

    @property
    def is_clearing(self) -> bool:
        """See `PrefixStore`."""
        return self._n_clears > 0

    def load(self, file: str) -> None:
        """See `PrefixStore`."""
        self._put(READING, lambda: self._load(file))

    def touch(self, file: str) -> None:
        """See `PrefixStore`."""
        self._put(WRITING, lambda: self._touch(file))

    def remove(self, file: str) -> None:
        """See `PrefixStore`."""
        self._put(WRITING, lambda: self._discard(file))

    def clear(self) -> None:
        """See `PrefixStore`."""
        with self._lock:
            self._n_clears += 1
        self._put(WRITING, self._clear)

    def close(self) -> None:
        """Write waiting prefixes for at most `CLOSE_S` seconds, and end the thread."""
        self._ends_at = time.monotonic() + CLOSE_S
        self._put(WRITING, None)
        # A write that hangs is left behind: its file has only a temporary name.
        self._thread.join(CLOSE_S + 1.0)

    def _put(self, priority: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((priority, next(self._n_jobs), job))

    # --- Its own thread ----------------------------------------------------------------------
    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            if time.monotonic() > self._ends_at:
                continue
            try:
                job()
            except Exception:
                logger.exception("an operation on a file of the prefix cache has failed")
            del job  # it holds the state that it has written

    def _write(self, name: str, tokens: Tokens, state: SequenceState) -> None:
        header = {"kind": KIND, "token_ids": tokens.tolist()}
        path = self._folder / name
        try:
            if not (path.exists() or self.is_clearing):
                self.n_bytes += write_state_file(path, header, state.data)
        except OSError as error:
            self._warn(error)
            self._post(PrefixLoaded(name, None))
        finally:
            with self._lock:
                self._n_pending_bytes -= len(state.data)
                if self._pending.get(name) is state:
                    del self._pending[name]
        self._fit()

    def _load(self, name: str) -> None:
        with self._lock:
            state = self._pending.get(name)
        try:
            if state is None:
                state = self._read(self._folder / name)
        except FileNotFoundError:  # another engine has removed the file to make room
            pass
        except (OSError, DamagedFileError, LookupError, TypeError) as error:
            logger.warning(
                "a file of the prefix cache is removed, its prefix is computed again: %s", error
            )
            self._remove(self._folder / name)
        finally:  # in any case: a caller waits
            self._post(PrefixLoaded(name, state))

    def _read(self, path: Path) -> SequenceState:
        header, data = read_state_file(path)
        if header.get("kind") != KIND:
            raise DamagedFileError(f"{path} is {header.get('kind')!r}")
        return SequenceState(data, len(header["token_ids"]))

    def _touch(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._folder / name)

    def _discard(self, name: str) -> None:
        self._remove(self._folder / name)
        self.n_bytes = self._count()

    def _clear(self) -> None:
        try:
            for path in self._folder.glob(f"*{SUFFIX}"):
                self._remove(path)
            self.n_bytes = self._count()
        finally:  # in any case: a caller waits
            with self._lock:
                self._n_clears -= 1
            self._post(PrefixesRemoved())

    def _fit(self) -> None:
        """Remove the least recently used files until the directory is within its limit.

        Files of other engines count, and are removed too.
        """
        files = sorted(self._files(), key=lambda found: found[1])
        n_bytes = sum(size for _, _, size in files)  # those of other engines too
        for path, _, size in files:
            if n_bytes <= self._n_bytes_max:
                break
            self._remove(path)
            if path.parent == self._folder:
                self._post(PrefixLoaded(path.name, None))
            n_bytes -= size
        self.n_bytes = n_bytes

    def _count(self) -> int:
        return sum(size for _, _, size in self._files())

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        """Yield each file of the directory, with its time of last use (mtime) and its size in bytes."""
        for path in self._directory.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_mtime, status.st_size

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _warn(self, error: OSError) -> None:
        """Log an error once: a full disk fails for every file."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("the prefix cache writes no files: %s", error)

    # --- The beginning -----------------------------------------------------------------------
    def _remove_stale(self) -> None:
        """Delete unfinished files of killed processes."""
        for path in self._folder.glob(".*.part"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()

    def _scan(self) -> Iterator[tuple[Tokens, str, int]]:
        """Yield the tokens, the file name and the size of each stored prefix, least recently used first."""
        own = [found for found in self._files() if found[0].parent == self._folder]
        for path, _, size in sorted(own, key=lambda found: found[1]):
            try:
                tokens = _tokens_of(read_state_header(path))
            except FileNotFoundError:
                continue
            except (OSError, DamagedFileError) as error:
                logger.warning("a file of the prefix cache is removed: %s", error)
                self._remove(path)
                continue
            yield tokens, path.name, size


def _check_own(directory: Path) -> None:
    """Reject a directory that other users can write to: its files affect answers.

    Raises
    ------
    InvalidArgumentError
    """
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        limit = f"a directory of this user that no other can write to ({directory})"
        raise InvalidArgumentError("prefix_cache_dir", str(directory), limit)


def _tokens_of(header: dict[str, Any]) -> Tokens:
    if header.get("kind") != KIND:
        raise DamagedFileError(f"a file of the kind {header.get('kind')!r}")
    try:
        tokens = np.array(header["token_ids"], np.int32)
    except (LookupError, TypeError, ValueError, OverflowError):
        raise DamagedFileError("no token ids in it") from None
    if tokens.ndim != 1 or not len(tokens):
        raise DamagedFileError("no token ids in it")
    return tokens
