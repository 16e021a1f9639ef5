"""The bench of the fault matrix where the engine has a process of its own.

Calls of the engine's process fail there, as `ProcessBench` tells `faulty_backend`.  Functions that only this
process calls, for example to tokenize a prompt, fail here.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Self

import anyio.to_thread
import pytest

from cllm import Engine
from cllm.engine.core.commands import AddRequest, Command
from tests.reliability.fault_workload import CANCELLED, CANCELLED_AT, OPTIONS, Bench, Run
from tests.reliability.faulty_backend import FAULTS_AT, MetThere, RunThere
from tests.reliability.native_faults import Fault, Met


class FaultyEngine(Engine):
    """An engine with a process whose native calls can fail."""

    _child_backend = "tests.reliability.faulty_backend:FaultyBackend"


class ProcessBench(Bench):
    """A `Bench` whose engines have processes of their own."""

    # The vocabulary of this process is a model too.
    serving = Bench.serving + Counter({"llama_model_load_from_file": 1})

    def __init__(self) -> None:
        super().__init__()
        self._there: Connection | None = None
        self._armed: list[Fault] = []
        self._called_only_here: set[str] = set()
        self._last_word: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        address = str(Path(directory) / "faults")
        self._listener = self._stack.enter_context(Listener(address, "AF_UNIX"))
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(FAULTS_AT, address)
        return await super().__aenter__()

    def _make_engine(self) -> Engine:
        return FaultyEngine(**OPTIONS, process=True)

    async def _open(self) -> None:
        await super()._open()
        self._there = await anyio.to_thread.run_sync(self._listener.accept)

    async def _close(self) -> list[str]:
        assert self._there is not None
        was_killed = self.engine.health().status == "failed"  # a killed process frees nothing
        await self.engine.aclose()
        self._last_word = Counter()
        wrong = []
        with self._there as there:
            try:
                self._last_word = self._hear(there)
            except EOFError:
                wrong = [] if was_killed else ["its process has ended without a last word"]
        self._there = None
        return wrong + await super()._close()

    # --- One run -------------------------------------------------------------------------------
    def _arm(self, faults: tuple[Fault, ...]) -> None:
        here = [fault for fault in faults if fault.function in self._called_only_here]
        self.faults.arm(*here)
        self._armed = [fault for fault in faults if fault not in here and fault.k]
        told = [(fault.function, fault.k, str(fault.outcome)) for fault in self._armed]
        self._met: list[Met] = []
        self._tell("arm", told, CANCELLED, CANCELLED_AT)

    def _submit(self, held: list[Command]) -> None:
        super()._submit(held)
        self._tell("release", sum(isinstance(command, AddRequest) for command in held))

    def _take(self, run: Run) -> None:
        super()._take(run)
        try:
            there: RunThere = self._tell("take")
        except (EOFError, OSError):  # the engine has failed, and its process is gone
            there = RunThere({}, [])
        else:
            self._called_only_here |= run.n_calls.keys() - there.n_calls.keys()
            self._called_only_here -= there.n_calls.keys()
        run.met += self._met
        run.n_calls |= there.n_calls
        run.wrong += there.unraisable

    def _n_open(self) -> Counter[str]:
        try:
            there = self._last_word if self._there is None else self._tell("n_open")
        except (EOFError, OSError):
            there = Counter()
        return self.faults.n_open + there

    def _tell(self, question: str, *arguments: Any) -> Any:
        """Send a question to the answering thread of `FaultyBackend`, and return its answer."""
        assert self._there is not None
        with suppress(OSError):  # the process is gone; its earlier messages can still be received
            self._there.send((question, arguments))
        answer = self._hear(self._there)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _hear(self, there: Connection) -> Any:
        """Return the next answer of the process; note the faults that it reports before that."""
        while isinstance(told := there.recv(), MetThere):
            fault = self._armed[told.place]
            self._met.append(Met(fault, told.owner, is_input=False))
        return told

    # --- What is to be so ----------------------------------------------------------------------
    def _is_because(self, error: object, cause: type[Exception]) -> bool:
        """Compare by name, too: a type that is not in `cllm.errors` arrives as a `CllmError` with its name."""
        return super()._is_because(error, cause) or str(error).startswith(f"{cause.__name__}: ")
