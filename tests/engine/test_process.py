"""An engine whose llama.cpp runs in a process of its own: what ends that costs a pause."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from cllm import (
    CllmError,
    Completion,
    DeadlineError,
    EmbeddingError,
    Engine,
    EngineFailedError,
    FinishReason,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
    Restart,
    RpcServerError,
    TokenDelta,
)
from cllm.engine.child_process import child_environment
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.core.commands import Progressed, Stopped
from cllm.engine.process import engine_process, spawn
from cllm.engine.process.crash_report import last_crash
from cllm.engine.process.engine_process import EngineProcess
from cllm.engine.process.frames import Frame, packets
from cllm.engine.process.wire import encode_events
from tests.conftest import IS_SANITIZED, QUIET, some_in_fast
from tests.engine.samplings import SAMPLINGS, SCHEMA
from tests.lora_files import make_lora

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

EXACT: dict[str, Any] = {
    "deterministic": True, "n_ctx": 4096, "n_seq_max": 8, "process": True, **QUIET,
}  # fmt: skip


PROMPT = "count:1..30"


def process_of(engine: Engine) -> EngineProcess:
    process = engine._parts.thread
    assert isinstance(process, EngineProcess)
    return process


def send(engine: Engine, number: signal.Signals) -> None:
    pid = process_of(engine).pid
    assert pid is not None
    os.kill(pid, number)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(**EXACT) as engine:
        yield engine


@pytest.mark.parametrize("begins", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_process_that_does_not_end_is_killed_in_the_end(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "END_S", 0.5)
    async with Engine(**EXACT, hang_timeout_s=None) as engine:
        if begins:
            await engine.generate("1+1=", max_tokens=1)
        send(engine, signal.SIGSTOP)
        with anyio.fail_after(20):
            await engine.aclose()


async def read(
    engine: Engine, on_token: Callable[[int], None] = lambda _: None, **options: Any
) -> tuple[list[int], str, Completion]:
    ids: list[int] = []
    text = ""
    async with engine.stream(PROMPT, **options) as stream:
        async for delta in stream:
            ids += delta.token_ids
            text += delta.text
            on_token(len(ids))
        return ids, text, await stream.completion()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(
            signal.SIGSEGV,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(
                    IS_SANITIZED,
                    reason="AddressSanitizer reports a SIGSEGV and aborts",
                ),
            ],
        ),
        pytest.param(signal.SIGABRT, marks=pytest.mark.full),
    ],
)
async def test_every_stream_goes_on_with_the_same_tokens_when_the_process_is_killed(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    restarts: list[Restart] = []
    async with Engine(on_restart=restarts.append, stream_buffer=8, **EXACT) as engine:
        await check_that_all_goes_on(engine, number)
        (restart,) = restarts
    assert number.name in restart.cause
    assert 0 < restart.n_requests <= len(SAMPLINGS)
    assert restart.duration_s > 0
    assert "started again" in caplog.text
    assert "serves again" in caplog.text
    assert (report := last_crash()) is not None
    assert (report.cause, report.n_requests) == (restart.cause, restart.n_requests)


async def check_that_all_goes_on(engine: Engine, number: signal.Signals) -> None:
    options = [{"max_tokens": 24, "logprobs": 1, **s} for s in SAMPLINGS.values()]
    wholes = [await engine.generate(PROMPT, **o) for o in options]

    n_heard = 0

    def kill_once(_: int) -> None:
        nonlocal n_heard
        n_heard += 1
        if n_heard == 60:
            send(engine, number)

    found: list[tuple[list[int], str, Completion] | None] = [None] * len(options)

    async def run(i: int) -> None:
        found[i] = await read(engine, kill_once, **options[i])

    async with anyio.create_task_group() as tasks:
        for i in range(len(options)):
            tasks.start_soon(run, i)
    for whole, other in zip(wholes, found, strict=True):
        assert other is not None
        ids, text, completion = other
        assert tuple(ids) == completion.token_ids == whole.token_ids
        assert text == completion.text == whole.text
        assert completion.logprobs == whole.logprobs
        assert completion.finish_reason == whole.finish_reason
        assert completion.prompt_token_ids == whole.prompt_token_ids
        assert completion.usage.n_output == whole.usage.n_output
    assert await engine.audit() == []
    told = engine.statistics()
    assert told.n_restarts == 1
    assert told.n_kv_cells_used == told.n_running == told.n_waiting == 0
    assert engine.health().status == "ready"


async def test_an_answer_without_a_seed_goes_on_with_its_own_draws() -> None:
    async with Engine(stream_buffer=4, **EXACT) as engine:
        ids, text, completion = await read(
            engine,
            lambda n: send(engine, signal.SIGKILL) if n == 9 else None,
            temperature=1.5,
            max_tokens=40,
            ignore_eos=True,
        )
        assert len(ids) == 40
        assert tuple(ids) == completion.token_ids
        assert text == completion.text
        assert completion.timings.ttft_s is not None
        assert completion.timings.itl_max_s is not None
        assert engine.statistics().n_output_tokens >= 40
        assert engine.statistics().n_restarts == 1


async def test_a_process_that_stands_still_is_killed_and_replaced() -> None:
    async with Engine(**EXACT, hang_timeout_s=5.0, stream_buffer=4) as engine:
        whole = await engine.generate(PROMPT, temperature=0, max_tokens=40)
        n_crashes: list[int] = []

        def stop_once(n: int) -> None:
            if n == 5:
                send(engine, signal.SIGSTOP)
            n_crashes.extend(known.n_crashes for known in process_of(engine)._ledger.requests)

        ids, _, _ = await read(engine, stop_once, temperature=0, max_tokens=40)
        assert tuple(ids) == whole.token_ids
        assert engine.statistics().n_restarts >= 1
        assert set(n_crashes) == {0}, "it stood still by somebody's hand: no request is to blame"


@pytest.mark.full
async def test_a_busy_event_loop_is_no_hang_and_the_thread_reads_meanwhile() -> None:
    async with Engine(**EXACT, hang_timeout_s=1.0) as engine, anyio.create_task_group() as tasks:
        process = process_of(engine)
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
        whole = await engine.generate(PROMPT, **options)
        ids: tuple[int, ...] = ()

        async def again() -> None:
            nonlocal ids
            ids = (await engine.generate(PROMPT, **options)).token_ids

        tasks.start_soon(again)
        while engine.statistics().n_output_tokens == 200:
            await anyio.sleep(0)
        # The thread leaves reading to the loop each time, and takes it back when the loop does not.
        n_offers, deadline = process._n_offers, time.monotonic() + 60
        while process._n_offers < n_offers + 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # the loop is busy
        assert process._n_offers >= n_offers + 2
    assert ids == whole.token_ids
    assert engine.statistics().n_restarts == 0


async def test_closing_does_not_wait_for_a_loop_that_reads_nothing() -> None:
    """As an exit handler would find it, which runs when there is no loop any more."""
    async with Engine(**EXACT) as engine:
        process = process_of(engine)
        process.request_stop()
        process.join(60)
        assert not process.is_alive


async def test_an_idle_process_that_was_killed_is_there_for_the_next_request(
    engine: Engine,
) -> None:
    first = await engine.generate("1+1=", temperature=0)
    send(engine, signal.SIGKILL)
    assert (await engine.generate("1+1=", temperature=0)).text == first.text


async def test_a_process_whose_main_thread_fails_is_replaced_like_one_that_was_killed(
    engine: Engine,
) -> None:
    whole = await engine.generate(PROMPT, temperature=0)
    async with engine.stream(PROMPT, temperature=0) as stream:
        await anext(stream)
        connection = process_of(engine)._process
        assert connection is not None
        connection.socket.sendall(b"".join(packets((b"no message",), is_bulky=False)))
        completion = await stream.completion()
    assert completion.token_ids == whole.token_ids
    assert engine.statistics().n_restarts == 1


class Poisonous(Engine):
    _child_backend = "tests.engine.process.poisonous:PoisonousBackend"


async def test_who_crashes_llama_cpp_alone_ends_and_nobody_else_hears_of_it() -> None:
    prompts = [f"{i}+1=" for i in range(7)] * 7
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    async with Poisonous(**EXACT) as engine:
        wholes = await engine.generate_all(prompts, **options)
        found = await engine.generate_all(
            [*prompts[:13], "poison ~", *prompts[13:]], return_exceptions=True, **options
        )
        failed = found.pop(13)
        assert isinstance(failed, GenerationError)
        assert "SIGABRT" in str(failed)
        assert "GGML_ASSERT(token != poison) failed" in str(failed.__cause__)
        assert failed.completion is not None
        assert failed.completion.token_ids == ()
        assert [c.token_ids for c in found] == [c.token_ids for c in wholes]
        assert engine.statistics().n_restarts <= 3
        assert engine.statistics().n_finished[FinishReason.ERROR] == 1
        assert await engine.audit() == []


async def test_texts_survive_a_crash_and_the_one_that_crashes_it_ends_alone() -> None:
    texts = [f"text {i}" for i in range(40)]
    async with Poisonous(pooling="mean", **EXACT) as engine:
        wholes = await engine.embed(texts)
        answer = await engine.generate("count:1..9", temperature=0)
        found: list[object] = []

        async def ask() -> None:
            found.append((await engine.generate("count:1..9", temperature=0)).token_ids)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(_into, found, engine.embed(texts))
            with pytest.raises(EmbeddingError, match="SIGABRT") as caught:
                await engine.embed(["fine", "poison ~"])
        assert "GGML_ASSERT(text != poison) failed" in str(caught.value.__cause__)
        (vectors,) = [each for each in found if isinstance(each, np.ndarray)]
        np.testing.assert_allclose((vectors * wholes).sum(axis=1), 1.0, atol=1e-3)
        assert [each for each in found if isinstance(each, tuple)] == [answer.token_ids]
        assert 1 <= engine.statistics().n_restarts <= 3
        assert await engine.audit() == []


async def _into(found: list[object], call: Awaitable[object]) -> None:
    found.append(await call)


async def test_a_process_that_takes_over_has_the_adapters_that_were_loaded(tmp_path: Path) -> None:
    path = make_lora(tmp_path / "a.gguf", EMBEDDED_MODEL, seed=1)

    engine = Engine(n_ctx=1024, n_seq_max=4, process=True, n_threads=1)

    async def score(**options: Any) -> float:
        return (await engine.score("count:1..9", "1 2 3 4 5", **options)).total

    async with engine:
        plain = await score()
        await engine.load_lora("a", path)
        adapted = await score(lora={"a": 1.0})
        assert abs(adapted - plain) > 0.1
        async with engine.stream(
            "1+1=", lora={"a": 1.0}, max_tokens=200, ignore_eos=True
        ) as stream:
            await anext(stream)
            send(engine, signal.SIGKILL)
            assert (await stream.completion()).usage.n_output == 200
        assert engine.statistics().n_restarts == 1
        assert [lora.name for lora in engine.model.loras] == ["a"]
        assert await score(lora={"a": 1.0}) == pytest.approx(adapted, abs=0.01)
        await engine.unload_lora("a")
        send(engine, signal.SIGKILL)
        assert await score() == pytest.approx(plain, abs=0.01)
        with pytest.raises(InvalidRequestError, match="none is loaded"):
            await score(lora={"a": 1.0})


async def test_texts_that_an_idle_process_was_given_are_computed_by_the_next_one() -> None:
    async with Engine(pooling="mean", **EXACT) as engine:
        first = await engine.embed(["one", "two"])
        send(engine, signal.SIGKILL)
        again = await engine.embed(["one", "two"])
        np.testing.assert_allclose((first * again).sum(axis=1), 1.0, atol=1e-4)


class DamagedFile(Engine):
    _child_backend = "tests.engine.process.poisonous:AbortsAtLoad"


async def test_a_file_that_ends_the_process_that_loads_it_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match=r"SIGABRT.*file is whole") as caught:
        async with DamagedFile(**EXACT):
            raise AssertionError("loaded")
    assert caught.value.path.endswith(".gguf")


async def test_a_missing_file_is_the_same_error_as_without(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"missing\.gguf"):
        async with Engine(tmp_path / "missing.gguf", process=True):
            raise AssertionError("loaded")


@pytest.mark.parametrize(
    "number", some_in_fast([errno.EMFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC], 4)
)
async def test_a_process_that_there_is_no_room_for_is_started_later(
    engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "RETRY_S", (0.01,) * 4)
    failures = [OSError(number, os.strerror(number))] * 4

    def spawned() -> spawn.Spawned:
        if failures:
            raise failures.pop()
        return spawn.Spawned()

    monkeypatch.setattr(spawn, "spawned", spawned)
    send(engine, signal.SIGKILL)
    assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert not failures
    assert engine.statistics().n_restarts == 1


async def test_a_request_that_comes_while_no_process_can_be_started_is_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed = threading.Event()

    def spawned() -> spawn.Spawned:
        if not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return spawn.Spawned()

    monkeypatch.setattr(engine_process, "RETRY_S", (0.5,))
    monkeypatch.setattr(spawn, "spawned", spawned)
    send(engine, signal.SIGKILL)
    await anyio.to_thread.run_sync(has_failed.wait, 30)
    with anyio.fail_after(30):
        assert (await engine.generate("1+1=", temperature=0)).text == "2"


LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}


async def kill_for_good(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the engine's process, and wait until another one could not be started; it is not tried again for long."""
    has_failed = threading.Event()

    def spawned() -> spawn.Spawned:
        has_failed.set()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(engine_process, "RETRY_S", (600.0,))
    monkeypatch.setattr(spawn, "spawned", spawned)
    send(engine, signal.SIGKILL)
    await anyio.to_thread.run_sync(has_failed.wait, 30)


