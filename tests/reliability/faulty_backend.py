"""The faults of an engine's process: a backend whose native calls fail as the process that started it says.

It connects to the Unix socket that `FAULTS_AT` names and answers there, in a thread of its own, one
question after the other; its last word is what it has not freed.
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
    """What else has happened in the process during a run."""

    n_calls: dict[str, int]
    unraisable: list[str]


class ToldFaults(NativeFaults):
    """Faults that are told of before they happen: the process may not live on."""

    def __init__(self, tell: Callable[[MetThere], None]) -> None:
        super().__init__()
        self._tell = tell
        self.armed: list[Fault] = []

    def _meet(self, fault: Fault, call: Call) -> Met:
        met = super()._meet(fault, call)
        self._tell(MetThere(self.armed.index(fault), met.owner))
        return met


class HeldRequests:
    """Requests stay before the inference thread until all of a run have come.

    Attributes
    ----------
    inbox : Inbox
        The engine's.
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
        """From here on."""
        with self._condition:
            self._is_holding, self._held, self._n_refused = True, [], 0

    def release(self, n_requests: int) -> None:
        """Let them go, in the order of their submission, when so many have come or were refused."""
        with self._condition:
            came = self._condition.wait_for(
                lambda: len(self._held) + self._n_refused == n_requests, HELD_S
            )
            assert came, f"{len(self._held)} of {n_requests} requests came"
            self._is_holding = False
            held, self._held = self._held, []
        put_at_once(self.inbox, sorted(held, key=_serial))

    def on_refused(self) -> None:
        """One will not come: its constraint was not compiled."""
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
        """Let these happen in a run, and a request be cancelled before a decode of it."""
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
        """What has happened since `arm`; no fault happens from here on."""
        run = RunThere(dict(self._faults.n_calls), self._unraisable.copy())
        self._faults.disarm()
        self._unraisable.clear()
        return run

    def n_open(self) -> Counter[str]:
        """What was made and is not freed."""
        return self._faults.n_open

    def _answer(self) -> None:
        questions: tuple[Callable[..., Any], ...] = (self.arm, self.release, self.take, self.n_open)
        by_name = {question.__name__: question for question in questions}
        while True:
            try:
                name, arguments = self._connection.recv()
            except EOFError:  # whoever asks is gone
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
