"""A generation is a value: suspended, saved, resumed elsewhere, it goes on as if nothing had happened."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from cllm import (
    ClosedError,
    Completion,
    Engine,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    SavedGeneration,
    TokenDelta,
    TokenStream,
)
from cllm.engine.core.commands import CancelRequest, Command
from cllm.engine.state_file import read_state_file, write_state_file
from cllm.engine.thread.mailbox import Inbox
from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import QUIET, some_in_fast
from tests.engine.samplings import FEW_IN_FAST, PROMPTS, SAMPLINGS

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

EXACT: dict[str, Any] = {"deterministic": True, "n_ctx": 2048, "n_seq_max": 4, **QUIET}
LONG = {"": "a long answer in many tokens"}


@pytest.fixture
async def exact() -> AsyncIterator[Engine]:
    async with Engine(**EXACT, stream_buffer=2) as engine:
        yield engine


async def read(stream: TokenStream, n_tokens: int) -> list[TokenDelta]:
    """The deltas of the next tokens."""
    deltas: list[TokenDelta] = []
    while n_tokens > 0:
        deltas.append(await anext(stream))
        n_tokens -= len(deltas[-1].token_ids)
    return deltas


async def suspended(stream: TokenStream, n_tokens: int) -> tuple[SavedGeneration, list[TokenDelta]]:
    """A stream that is suspended when so many tokens have been read, and what was read."""
    async with stream:
        deltas = await read(stream, n_tokens)
        return await stream.suspend(), deltas


def without_times(completion: Completion) -> dict[str, Any]:
    told = {name: getattr(completion, name) for name in completion.__slots__}
    del told["timings"], told["request_id"]
    told["usage"] = (completion.usage.n_prompt, completion.usage.n_output)
    return told


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("name", FEW_IN_FAST)
async def test_it_goes_on_with_the_same_tokens_whatever_samples_or_constrains_it(
    exact: Engine, name: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 1, **SAMPLINGS[name]}
    for prompt in PROMPTS[:2]:
        whole = await exact.generate(prompt, **options)
        for n_read in {1, len(whole.token_ids) // 2, len(whole.token_ids) - 1} - {0}:
            saved, first = await suspended(exact.stream(prompt, **options), n_read)
            path = tmp_path / "saved"
            saved.save(path)
            await exact.reset_prefix_cache()
            async with exact.resume(SavedGeneration.load(path)) as resumed:
                rest = [delta async for delta in resumed]
                assert without_times(await resumed.completion()) == without_times(whole)
            assert text_of(first) + text_of(rest) == whole.text
    assert await exact.audit() == []


@pytest.mark.full
async def test_at_every_token_of_a_chat_with_reasoning_and_calls() -> None:
    answer = FakeAnswer(
        "It is warm.",
        reasoning="Let me think.",
        tool_calls=[("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})],
    )
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    options: dict[str, Any] = {"tools": [tool], "max_tokens": 2000}
    messages = [{"role": "user", "content": "Hello"}]
    async with FakeEngine({"": answer}, stream_buffer=2) as engine:
        whole = await engine.chat(messages, **options)
        for n_read in range(1, len(whole.token_ids) - 4, 5):
            saved, first = await suspended(engine.stream_chat(messages, **options), n_read)
            resumed = engine.resume(saved)
            rest = [delta async for delta in resumed]
            both, ended = first + rest, await resumed.completion()
            assert text_of(both) == whole.text
            assert "".join(d.reasoning for d in both) == whole.reasoning
            told = {c.id: c.name for d in both for c in d.tool_calls if c.name}
            assert told == {c.id: c.name for c in ended.tool_calls}
            assert [c.arguments for c in ended.tool_calls] == [
                c.arguments for c in whole.tool_calls
            ]
            assert ended.usage.n_reasoning == whole.usage.n_reasoning


async def test_what_was_computed_ahead_of_the_reader_is_kept() -> None:
    async with FakeEngine(LONG, stream_buffer=8) as engine:
        whole = await engine.generate("p")
        async with engine.stream("p") as stream:
            first = await read(stream, 1)
            await engine.audit()  # it has computed meanwhile
            saved = await stream.suspend()
        assert len(saved.token_ids) > 1
        n_before = engine.statistics().n_output_tokens
        resumed = engine.resume(saved)
        rest = [delta async for delta in resumed]
        assert text_of(first + rest) == whole.text
        n_computed = engine.statistics().n_output_tokens - n_before
        assert n_computed == len(whole.token_ids) - len(saved.token_ids)


async def test_nothing_is_computed_again_where_its_state_can_be_used() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        saved, _ = await suspended(engine.stream("p" * 100), 3)
        assert saved.n_state_bytes > 100
        assert saved.prompt_token_ids == (112,) * 100
        await engine.reset_prefix_cache()
        n_before = engine.statistics().n_prefill_tokens
        completion = await engine.resume(saved).completion()
        assert completion.text == LONG[""]
        assert engine.statistics().n_prefill_tokens == n_before
        assert await engine.audit() == []


async def test_what_others_have_in_cells_is_shared_and_not_restored_beside_them() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        saved, _ = await suspended(engine.stream("p" * 100), 3)
        resumed = engine.resume(saved)
        await anext(resumed)
        n_restored = engine.decoder.n_calls["state_seq_set_data"]
        assert (await resumed.completion()).text == LONG[""]
        assert n_restored == 0


async def test_one_value_can_be_resumed_more_than_once_and_by_another_engine() -> None:
    async with FakeEngine(LONG) as engine:
        saved, first = await suspended(engine.stream("p"), 2)
        for i in range(3):
            completion = await engine.resume(saved, request_id=f"again-{i}").completion()
            assert (completion.text, completion.request_id) == (LONG[""], f"again-{i}")
    async with FakeEngine(LONG, n_seq_max=2, n_ctx=512) as other:
        rest = [delta async for delta in other.resume(saved)]
        assert text_of(first + rest) == LONG[""]


async def test_a_resumed_one_can_be_suspended_again() -> None:
    async with FakeEngine(LONG) as engine:
        whole = await engine.generate("p")
        saved, told = await suspended(engine.stream("p"), 1)
        for _ in range(len(whole.token_ids) - 3):
            saved, more = await suspended(engine.resume(saved), 1)
            told += more
        told += [delta async for delta in engine.resume(saved)]
        assert text_of(told) == whole.text


async def test_one_that_only_its_reader_has_not_all_of_is_suspended_too(tmp_path: Path) -> None:
    async with FakeEngine({"": "abc"}) as engine:
        whole = await engine.generate("p")
        async with engine.stream("p") as stream:
            first = await read(stream, 1)
            while engine.statistics().n_running:
                await engine.audit()
            (await stream.suspend()).save(tmp_path / "saved")
        saved = SavedGeneration.load(tmp_path / "saved")
        n_before = engine.statistics().n_ticks
        async with engine.resume(saved, request_id="later") as resumed:
            rest = [delta async for delta in resumed]
            assert text_of(first + rest) == "abc"
            assert without_times(await resumed.completion()) == without_times(whole)
            assert engine.statistics().n_ticks == n_before
            await resumed.rewind(2)
            assert text_of([delta async for delta in resumed]) == "c"


async def test_one_that_was_begun_elsewhere_is_whole_when_it_has_been_suspended() -> None:
    async with FakeEngine(LONG, stream_buffer=2) as engine:
        whole = await engine.generate("p")
        begun = whole.token_ids[:4]
        saved, first = await suspended(engine.stream("p", generated=begun), 3)
        assert saved.token_ids[:7] == whole.token_ids[:7]
        async with engine.resume(saved) as resumed:
            rest = [delta async for delta in resumed]
            completion = await resumed.completion()
        assert text_of(first + rest) == whole.text[4:]
        assert (completion.text, completion.token_ids) == (whole.text, whole.token_ids)
        async with engine.stream("p", generated=begun, logprobs=0) as stream:
            for act in (stream.suspend(), stream.rewind(1)):
                with pytest.raises(InvalidRequestError) as caught:
                    await act
                assert caught.value.field == "logprobs"
            assert text_of([delta async for delta in stream]) == whole.text[4:]


async def test_a_stream_whose_suspension_was_cancelled_does_not_look_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The buffer keeps the engine from reaching the end of the output.
    async with FakeEngine(LONG, stream_buffer=2) as engine, engine.stream("p" * 100) as stream:
        await read(stream, 2)
        held: list[tuple[Inbox, Command]] = []
        with monkeypatch.context() as patched, anyio.CancelScope() as scope:
            # The state cannot come at the same time as the cancellation.
            patched.setattr(Inbox, "put", lambda inbox, command: held.append((inbox, command)))
            scope.cancel()
            await stream.suspend()
        assert scope.cancelled_caught
        assert any(isinstance(command, CancelRequest) for _, command in held)
        for inbox, command in held:
            inbox.put(command)
        with pytest.raises(ClosedError, match="before its end"):
            async for _ in stream:
                pass


async def test_an_output_that_was_read_to_its_end_cannot_be_suspended() -> None:
    async with FakeEngine({"": "ab"}) as engine:
        for close in (True, False):
            async with engine.stream("p") as stream:
                while (await anext(stream)).finish_reason is None:
                    pass
                if close:
                    await stream.aclose()
                with pytest.raises(ClosedError, match="nothing to suspend"):
                    await stream.suspend()


async def test_another_model_is_refused_by_name(tiny_model_path: Path) -> None:
    async with FakeEngine(LONG) as engine:
        saved, _ = await suspended(engine.stream("p"), 2)
        with pytest.raises(InvalidRequestError) as caught:
            engine.resume("saved")  # type: ignore[arg-type]
        assert caught.value.field == "saved"
    async with Engine(tiny_model_path, n_ctx=256, **QUIET) as other:
        with pytest.raises(InvalidRequestError, match="for the model with architecture fake"):
            await anext(other.resume(saved))
        assert await other.audit() == []


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-3],
    "cut in its header": lambda data: data[:60],
    "empty": lambda data: b"",
    "a bit flipped in its state": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "a bit flipped in its header": lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:],
    "longer": lambda data: data + b"x",
    "something else": lambda data: b"GGUF" + data,
    "a length that is not there": lambda data: data[:45] + b"\xff" * 16 + data[61:],
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_damaged_file_is_refused_and_never_used(change: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    async with FakeEngine(LONG) as engine:
        saved, _ = await suspended(engine.stream("p"), 2)
        saved.save(path)
    path.write_bytes(CHANGES[change](path.read_bytes()))
    with pytest.raises(InvalidArgumentError, match=r"SavedGeneration\.save") as caught:
        SavedGeneration.load(path)
    assert caught.value.field == "path"


async def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    async with FakeEngine(LONG) as engine:
        saved, _ = await suspended(engine.stream("p"), 2)
        with pytest.raises(OSError, match="directory"):
            saved.save(path)
        assert [p.name for p in tmp_path.iterdir()] == ["saved"]


IN_ANOTHER_PROCESS = """
import json, sys
import anyio, cllm
from tests.time_limits import raise_time_limits

