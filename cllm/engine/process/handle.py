"""ProcessHandle: the parent's side of one engine process: socket, standard error, exit status."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

from cllm.engine.child_process import how_ended
from cllm.engine.config import N_TEXTS_MAX, EngineConfig
from cllm.engine.core.commands import (
    AddRequest,
    CancelRequest,
    Command,
    Read,
    Shutdown,
)
from cllm.engine.file_content import FileContent
from cllm.engine.plain_values import as_plain
from cllm.engine.process import spawn
from cllm.engine.process.batch_record import BatchRecord, Underway
from cllm.engine.process.frames import Frame, FrameReader, packets
from cllm.engine.process.wire import Beat, SetLogLevel, ToChild, encode_commands, is_bulky
from cllm.errors import CllmError
from cllm.system import SIGKILL, is_stopped

MAX_READ = 1 << 16
# Bytes that one call sends: it may run in the event loop, and answers come in meanwhile.
MAX_SENT = 1 << 20
# A tick hangs after `hang_timeout_s` if its processor time is less than this share of its duration.
SLOW_SHARE = 0.1
HUNG_FACTOR = 10.0  # a tick that computes more hangs after this many `hang_timeout_s`
LOGGERS = ("cllm.engine", "cllm.llama")  # that an engine process writes to
N_LAST_WORDS = 4096  # bytes of the end of a process's standard error that are kept


class CrashError(CllmError):
    """The engine's process has ended by itself."""


class Ending(NamedTuple):
    """How a process ended.

    Attributes
    ----------
    crash : CrashError
    was_killed : bool
        True if SIGKILL ended it: from a user, from the kernel without memory, or from `ProcessHandle.kill`.
    underway : Underway
        Work of the process when it ended.
    """

    crash: CrashError
    was_killed: bool
    underway: Underway


class CommandSender:
    """Sender of commands to one process.  One thread at a time; never blocks.

    Commands for other requests overtake a request with large images, audio or a large KV state.

    Parameters
    ----------
    connection : socket.socket
        Non-blocking.

    Attributes
    ----------
    log_level : int
        Level of the log of the process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.log_level: int = _log_level()
        self._packet = memoryview(b"")  # the rest of the one that is being sent
        self._swift: deque[bytes] = deque()  # packets
        # Packets of each frame, and the requests of its commands.
        self._bulky: deque[tuple[Iterator[bytes], list[str]]] = deque()
        self._behind: Counter[str] = Counter()  # these requests, by the number of commands

    def send(self, commands: list[Command]) -> None:
        """Send unsent bytes and the commands, in at most a few milliseconds.

        Keeps the bytes that the socket does not take, and those beyond `MAX_SENT`.
        """
        if commands:
            swift: list[ToChild] = []
            bulky: list[ToChild] = []
            if (log_level := _log_level()) != self.log_level:
                self.log_level = log_level
                swift.append(SetLogLevel(log_level))
            ids: list[str] = []
            for command in commands:
                is_last = isinstance(command, Shutdown) and bool(bulky)
                if not (is_last or self._is_behind(command)):
                    swift.append(command)
                    continue
                bulky.append(command)
                if (request_id := _request_of(command)) is not None:
                    ids.append(request_id)
                    self._behind[request_id] += 1
            if swift:
                self._swift += packets(encode_commands(swift), is_bulky=False)
            if bulky:
                self._bulky.append((packets(encode_commands(bulky), is_bulky=True), ids))
        n_sent = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while n_sent < MAX_SENT and (self._packet or self._advance()):
                n_taken = self._socket.send(self._packet)
                self._packet = self._packet[n_taken:]
                n_sent += n_taken

    def _is_behind(self, command: Command) -> bool:
        """True if a command is bulky, or must arrive after a bulky one that is not yet sent."""
        if isinstance(command, AddRequest) and is_bulky(command.request):
            return True
        if isinstance(command, Shutdown):
            return bool(self._bulky)
        return _request_of(command) in self._behind

    def _advance(self) -> bool:
        """Take the next packet; return False if there is none."""
        packet = self._swift.popleft() if self._swift else None
        while packet is None and self._bulky:
            frame, ids = self._bulky[0]
            if (packet := next(frame, None)) is None:
                self._behind -= Counter(ids)
                self._bulky.popleft()
        if packet is None:
            return False
        self._packet = memoryview(packet)
        return True

    @property
    def has_unsent(self) -> bool:
        """True if bytes are left to be sent."""
        return bool(self._packet or self._swift or self._bulky)


class ProcessHandle:
    """One process, its socket and its standard error.  One thread at a time.

    Parameters
    ----------
    backend : str
        `module:name` of the callable that makes the process's backend.
    files : iterable of FileContent
        Files that an earlier process has loaded; see `LlamaBackend`.

    Attributes
    ----------
    n_reads : int
        Number of reads from the socket that returned data.
    computes_on_gpu : bool
        True if a long tick may use no processor time, because a GPU computes.
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
        self._sender = CommandSender(self.socket)
        self._last_words = b""
        self._heard_at = time.perf_counter()
        self._beat: Beat | None = None
        self._idle_cpu_s = 0.0
        self.computes_on_gpu: bool = False
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self.stderr: IO[bytes] = self._process.stderr
        os.set_blocking(self.stderr.fileno(), False)
        settings = {
            "backend": backend,
            "config": json.loads(config.to_json()),
            "files": as_plain(tuple(files)),
            "log_level": self._sender.log_level,
        }
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(settings).encode())
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def send(self, commands: list[Command]) -> None:
        """See `CommandSender`."""
        self._sender.send(commands)

    @property
    def has_unsent(self) -> bool:
        """See `CommandSender`."""
        return self._sender.has_unsent

    def frames(self) -> list[Frame] | None:
        """Return the complete frames that have arrived, possibly none; None at the end of the connection."""
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
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:  # the process ended with unread commands: `frames` returns None
            return True
        return True

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
        """True after `limit_s` seconds (None: never) of silence or of a hanging tick; see `SLOW_SHARE`."""
        beat = self._beat
        if limit_s is None or beat is None:
            return False
        if time.perf_counter() - self._heard_at > limit_s:
            return True
        is_idle = beat.cpu_s - self._idle_cpu_s < SLOW_SHARE * beat.busy_s
        is_idle = is_idle and not self.computes_on_gpu
        return beat.busy_s > limit_s * (1.0 if is_idle else HUNG_FACTOR)

    @property
    def is_stopped(self) -> bool:
        """True if a signal such as SIGSTOP has paused the process; its requests are not the cause."""
        return is_stopped(self.pid)

    def listen(self) -> bool:
        """Copy the process's standard error to that of this process; return False if there is no more now."""
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
        """Kill the process if it lives, free everything but the socket, and return how the process ended."""
        self.kill()
        code = self._process.wait()
        while self.listen():
            pass
        self.stderr.close()
        last_words = self._last_words.decode("utf-8", "replace").strip()
        underway = self._batch.read()
        self._batch.close()
        return Ending(_crash_of(code, last_words), code == -SIGKILL, underway)


def _request_of(command: ToChild) -> str | None:
    """Return the id of the request of a command; None for other commands."""
    match command:
        case AddRequest(request):
            return request.request_id
        case CancelRequest(request_id) | Read(request_id):
            return request_id
    return None


def _log_level() -> int:
    """Return the lowest effective level of `LOGGERS` in this process."""
    return min(logging.getLogger(name).getEffectiveLevel() for name in LOGGERS)


def _crash_of(code: int, last_words: str) -> CrashError:
    how = how_ended(code)
    return CrashError(f"{how}: {last_words[-1000:]}" if last_words else how)
