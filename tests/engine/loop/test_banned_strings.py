"""Strings that an output does not have, though tokens would make them."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm import (
    Engine,
    FinishReason,
    GenerationError,
    InvalidRequestError,
    TokenDelta,
    TokenStream,
    ToolCallDelta,
)
from cllm.engine.loop.banned_strings import Ban, BannedStrings
from cllm.testing import FakeAnswer, FakeEngine, FakeVocabulary
from tests.conftest import QUIET

PIECES = ["a", "b", "ab", "ba", "", "aab"]
STRINGS = st.lists(st.sampled_from(["ab", "ba", "aa", "abab", "b"]), min_size=1, max_size=3)


@given(st.lists(st.permutations(PIECES), min_size=1, max_size=20), STRINGS)
def test_nothing_is_let_through_that_ends_in_a_banned_string_and_all_else_is(
    preferred: list[list[str]], strings: list[str]
) -> None:
    """At each place a model writes the first piece that was not excluded there."""
    banned, released = BannedStrings(strings), list[TokenDelta]()
    excluded: dict[int, list[str]] = {}
    unread: list[TokenDelta] = []
    while (n := len(released) + len(banned.held)) < len(preferred):
        if not unread:
            left = [piece for piece in preferred[n] if piece not in excluded.get(n, ())]
            if not left:
                return  # a dead end
            is_last = n == len(preferred) - 1
            unread = [TokenDelta(left[0], (n,), FinishReason.STOP if is_last else None)]
        found = banned.push(unread.pop(0))
        released += iter(banned.take, None)
        before = "".join(d.text for d in released)
        assert not any(s in before for s in strings)
        if found is None:
            assert not any(s in before + "".join(d.text for d in banned.held) for s in strings)
            continue
        kept = before + "".join(d.text for d in found.kept)
        first, *rest = found.rest
        assert first.token_ids == (len(released) + len(found.kept),)
        assert not any(s in kept for s in strings)
        assert any(s in kept + first.text + "".join(d.text for d in rest) for s in strings)
        place = first.token_ids[0]
        excluded = {n: pieces for n, pieces in excluded.items() if n <= place}
        excluded.setdefault(place, []).append(first.text)
        unread, banned = [*found.kept], BannedStrings(strings, before)
    assert [d.token_ids for d in released] == [(i,) for i in range(len(preferred))]


def test_what_may_begin_one_is_held_back_and_no_more() -> None:
    banned = BannedStrings(["abc"])
    assert banned.push(TokenDelta("xa", (1,))) is None
    assert banned.take() is None
    assert banned.push(TokenDelta("b", (2,))) is None
    assert banned.take() is None
    assert banned.push(TokenDelta("d", (3,))) is None
    assert [d.token_ids for d in iter(banned.take, None)] == [(1,), (2,)]
    last, next_ = TokenDelta("d", (3,)), TokenDelta("y", (4,))
    assert banned.push(next_) is None
    assert list(iter(banned.take, None)) == [last]
    ended = TokenDelta("abc", (5,))
    assert banned.push(ended) == Ban((next_,), (ended,))


def test_a_token_whose_text_came_later_has_begun_it() -> None:
    banned = BannedStrings(["\n\n"])
    for delta in (TokenDelta("a", (1,)), TokenDelta("", (2,)), TokenDelta("", (3,))):
        assert banned.push(delta) is None
    assert [d.token_ids for d in iter(banned.take, None)] == []
    found = banned.push(TokenDelta("\n\nb", (4,)))
    assert found is not None
    assert found.kept == (TokenDelta("a", (1,)),)
    assert [delta.token_ids for delta in found.rest] == [(2,), (3,), (4,)]


def test_reasoning_and_calls_are_let_through_and_a_ban_of_the_answer_keeps_them() -> None:
    banned = BannedStrings(["Sure"])
    thought = [TokenDelta("", (n,), reasoning=f"{n}") for n in range(3)]
    released: list[TokenDelta] = []
    for delta in thought:
        assert banned.push(delta) is None
        released += iter(banned.take, None)
    assert released == thought[:-1]
    assert banned.push(TokenDelta("Su", (3,))) is None
    found = banned.push(TokenDelta("re", (4,)))
    assert found is not None
    assert [d.token_ids for d in (*iter(banned.take, None), *found.kept)] == [(2,)]
    assert found.rest[0].token_ids == (3,)
    banned = BannedStrings(["Sure"])
    calls = [TokenDelta("", (n,), tool_calls=(ToolCallDelta(0, "a", "f", ""),)) for n in range(3)]
    assert [banned.push(delta) for delta in calls] == [None] * 3
    assert list(iter(banned.take, None)) == calls[:-1]


def test_a_string_that_begins_in_text_that_was_told_is_banned_at_the_first_token_after_it() -> None:
    banned = BannedStrings(["abcd", "b"], "xab")
    thought = TokenDelta("", (3,), reasoning="hm")
    assert [banned.push(d) for d in (thought, TokenDelta("c", (4,)))] == [None, None]
    assert list(iter(banned.take, None)) == [thought]
    ended = TokenDelta("d", (5,), FinishReason.STOP)
    assert banned.push(ended) == Ban((), (TokenDelta("c", (4,)), ended))


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("how", ["generated", "inject", "fork", "rewind", "resume", "end"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["prompt", "chat"])
async def test_no_banned_string_is_completed_that_begins_in_text_that_was_there(
    how: str, is_chat: bool
) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with FakeEngine(lambda _: "--cd") as engine:

        def stream(**options: Any) -> TokenStream:
            options["banned_strings"] = ["abc"]
            if not is_chat:
                return engine.stream("p", **options)
            return engine.stream_chat([{"role": "user", "content": "p"}], tools=offered, **options)

        if how == "generated":
            async with stream(generated=tuple(b"ab")) as rest:
                assert "".join([delta.text async for delta in rest]) == "d"
                assert (await rest.completion()).text == "d"
            return
        async with stream() as first:
            await first.inject("abx" if how == "rewind" else "ab")
            if how == "rewind":
                await first.rewind(1)
            last = first.fork(1)[0] if how == "fork" else first
            while how == "end" and engine.statistics().n_running:
                await anyio.lowlevel.checkpoint()
            if how in ("resume", "end"):
                last = engine.resume(await first.suspend())
            async with last:
                text = "".join([delta.text async for delta in last])
                assert (text, (await last.completion()).text) == ("d", "abd")
        assert await engine.audit() == []


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_completion_without_banned_strings_leaves_out_the_given_tokens() -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "logprobs": 1}
    async with Engine(n_ctx=1024, **QUIET) as engine:
        free = await engine.generate("count:11..40", **options)
        given = free.token_ids[:3]
        banned = [free.text[9:11], free.text[15:17]]
        options |= {"generated": given, "banned_strings": banned}
        stream = engine.stream("count:11..40", **options)
        deltas = [delta async for delta in stream]
        rest = await stream.completion()
        assert not any(string in rest.text for string in banned)
        assert rest.text == "".join(d.text for d in deltas)
        assert rest.token_ids == tuple(t for d in deltas for t in d.token_ids)
        assert rest.logprobs == tuple(each for d in deltas for each in d.logprobs or ())
        assert rest.usage.n_output == len(rest.token_ids) == len(rest.logprobs)
        with pytest.raises(InvalidRequestError, match="logprobs"):
            await stream.rewind(1)
        assert await engine.audit() == []


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("n_given", [0, 4, 12, 20])
async def test_a_chat_without_banned_strings_leaves_out_the_given_channels(n_given: int) -> None:
    answer = FakeAnswer("It is warm in May.", reasoning="Let me think.")
    messages = [{"role": "user", "content": "Hello"}]
    banned: dict[str, Any] = {"banned_strings": ["in"]}
    async with FakeEngine({"": answer}) as engine:
        given = [delta async for delta in engine.stream_chat(messages)][:n_given]
        ids = [token for delta in given for token in delta.token_ids]
        rest = engine.stream_chat(messages, generated=ids, **banned)
        deltas = [delta async for delta in rest]
        ended = await rest.completion()
        assert ended.text == "".join(d.text for d in deltas)
        assert ended.reasoning == "".join(d.reasoning for d in deltas)
        assert ended.usage.n_output == len(ended.token_ids) == sum(len(d.token_ids) for d in deltas)
        text = "".join(delta.text for delta in given) + ended.text
        for n_read in (1, len(deltas) - 1):  # before the ban and after it
            for is_computed in (False, True):
                again = engine.stream_chat(messages, generated=ids, **banned)
                async with again:
                    for _ in range(n_read):
                        await anext(again)
                    while is_computed and engine.statistics().n_running:
                        await anyio.lowlevel.checkpoint()
                    one, resumed = again.fork(1)[0], engine.resume(await again.suspend())
                for other in (one, resumed):
                    completion = await other.completion()
                    assert completion.token_ids == (*ids, *ended.token_ids)
                    assert completion.reasoning == "Let me think."
                    assert completion.text == text
                    assert completion.usage.n_output == len(completion.token_ids)


@pytest.mark.anyio
async def test_a_string_whose_beginning_a_reader_has_fails_where_nothing_else_may_follow() -> None:
    """A constraint leaves no output without the string, after a part of it was released."""
    options: dict[str, Any] = {
        "temperature": 0.0, "max_tokens": 12, "logit_bias": {ord("b"): 60.0}, "banned_strings": ["abac"],
    }  # fmt: skip
    async with Engine(n_ctx=256, **QUIET) as engine:
        assert (await engine.generate("x", regex="ab(abac|ac|d)X", **options)).text == "abdX"
        with pytest.raises(GenerationError, match="banned_strings") as caught:
            await engine.generate("x", regex="ab(abac|ac)X", **options)
        assert isinstance(caught.value.__cause__, InvalidRequestError)


@pytest.mark.anyio
async def test_greedy_output_goes_round_a_string_and_the_rest_is_as_if_its_token_were_banned() -> (
    None
):
    async with Engine(n_ctx=1024, **QUIET) as engine:
        options = {"temperature": 0.0, "max_tokens": 24}
        free = await engine.generate("count:11..40", **options)  # type: ignore[arg-type]
        string = free.text[3:6]
        deltas = []
        async with engine.stream("count:11..40", banned_strings=[string], **options) as stream:  # type: ignore[arg-type]
            async for delta in stream:
                deltas.append(delta)
                assert string not in "".join(d.text for d in deltas)
            ended = await stream.completion()
        assert ended.text == "".join(d.text for d in deltas)
        assert ended.token_ids == tuple(t for d in deltas for t in d.token_ids)
        assert string not in ended.text
        n_same = next(
            i
            for i, (a, b) in enumerate(zip(ended.token_ids, free.token_ids, strict=False))
            if a != b
        )
        before = free.token_ids[:n_same]
        forced = await engine.generate(
            "count:11..40", generated=before, logit_bias={free.token_ids[n_same]: float("-inf")},
            temperature=0.0, max_tokens=n_same + 1,
        )  # fmt: skip
        assert forced.token_ids[0] == ended.token_ids[n_same]
        assert await engine.audit() == []


@pytest.mark.anyio
async def test_what_a_stop_string_holds_back_is_gone_round_too() -> None:
    """The token that is banned gives its text with the next one, whatever that is."""
    async with Engine(n_ctx=1024, **QUIET) as engine:
        free = await engine.generate("count:11..40", temperature=0.0, max_tokens=12)
        string = free.text[4:6]
        completion = await engine.generate(
            "count:11..40",
            banned_strings=[string],
            stop=[f"{string}never"],
            temperature=0.0,
            max_tokens=12,
        )
        assert string not in completion.text
        assert len(completion.token_ids) == 12 or completion.finish_reason == "stop"
        assert engine.statistics().n_rebuilds == 0
        assert engine.statistics().n_output_tokens < 200


@pytest.mark.anyio
async def test_a_stream_that_is_cancelled_ends_before_a_banned_string() -> None:
    async with Engine(n_ctx=1024, stream_buffer=16, **QUIET) as engine:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        free = await engine.generate("count:11..40", **options)
        async with engine.stream(
            "count:11..40", banned_strings=[free.text[6:9]], **options
        ) as stream:
            deltas = [await anext(stream)]
            with anyio.fail_after(30):
                while not engine.statistics().n_paused:  # it has computed beyond the banned string
                    await engine.audit()
            await stream.cancel()
            deltas += [delta async for delta in stream]
        text = "".join(delta.text for delta in deltas)
        assert free.text.startswith(text)
        assert free.text[6:9] not in text
        assert deltas[-1].finish_reason == "cancelled"
        assert engine.statistics().n_running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("strings", [[""], ["a"] * 65, 5, ["x" * 1025]])
async def test_strings_that_cannot_be_banned_are_refused_by_name(strings: object) -> None:
    async with Engine(n_ctx=256, **QUIET) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream("x", banned_strings=strings)  # type: ignore[arg-type]
        assert caught.value.field == "banned_strings"


def test_a_ban_is_placed_where_another_token_is_allowed() -> None:
    kept = (TokenDelta("x", (1,)),)
    rest = (
        TokenDelta("a", (2,)),
        TokenDelta("", (3,)),
        TokenDelta("bc", (4,)),
        TokenDelta("d", ()),
    )
    ban = Ban(kept, rest)
    assert ban.placed(5, {4, 5}) == ban
    assert ban.placed(5, {6}) == Ban((*kept, rest[0]), rest[1:])
    # The text of the second token is in the third delta: nothing is cut between them.
    assert ban.placed(5, {6, 7}) == Ban((), kept)
    assert ban.placed(5, {5, 6, 7}) is None
    assert Ban((), rest).placed(6, {6, 7}) is None


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("banned", "text"),
    [
        ("three", "one two hree four"), ("one two three four", "ne two three four"), ("r", "one two thee fou"),
    ],
)  # fmt: skip
async def test_a_scripted_answer_leaves_out_what_begins_a_banned_string(
    banned: str, text: str
) -> None:
    async with FakeEngine(lambda _: "one two three four") as engine:
        assert (await engine.generate("p", banned_strings=[banned])).text == text


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("leaves", [False, True], ids=["cancels", "leaves"])
@pytest.mark.parametrize("waits", [False, True], ids=["early", "late"])
async def test_an_output_that_is_cancelled_has_no_banned_string_either(
    leaves: bool, waits: bool
) -> None:
    """The engine is ahead of the reader, and may have written one."""
    vocabulary = FakeVocabulary()
    async with FakeEngine(lambda _: "one two three four", stream_buffer=64) as engine:
        for n_read in range(9):
            stream, text = engine.stream("p", banned_strings=["three"]), ""
            async with stream:
                for _ in range(n_read):
                    text += (await anext(stream)).text
                while waits and engine.statistics().n_running:
                    await anyio.lowlevel.checkpoint()
                if not leaves:
                    await stream.cancel()
                    text += "".join([delta.text async for delta in stream])
                    assert (await stream.completion()).text == text
            completion = await stream.completion()
            assert completion.text.startswith(text)
            assert "three" not in completion.text
            assert "one two three four".startswith(completion.text)
            assert completion.usage.n_output == len(completion.token_ids)
            assert completion.text == "".join(
                vocabulary.piece(token).decode() for token in completion.token_ids
            )
