"""EngineProcess: the engine's process as the parent sees it: started, listened to, and started again.

One thread does all of it: it owns the socket, the ledger and the child.  The event loop talks to it as
to an inference thread: commands through the inbox, events out of the outbox.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace

from cllm.checks import MAX_SEED
from cllm.engine.child_process import child_command, child_environment
from cllm.engine.config import EngineConfig
from cllm.engine.core.messages import (
    AddRequest,
    Command,
    Ended,
    Event,
    Ready,
    Shutdown,
    Stopped,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.process.frames import FrameReader, framed
from cllm.engine.process.ledger import Ledger
from cllm.engine.process.wire import Beat, Computing, Logged, decode_events, encode_commands
from cllm.engine.thread.host import EngineHost
from cllm.engine.thread.mailbox import Inbox, Outbox
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import CllmError, EngineFailedError, ModelLoadError

logger = logging.getLogger("cllm.engine")

MAX_READ = 1 << 20
N_LAST_WORDS = 4096  # bytes of the standard error of a process that are kept
# Restarts in a row after which nobody had got a token further.
N_IN_VAIN_MAX = 5
# A child that has computed for less than this share of a stall is hung, not slow.
SLOW_SHARE = 0.1
HUNG_FACTOR = 10.0  # a stall of so many `hang_timeout_s` is one whatever it computes


class CrashError(CllmError):
    """The engine's process has ended by itself."""


