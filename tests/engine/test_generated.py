"""Requests that go on after tokens that were sampled before: exactly, or refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cllm import Completion, Engine, GenerationError, InvalidRequestError, PromptTooLongError
from cllm.testing import FakeAnswer, FakeEngine, FakeVocabulary
from tests.conftest import QUIET
from tests.engine.samplings import FEW_IN_FAST, PROMPTS, SAMPLINGS

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

EXACT: dict[str, Any] = {"deterministic": True, "n_ctx": 2048, "n_seq_max": 4, **QUIET}


@pytest.fixture
async def exact() -> AsyncIterator[Engine]:
    async with Engine(**EXACT) as engine:
        yield engine


async def cut_at(engine: Engine, prompt: str, n_tokens: int, **options: Any) -> str:
    """What the reader of a stream has been told with its first tokens."""
    told, n_told = "", 0
    async with engine.stream(prompt, **options) as stream:
        async for delta in stream:
            told, n_told = told + delta.text, n_told + len(delta.token_ids)
            if n_told == n_tokens:
                break
    return told


def rest_of(whole: Completion, n_cut: int) -> dict[str, Any]:
    assert whole.logprobs is not None
    return {"token_ids": whole.token_ids[n_cut:], "logprobs": whole.logprobs[n_cut:]}


@pytest.mark.parametrize("name", FEW_IN_FAST)
async def test_a_request_goes_on_exactly_whatever_samples_or_constrains_it(
    exact: Engine, name: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "logprobs": 2, **SAMPLINGS[name]}
    for prompt in PROMPTS[:2]:
        whole = await exact.generate(prompt, **options)
        for n_cut in {1, len(whole.token_ids) // 2, len(whole.token_ids) - 1} - {0}:
            await exact.reset_prefix_cache()
            cut = whole.token_ids[:n_cut]
            rest = await exact.generate(prompt, generated=cut, **options)
            assert {"token_ids": rest.token_ids, "logprobs": rest.logprobs} == rest_of(whole, n_cut)
            assert (rest.finish_reason, rest.stop_reason) == (
                whole.finish_reason,
                whole.stop_reason,
            )
            told = await cut_at(exact, prompt, n_cut, **options)
            assert told + rest.text == whole.text
            assert rest.usage.n_output == len(rest.token_ids)


async def test_prompt_log_probabilities_are_as_without(exact: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "prompt_logprobs": 1}
    for probability in (0.0, 0.5):
        options |= {"xtc_probability": probability, "xtc_threshold": 0.05}
        whole = await exact.generate("count: 1 2 3", **options)
        rest = await exact.generate("count: 1 2 3", generated=whole.token_ids[:2], **options)
        assert rest.prompt_logprobs == whole.prompt_logprobs
        assert rest.token_ids == whole.token_ids[2:]


@pytest.mark.full
async def test_a_chat_goes_on_in_its_channels_and_tells_nothing_twice() -> None:
    answer = FakeAnswer(
        "It is warm.",
        reasoning="Let me think about it.",
        tool_calls=[("get_weather", {"city": "Oslo " * 80}), ("get_time", {"city": "Oslo"})],
    )
    messages = [{"role": "user", "content": "Hello"}]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    other = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    options: dict[str, Any] = {"tools": [tool, other], "max_tokens": 2000}
    async with FakeEngine({"": answer}) as engine:
        deltas = [d async for d in engine.stream_chat(messages, **options)]
        whole = await engine.chat(messages, **options)
        ids = [token for delta in deltas for token in delta.token_ids]
        for n_cut in range(1, len(ids) - 1, 23):
            rest = engine.stream_chat(messages, generated=ids[:n_cut], **options)
            later = [d async for d in rest]
            both = [*deltas[:n_cut], *later]
            assert "".join(d.text for d in both) == whole.text
            assert "".join(d.reasoning for d in both) == whole.reasoning
            for i, call in enumerate(whole.tool_calls):
                pieces = [c for d in both for c in d.tool_calls if c.index == i]
                assert "".join(p.arguments for p in pieces) == call.arguments
                assert [p.name for p in pieces if p.name] == [call.name]
            ended = await rest.completion()
            assert [c.arguments for c in ended.tool_calls] == [
                c.arguments for c in whole.tool_calls
            ]
            assert ended.text == "".join(d.text for d in later)
            assert ended.finish_reason == whole.finish_reason


@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [
        ({"generated": "text"}, "generated", "a sequence of token ids"),
        ({"generated": 3}, "generated", "a sequence of token ids"),
        ({"generated": [-1]}, "generated", "0 to"),
        ({"generated": [1.5]}, "generated", "integer"),
        ({"generated": [10**6]}, "generated", "token ids 0 to 257"),
        ({"generated": [97, FakeVocabulary.END]}, "generated", "has not ended"),
        ({"generated": [97, 98], "stop_token_ids": [98]}, "generated", "has not ended"),
        ({"generated": [*b"xab"], "stop": ["ab"]}, "generated", "has not ended"),
        ({"generated": [97] * 8, "max_tokens": 8}, "generated", "fewer tokens than max_tokens"),
    ],
)
async def test_what_cannot_go_on_is_refused_by_name(
    options: dict[str, Any], field: str, limit: str
) -> None:
    async with FakeEngine({"": "answer"}) as engine:
        with pytest.raises(InvalidRequestError, match=limit) as caught:
            await engine.generate("prompt", **options)
        assert caught.value.field == field
        assert (await engine.generate("prompt")).text == "answer"


async def test_prompt_and_output_have_to_fit_together() -> None:
    async with FakeEngine({"": "answer"}, n_ctx=64, n_seq_max=1) as engine:
        with pytest.raises(PromptTooLongError):
            await engine.generate("p" * 40, generated=[97] * 30)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_that_a_constraint_forbids_end_that_request_alone(
    exact: Engine, temperature: float
) -> None:
    ids = await exact.tokenize("no such", add_special=False)
    with pytest.raises(GenerationError, match="tokens that the constraint allows"):
        await exact.generate("x", generated=ids, regex="[0-9]+", temperature=temperature, seed=1)
    completion = await exact.generate("1+1=", temperature=0.0)
    assert completion.text == "2"