async def check_that_limits_are_kept(engine: Engine) -> None:
    """Call deadlines, cancels and a drain while no process serves."""
    with anyio.fail_after(30):
        completion = await engine.generate(PROMPT, timeout=0.05)
        assert (completion.finish_reason, completion.token_ids) == ("deadline", ())
        with pytest.raises(DeadlineError):
            await engine.embed(["text"], timeout=0.05)
        with pytest.raises(DeadlineError):
            await engine.score("1+1=", "2", timeout=0.05)
        async with engine.stream(PROMPT) as stream:
            await stream.cancel()
            assert (await stream.completion()).finish_reason == "cancelled"


async def test_limits_are_kept_while_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        Engine(pooling="mean", **EXACT) as engine,
        engine.stream(PROMPT, **LONG) as stream,
    ):
        first = await anext(stream)
        await kill_for_good(engine, monkeypatch)
        await check_that_limits_are_kept(engine)
        with anyio.fail_after(30):
            await engine.drain(0.05)
        completion = await stream.completion()
        assert completion.finish_reason == "cancelled"
        assert completion.token_ids[:1] == first.token_ids
        n_finished = engine.statistics().n_finished
        assert n_finished[FinishReason.CANCELLED] == 2
        assert n_finished[FinishReason.DEADLINE] == 2


