"""A model is replaced while requests run: each is answered by the one that had it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from cllm import (
    ClosedError,
    Engine,
    InvalidArgumentError,
    ModelLoadError,
)
from cllm.engine.parts import Parts
from cllm.testing import FakeEngine
from tests.conftest import QUIET

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

OPTIONS: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 4, **QUIET}
LONG = "count:1..199"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def test_a_ranking_by_yes_and_no_ends_with_the_model_that_it_began_with() -> None:
    """The second model has no room for the prompts of the first, and its queue is another."""
    documents = ["d" * 300 + str(n) for n in range(12)]
    template = "Is {document} about {query}? "
    async with FakeEngine(n_ctx=1024, n_seq_max=2, max_queue=0) as engine:
        expected = await engine.rerank("q", documents, template=template)
        ranked: list[Any] = []

        async def rank() -> None:
            ranked.extend(await engine.rerank("q", documents, template=template))

        async with anyio.create_task_group() as group:
            group.start_soon(rank)
            await anyio.wait_all_tasks_blocked()
            await engine.reload(n_ctx=128)
        assert ranked == expected


@pytest.fixture(params=[False, True], ids=["thread", "process"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with Engine(process=request.param, **OPTIONS) as engine:
        yield engine


async def test_who_runs_ends_with_the_old_model_and_who_comes_has_the_new_one(
    engine: Engine,
) -> None:
    whole = await engine.generate(LONG, max_tokens=400, **GREEDY)
    old = engine._parts
    has_returned = anyio.Event()

    async def reload() -> None:
        await engine.reload(n_ctx=2048)
        has_returned.set()

    async with (
        anyio.create_task_group() as tasks,
        engine.stream(LONG, max_tokens=400, **GREEDY) as stream,
    ):
        await anext(stream)
        later = engine.stream("1+1=", temperature=0)  # submitted after
        tasks.start_soon(reload)
        while engine._parts is old:  # it is loaded: the old one answers, be it slowly read
            assert (await engine.generate("2+2=", temperature=0)).text == "4"
        assert not has_returned.is_set()
        assert engine.model.n_ctx == engine.config.n_ctx == 2048
        assert (await engine.generate("1+2=", temperature=0)).text == "3"
        assert (await later.completion()).text == "2"
        assert engine._parts.thread.is_alive
        assert old.thread.is_alive
        completion = await stream.completion()
        await has_returned.wait()
    assert completion.token_ids == whole.token_ids
    assert not old.thread.is_alive
    assert engine._started == [engine._parts]
    assert await engine.audit() == []


async def test_what_was_counted_is_counted_on(engine: Engine) -> None:
    await engine.generate_all(["1+1=", "2+2="], temperature=0)
    before = engine.statistics()
    await engine.reload(n_ctx=2048)
    between = engine.statistics()
    await engine.generate("3+3=", temperature=0)
    after = engine.statistics()
    assert between.n_finished == before.n_finished
    assert sum(after.n_finished.values()) == 3
    assert after.n_output_tokens > between.n_output_tokens == before.n_output_tokens
    assert (before.n_kv_cells, after.n_kv_cells) == (4096, 2048)


async def test_a_file_that_cannot_be_loaded_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    present, config = engine._parts, engine.config
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(64))
    async with engine.stream(LONG, max_tokens=300, **GREEDY) as stream:
        for path in (damaged, tmp_path / "missing.gguf"):
            with pytest.raises(ModelLoadError, match=path.name):
                await engine.reload(path)
        assert (engine._parts, engine.config, engine._started) == (present, config, [present])
        assert len((await stream.completion()).token_ids) == 300
    await engine.reload()


async def test_what_does_not_fit_beside_the_present_one_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda: 4 << 20)
    with pytest.raises(
        ModelLoadError, match=r"needs at least 0 MiB for weights and [0-9]+ MiB .* 4 MiB"
    ):
        await engine.reload(n_ctx=1 << 16)
    with pytest.raises(ModelLoadError, match=r"needs at least [1-9]+ MiB for weights"):
        await engine.reload(n_ctx=1 << 16, use_mmap=False)
    # The weights are there already, and what is mapped counts as available.
    monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda: 8 << 20)
    await engine.reload(n_ctx=512)
    monkeypatch.setattr("cllm.engine.llama.memory.available_bytes", lambda: None)
    await engine.reload(n_ctx=2048)
    assert (await engine.generate("1+1=", temperature=0)).text == "2"


async def test_cancelled_before_the_new_one_is_loaded_it_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, start, scope = engine._parts, engine._start, anyio.CancelScope()

    def start_and_cancel(*given: Any) -> Parts:
        new = start(*given)
        scope.cancel()
        return new

    monkeypatch.setattr(engine, "_start", start_and_cancel)
    with scope:
        await engine.reload(n_ctx=2048)
    assert scope.cancelled_caught
    assert (engine._parts, engine._started) == (present, [present])
    assert engine.config.n_ctx == 4096
    assert (await engine.generate("1+1=", temperature=0)).text == "2"


async def test_cancelled_while_the_old_one_ends_it_ends_all_the_same(engine: Engine) -> None:
    old = engine._parts
    async with engine.stream(LONG, max_tokens=400, **GREEDY) as stream:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel() -> None:
                    while engine._parts is old:
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                tasks.start_soon(cancel)
                await engine.reload(n_ctx=2048)
        assert len((await stream.completion()).token_ids) == 400
        await old.dispatcher.ended.wait()
    assert (await engine.generate("1+1=", temperature=0)).text == "2"


async def test_closing_ends_the_old_one_and_the_new_one() -> None:
    async with Engine(**OPTIONS) as engine, engine.stream(LONG, **GREEDY) as stream:
        await anext(stream)
        old, errors = engine._parts, []

        async def reload() -> None:
            try:
                await engine.reload(n_ctx=2048)
            except ClosedError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reload)
            while len(engine._started) == 1:
                await anyio.lowlevel.checkpoint()
            started = list(engine._started)
            await engine.aclose()
        assert len(started) == 2
        assert not any(parts.thread.is_alive for parts in (old, *started))
        assert len(errors) == 1


async def test_two_at_once_wrong_options_and_closed_engines_are_refused() -> None:
    async with FakeEngine(latency_s=0.01, n_ctx=512) as engine, engine.stream("x" * 60) as stream:
        await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.reload)
            while not engine._is_reloading:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(anyio.BusyResourceError, match="reloading"):
                await engine.reload()
        with pytest.raises(TypeError, match="unknown engine option 'n_ctxx'"):
            await engine.reload(n_ctxx=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidArgumentError, match="n_ctx is -1"):
            await engine.reload(n_ctx=-1)
    with pytest.raises(ClosedError):
        await engine.reload()


async def test_a_fake_engine_has_a_new_decoder_then() -> None:
    async with FakeEngine(n_seq_max=2) as engine:
        first = engine.decoder
        await engine.reload(n_seq_max=3)
        assert engine.decoder is not first
        assert (await engine.generate("again")).text == "again"
        assert len(await engine.slots()) == engine.decoder.n_seq_max > first.n_seq_max


async def test_who_waits_for_the_end_waits_for_the_end_of_the_last_one(engine: Engine) -> None:
    ended = anyio.Event()

    async def wait() -> None:
        await engine.wait_stopped()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await engine.reload()
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
        assert not ended.is_set()
        await engine.aclose()
        await ended.wait()


async def test_what_is_no_request_is_answered_by_the_model_that_it_was_asked_of(
    engine: Engine,
) -> None:
    old, text = engine._parts, "count " * 20_000
    counts: list[int] = []

    async def tokenize() -> None:
        counts.append(len(await engine.tokenize(text)))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(tokenize)
        await anyio.lowlevel.checkpoint()
        await engine.reload(n_ctx=2048)
    assert engine._parts is not old
    assert len(counts) == 8
    score = await engine.score("1+1=", "2")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.reload)
        assert (await engine.score("1+1=", "2")).token_ids == score.token_ids


async def test_a_stream_of_a_model_that_was_replaced_says_so() -> None:
    async with FakeEngine() as engine:
        async with engine.stream("abcdef") as stream:
            await anext(stream)
            (fork,) = stream.fork(1)
            await stream.completion()
            await engine.reload()
            for call in (fork.__aenter__, partial(stream.rewind, 1)):
                with pytest.raises(ClosedError, match="was replaced by `reload`"):
                    await call()
        assert (await engine.generate("a")).text == "a"
