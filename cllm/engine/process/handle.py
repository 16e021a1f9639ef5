"""ProcessHandle: one process of an engine as its parent holds it: its socket, its standard error, its end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from typing import IO, NamedTuple

from cllm.engine.child_process import how_ended
from cllm.engine.config import N_TEXTS_MAX, EngineConfig
from cllm.engine.core.commands import Command
from cllm.engine.file_content import FileContent
from cllm.engine.plain_values import as_plain
from cllm.engine.process import spawn
from cllm.engine.process.batch_record import BatchRecord
from cllm.engine.process.frames import FrameReader, framed
from cllm.engine.process.wire import Beat, SetLogLevel, ToChild, encode_commands
from cllm.errors import CllmError

MAX_READ = 1 << 16
# A process that has computed for less than this share of a stall is hung, not slow.
SLOW_SHARE = 0.1
HUNG_FACTOR = 10.0  # a stall of so many `hang_timeout_s` is one whatever it computes
LOGGERS = ("cllm.engine", "cllm.llama")  # of a process
N_LAST_WORDS = 4096  # bytes of the standard error of a process that are kept


class CrashError(CllmError):
    """The engine's process has ended by itself."""


class Ending(NamedTuple):
    """How a process ended.

    Attributes
    ----------
    crash : CrashError
    was_killed : bool
        By a user, or by the system for its memory.
    request_ids : tuple of str
        Those whose tokens it computed.
    """

    crash: CrashError
    was_killed: bool
    request_ids: tuple[str, ...]


class ProcessHandle:
    """One process, its socket and its standard error.  One thread at a time.

    Parameters
    ----------
    files : iterable of FileContent
        What an earlier process has loaded; see `LlamaBackend`.

    Attributes
    ----------
    n_reads : int
        Times that something had come.
    """

    def __init__(
        self, config: EngineConfig, backend: str, files: Iterable[FileContent] = ()
    ) -> None:
        spawned = spawn.spawned()
        try:
            with spawned.batch_file as file:
                self._batch = BatchRecord(file.fileno(), max(config.n_seq_max, N_TEXTS_MAX))
        except BaseException:
            spawned.close()
            raise
        self._process = spawned.process
        self.socket: socket.socket = spawned.socket
        self._reader = FrameReader()
        self.n_reads: int = 0
        self._unsent = bytearray()
        self._last_words = b""
        self._heard_at = time.perf_counter()
        self._beat: Beat | None = None
        self._idle_cpu_s = 0.0
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self.stderr: IO[bytes] = self._process.stderr
        os.set_blocking(self.stderr.fileno(), False)
        self._log_level = _log_level()
        settings = {
            "backend": backend,
            "config": json.loads(config.to_json()),
            "files": as_plain(tuple(files)),
            "log_level": self._log_level,
        }
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(settings).encode())
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, commands: list[Command]) -> None:
        """Send bytes after the unsent ones; keep those that do not fit."""
        if commands:
            asked: list[ToChild] = [*commands]
            if (log_level := _log_level()) != self._log_level:
                self._log_level = log_level
                asked.insert(0, SetLogLevel(log_level))
            self._unsent += framed(encode_commands(asked))
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    @property
    def has_unsent(self) -> bool:
        """True if there was no room for all."""
        return bool(self._unsent)

    def frames(self) -> list[bytes] | None:
        """Return the frames that have arrived; None at the end."""
        try:
            frames = self._reader.receive(self.socket)
        except BlockingIOError:
            return []
        if frames is not None:
            self._heard_at = time.perf_counter()
            self.n_reads += 1
        return frames

    @property
    def has_unread(self) -> bool:
        """True if something has come that was not read."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def on_beat(self, beat: Beat) -> None:
        """Note a sign of life and what the process is doing."""
        self._beat = beat
        if not beat.busy_s:
            self._idle_cpu_s = beat.cpu_s

    @property
    def busy_s(self) -> float:
        """Seconds that its inference thread has been in its tick; 0 while it is idle.  Any thread."""
        beat = self._beat
        if beat is None or not beat.busy_s:
            return 0.0
        return beat.busy_s + time.perf_counter() - self._heard_at

    def is_hung(self, limit_s: float | None) -> bool:
        """Return True if the process is silent, or its tick lasts longer than any that computes."""
        beat = self._beat
        if limit_s is None or beat is None:
            return False
        if time.perf_counter() - self._heard_at > limit_s:
            return True
        is_idle = beat.cpu_s - self._idle_cpu_s < SLOW_SHARE * beat.busy_s
        return beat.busy_s > limit_s * (1.0 if is_idle else HUNG_FACTOR)

    @property
    def is_stopped(self) -> bool:
        """Return True if a signal has stopped the process: nothing it computes is to blame."""
        with contextlib.suppress(OSError):
            flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        return False

    def listen(self) -> bool:
        """Read the process's standard error; return False if there is nothing more now."""
        try:
            data = os.read(self.stderr.fileno(), MAX_READ)
        except BlockingIOError:
            return False
        if data:
            self._last_words = (self._last_words + data)[-N_LAST_WORDS:]
            with contextlib.suppress(OSError):
                os.write(2, data)
        return bool(data)

    def kill(self) -> None:
        """Kill the process; the messages it sent can still be read."""
        self._process.kill()

    def end(self) -> Ending:
        """Kill it if it lives, and forget all of it but the socket; how it has ended."""
        self.kill()
        code = self._process.wait()
        while self.listen():
            pass
        self.stderr.close()
        last_words = self._last_words.decode("utf-8", "replace").strip()
        request_ids = self._batch.read()
        self._batch.close()
        return Ending(_crash_of(code, last_words), code == -signal.SIGKILL, request_ids)


def _log_level() -> int:
    """Return the lowest log level that a handler here takes."""
    return min(logging.getLogger(name).getEffectiveLevel() for name in LOGGERS)


def _crash_of(code: int, last_words: str) -> CrashError:
    how = how_ended(code)
    return CrashError(f"{how}: {last_words[-1000:]}" if last_words else how)