class Late(Engine):
    _child_backend = "tests.engine.process.poisonous:LoadsAgainWhenLet"


async def test_limits_are_kept_while_the_model_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("CLLM_TEST_MARKS", str(gate))
    async with (
        Late(pooling="mean", **EXACT) as engine,
        engine.stream(PROMPT, **LONG) as stream,
    ):
        first = await anext(stream)
        os.mkfifo(gate)
        send(engine, signal.SIGKILL)
        # The next process opens it, too.
        opened = await anyio.to_thread.run_sync(partial(gate.open, "w"))
        with opened:
            await check_that_limits_are_kept(engine)
        gate.unlink()
        completion = await stream.completion()
        assert completion.finish_reason == "length"
        assert completion.token_ids[:1] == first.token_ids
        assert engine.statistics().n_restarts == 1
        assert await engine.audit() == []


@pytest.mark.full
async def test_limits_are_kept_while_the_process_stands_still() -> None:
    async with (
        Engine(pooling="mean", **EXACT) as engine,
        engine.stream(PROMPT, **LONG) as stream,
    ):
        whole = await engine.generate(PROMPT, temperature=0)
        await anext(stream)
        send(engine, signal.SIGSTOP)
        await check_that_limits_are_kept(engine)
        send(engine, signal.SIGCONT)
        assert (await engine.generate(PROMPT, temperature=0)).token_ids == whole.token_ids
        assert (await stream.completion()).finish_reason == "length"
        assert engine.statistics().n_restarts == 0
        assert await engine.audit() == []


