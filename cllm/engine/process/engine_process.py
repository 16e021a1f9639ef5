"""EngineProcess: runs llama.cpp in another process, and starts a new process after a crash.

Requests do not wait for a thread of this process: `on_put` sends a command in the caller's thread, and
the event loop reads the events.  The thread starts processes and reads from them until they are ready.
It also reads while the engine closes, and while the event loop is busy or gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from cllm.engine.config import EngineConfig
from cllm.engine.core.commands import (
    Answered,
    Command,
    Embedded,
    Ended,
    Event,
    Finished,
    LoadedLoras,
    Progressed,
    Ready,
    Restarted,
    Shutdown,
    Stopped,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.file_content import FileContent
from cllm.engine.health import Restart
from cllm.engine.lora import LoraInfo
from cllm.engine.process.crash_report import CrashReport, save_crash
from cllm.engine.process.handle import Ending, ProcessHandle
from cllm.engine.process.ledger import Ledger
from cllm.engine.process.wire import Beat, FromChild, Logged, decode_events
from cllm.engine.thread.host import EngineHost
from cllm.engine.thread.mailbox import Inbox, Outbox
from cllm.engine.thread.socket_watch import SocketWatch
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import (
    CllmError,
    EngineFailedError,
    ModelChangedError,
    ModelLoadError,
    RpcServerError,
)

logger: logging.Logger = logging.getLogger("cllm.engine")

# The engine fails after more than this many crashes in a row without progress of any request.  A crash of
# a process that served for longer than `IN_VAIN_S` starts a new count.
N_IN_VAIN_MAX = 5
IN_VAIN_S = 60.0
# Pauses before the next attempt to start a process, and the errors of an attempt that may pass.
RETRY_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN}
# Seconds that the loop may leave data unread, or an offer unanswered, before the thread reads instead.
LOOP_S = 1.0
OFFER_S = 0.1
EXPIRY_S = 0.1  # between two looks for late requests while no process serves
# A process that would count as hung after so many seconds, if that were `hang_timeout_s`, is silent: its
# cancelled and late requests end without it.
SILENT_S = 2.0
END_S = 30.0  # for a process to end after `Shutdown`: it writes files and frees memory
# Parts of the messages with which ggml-rpc.cpp aborts.
RPC_LOST = ("Remote RPC server crashed", "Failed to connect to", "RPC handshake failed")


class EngineProcess(EngineHost):
    """An `EngineHost` that computes in another process; its vocabulary is loaded in this process.

    The ledger and the process's socket are guarded by the lock.  A caller that puts a command never waits
    for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        inbox: Inbox,
        outbox: Outbox[list[Event]],
        workers: WorkerThreads,
        open_vocabularies: Callable[
            [Sequence[FileContent], ExitStack], tuple[EngineVocabulary, EngineVocabulary]
        ],
        *,
        backend: str,
    ) -> None:
        super().__init__("cllm-process", inbox, outbox, workers)
        self._deliver = outbox.deliver
        self._config, self._backend = config, backend
        self._open_vocabularies = open_vocabularies
        self._files: dict[str, FileContent] = {}  # what the first process has loaded, and since
        self._lock = threading.Lock()
        self._ledger = Ledger()
        self._process: ProcessHandle | None = None
        self._watch = SocketWatch()
        # True once the thread has offered reading to the loop.  The loop reads after it accepts the last offer.
        self._is_offered = False
        self._n_offers = self._n_taken = 0
        self._ready: Ready | None = None  # of the present process, not yet handled
        self._has_ended = self._is_ready = self._was_hung = False
        self._heard_error: BaseException | None = None  # that ended the process
        self._checked_at, self._n_reads = 0.0, 0  # of `_is_loop_behind`
        self._expired_at = 0.0
        self._base = self._statistics = EngineStatistics()
        self._n_uncounted = 0  # tokens since the process last sent its statistics
        self._n_in_vain = 0
        self._crashed_at = 0.0
        self._ready_at: float | None = None  # of the present process
        # Not a pipe: a write to a closed socket object fails, and cannot reach a reused descriptor.
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)

    # --- Any thread --------------------------------------------------------------------------
    def on_put(self) -> None:
        """Send the commands in the inbox, or wake the thread to send them.  Any thread; returns at once."""
        if not self.is_alive:  # it has ended, or this is a fork, whose socket is not its own
            return
        if self._lock.acquire(blocking=False):
            try:
                if (process := self._process) is not None:
                    self._pass_on(process)
                    if not (process.has_unsent or self._stopping):
                        return
            finally:
                self._lock.release()
        self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._wake.send(b"\0")

    @property
    def pid(self) -> int | None:
        """Id of the present process; None between two processes."""
        process = self._process
        return None if process is None else process.pid

    @property
    def statistics(self) -> EngineStatistics:
        """See `EngineHost`; the counters include those of earlier processes and of the ledger."""
        told, n_finished = self._statistics, self._ledger.n_finished
        return told.plus(EngineStatistics(n_finished=n_finished)) if n_finished else told

    @property
    def heartbeat_age_s(self) -> float:
        """See `EngineHost`."""
        process = self._process
        return 0.0 if process is None else process.busy_s

    # --- Event loop --------------------------------------------------------------------------
    def _accept(self, process: ProcessHandle, n_offer: int) -> None:
        """Begin to read in the event loop.  All earlier messages were delivered before this call."""
        with self._lock:
            if process is self._process and self._is_offered and n_offer == self._n_offers:
                self._n_taken = n_offer
                self._watch.start(process.socket, partial(self._on_readable, process))

    def _on_readable(self, process: ProcessHandle) -> bool:
        """Read and deliver messages; return False if the thread must read from now on."""
        with self._lock:
            if process is not self._process or not self._is_loops:
                return False
            try:
                told = self._read(process)
            except Exception as error:
                told, self._heard_error = None, error
            if told is None:
                self._is_offered = False
        if told is None or process.has_unsent or self._heard_error is not None:
            self._wake_thread()
        if told:
            self._deliver(told)
        return told is not None

    @property
    def _is_loops(self) -> bool:
        return self._is_offered and self._n_taken == self._n_offers

    # --- The thread --------------------------------------------------------------------------
    def _serve(self, owned: ExitStack) -> None:
        owned.enter_context(self._woken)
        owned.enter_context(self._wake)
        try:
            self._config = self._config.absolute()
            self._serve_on(owned)
        except BaseException as error:
            self.failure: BaseException | None = error  # before it is reported
            with self._lock:
                self._outbox.post(self._ledger.fail_all(error, time.perf_counter()))
            raise
        with self._lock:  # what the last process has not ended
            self._pass_on(None)
            self._outbox.post(self._ledger.cancel_all(time.perf_counter()))

    def _serve_on(self, owned: ExitStack) -> None:
        """Start a process and serve; after a crash, start the next one.

        A process that cannot start for a reason that may pass is started again after a pause.  Each
        pause is longer than the one before.
        """
        pauses = iter(RETRY_S)
        while True:
            try:
                ending = self._serve_once(owned)
            except (OSError, CllmError) as error:
                if not self._may_pass(error) or (pause_s := next(pauses, None)) is None:
                    raise
                logger.warning("the engine's process cannot start, and is tried again: %s", error)
            else:
                if ending is None:
                    return
                if self._ready_at is not None:
                    pauses = iter(RETRY_S)
                    self._on_crash(ending)
                    continue
                if (pause_s := next(pauses, None)) is None:
                    raise EngineFailedError(
                        f"its process has ended, and {len(RETRY_S) + 1} attempts in a row to start it again "
                        f"have failed; the last time: {ending.crash}"
                    ) from ending.crash
                logger.error("the engine's process ended before it served: %s", ending.crash)
            self._pause(pause_s)
            if self._stopping:
                return

    def _may_pass(self, error: OSError | CllmError) -> bool:
        """True if a later start may succeed after this error."""
        if isinstance(error, OSError):
            return error.errno in PASSING
        # The same files with the same settings were loaded before.  Starts wait for RPC servers themselves.
        is_start = self._is_ready and self._ready_at is None
        return is_start and not isinstance(error, ModelChangedError | RpcServerError)

    def _pause(self, seconds: float) -> None:
        """Wait for so long, or until the engine is stopped."""
        ends_at = time.perf_counter() + seconds
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while not self._stopping and (left_s := ends_at - time.perf_counter()) > 0:
            if poll.poll(1000 * min(left_s, EXPIRY_S)):
                self._drain_wakes()
            with self._lock:
                self._pass_on(None)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _serve_once(self, owned: ExitStack) -> Ending | None:
        """Start a process and serve until it ends; return how it crashed, None if the engine was stopped."""
        self._was_hung, self._ready_at, self._heard_error = False, None, None
        with selectors.DefaultSelector() as selector:
            process = ProcessHandle(self._config_of_next(), self._backend, self._files.values())
            return self._serve_with(process, selector, owned)

    def _serve_with(
        self, process: ProcessHandle, selector: selectors.BaseSelector, owned: ExitStack
    ) -> Ending | None:
        logger.debug("engine process %d", process.pid)
        self._process = process
        try:
            self._listen(process, selector, owned)
        finally:
            with self._lock:
                self._process, self._is_offered = None, False
                ending = process.end()
            self._watch.close(process.socket)
        if self._has_ended or self._stopping:
            return None
        if not self._is_ready:
            if _is_by_rpc(ending):
                servers = ", ".join(self._config.rpc)
                raise RpcServerError(
                    servers, f"lost while loading: {ending.crash}"
                ) from ending.crash
            path = str(self._config.model_path)
            raise ModelLoadError(path, f"its process ended: {ending.crash}") from ending.crash
        return ending

    def _config_of_next(self) -> EngineConfig:
        """Return the configuration of the next process, with a trace file of its own."""
        config, n_restarts = self._config, self._statistics.n_restarts
        if config.trace is None or not n_restarts:
            return config
        return replace(config, trace=f"{config.trace}.{n_restarts}")

    def _on_crash(self, ending: Ending) -> None:
        """Record a crash and end the requests that it concerns; raise an error after too many in a row."""
        crash = ending.crash
        self._crashed_at = time.perf_counter()
        if self._ready_at is not None and self._crashed_at - self._ready_at > IN_VAIN_S:
            self._n_in_vain = 0
        # A user or the kernel may have sent SIGKILL: requests are suspect only if it soon happens again.
        is_own = not ending.was_killed or self._was_hung or self._n_in_vain > 0
        is_own = is_own and not _is_by_rpc(ending)
        self.crash: str = str(crash)
        self._n_in_vain += 1
        logger.error("the engine's process ended, and is started again: %s", crash)
        n_open = len(self._ledger.requests)
        save_crash(CrashReport.of(self._config.model_path, self.crash, n_open))
        with self._lock:
            told = self._ledger.on_crash(crash, ending.underway, self._crashed_at, is_own=is_own)
        if told:
            self._n_in_vain = 0
            self._outbox.post(told)
        told_last = self._statistics
        self._base = self._statistics = replace(
            told_last,
            n_restarts=told_last.n_restarts + 1,
            n_output_tokens=told_last.n_output_tokens + self._n_uncounted,
        )
        self._n_uncounted = 0
        if self._n_in_vain > N_IN_VAIN_MAX:
            raise EngineFailedError(
                f"its process has ended {self._n_in_vain} times in a row, and {n_open} requests are open: {crash}"
            ) from crash

    def _listen(
        self, process: ProcessHandle, selector: selectors.BaseSelector, owned: ExitStack
    ) -> None:
        """Handle messages until the process has ended."""
        ends_at = math.inf
        selector.register(process.stderr, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        while True:
            self._wait(process, selector)
            with self._lock:
                if self._stopping or self._is_loop_behind(process):
                    self._is_offered = False
                reads = not self._is_offered and self._heard_error is None
                told = self._read(process) if reads else []
                if told:  # also what came before the error
                    self._outbox.post(told)
                self._expire(is_silent=self._is_ready and self._is_hung(process, SILENT_S))
                is_hung = self._is_ready and self._is_hung(process, self._config.hang_timeout_s)
                error, self._heard_error = self._heard_error, None
            if error is not None:
                raise error
            if told is None:
                return
            if self._ready is not None:
                self._on_ready(process, self._ready, owned)
                self._ready = None
            if self._stopping:
                ends_at = min(ends_at, time.perf_counter() + END_S)
            if is_hung or time.perf_counter() > ends_at:
                logger.error(
                    "the engine's process is killed: it hangs (see hang_timeout_s), or did not end in time"
                )
                self._was_hung = not process.is_stopped
                process.kill()
            if self._ready_at is not None and not (self._is_offered or self._stopping):
                self._offer(process)

    def _wait(self, process: ProcessHandle, selector: selectors.BaseSelector) -> None:
        """Wait for a message, a wake-up or a time limit; send commands, and copy the standard error."""
        mask = 0 if self._is_offered else selectors.EVENT_READ
        if process.has_unsent:
            mask |= selectors.EVENT_WRITE
        if process.socket in selector.get_map():
            selector.unregister(process.socket)
        if mask:
            selector.register(process.socket, mask)
        wait_s = EXPIRY_S if self._ledger.holds_back else self._patience_s
        for key, ready in selector.select(wait_s):
            if key.fileobj is process.stderr and not process.listen():
                selector.unregister(process.stderr)
            elif key.fileobj is self._woken or ready & selectors.EVENT_WRITE:
                self._drain_wakes()
                with self._lock:
                    self._pass_on(process)

    def _offer(self, process: ProcessHandle) -> None:
        """Offer the event loop to read from the socket; the thread stops reading."""
        self._checked_at, self._n_reads = time.perf_counter(), process.n_reads
        self._n_offers += 1
        self._is_offered = True
        if not self._watch.call_soon(partial(self._accept, process, self._n_offers)):
            self._is_offered = False  # the loop is gone

    def _is_loop_behind(self, process: ProcessHandle) -> bool:
        """Return True if the event loop has not read a message for some time.  With the lock."""
        now = time.perf_counter()
        if not self._is_offered or now - self._checked_at < self._patience_s:
            return False
        has_read, self._n_reads = process.n_reads != self._n_reads, process.n_reads
        self._checked_at = now
        return not has_read and process.has_unread

    def _is_hung(self, process: ProcessHandle, limit_s: float | None) -> bool:
        """Return True if the process hangs after `limit_s`.  An unread message may be a sign of life."""
        return process.is_hung(limit_s) and not process.has_unread

    @property
    def _patience_s(self) -> float:
        return LOOP_S if self._is_loops else OFFER_S

    def _expire(self, *, is_silent: bool = False) -> None:
        """End requests that no process works on; see `Ledger.expire`.  With the lock."""
        now = self._expired_at = time.perf_counter()
        if told := self._ledger.expire(now, is_silent=is_silent):
            self._outbox.post(told)

    def _pass_on(self, process: ProcessHandle | None) -> None:
        """Pass the commands in the inbox to the ledger and the process, and send unsent bytes.  With the lock."""
        commands: list[Command] = []
        self._inbox.take_arrivals()  # dropped: the process records arrival times itself
        for command in self._inbox.drain(wait=False):
            commands += (
                [command] if isinstance(command, Shutdown) else self._ledger.command(command)
            )
        if time.perf_counter() - self._expired_at > EXPIRY_S / 2:  # it looks at all requests
            self._expire()
        if process is not None:
            process.send(commands)

    def _read(self, process: ProcessHandle) -> list[Event] | None:
        """Read the socket and return the events for the event loop; None at its end.  With the lock."""
        frames = process.frames()
        if frames is None:
            return None
        told_on: list[Event] = []
        for frame in frames:
            heard, statistics = decode_events(frame)
            if statistics is None:
                self._n_uncounted += sum(isinstance(told, Progressed) for told in heard)
            else:
                self._n_uncounted = 0
                self._statistics = (
                    statistics.plus(self._base) if self._base.n_restarts else statistics
                )
            if events := [event for told in heard if (event := self._hear(process, told))]:
                told, commands = self._ledger.events(events, time.perf_counter())
                if commands:
                    process.send(commands)
                told_on += told
        if self._n_in_vain and any(map(_is_further, told_on)):
            self._n_in_vain = 0
        return told_on

    def _hear(self, process: ProcessHandle, told: FromChild) -> Event | None:
        """Handle a message for the parent only; return an event for the ledger."""
        match told:
            case Beat():
                process.on_beat(told)
            case Logged(name=name, level=level, text=text):
                logging.getLogger(name).log(level, "%s", text)
            case Ready():
                self._ready = told
            case Stopped(error):
                self._heard_error = error
            case Ended():
                self._has_ended = True
            case Answered(value=LoadedLoras(loras)):  # which the next process is to begin with
                self._on_loras(loras)
                return told
            case _:
                return told
        return None

    def _on_loras(self, loras: Sequence[LoraInfo]) -> None:
        """Record the adapters that the next process loads, and their contents."""
        for lora in self._config.loras:
            self._files.pop(lora.path, None)
        settings = []
        for lora in loras:
            assert lora.content is not None
            self._files[lora.content.path] = lora.content
            settings.append((lora.name, lora.content.path, lora.scale))
        self._config = replace(self._config, lora=tuple(settings))

    def _on_ready(self, process: ProcessHandle, ready: Ready, owned: ExitStack) -> None:
        is_first, self._is_ready, self._ready_at = not self._is_ready, True, time.perf_counter()
        process.computes_on_gpu = bool(ready.model.devices) and not self._config.rpc
        if is_first:
            # The next process computes with the same settings, whatever is measured meanwhile.
            self._config = self._config.tuned(ready.model.tuned)
            self._files.update({file.path: file for file in ready.model.files})
            vocabularies = self._open_vocabularies(ready.model.files, owned)
            self.vocabulary, self.text_vocabulary = vocabularies
        with self._lock:
            n_requests = len(self._ledger.requests)
            self._pass_on(process)  # what was put while there was none
            process.send(self._ledger.on_ready())
        if is_first:
            self._outbox.post([ready])
            return
        crash, self.crash = self.crash, ""
        duration_s = time.perf_counter() - self._crashed_at
        logger.warning(
            "the engine's process serves again after %.2f s, with %d requests",
            duration_s,
            n_requests,
        )
        self._outbox.post([Restarted(Restart(crash, n_requests, duration_s))])


def _is_by_rpc(ending: Ending) -> bool:
    """Return True if llama.cpp aborted because an RPC server was gone."""
    return any(words in str(ending.crash) for words in RPC_LOST)


def _is_further(event: Event) -> bool:
    """Return True if a request has received something that was computed."""
    match event:
        case Progressed(delta=delta) | Finished(delta=delta):
            return bool(delta.token_ids)
        case Embedded(vectors=vectors):
            return bool(vectors)
    return False