class Child:
    """One process, its socket and its standard error.  The thread that started it."""

    def __init__(self, config: EngineConfig, backend: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                child_command("cllm.engine.process.child", str(theirs.fileno()), backend),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.socket = ours
        ours.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._last_words = b""
        self.heard_at = time.perf_counter()
        self.beat: Beat | None = None
        self.last_idle_cpu_s = 0.0
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        log_level = logging.getLogger("cllm").getEffectiveLevel()
        settings = {"config": json.loads(config.to_json()), "log_level": log_level}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(settings).encode())
            self.process.stdin.close()

    def send(self, commands: list[Command]) -> None:
        """Send, or keep until there is room."""
        if commands:
            self._unsent += framed(encode_commands(commands))
            self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether there was no room for all."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send as much as there is room for."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]

    def frames(self) -> list[bytes] | None:
        """What has come; None at the end."""
        try:
            data = self.socket.recv(MAX_READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard_at = time.perf_counter()
        return list(self._reader.add(data))

    def listen(self) -> bool:
        """Take what it has written to its standard error; False if there is nothing more now."""
        assert self.process.stderr is not None
        try:
            data = os.read(self.process.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._last_words = (self._last_words + data)[-N_LAST_WORDS:]
            with contextlib.suppress(OSError):
                os.write(2, data)
        return bool(data)

    @property
    def last_words(self) -> str:
        """The end of what it has written to its standard error."""
        return self._last_words.decode("utf-8", "replace").strip()

    def end(self) -> int:
        """Kill it if it lives, and forget it; how it has ended."""
        self.process.kill()
        code = self.process.wait()
        while self.listen():
            pass
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.socket.close()
        return code


class EngineProcess(EngineHost):
    """An `EngineHost` that lets another process compute; its vocabulary is of this one."""

    def __init__(
        self,
        config: EngineConfig,
        inbox: Inbox,
        outbox: Outbox[list[Event]],
        workers: WorkerThreads,
        open_vocabulary: Callable[[ExitStack], EngineVocabulary],
        *,
        backend: str,
    ) -> None:
        super().__init__("cllm-process", inbox, outbox, workers)
        self._config, self._backend = config, backend
        self._open_vocabulary = open_vocabulary
        self.last_crash = ""
        self._ledger = Ledger()
        self._child: Child | None = None
        self._is_ready = self._was_hung = False
        self._base = self._statistics = EngineStatistics()
        self._n_in_vain = 0
        # Not a pipe: who wakes a closed socket meets an error, not another file of that number.
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    # --- Any thread --------------------------------------------------------------------------
    def wake(self) -> None:
        """Something was put into the inbox.  Any thread; returns at once."""
        with contextlib.suppress(OSError):  # full, or closed
            self._wake.send(b"\0")

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        child = self._child
        return None if child is None else child.process.pid

    @property
    def statistics(self) -> EngineStatistics:
        """See `EngineHost`; of all processes."""
        return self._statistics

    @property
    def heartbeat_age_s(self) -> float:
        """See `EngineHost`."""
        child = self._child
        beat = None if child is None else child.beat
        if child is None or beat is None:
            return 0.0
        return beat.busy_s + time.perf_counter() - child.heard_at if beat.busy_s else 0.0

    # --- The thread --------------------------------------------------------------------------
    def _serve(self, owned: ExitStack) -> None:
        owned.enter_context(self._woken)
        owned.enter_context(self._wake)
        try:
            self._serve_on(owned)
        except BaseException as error:
            self.failure = error  # before anybody hears of it
            self._outbox.post(self._ledger.fail_all(error, time.perf_counter()))
            raise

    def _serve_on(self, owned: ExitStack) -> None:
        while True:
            self._was_hung = False
            self._child = child = Child(self._config, self._backend)
            try:
                if self._converse(child, owned):
                    return
            finally:
                code = child.end()
                self._child = None
            crash = _crash_of(code, child.last_words)
            # Killed by hand, or for its memory: of that a request is accused if it happens again at once.
            is_own = code != -signal.SIGKILL or self._was_hung or self._n_in_vain > 0
            if self._stopping:
                return
            if not self._is_ready:
                path = str(self._config.model_path)
                raise ModelLoadError(path, f"its process ended: {crash}") from crash
            self._restart(crash, is_own=is_own)

    def _restart(self, crash: CrashError, *, is_own: bool) -> None:
        self.last_crash = str(crash)
        self._n_in_vain += 1
        logger.error("the engine's process ended, and is started again: %s", crash)
        n_open = len(self._ledger.requests)
        told = self._ledger.on_crash(crash, time.perf_counter(), is_own=is_own)
        if told:
            self._n_in_vain = 0
            self._outbox.post(told)
        self._base = self._statistics = replace(
            self._statistics, n_restarts=self._statistics.n_restarts + 1
        )
        if self._n_in_vain > N_IN_VAIN_MAX:
            raise EngineFailedError(
                f"its process has ended {self._n_in_vain} times in a row, with {n_open} requests: {crash}"
            ) from crash

    def _converse(self, child: Child, owned: ExitStack) -> bool:
        """Until the process is gone; True if it was told to end and has."""
        assert child.process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.socket, selectors.EVENT_READ)
            selector.register(child.process.stderr, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            has_ended = False
            while True:
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.has_unsent else 0)
                selector.modify(child.socket, mask)
                for key, _ in selector.select(1.0):
                    if key.fileobj is child.process.stderr and not child.listen():
                        selector.unregister(child.process.stderr)
                    if key.fileobj == self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                self._take_commands(child)
                child.flush()
                frames = child.frames()
                if frames is None:
                    return has_ended
                for frame in frames:
                    has_ended = self._hear(child, frame, owned) or has_ended
                if self._is_hung(child):
                    logger.error("the engine's process hangs, and is killed")
                    self._was_hung = True
                    child.process.kill()

    def _take_commands(self, child: Child) -> None:
        commands: list[Command] = []
        self._inbox.take_arrivals()  # the process has its own
        for command in self._inbox.drain(wait=False):
            if isinstance(command, AddRequest) and command.request.params.seed is None:
                # What is drawn must be drawn again after a crash.
                request = replace(command.request, seed=secrets.randbelow(MAX_SEED + 1))
                command = AddRequest(request)
            commands += (
                [command] if isinstance(command, Shutdown) else self._ledger.command(command)
            )
        child.send(commands)

    def _hear(self, child: Child, frame: bytes, owned: ExitStack) -> bool:
        """A frame from the process; whether it was its last."""
        heard, statistics = decode_events(frame)
        if statistics is not None:
            self._statistics = added(self._base, statistics)
        events: list[Event] = []
        has_ended = False
        for told in heard:
            match told:
                case Computing(request_ids=request_ids):
                    self._ledger.on_batch(request_ids)
                case Beat():
                    child.beat = told
                    if not told.busy_s:
                        child.last_idle_cpu_s = told.cpu_s
                case Logged(name=name, level=level, text=text):
                    logging.getLogger(name).log(level, "%s", text)
                case Ready():
                    self._get_ready(child, told, owned)
                case Stopped(error):
                    if error is not None:
                        raise error
                case Ended():
                    has_ended = True
                case _:
                    events.append(told)
        now = time.perf_counter()
        told_on, commands = self._ledger.events(events, now)
        if told_on:
            self._n_in_vain = 0
            self._outbox.post(told_on)
        child.send(commands)
        return has_ended

    def _get_ready(self, child: Child, ready: Ready, owned: ExitStack) -> None:
        if not self._is_ready:
            self.vocabulary = self._open_vocabulary(owned)
            self._is_ready = True
            self._outbox.post([ready])
        child.send(self._ledger.on_ready())

    def _is_hung(self, child: Child) -> bool:
        """Whether its tick lasts longer than any that computes, or it says nothing at all."""
        limit_s, beat = self._config.hang_timeout_s, child.beat
        silent_s = time.perf_counter() - child.heard_at
        if limit_s is None or not self._is_ready or beat is None:
            return False
        if silent_s > limit_s:
            return True
        stalled_s = beat.busy_s
        computed_s = beat.cpu_s - child.last_idle_cpu_s
        is_idle = computed_s < SLOW_SHARE * stalled_s
        return stalled_s > limit_s * (1.0 if is_idle else HUNG_FACTOR)


# Gauges, and what is of a process alone; all else is counted on.
_GAUGES = frozenset((
    "n_waiting", "n_running", "n_paused", "n_kv_cells_used", "n_kv_cells_cached", "n_kv_cells",
    "n_seq_ids_used", "n_seq_ids_cached", "uptime_s", "n_finished", "tick_times", "n_restarts",
))  # fmt: skip


def added(base: EngineStatistics, present: EngineStatistics) -> EngineStatistics:
    """The statistics of a process after those of the ones before it."""
    if not base.n_restarts:
        return present
    counts = {
        f.name: getattr(base, f.name) + getattr(present, f.name)
        for f in fields(EngineStatistics)
        if f.name not in _GAUGES
    }
    n_finished = {r: n + base.n_finished.get(r, 0) for r, n in present.n_finished.items()}
    times = type(present.tick_times)(
        *(
            getattr(base.tick_times, f.name) + getattr(present.tick_times, f.name)
            for f in fields(present.tick_times)
        )
    )
    return replace(
        present,
        **counts,
        n_finished=n_finished,
        tick_times=times,
        n_restarts=base.n_restarts,
    )


def _crash_of(code: int, last_words: str) -> CrashError:
    how = f"status {code}"
    if code < 0:
        try:
            how = signal.Signals(-code).name
        except ValueError:
            how = f"signal {-code}"
    return CrashError(f"{how}: {last_words[-1000:]}" if last_words else how)