@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_a_reset_of_the_prefix_cache_that_meets_a_crash_is_done_by_the_next_process(
    tmp_path: Path, *, is_late: bool
) -> None:
    """The reset comes before the engine knows of the crash, or after."""
    options = {**EXACT, "prefix_cache_dir": tmp_path}
    prompt = "one two three " * 20
    async with Engine(**options) as engine:
        await engine.generate(prompt, max_tokens=1)
    assert list(tmp_path.glob("*/*.prefix"))
    async with Engine(**options) as engine:
        send(engine, signal.SIGSTOP)
        process = process_of(engine)
        async with anyio.create_task_group() as tasks:
            if not is_late:
                tasks.start_soon(engine.reset_prefix_cache)
                await anyio.wait_all_tasks_blocked()
            send(engine, signal.SIGKILL)
            if is_late:
                while process.statistics.n_restarts == 0:
                    await anyio.sleep(0)
                tasks.start_soon(engine.reset_prefix_cache)
        assert not list(tmp_path.glob("*/*.prefix"))
        assert (await engine.generate(prompt, max_tokens=1)).usage.n_cached == 0


async def test_a_start_that_has_waited_for_a_server_in_vain_is_not_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_starts = 0

    def spawned() -> spawn.Spawned:
        nonlocal n_starts
        n_starts += 1
        raise RpcServerError("10.0.0.2:50052", "it does not answer")

    monkeypatch.setattr(spawn, "spawned", spawned)
    send(engine, signal.SIGKILL)
    with pytest.raises(EngineFailedError) as caught:
        await engine.generate("1+1=", temperature=0)
    assert isinstance(caught.value.__cause__, RpcServerError)
    assert n_starts == 1


