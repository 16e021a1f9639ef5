"""Streams that fork, go back, and get words put into their mouths."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio.lowlevel
import numpy as np
import pytest

from cllm import (
    ClosedError,
    Engine,
    Image,
    InvalidRequestError,
    SavedGeneration,
    TokenDelta,
    TokenStream,
)
from cllm.checks import MAX_SEED
from cllm.testing import FakeAnswer, FakeEngine, FakeVocabulary
from tests.conftest import QUIET, some_in_fast
from tests.engine.samplings import PROMPTS
from tests.engine.test_suspended import EXACT, LONG, read, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

# Nearly every token is as likely as any other.
WILD: dict[str, Any] = {
    "temperature": 20.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "ignore_eos": True,
}  # fmt: skip


async def test_forks_go_on_from_what_was_read_and_the_stream_goes_on_itself() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        whole = await engine.generate("p")
        async with engine.stream("p", request_id="one") as stream:
            first = await read(stream, 5)
            forks = stream.fork(3)
            for fork in forks:
                async with fork:
                    rest = [delta async for delta in fork]
                    assert text_of(first + rest) == whole.text
                    ended = await fork.completion()
                    assert ended.text == whole.text
                    assert ended.token_ids == whole.token_ids
                    assert ended.usage.n_output == whole.usage.n_output
            assert (await stream.completion()).text == whole.text
        assert len({fork.request_id for fork in forks} | {"one"}) == 4
        assert await engine.audit() == []


def ids_of(deltas: list[TokenDelta]) -> list[str]:
    return [call.id for delta in deltas for call in delta.tool_calls if call.id is not None]


async def test_calls_have_other_ids_in_each_fork_but_for_those_that_were_told() -> None:
    answer = FakeAnswer("Well.", tool_calls=[("f", {"n": n}) for n in range(3)])
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with FakeEngine({"": answer}, n_seq_max=8) as engine:

        async def rest(stream: TokenStream, told: list[str]) -> list[str]:
            """The ids that calls get from here on, in a completion with those that were told."""
            async with stream:
                found = ids_of([delta async for delta in stream])
                calls = (await stream.completion()).tool_calls
            assert [call.id for call in calls] == told + found
            assert [call.arguments for call in calls] == [f'{{"n": {n}}}' for n in range(3)]
            return found

        async with engine.stream_chat([{"role": "user", "content": "p"}], tools=tools) as stream:
            deltas = await read(stream, 12)  # inside of the first call
            found = [await rest(fork, []) for fork in stream.fork(2)]
            while not ids_of(deltas):
                deltas += await read(stream, 1)
            deltas += await read(stream, 12)  # inside of the second
            first = ids_of(deltas)
            (fork,) = stream.fork(1)
            async with fork:
                await read(fork, 1)
                (of_fork,) = fork.fork(1)
                found += [await rest(of_fork, first)]
                resumed = engine.resume(await fork.suspend())
            found += [await rest(resumed, first)]
            while len(ids_of(deltas)) < 2:
                deltas += await read(stream, 1)
            await stream.rewind(1)  # the end of the second
            found += [await rest(stream, first)]
        ids = ids_of(deltas) + [call_id for each in found for call_id in each]
        assert len(set(ids)) == len(ids) == 2 + 2 * 3 + 3 * 2
        assert await engine.audit() == []


@pytest.mark.parametrize("step", ["rewind", "fork"])
async def test_calls_of_a_finished_output_keep_the_ids_that_were_told_after_it_is_resumed(
    step: str,
) -> None:
    answer = FakeAnswer("Well.", tool_calls=[("f", {"n": n}) for n in range(3)])
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with FakeEngine({"": answer}, n_seq_max=8, stream_buffer=1000) as engine:
        async with engine.stream_chat([{"role": "user", "content": "p"}], tools=tools) as stream:
            deltas = await read(stream, 12)
            while not ids_of(deltas):
                deltas += await read(stream, 1)
            await read(stream, 3)
            while engine.statistics().n_running:
                await engine.audit()
            saved = await stream.suspend()
        async with engine.resume(saved) as resumed:
            if step == "rewind":
                await resumed.rewind(1)
                calls = (await resumed.completion()).tool_calls
            else:
                (fork,) = resumed.fork(1)
                async with fork:
                    calls = (await fork.completion()).tool_calls
        assert [call.id for call in calls][:1] == ids_of(deltas)
        assert len({call.id for call in calls}) == 3


async def test_a_fork_costs_one_row_and_no_cell_more_than_its_own_tokens() -> None:
    async with FakeEngine(LONG, stream_buffer=1, n_seq_max=8, prefix_cache_tokens=1) as engine:
        async with engine.stream("p" * 100) as stream:
            await read(stream, 5)
            await engine.audit()
            n_before = engine.statistics()
            forks = stream.fork(4)
            for fork in forks:
                await fork.__aenter__()
            await engine.audit()
            n_after = engine.statistics()
            assert n_after.n_running == 5
            n_rows = n_after.n_decode_rows - n_before.n_decode_rows
            n_tokens = n_after.n_output_tokens - n_before.n_output_tokens
            assert n_rows == n_tokens
            assert n_after.n_prefill_tokens == n_before.n_prefill_tokens
            n_cells = n_after.n_kv_cells_used - n_before.n_kv_cells_used
            assert n_cells == 4  # the token before the first of its own
            for fork in forks:
                assert (await fork.completion()).text == LONG[""]
        assert await engine.audit() == []


async def test_forks_draw_each_its_own_and_by_the_seed_the_same_each_time(engine: Engine) -> None:
    options: dict[str, Any] = {**WILD, "max_tokens": 16}
    found = []
    for _ in range(2):
        async with engine.stream("x", **options) as stream:
            await read(stream, 2)
            forks = stream.fork(4)
            found.append([(await fork.completion()).token_ids for fork in forks])
    assert len(set(found[0])) > 1
    assert found[0][0][:2] == found[0][3][:2]


async def test_a_stream_goes_back_and_gives_the_same_again_where_nothing_is_drawn() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        whole = await engine.generate("p")
        async with engine.stream("p") as stream:
            first = await read(stream, 6)
            await stream.rewind(4)
            again = await read(stream, 4)
            assert text_of(again) == text_of(first[2:])
            assert await stream.completion() is not None
            ended = await stream.completion()
            assert (ended.text, ended.token_ids) == (whole.text, whole.token_ids)
            assert ended.usage.n_output == whole.usage.n_output
        assert await engine.audit() == []


async def test_it_goes_back_after_its_end_too() -> None:
    async with FakeEngine({"": "abc"}) as engine, engine.stream("p") as stream:
        assert text_of([delta async for delta in stream]) == "abc"
        await stream.rewind(2)
        assert text_of([delta async for delta in stream]) == "c"
        assert (await stream.completion()).text == "abc"


async def test_going_back_draws_anew_by_the_next_seed(engine: Engine) -> None:
    options: dict[str, Any] = {**WILD, "max_tokens": 20}
    found = []
    for _ in range(2):
        async with engine.stream("x", **options) as stream:
            first = await read(stream, 18)
            await stream.rewind(16)
            again = await read(stream, 16)
            found.append([d.token_ids for d in again])
            assert found[-1] != [d.token_ids for d in first[2:]]
    assert found[0][0] == found[1][0]


async def test_no_two_outputs_of_a_stream_draw_the_same_numbers(engine: Engine) -> None:
    options: dict[str, Any] = {**WILD, "max_tokens": 20}
    async with engine.stream("x", **options) as stream:
        await read(stream, 4)
        before = stream.fork(2)
        await stream.rewind(2)
        after = [*stream.fork(1), *stream.fork(1)]
        async with before[0] as first:
            await read(first, 1)
            await first.rewind(1)
            after += first.fork(1)
            found = [(await each.completion()).token_ids[4:] for each in (*before, *after, stream)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("how", [{"mirostat": 2}, {"xtc_probability": 0.5}, {"regex": "[a-k]*"}])
@pytest.mark.parametrize("rest", [(), ("!",)], ids=["ends in an image", "ends in text"])
async def test_a_stream_goes_back_whatever_its_prompt_ends_in(
    how: dict[str, Any], rest: tuple[str, ...]
) -> None:
    picture = Image(np.zeros((64, 64, 3), np.uint8))
    answer = "abcdefghijk"
    async with FakeEngine(lambda _: answer, n_ctx=2000, n_seq_max=2, prefix_cache=False) as engine:
        async with engine.stream(["hi ", picture, *rest], temperature=1.0, **how) as stream:
            await read(stream, 4)
            await stream.rewind(2)
            assert (await stream.completion()).text == answer
        assert await engine.audit() == []


async def test_what_is_injected_is_as_if_the_model_had_written_it() -> None:
    async with Engine(**EXACT) as engine:
        async with engine.stream("1+1=", temperature=0.0, max_tokens=12) as stream:
            await stream.inject("3\n2+2=")
            rest = [delta async for delta in stream]
            ended = await stream.completion()
        ids = tuple(await engine.tokenize("3\n2+2=", add_special=False))
        same = await engine.generate("1+1=", generated=ids, temperature=0.0, max_tokens=12)
        assert text_of(rest) == same.text
        assert ended.token_ids == ids + same.token_ids
        assert ended.text == "3\n2+2=" + same.text
        assert await engine.audit() == []


async def test_a_chat_that_goes_back_tells_its_channels_from_there() -> None:
    answer = FakeAnswer("It is warm here, and dry.", reasoning="Let me think about it.")
    async with FakeEngine({"": answer}) as engine:
        messages = [{"role": "user", "content": "Hello"}]
        whole = await engine.chat(messages)
        async with engine.stream_chat(messages) as stream:
            deltas = await read(stream, len(whole.token_ids) - 3)
            await stream.rewind(len(whole.token_ids) - 6)
            deltas = deltas[:3] + [delta async for delta in stream]
            ended = await stream.completion()
        assert "".join(d.reasoning for d in deltas) == whole.reasoning
        assert text_of(deltas) == whole.text
        assert (ended.text, ended.reasoning) == (whole.text, whole.reasoning)
        assert ended.usage.n_reasoning == whole.usage.n_reasoning


async def test_a_number_of_another_type_counts_as_the_same_number() -> None:
    """Minus an unsigned 2 is 254: nothing would be removed."""
    async with FakeEngine(LONG) as engine, engine.stream("p", max_tokens=60) as stream:
        first = await read(stream, 6)
        await stream.rewind(cast(int, np.uint8(2)))
        assert len(stream._position) == 4
        assert len(stream.fork(cast(int, np.uint8(2)))) == 2
        assert text_of(first[:4]) + text_of(await read(stream, 4)) == LONG[""][:8]
        await stream.cancel()


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda s: s.rewind(0), "n_tokens"),
        (lambda s: s.rewind(4), "n_tokens"),
        (lambda s: s.rewind("1"), "n_tokens"),
        (lambda s: s.inject(""), "text"),
        (lambda s: s.inject(5), "text"),
        (lambda s: s.inject([-1]), "text"),
        (lambda s: s.inject([10**6]), "generated"),
        (lambda s: s.inject([FakeVocabulary.END]), "generated"),
        (lambda s: s.inject("a" * 60), "generated"),
    ],
)
async def test_what_cannot_be_is_refused_by_name_and_the_stream_goes_on(
    act: Any, field: str
) -> None:
    async with FakeEngine(LONG) as engine, engine.stream("p", max_tokens=60) as stream:
        first = await read(stream, 3)
        with pytest.raises(InvalidRequestError) as caught:
            await act(stream)
        assert caught.value.field == field
        assert text_of(first + [delta async for delta in stream]) == LONG[""]


async def test_another_output_of_a_request_is_asked_for_before_it_is_submitted() -> None:
    async with FakeEngine(LONG) as engine:
        stream = engine.stream("p", max_tokens=5, seed=MAX_SEED)
        others = [stream.again(i, f"other-{i}") for i in range(2)]
        assert [other.request_id for other in others] == ["other-0", "other-1"]
        assert [other._call.seed for other in others] == [MAX_SEED, 0]
        with pytest.raises(InvalidRequestError, match="request_id"):
            stream.again(1, "")
        async with stream:
            with pytest.raises(ClosedError, match="was submitted"):
                stream.again(1, "late")
            (fork,) = stream.fork(1)
            with pytest.raises(InvalidRequestError, match="continues no other"):
                fork.again(1, "late")
        texts = [(await other.completion()).text for other in others]
        assert texts == [LONG[""][:5]] * 2
        unread = engine.stream("p")
        await unread.aclose()
        with pytest.raises(ClosedError, match="closed"):
            unread.again(1, "late")


async def test_a_fork_of_a_fork_draws_numbers_of_its_own() -> None:
    async with FakeEngine(LONG) as engine, engine.stream("p", max_tokens=60, seed=7) as stream:
        await read(stream, 3)
        (fork,) = stream.fork(1)
        async with fork:
            await read(fork, 3)
            (second,) = fork.fork(1)
        assert [each._call.seed for each in (fork, second)] == [8, 9]


async def test_forks_are_counted_and_need_a_stream_that_has_begun() -> None:
    async with FakeEngine(LONG) as engine:
        stream = engine.stream("p")
        with pytest.raises(ClosedError, match="not been entered"):
            stream.fork(1)
        async with stream:
            for n in (0, 257, 1.5):
                with pytest.raises(InvalidRequestError) as caught:
                    stream.fork(n)  # type: ignore[arg-type]
                assert caught.value.field == "n"


async def test_who_is_served_goes_back_though_the_queue_is_full() -> None:
    async with (
        FakeEngine(LONG, n_seq_max=1, max_queue=1, stream_buffer=1) as engine,
        engine.stream("p") as stream,
        engine.stream("q") as waiting,
    ):
        await read(stream, 3)
        await stream.rewind(2)
        assert (await stream.completion()).text == LONG[""]
        assert (await waiting.completion()).text == LONG[""]


async def test_a_stream_that_is_cancelled_while_it_goes_back_stays_cancelled() -> None:
    async with FakeEngine(LONG, stream_buffer=2) as engine:
        async with engine.stream("p") as stream:
            await read(stream, 3)
            await stream.cancel()
            await stream.rewind(1)
            await stream.cancel()
            assert (await stream.completion()).finish_reason in ("cancelled", "stop")
        assert engine.statistics().n_kv_cells_used == 0 or await engine.audit() == []


async def test_it_is_the_same_with_a_process_of_its_own() -> None:
    async with Engine(process=True, n_ctx=1024, **QUIET) as engine:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
        whole = await engine.generate("count:11..40", **options)
        async with engine.stream("count:11..40", **options) as stream:
            first = await read(stream, 4)
            (fork,) = stream.fork(1)
            assert (await fork.completion()).token_ids[:4] == whole.token_ids[:4]
            await stream.rewind(2)
            first = first[:2] + await read(stream, 2)
            saved = await stream.suspend()
        rest = [delta async for delta in engine.resume(saved)]
        assert text_of(first + rest) == whole.text


async def _any_course(engine: Engine, choose: random.Random, tmp_path: Path) -> None:
    """Streams that read, fork, go back, are injected into and suspended, in any order."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    prompt = choose.choice(PROMPTS)
    # Each with what its output has to be so far.
    streams: list[tuple[TokenStream, list[int]]] = [(engine.stream(prompt, **options), [])]
    ids = await engine.tokenize(" 7 8 b", add_special=False)
    for _ in range(14):
        at = choose.randrange(len(streams))
        stream, tokens = streams[at]
        await stream.__aenter__()
        act = choose.choice(("read", "read", "fork", "rewind", "inject", "suspend"))
        if act == "read" or not tokens:
            for delta in await read(stream, choose.randint(1, 4)) if len(tokens) < 30 else []:
                tokens += delta.token_ids
        elif act == "fork" and len(streams) < 4:
            streams += [(fork, list(tokens)) for fork in stream.fork(choose.randint(1, 2))]
        elif act == "rewind":
            n_tokens = choose.randint(1, len(tokens))
            await stream.rewind(n_tokens)
            del tokens[-n_tokens:]
        elif act == "inject" and len(tokens) < 30:
            injected = ids[: choose.randint(1, len(ids))]
            await stream.inject(injected)
            tokens += injected
        elif act == "suspend":
            path = tmp_path / "saved"
            (await stream.suspend()).save(path)
            streams[at] = (engine.resume(SavedGeneration.load(path)), tokens)
    for stream, tokens in streams:
        completion = await stream.completion()
        assert list(completion.token_ids[: len(tokens)]) == tokens
        rest = await engine.generate(prompt, generated=tokens, **options)
        assert completion.token_ids == (*tokens, *rest.token_ids)
        assert completion.usage.n_output == len(completion.token_ids)
        await stream.aclose()
    assert await engine.audit() == []


