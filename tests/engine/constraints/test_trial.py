"""ConstraintTrial finds what a constraint does to llguidance, in a process that may end by it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from cllm import CllmError, ClosedError, InvalidRequestError
from cllm.engine import child_process
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraints import trial as trial_module
from cllm.engine.constraints.trial import FATAL, ConstraintTrial
from cllm.engine.file_content import FileContent, content_of
from cllm.engine.thread.mailbox import Outbox
from cllm.engine.thread.worker_thread import WorkerThreads
from tests.conftest import is_there
from tests.engine.constraints.llama_grammar import grammars_of
from tests.engine.constraints.test_gbnf import GOOD, chain

pytestmark = pytest.mark.one_loop

# llguidance counts to the multiple, and recurses along rules.
# Each divisor is small enough to be enforced, but llguidance follows both remainders at once.
SLOW = (
    "json_schema",
    '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}',
)
# It recurses until the stack is full.
OVERFLOWING = ("json_schema", '{"const": -9223372036854775807}')
# llama.cpp and the vocabulary allow no token behind the end: 257 ends every output.
DEAD_END = 'root ::= <[97]> <[98]> <[257]> "c"'


@pytest.fixture
async def trial(anyio_backend: str) -> AsyncIterator[ConstraintTrial]:
    """Of the embedded model."""
    workers = WorkerThreads()
    trial = ConstraintTrial(content_of(EMBEDDED_MODEL), workers)
    yield trial
    await trial.aclose()
    assert trial._child._process is None
    await anyio.to_thread.run_sync(workers.end)


async def verdict(trial: ConstraintTrial, text: str, field: str = "grammar") -> str | None:
    """Return what a constraint must have been, or None if it may be used."""
    with anyio.fail_after(30):
        try:
            await trial.run(field, text)
        except InvalidRequestError as error:
            return error.limit
    return None


class Asked:
    """Counts the requests to the process, and reports when one is about to be sent."""

    def __init__(self, trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.event = anyio.Event()
        self.pids: list[int] = []
        started = trial._child._started
        outbox: Outbox[None] = Outbox(lambda _: self.event.set())

        def counted(n_endings: int) -> subprocess.Popen[bytes]:
            process = started(n_endings)
            self.n += 1
            self.pids.append(process.pid)
            outbox.post(None)
            return process

        monkeypatch.setattr(trial._child, "_started", counted)


# --- Verdicts --------------------------------------------------------------------------------
@pytest.mark.anyio
async def test_good_grammars_pass_in_one_process(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(trial, monkeypatch)
    for name, text in GOOD.items():
        assert await verdict(trial, text) is None, name
    assert asked.n == len(GOOD)
    assert len(set(asked.pids)) == 1


@pytest.mark.anyio
async def test_the_grammars_of_llama_cpp_pass(
    trial: ConstraintTrial, llama_cpp_source: Path
) -> None:
    for name, text in grammars_of(llama_cpp_source).items():
        if name.endswith(".gbnf"):
            assert await verdict(trial, text) is None, name


@pytest.mark.anyio
async def test_a_chain_of_3000_rules_passes(trial: ConstraintTrial) -> None:
    assert await verdict(trial, chain(3000, "{next}")) is None


@pytest.mark.anyio
async def test_what_overflows_the_stack_is_refused_and_the_next_is_tried(
    trial: ConstraintTrial,
) -> None:
    field, text = OVERFLOWING
    assert await verdict(trial, text, field) == FATAL
    assert await verdict(trial, 'root ::= "ok"') is None


@pytest.mark.anyio
async def test_a_text_without_a_choice_that_is_too_long_is_refused(trial: ConstraintTrial) -> None:
    letters = "a" * 60_000
    assert await verdict(trial, f'root ::= "{letters[:10_000]}"') is None
    assert "can be followed" in (await verdict(trial, f'root ::= "{letters}"{{1000}}') or "")


@pytest.mark.anyio
async def test_a_grammar_that_no_token_goes_on_with_is_refused(trial: ConstraintTrial) -> None:
    assert "after 2 tokens no other may come" in (await verdict(trial, DEAD_END) or "")


@pytest.mark.full
@pytest.mark.anyio
async def test_what_takes_too_long_is_refused_and_the_next_is_tried(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, text = SLOW
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "TRIAL_S", 0.7)  # an endless call is not worth nine seconds
        refusal = await verdict(trial, text, field)
    assert (refusal or "").startswith("one that can be followed a while")
    assert await verdict(trial, 'root ::= "ok"') is None


@pytest.mark.full
@pytest.mark.anyio
async def test_a_constraint_that_takes_the_memory_is_fatal(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory is limited where /proc says how much is in use")
    monkeypatch.setattr(trial_module, "MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(trial_module, "TRIAL_S", 30.0)
    field, text = SLOW
    assert await verdict(trial, text, field) == FATAL
    assert await verdict(trial, 'root ::= "ok"') is None


@pytest.mark.anyio
async def test_a_verdict_is_remembered(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(trial, monkeypatch)
    for _ in range(3):
        assert await verdict(trial, 'root ::= "a"') is None
        assert await verdict(trial, "root ::= [z-a]")
    assert asked.n == 2
    field, text = OVERFLOWING
    for _ in range(2):  # perhaps it was not the constraint's fault: asked again
        assert await verdict(trial, text, field) == FATAL
    assert asked.n == 4


@pytest.mark.anyio
async def test_the_least_recently_used_verdict_is_forgotten(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "MAX_VERDICTS", 2)
    asked = Asked(trial, monkeypatch)
    for letter in "abaca":
        assert await verdict(trial, f'root ::= "{letter}"') is None
    assert asked.n == 3
    assert await verdict(trial, 'root ::= "b"') is None
    assert asked.n == 4


@pytest.mark.anyio
async def test_callers_with_the_same_grammar_wait_for_one_trial(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(trial, monkeypatch)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(trial.run, "grammar", 'root ::= "a"')
            group.start_soon(trial.run, "grammar", 'root ::= "b"')
    assert asked.n == 2


@pytest.mark.anyio
async def test_the_error_shows_how_the_grammar_begins(trial: ConstraintTrial) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar is 'root ::= .z-a.") as caught:
        await trial.run("grammar", "root ::= [z-a]" + " " * 1000)
    assert len(str(caught.value.value)) <= 60


# --- The process -----------------------------------------------------------------------------
@pytest.mark.anyio
async def test_a_cancelled_trial_ends_its_process_and_the_next_starts_another(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "TRIAL_S", 60.0)
    asked = Asked(trial, monkeypatch)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(trial.run, *SLOW)
            await asked.event.wait()
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert not is_there(asked.pids[0])
    assert await verdict(trial, 'root ::= "ok"') is None
    assert asked.pids[1] != asked.pids[0]


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_no_process(trial: ConstraintTrial) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await trial.run("grammar", 'root ::= "a"')
    with anyio.move_on_after(0):
        await trial.run("grammar", 'root ::= "a"')
    assert trial._child._process is None
    assert await verdict(trial, 'root ::= "a"') is None


@pytest.mark.anyio
async def test_a_process_that_was_killed_is_replaced(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(trial, monkeypatch)
    assert await verdict(trial, 'root ::= "a"') is None
    assert trial._child._process is not None
    os.kill(trial._child._process.pid, signal.SIGKILL)
    trial._child._process.wait()
    assert await verdict(trial, 'root ::= "b"') is None
    assert len(set(asked.pids)) == 2


@pytest.mark.anyio
async def test_closing_ends_a_trial_and_the_process(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "TRIAL_S", 60.0)
    asked = Asked(trial, monkeypatch)
    raised: list[Exception] = []

    async def run(field: str, text: str) -> None:
        try:
            await trial.run(field, text)
        except ClosedError as error:
            raised.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run, *SLOW)
            await asked.event.wait()
            group.start_soon(run, "grammar", 'root ::= "waits"')
            await anyio.wait_all_tasks_blocked()
            group.start_soon(trial.aclose)
            group.start_soon(trial.aclose)
    assert len(raised) == 2
    assert not is_there(asked.pids[0])
    with pytest.raises(ClosedError):
        await trial.run("grammar", 'root ::= "after"')


@pytest.mark.anyio
async def test_closing_during_the_start_ends_the_process(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_ready = trial._child._wait_until_ready

    def stop_and_wait(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)  # it gets no further
        wait_until_ready(process)

    monkeypatch.setattr(trial._child, "_wait_until_ready", stop_and_wait)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                with pytest.raises(ClosedError):
                    await trial.run("grammar", 'root ::= "a"')

            group.start_soon(run)
            while trial._child._process is None:
                await anyio.lowlevel.checkpoint()
            await trial.aclose()
    assert trial._child._process is None


@pytest.mark.anyio
@pytest.mark.parametrize("shield", [True, False])
async def test_closing_waits_for_the_end_in_a_cancelled_scope(
    trial: ConstraintTrial, shield: bool
) -> None:
    assert await verdict(trial, 'root ::= "a"') is None
    assert trial._child._process is not None
    pid = trial._child._process.pid
    with anyio.CancelScope() as scope:
        scope.cancel()
        with anyio.CancelScope(shield=shield):
            await trial.aclose()
            await trial.aclose()
    assert not is_there(pid)


@pytest.mark.anyio
async def test_closing_before_the_first_trial_does_nothing() -> None:
    trial = ConstraintTrial(content_of(EMBEDDED_MODEL), WorkerThreads())
    await trial.aclose()
    with pytest.raises(ClosedError):
        await trial.run("grammar", 'root ::= "a"')


@pytest.mark.full
@pytest.mark.anyio
async def test_a_process_that_cannot_start_is_no_fault_of_the_grammar(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def error_of(model: Path) -> str:
        workers = WorkerThreads()
        trial = ConstraintTrial(FileContent(str(model), "", 0, ()), workers)
        with pytest.raises(CllmError) as caught:
            await trial.run("grammar", 'root ::= "a"')
        assert not isinstance(caught.value, InvalidRequestError)
        assert trial._child._process is None
        await trial.aclose()
        await anyio.to_thread.run_sync(workers.end)
        return str(caught.value)

    path = tmp_path / "model.gguf"
    assert "No such file" in await error_of(path)
    path.write_bytes(b"GGUF")
    assert "cannot load" in await error_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(child_process, "START_S", 0.0)
        assert "not ready within 0 s" in await error_of(EMBEDDED_MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "HELPER", "cllm.no_such_module")
        assert "it ended" in await error_of(EMBEDDED_MODEL)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", str(tmp_path / "python"))
        assert "No such file" in await error_of(EMBEDDED_MODEL)
