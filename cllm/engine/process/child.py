"""The engine's process: an inference thread whose commands and events cross a socket.

    python -P -m cllm.engine.process.child SOCKET_FD MEMORY_FD

reads its settings from its standard input, and serves until `Shutdown` or the end of its parent.  It exits
at once if its standard input ends without settings.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cllm.engine.config import N_TEXTS_MAX, EngineConfig
from cllm.engine.constraint import CompiledConstraint, NamedConstraint
from cllm.engine.core.commands import (
    AddRequest,
    CancelRequest,
    Command,
    Event,
    Progressed,
    Read,
    Shutdown,
)
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.file_content import FileContent
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.plain_values import of_plain
from cllm.engine.process.batch_record import BatchRecord
from cllm.engine.process.frames import Frame, FrameReader, packets
from cllm.engine.process.ledger import OpenRequest
from cllm.engine.process.wire import (
    Beat,
    FromChild,
    Logged,
    SetLogLevel,
    decode_commands,
    encode_events,
    has_large_state,
)
from cllm.engine.request import GenerationRequest
from cllm.engine.thread.inference_thread import InferenceThread
from cllm.engine.thread.interrupter import Abortable, Interrupter
from cllm.engine.thread.mailbox import Inbox
from cllm.engine.thread.worker_thread import WorkerThreads, start_thread
from cllm.system import disable_core_files

BEAT_S = 0.5
# Statistics are sent with tokens at most once in this time, unless a number of requests has changed.  To encode them
# takes longer than to encode a token.
STATISTICS_S = 0.1


class ToParent:
    """Sender of frames to the parent.  Any thread.

    A thread of its own sends large KV states, and the inference thread continues.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # Held while waiting for `_lock`: the sender of a state waits here in its turn before its next packet.
        self._turn = threading.Lock()
        self._states: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_states, name="cllm-states", daemon=True)
        self._sender.start()
        self._counted_at, self._n_requests = 0.0, (0, 0, 0)
        self.thread: InferenceThread | None = None

    def post(self, events: list[Event]) -> bool:
        """See `Outbox`."""
        sent = [event for event in events if not has_large_state(event)]
        is_sent = self._send(encode_events(sent, self._statistics(events)))
        for event in filter(has_large_state, events):  # the ends of requests, after their tokens
            self._states.put(encode_events([event]))
        return is_sent

    def close(self) -> None:
        """Wait until all states are sent."""
        self._states.put(None)
        self._sender.join()

    def tell(self, told: FromChild) -> None:
        """Send a report that is none of the engine's events."""
        self._send(encode_events([told]))

    def _statistics(self, events: Sequence[Event]) -> EngineStatistics | None:
        """Return the statistics that are sent with these events; None for tokens that follow others soon.

        Without events there are statistics only.
        """
        if self.thread is None or (n_requests := self.thread.n_requests) is None:
            return None
        now = time.perf_counter()
        is_soon = n_requests == self._n_requests and now - self._counted_at < STATISTICS_S
        if is_soon and events and all(isinstance(event, Progressed) for event in events):
            return None
        self._counted_at, self._n_requests = now, n_requests
        return self.thread.statistics

    def _send(self, frame: Frame) -> bool:
        return self._send_together(packets(frame, is_bulky=False))

    def _send_states(self) -> None:
        while (frame := self._states.get()) is not None:
            for packet in packets(frame, is_bulky=True):
                self._send_together([packet])

    def _send_together(self, sent: Iterable[bytes]) -> bool:
        with self._turn:
            self._lock.acquire()
        try:
            for packet in sent:
                self._connection.sendall(packet)
        except OSError:  # the parent is gone
            return False
        finally:
            self._lock.release()
        return True


class RecordingInterrupter(Interrupter):
    """`Interrupter` that records the requests of each decode, and the image or audio of each encode."""

    def __init__(self, record: BatchRecord) -> None:
        super().__init__()
        self._record = record
        self._recorded: tuple[str, ...] = ()

    def begin(self, n_rows: Mapping[str, int], computing: Abortable | None = None) -> None:
        """See `Interrupter`."""
        if (present := tuple(n_rows)) != self._recorded:
            self._record.write(present)
            self._recorded = present
        super().begin(n_rows, computing)

    def note_media(self, digest: bytes) -> None:
        """See `Interrupter`."""
        self._record.write_media(digest)