async def test_an_engine_whose_process_cannot_be_started_fails_in_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawned() -> spawn.Spawned:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(engine_process, "RETRY_S", (0.01,) * 2)
    monkeypatch.setattr(spawn, "spawned", spawned)
    send(engine, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="too many open files"):
        await engine.generate("1+1=", temperature=0)


@pytest.mark.parametrize("is_loop", [True, False])
async def test_a_token_that_is_read_together_with_a_failure_comes_before_it(
    *, is_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop reads both, or the thread."""
    if not is_loop:
        monkeypatch.setattr(EngineProcess, "_offer", lambda self, process: None)
    async with (
        Engine(**EXACT, stream_buffer=1) as engine,
        engine.stream(PROMPT, **LONG) as stream,
    ):
        ids = [*(await anext(stream)).token_ids]
        while not stream._present.unread:  # then the process pauses
            await anyio.sleep(0)
        handle = process_of(engine)._process
        assert handle is not None
        frames = handle.frames
        last = Progressed(stream.request_id, TokenDelta("last", (7,)))
        script = [encode_events([last]), encode_events([Stopped(CllmError("a disk is gone"))])]

        def scripted() -> list[Frame] | None:
            found = frames()
            if found and not script:
                return []  # this process goes on, but one that has failed sends nothing
            if found:  # a sign of life
                found += script
                script.clear()
            return found

        monkeypatch.setattr(handle, "frames", scripted)
        while script:
            await anyio.sleep(0)
        for _ in range(2):
            ids += (await anext(stream)).token_ids
        assert ids[2] == 7
        assert (await anext(stream)).finish_reason == "error"
        with pytest.raises(EngineFailedError, match="a disk is gone") as caught:
            await anext(stream)
        assert caught.value.completion is not None
        assert list(caught.value.completion.token_ids) == ids


class Unsteady(Engine):
    _child_backend = "tests.engine.process.poisonous:LoadsNotAtOnce"


async def test_a_process_that_fails_to_load_what_was_loaded_before_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLLM_TEST_MARKS", str(tmp_path / "marks"))
    monkeypatch.setattr(engine_process, "RETRY_S", (0.01,) * 2)
    async with Unsteady(**EXACT) as engine:
        send(engine, signal.SIGKILL)
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
        assert engine.statistics().n_restarts == 1


class Hopeless(Engine):
    _child_backend = "tests.engine.process.poisonous:AbortsAlways"


@pytest.mark.full
async def test_a_process_that_always_ends_ends_the_requests_and_then_the_engine() -> None:
    async with Hopeless(**EXACT) as engine:
        errors: list[BaseException] = []

        async def ask() -> None:
            try:
                await engine.generate("1+1=")
            except (GenerationError, EngineFailedError) as error:
                errors.append(error)

        with anyio.fail_after(250):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
        assert len(errors) == 3
        assert all("SIGKILL" in str(error) for error in errors)


async def test_without_msgspec_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cllm.engine.process.engine_process", None)
    with pytest.raises(InvalidArgumentError, match=r"process.*cllm\[process\]"):
        async with Engine(**EXACT):
            raise AssertionError("started")


async def test_the_engine_looks_as_it_does_without(engine: Engine) -> None:
    told = engine.statistics()
    assert (told.n_kv_cells, told.n_restarts) == (4096, 0)
    assert engine.health().status == "ready"
    assert {slot.state for slot in await engine.slots()} == {"free"}
    async with Engine(**{**EXACT, "process": False}) as other:
        assert other.model == engine.model
        assert await other.tokenize(PROMPT) == await engine.tokenize(PROMPT)


async def test_constraints_are_refused_here_and_obeyed_there(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate("x", regex="(")
    assert caught.value.field == "regex"
    told = await engine.generate("x", json_schema=SCHEMA, seed=3, max_tokens=100)
    assert told.text.startswith("{")
    again = await engine.generate("x", regex="[0-9]{3}", seed=3, max_tokens=10)
    assert again.text.isdigit()


async def test_a_request_that_waits_for_its_constraint_can_be_cancelled(engine: Engine) -> None:
    stream = engine.stream("x", regex="[a-f]{500}", max_tokens=400)
    async with stream:
        await stream.cancel()
        completion = await stream.completion()
    assert completion.finish_reason == "cancelled"
    assert (await engine.generate("1+1=", temperature=0)).text == "2"


async def test_closing_ends_the_process_while_streams_run() -> None:
    async with Engine(**EXACT) as engine:
        pid = process_of(engine).pid
        stream = engine.stream(PROMPT, max_tokens=1000, ignore_eos=True)
        await anext(aiter(stream))
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class NeverCompiled(Engine):
    _child_backend = "tests.engine.process.poisonous:CompilesForEver"


async def test_closing_cancels_requests_whose_constraints_are_being_compiled() -> None:
    async with NeverCompiled(**EXACT) as engine, AsyncExitStack() as entered:
        streams = [
            await entered.enter_async_context(engine.stream(PROMPT, **options))
            for options in ({"regex": "[a-f]{5}"}, {"regex": "[0-9]{5}"}, LONG)
        ]
        await anext(streams[-1])
        await engine.aclose()
        for stream in streams:
            assert (await stream.completion()).finish_reason == "cancelled"


async def test_closing_while_no_process_serves_cancels_requests_and_keeps_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engine(pooling="mean", **EXACT) as engine, engine.stream(PROMPT, **LONG) as stream:
        first = await anext(stream)
        await kill_for_good(engine, monkeypatch)
        async with engine.stream(PROMPT) as other, anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_cancelled, engine.embed(["text"]))
            with anyio.fail_after(30):
                while not engine._parts.dispatcher._embeddings:
                    await anyio.sleep(0)
                await engine.aclose()
            assert (await other.completion()).finish_reason == "cancelled"
        completion = await stream.completion()
        assert completion.finish_reason == "cancelled"
        assert completion.token_ids[:1] == first.token_ids


async def _expect_cancelled(call: Awaitable[object]) -> None:
    with pytest.raises(EmbeddingError, match="cancelled"):
        await call


async def test_a_dropped_engine_ends_its_process() -> None:
    engines = [Engine(**EXACT)]
    await engines[0].__aenter__()
    process = process_of(engines[0])

    def forget() -> None:
        engines.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        forget()
    await anyio.to_thread.run_sync(process.join, 50)
    assert not process.is_alive


def test_without_its_parent_the_process_ends() -> None:
    program = """
        import anyio, os, signal, sys
        import cllm

        async def main():
            async with cllm.Engine(process=True, n_threads=1) as engine:
                print(engine._parts.thread.pid, flush=True)
                async with engine.stream("count:1..30", max_tokens=3000, ignore_eos=True) as stream:
                    async for delta in stream:
                        pass
                await anyio.sleep(60)

        anyio.run(main)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env=child_environment(),
        process_group=0,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        process = os.pidfd_open(pid)
    finally:
        parent.kill()
        parent.communicate()
    ended, _, _ = select.select([process], [], [], 50)
    os.close(process)
    assert ended


@pytest.mark.full
def test_a_fork_can_do_nothing_to_the_streams_of_its_parent() -> None:
    program = """
        import anyio, os
        import cllm

        async def main():
            async with cllm.Engine(process=True, n_threads=1) as engine:
                async with engine.stream("count:1..60", temperature=0) as stream:
                    await anext(stream)
                    if not (pid := os.fork()):
                        stream._channel.cancel()
                        engine._parts.thread.request_stop()
                        os._exit(0)
                    os.waitpid(pid, 0)
                    assert (await stream.completion()).text.endswith("59 60")

        anyio.run(main)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=child_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
