"""A backend for an engine's process whose native calls fail as `fault_process.ProcessBench` tells it.

It connects to the Unix socket that `FAULTS_AT` names.  A thread answers questions there, one after the
other.  When the process ends, it sends the numbers of objects that are not freed.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

from cllm.engine.config import EngineConfig
from cllm.engine.constraint import CompiledConstraint, NamedConstraint
from cllm.engine.core.commands import AddRequest, CancelRequest, Command
from cllm.engine.file_content import FileContent
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.thread.backend import Loaded
from cllm.engine.thread.mailbox import Inbox
from cllm.engine.vocabulary import EngineVocabulary
from tests.conftest import put_at_once
from tests.reliability.fault_matrix import ROWS
from tests.reliability.fault_workload import always_the_same, forget_words, warned_of
from tests.reliability.native_faults import Call, Fault, Met, NativeFaults

FAULTS_AT = "CLLM_TEST_FAULTS_AT"
HELD_S = 20.0
OUTCOMES = {(row.function, str(row.outcome)): row.outcome for row in ROWS}


class MetThere(NamedTuple):
    """A fault that has happened in the process, by its place among those that were armed."""

    place: int
    owner: str | None


class RunThere(NamedTuple):
    """Counts of native calls, and unraisable exceptions, in the process during a run."""

    n_calls: dict[str, int]
    unraisable: list[str]


class ToldFaults(NativeFaults):
    """Faults that are reported before they happen, since the process may not survive them."""

    def __init__(self, tell: Callable[[MetThere], None]) -> None:
        super().__init__()
        self._tell = tell
        self.armed: list[Fault] = []

    def _meet(self, fault: Fault, call: Call) -> Met:
        met = super()._meet(fault, call)
        self._tell(MetThere(self.armed.index(fault), met.owner))
        return met


class HeldRequests:
    """Holds back the requests of a run until all of them have arrived.

    Attributes
    ----------
    inbox : Inbox
        Inbox of the engine.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._held: list[Command] = []
        self._n_refused = 0
        self._is_holding = False
        self._put = Inbox.put
        held = self

        def put(inbox: Inbox, command: Command) -> None:
            held.take(inbox, command)

        setattr(Inbox, "put", put)  # noqa: B010

    def hold(self) -> None:
        """Hold back requests from now on."""
        with self._condition:
            self._is_holding, self._held, self._n_refused = True, [], 0

    def release(self, n_requests: int) -> None:
        """Wait until `n_requests` have arrived or were refused, and pass them on in order of submission."""
        with self._condition:
            came = self._condition.wait_for(
                lambda: len(self._held) + self._n_refused == n_requests, HELD_S
            )
            assert came, f"{len(self._held)} of {n_requests} requests came"
            self._is_holding = False
            held, self._held = self._held, []
        put_at_once(self.inbox, sorted(held, key=_serial))

    def on_refused(self) -> None:
        """Count a request that does not arrive because its constraint could not be compiled."""
        with self._condition:
            self._n_refused += 1
            self._condition.notify_all()

    def take(self, inbox: Inbox, command: Command) -> None:
        """Pass a command on to its inbox, now or with the others."""
        self.inbox = inbox
        with self._condition:
            if self._is_holding and isinstance(command, AddRequest):
                self._held.append(command)
                self._condition.notify_all()
                return
        self._put(inbox, command)


def _serial(command: Command) -> int:
    assert isinstance(command, AddRequest)
    return command.request.serial


class FaultyBackend(LlamaBackend):
    """llama.cpp, any of whose functions may fail; in the process of an engine."""

    def __init__(self, config: EngineConfig, files: Sequence[FileContent] = ()) -> None:
        super().__init__(config, files)
        self._faults = ToldFaults(self._send)
        self._unraisable: list[str] = []
        self._held = HeldRequests()
        self._patches = patches = ExitStack()  # undone with the last reference to it
        patches.enter_context(self._faults)
        patches.enter_context(always_the_same())
        patches.enter_context(warned_of(self._unraisable))
        self._sending = threading.Lock()
        self._connection: Connection = Client(os.environ[FAULTS_AT], "AF_UNIX")
        atexit.register(self._say_last_word)
        threading.Thread(target=self._answer, daemon=True).start()

    def load(self, owned: ExitStack) -> Loaded:
        """See `Backend`."""
        loaded = super().load(owned)
        self._vocabulary = loaded.vocabulary
        return loaded

    def compile(
        self, vocabulary: EngineVocabulary, constraint: NamedConstraint
    ) -> CompiledConstraint:
        """See `LlamaBackend`."""
        try:
            return super().compile(vocabulary, constraint)
        except BaseException:
            self._held.on_refused()
            raise

    # --- Questions -----------------------------------------------------------------------------
    def arm(self, faults: list[tuple[str, int, str]], cancelled: str, cancelled_at: int) -> None:
        """Arm faults for a run, and the cancellation of a request before its `cancelled_at`-th decode."""
        forget_words(self._vocabulary)
        armed = [Fault(f, k, OUTCOMES[f, words]) for f, k, words in faults]
        self._faults.armed = armed
        self._faults.arm(*armed)
        cancel = CancelRequest(cancelled)
        self._faults.at("llama_decode", cancelled_at, lambda: self._held.inbox.put(cancel))
        self._held.hold()

    def release(self, n_requests: int) -> None:
        """See `HeldRequests`."""
        self._held.release(n_requests)

    def take(self) -> RunThere:
        """Return the calls and exceptions since `arm`, and disarm the faults."""
        run = RunThere(dict(self._faults.n_calls), self._unraisable.copy())
        self._faults.disarm()
        self._unraisable.clear()
        return run

    def n_open(self) -> Counter[str]:
        """Return the numbers of native objects that are not freed, by the function that made them."""
        return self._faults.n_open

    def _answer(self) -> None:
        questions: tuple[Callable[..., Any], ...] = (self.arm, self.release, self.take, self.n_open)
        by_name = {question.__name__: question for question in questions}
        while True:
            try:
                name, arguments = self._connection.recv()
            except EOFError:  # the other process is gone
                return
            try:
                answer = by_name[name](*arguments)
            except Exception as error:
                answer = error
            self._send(answer)

    def _say_last_word(self) -> None:
        self._send(self._faults.n_open)

    def _send(self, told: object) -> None:
        with self._sending:
            self._connection.send(told)
