"""ConstraintTrial finds what a grammar does to llama.cpp, in a process that may end by it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm import CllmError, ClosedError, InvalidRequestError
from cllm.bindings import Model
from cllm.engine import child_process
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraints import trial as trial_module
from cllm.engine.constraints.gbnf import check_gbnf
from cllm.engine.constraints.trial import FATAL, TOO_SLOW, ConstraintTrial
from cllm.engine.llama.trial_child import GrammarFollower
from cllm.engine.thread.mailbox import Outbox
from cllm.engine.thread.worker_thread import WorkerThreads
from tests.conftest import is_there, on_either_loop
from tests.engine.constraints.test_gbnf import (
    GOOD,
    HAZARDS,
    chain,
    llama_cpp_grammars,
    refusal,
    rules,
)

__all__ = ("llama_cpp_grammars",)  # a fixture

N_VOCAB = 260  # of the embedded model: every byte, and four that are none

# Seen neither by llama.cpp's parser nor in time: these reach it only past `check_gbnf`.
HANG = rules('root ::= ((("a"?){100}){100}){100}')
RAW = {
    "fewer at most than at least": 'root ::= "a"{5,2}',
    "50,000 brackets": "root ::= " + "(" * 50_000,
    "chain of 100,000": chain(100_000, "{next}"),
    "chain with two ways": chain(40, "{next} | {next}"),
    "empty parts multiplied": HANG,
    "left recursion behind what may be empty": HAZARDS["left recursion behind what may be empty"][
        0
    ],
    "character that no text has": r'root ::= "\x00"',
    "range downwards": "root ::= [z-a]",
    "token out of range": "root ::= <[99999999]>",
    "malformed": 'root ::= "a',
    "lone surrogate": 'root ::= "\ud800"',
}
# Nothing in the text shows what these do.
ACCEPTED_TEXTS = {
    "a stack for every path": (chain(17, '{next} "a" | {next} "b"'), TOO_SLOW),
    "unknown token": ("root ::= <nothing> | <nobody>", "GBNF that llama.cpp can read"),
    # llama.cpp allows a token that ends the output only at the end of the grammar.
    "dead end": ('root ::= <[97]> <[98]> <[257]> "c"', "after 2 tokens no other"),
}


@pytest.fixture
async def trial(anyio_backend: str) -> AsyncIterator[ConstraintTrial]:
    """Of the embedded model."""
    workers = WorkerThreads()
    trial = ConstraintTrial(str(EMBEDDED_MODEL), workers)
    yield trial
    await trial.aclose()
    assert trial._child._process is None
    await anyio.to_thread.run_sync(workers.end)


@pytest.fixture
def follower() -> Iterator[GrammarFollower]:
    """What the process does, in this one."""
    with Model(EMBEDDED_MODEL, vocab_only=True) as model:
        yield GrammarFollower(model.vocab)


async def verdict(trial: ConstraintTrial, text: str) -> str | None:
    """What a grammar should have been, or None if it may be used."""
    with anyio.fail_after(30):
        try:
            await trial.run(text)
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
    trial: ConstraintTrial, llama_cpp_grammars: list[str]
) -> None:
    for text in llama_cpp_grammars:
        assert await verdict(trial, text) is None


@pytest.mark.full
@pytest.mark.anyio
@on_either_loop("name", RAW)
async def test_what_llama_cpp_cannot_stand_is_refused_and_the_next_is_tried(
    trial: ConstraintTrial, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "TRIAL_S", 0.7)  # an endless call is not worth two seconds
        assert await verdict(trial, RAW[name])
    assert await verdict(trial, 'root ::= "ok"') is None


@pytest.mark.full
@pytest.mark.anyio
async def test_what_no_text_shows_is_refused_and_the_next_is_tried(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "TRIAL_S", 2.0)  # to tell a text that goes on takes all
    for name, (text, limit) in ACCEPTED_TEXTS.items():
        check_gbnf(text, N_VOCAB)
        assert limit in (await verdict(trial, text) or "accepted"), name
        assert await verdict(trial, f'root ::= "{name}"') is None


@pytest.mark.full
@pytest.mark.anyio
async def test_a_grammar_that_takes_the_memory_is_fatal(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory is limited where /proc says how much is in use")
    monkeypatch.setattr(trial_module, "MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(trial_module, "TRIAL_S", 30.0)
    # While rules are read llama.cpp tells, where stacks grow the process ends.
    text, _ = ACCEPTED_TEXTS["a stack for every path"]
    assert await verdict(trial, text) == FATAL
    assert await verdict(trial, 'root ::= "ok"') is None


@pytest.mark.anyio
async def test_a_verdict_is_remembered(
    trial: ConstraintTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(trial, monkeypatch)
    for _ in range(3):
        assert await verdict(trial, 'root ::= "a"') is None
        assert await verdict(trial, RAW["range downwards"])
    assert asked.n == 2
    for _ in range(2):  # perhaps it was not the grammar's fault: asked again
        assert await verdict(trial, RAW["50,000 brackets"]) == FATAL
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
            group.start_soon(trial.run, 'root ::= "a"')
            group.start_soon(trial.run, 'root ::= "b"')
    assert asked.n == 2


@pytest.mark.anyio
async def test_the_error_shows_how_the_grammar_begins(trial: ConstraintTrial) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar is 'root ::= .z-a.") as caught:
        await trial.run("root ::= [z-a]" + " " * 1000)
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
            group.start_soon(trial.run, HANG)
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
        await trial.run('root ::= "a"')
    with anyio.move_on_after(0):
        await trial.run('root ::= "a"')
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

    async def run(text: str) -> None:
        try:
            await trial.run(text)
        except ClosedError as error:
            raised.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run, HANG)
            await asked.event.wait()
            group.start_soon(run, 'root ::= "waits"')
            await anyio.wait_all_tasks_blocked()
            group.start_soon(trial.aclose)
            group.start_soon(trial.aclose)
    assert len(raised) == 2
    assert not is_there(asked.pids[0])
    with pytest.raises(ClosedError):
        await trial.run('root ::= "after"')


@pytest.mark.anyio
async def test_closing_during_the_start_ends_the_process(trial: ConstraintTrial) -> None:
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                with pytest.raises(ClosedError):
                    await trial.run('root ::= "a"')

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
    trial = ConstraintTrial(str(EMBEDDED_MODEL), WorkerThreads())
    await trial.aclose()
    with pytest.raises(ClosedError):
        await trial.run('root ::= "a"')


@pytest.mark.full
@pytest.mark.anyio
async def test_a_process_that_cannot_start_is_no_fault_of_the_grammar(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def error_of(model: Path) -> str:
        workers = WorkerThreads()
        trial = ConstraintTrial(str(model), workers)
        with pytest.raises(CllmError) as caught:
            await trial.run('root ::= "a"')
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


# --- What is tried ---------------------------------------------------------------------------
def test_a_step_that_takes_long_is_refused(follower: GrammarFollower) -> None:
    assert follower.fault("grammar", "root ::= .*") is None
    follower._step_s = 0.0
    assert "faster to follow" in (follower.fault("grammar", "root ::= .*") or "")


def test_a_grammar_is_followed_the_same_way_every_time(
    follower: GrammarFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cllm.bindings import Grammar

    walks: list[list[int]] = []
    accept = Grammar.accept

    def recorded(grammar: Grammar, token: int) -> None:
        walks[-1].append(token)
        accept(grammar, token)

    monkeypatch.setattr(Grammar, "accept", recorded)
    for _ in range(2):
        walks.append([])
        assert follower.fault("grammar", "root ::= [a-z]{8} [0-9]+") is None
    assert walks[0] == walks[1]
    assert len(walks[0]) == 32
    assert bytes(walks[0][:8]).isalpha()


def test_the_end_of_the_output_is_no_dead_end(follower: GrammarFollower) -> None:
    assert follower.fault("grammar", 'root ::= "abc"') is None
    assert follower.fault("grammar", "root ::=") is None


NAMES = ["root", "x", "y", "z"]
ATOMS = ['"a"', '"ab"', "[a-z]", "[^a]", ".", "[0-9]", '"é"', "[α-ω]", '("(" root ")")', '"b"?']
REPETITIONS = ["", "", "", "", "*", "+", "?", "{2}", "{0,3}", "{1,}", "{1,60}", "{0,900}"]


def definitions(name: str) -> st.SearchStrategy[str]:
    """A rule that refers to later ones, and to root behind a bracket: much of it is accepted."""
    later = NAMES[NAMES.index(name) + 1 :]
    parts = st.sampled_from([*ATOMS, *later, *later])
    group = st.lists(parts, min_size=1, max_size=3).map(lambda items: f"({' | '.join(items)})")
    repeated = st.builds(str.__add__, parts | group, st.sampled_from(REPETITIONS))
    sequence = st.lists(repeated, min_size=1, max_size=3).map(" ".join)
    alternatives = st.lists(sequence, min_size=1, max_size=3).map(" | ".join)
    return alternatives.map(f"{name} ::= {{}}".format)


GRAMMARS = st.tuples(*map(definitions, NAMES)).map("\n".join)


@pytest.mark.full
@pytest.mark.anyio
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(text=GRAMMARS.filter(lambda text: refusal(text) is None))
async def test_what_is_accepted_neither_hangs_nor_ends_llama_cpp(
    trial: ConstraintTrial, text: str
) -> None:
    outcome: Any = await verdict(trial, text)
    assert outcome is None or "no other may come" in outcome or "faster" in outcome