class Compiling:
    """Thread that compiles the constraints of requests; later commands for such a request wait."""

    def __init__(
        self,
        compile_constraint: Callable[[NamedConstraint], CompiledConstraint],
        inbox: Inbox,
        to_parent: ToParent,
    ) -> None:
        self._compile = compile_constraint
        self._inbox = inbox
        self._to_parent = to_parent
        self._lock = threading.Lock()
        self._pending: dict[str, list[Command]] = {}
        self._queue: queue.SimpleQueue[GenerationRequest] = queue.SimpleQueue()
        start_thread(self._run, "cllm-compiler")

    def put(self, command: Command) -> None:
        """Put a command into the inbox, once the constraint of its request is compiled."""
        match command:
            case AddRequest(request) if request.constraint is not None:
                with self._lock:
                    self._pending[request.request_id] = []
                self._queue.put(request)
                return
            case CancelRequest(request_id) | Read(request_id):
                with self._lock:
                    if (later := self._pending.get(request_id)) is not None:
                        later.append(command)
                        return
        self._inbox.put(command)

    def _run(self) -> None:
        while True:
            request = self._queue.get()
            try:
                assert isinstance(request.constraint, NamedConstraint)
                compiled = self._compile(request.constraint)
                first: Command | None = AddRequest(replace(request, constraint=compiled))
            except Exception as error:
                self._to_parent.post([OpenRequest(request).failed(error, time.perf_counter())])
                first = None
            with self._lock:
                later = self._pending.pop(request.request_id)
                for command in [first, *later] if first is not None else []:
                    self._inbox.put(command)


class LogToParent(logging.Handler):
    """Sends records to the parent's log."""

    def __init__(self, to_parent: ToParent) -> None:
        super().__init__()
        self._to_parent = to_parent

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with contextlib.suppress(Exception):
            self._to_parent.tell(Logged(record.name, record.levelno, self.format(record)))


def serve(
    connection: socket.socket, record: BatchRecord, backend: LlamaBackend, config: EngineConfig
) -> None:
    """Serve until `Shutdown` comes, or the parent is gone."""
    to_parent = ToParent(connection)
    logging.getLogger("cllm").addHandler(LogToParent(to_parent))
    interrupter = RecordingInterrupter(record)
    inbox = Inbox(interrupter.cancel)
    thread = InferenceThread(config, backend, inbox, to_parent, WorkerThreads(), interrupter)
    to_parent.thread = thread

    def compile_constraint(constraint: NamedConstraint) -> CompiledConstraint:
        vocabulary = thread.vocabulary
        assert vocabulary is not None
        return backend.compile(vocabulary, constraint)

    compiling = Compiling(compile_constraint, inbox, to_parent)
    threading.Thread(target=_beat, args=(thread, to_parent, os.getppid()), daemon=True).start()
    thread.start()
    reader = FrameReader()
    while (frames := reader.receive(connection)) is not None:
        for frame in frames:
            for command in decode_commands(frame):
                match command:
                    case Shutdown():
                        thread.request_stop()
                        thread.join()
                        to_parent.close()
                        return
                    case SetLogLevel(level=level):
                        logging.getLogger("cllm").setLevel(level)
                    case _:
                        compiling.put(command)
    os._exit(1)  # no parent is left to hear of it


def _beat(thread: InferenceThread, to_parent: ToParent, parent: int) -> None:
    # A fork of the parent may keep the socket open after the parent's end, so that no end is read.
    while os.getppid() == parent:
        to_parent.tell(Beat(thread.heartbeat_age_s, time.process_time()))
        time.sleep(BEAT_S)
    os._exit(1)


def main() -> None:
    """See the module."""
    disable_core_files()
    faulthandler.enable(all_threads=False)
    os.dup2(2, 1)  # output of libraries goes to standard error
    fd, shared = sys.argv[1:]
    given = sys.stdin.buffer.read()
    if not given:
        return
    settings = json.loads(given)
    module, _, name = settings["backend"].partition(":")
    logging.getLogger("cllm").setLevel(settings["log_level"])
    config = EngineConfig(**settings["config"])
    make_backend = getattr(importlib.import_module(module), name)
    record = BatchRecord(int(shared), max(config.n_seq_max, N_TEXTS_MAX))
    os.close(int(shared))
    gc.freeze()  # what is imported stays: a search for garbage would stop all streams for 0.02 s
    files = of_plain(tuple[FileContent, ...], settings["files"])
    try:
        serve(socket.socket(fileno=int(fd)), record, make_backend(config, files), config)
    except BaseException:
        # Not `raise`: the exit handler would end the thread in order, as if the parent had asked for it.
        logging.getLogger("cllm").exception("the engine's process cannot go on")
        os._exit(1)


if __name__ == "__main__":
    main()