async def main():
    raise_time_limits()
    async with cllm.Engine(**json.loads(sys.argv[2])) as engine:
        n_computed = engine.statistics().n_prefill_tokens
        completion = await engine.resume(cllm.SavedGeneration.load(sys.argv[1])).completion()
        print(json.dumps([completion.text, completion.token_ids, completion.finish_reason,
                          engine.statistics().n_prefill_tokens - n_computed]))

anyio.run(main)
"""


@pytest.mark.parametrize("name", some_in_fast(["schema", "seeded", "mirostat 2"]))
async def test_another_process_goes_on_with_the_same_tokens(
    exact: Engine, name: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, **SAMPLINGS[name]}
    whole = await exact.generate(PROMPTS[0], **options)
    async with exact.stream(PROMPTS[0], **options) as stream:
        await read(stream, 2)
        saved = await stream.suspend()
    saved.save(tmp_path / "saved")
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "saved"), json.dumps(EXACT)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text, token_ids, finish_reason, n_computed = json.loads(done.stdout.splitlines()[-1])
    assert (text, tuple(token_ids), finish_reason) == (
        whole.text,
        whole.token_ids,
        whole.finish_reason,
    )
    if name == "seeded":  # whose sampler need not see the logits once more
        assert n_computed == 0


@pytest.mark.full
@pytest.mark.parametrize("value", [None, [], "x", -1, 1 << 70, 0, 1.5, [-1], [1 << 40], [259], {}])
async def test_a_file_with_another_value_in_it_is_refused_or_ends_its_request_alone(
    value: object, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    async with Engine(n_ctx=512, **QUIET) as engine:
        saved, _ = await suspended(engine.stream("count:1..40", seed=1, max_tokens=40), 3)
        saved.save(path)
        header, data = read_state_file(path)
        for place in places_in(header):
            changed = copy.deepcopy(header)
            inner = changed
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value
            write_state_file(path, changed, data)
            with suppress(InvalidArgumentError, InvalidRequestError, GenerationError):
                resumed = engine.resume(SavedGeneration.load(path))
                with anyio.fail_after(30):
                    async with resumed:
                        async for _ in resumed:
                            pass
        assert (await engine.generate("1+1=", temperature=0)).text == "2"


def places_in(value: object, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where each value of nested mappings is."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*place, name)
            yield from places_in(item, (*place, name))


@pytest.mark.parametrize("path", [123, None, True, b"a", [], object(), "a\0b", "\ud800", ""])
async def test_a_path_that_cannot_be_one_is_rejected_by_name(path: Any) -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine, engine.stream("p") as stream:
        await read(stream, 2)
        saved = await stream.suspend()
    for call in (saved.save, SavedGeneration.load):
        with pytest.raises(InvalidArgumentError, match="path is "):
            call(path)


async def test_a_generation_is_not_saved_in_the_place_of_a_special_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with FakeEngine(LONG, stream_buffer=4) as engine, engine.stream("p") as stream:
        await read(stream, 2)
        saved = await stream.suspend()
    with pytest.raises(OSError, match="not a regular file"):
        saved.save(fifo)
    assert fifo.is_fifo()
    assert list(tmp_path.iterdir()) == [fifo]