@pytest.mark.parametrize("seed", some_in_fast(range(8), 4))
async def test_whatever_course_streams_take_they_are_where_their_tokens_are(
    seed: int, tmp_path: Path
) -> None:
    async with Engine(**EXACT, stream_buffer=4) as engine:
        for number in range(3):
            await _any_course(engine, random.Random(f"{seed} {number}"), tmp_path)
        assert engine.statistics().n_kv_cells_used == 0


async def test_a_stream_whose_id_another_request_has_now_cannot_go_back() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        async with engine.stream("p", request_id="x", max_tokens=9) as first:
            await first.completion()
            async with engine.stream("p", request_id="x") as second:
                await read(second, 2)
                with pytest.raises(InvalidRequestError, match="request_id is 'x', must be not in"):
                    await first.rewind(2)
                assert (await second.completion()).text == (await engine.generate("p")).text
            await first.rewind(2)  # the id is free again
            assert (await first.completion()).usage.n_output == 9
        assert await engine.audit() == []


async def test_no_request_takes_the_id_of_a_stream_that_is_going_back() -> None:
    """Between the end of its request and the next one, none is open."""
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        async with engine.stream("p", request_id="x", max_tokens=40) as stream:
            await read(stream, 8)
            refused = 0
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.rewind, 3)
                while not stream._is_continuing:
                    await anyio.lowlevel.checkpoint()
                while stream._is_continuing:
                    with pytest.raises(InvalidRequestError, match="must be not in use"):
                        await engine.generate("q", request_id="x", max_tokens=1)
                    refused += 1
                    await anyio.lowlevel.checkpoint()
            assert refused
            assert (await stream.completion()).text == (await engine.generate("p")).text
        assert await engine.audit() == []


async def test_one_task_at_a_time_makes_a_stream_go_on_from_another_place() -> None:
    async with FakeEngine(LONG, stream_buffer=4) as engine:
        async with engine.stream("p", max_tokens=40, request_id="x") as stream:
            await read(stream, 8)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.rewind, 3)
                while not stream._is_continuing:
                    await anyio.lowlevel.checkpoint()
                for call in (
                    partial(stream.rewind, 1),
                    partial(stream.inject, "a"),
                    stream.__anext__,
                ):
                    with pytest.raises(anyio.BusyResourceError):
                        await call()
            assert (await stream.completion()).text == (await engine.generate("p")).text
        assert await engine.audit() == []
