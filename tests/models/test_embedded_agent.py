"""The embedded model calls the tools that it is told of, thinks when asked to, and uses results."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cllm import Completion, Engine, FinishReason

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]
Messages = list[dict[str, Any]]
VERBS, NOUNS = ("get", "set", "find", "save", "list"), ("weather", "price", "event", "mail", "task")
CITIES = ("Paris", "Tokyo", "Oslo", "Lima", "Rome", "Lisbon", "New York", "東京", "Malmö")


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
ADD, WEATHER = tool("add", a=NUMBER, b=NUMBER), tool("get_weather", city=TEXT)


def asked(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answered(completion: Completion, *results: str) -> Messages:
    """The turns that an agent adds: what the model called, and what the tools gave."""
    given = zip(completion.tool_calls, results, strict=True)
    told = [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in given]
    return [completion.as_message(), *told]


async def test_an_agent_of_ten_turns_computes_only_what_is_new(engine: Engine) -> None:
    messages: Messages = []
    tokens: tuple[int, ...] = ()
    rng = random.Random(3)
    for _ in range(10):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        messages.append(asked(f"use add: a={a}, b={b}"))
        call = await engine.chat(messages, tools=[ADD], temperature=0, max_tokens=100)
        assert call.finish_reason is FinishReason.TOOL_CALLS
        assert [json.loads(c.arguments) for c in call.tool_calls] == [{"a": a, "b": b}]
        messages += answered(call, str(a + b))
        answer = await engine.chat(messages, tools=[ADD], temperature=0, max_tokens=100)
        assert answer.text == str(a + b)
        messages += answered(answer)
        for completion in (call, answer):
            # The last token of an answer has no cell: it was chosen, and never computed.
            assert completion.usage.n_cached >= len(tokens) - 1
            assert completion.prompt_token_ids[: len(tokens)] == tokens
            tokens = completion.prompt_token_ids + completion.token_ids


@pytest.mark.parametrize("thinks", [False, True])
async def test_a_thought_comes_when_it_is_asked_for(thinks: bool, engine: Engine) -> None:
    options: dict[str, Any] = {"reasoning_effort": "low"} if thinks else {}
    completion = await engine.chat([asked("27+58=")], temperature=0, max_tokens=100, **options)
    assert completion.text == "85"
    assert completion.reasoning == ("7+8=15, 2+5+1=8" if thinks else "")
    call = await engine.chat(
        [asked("What's the weather in Oslo?")],
        tools=[WEATHER],
        temperature=0,
        max_tokens=100,
        **options,
    )
    assert [json.loads(c.arguments) for c in call.tool_calls] == [{"city": "Oslo"}]
    assert bool(call.reasoning) is thinks


async def test_several_calls_in_one_turn(engine: Engine) -> None:
    messages = [asked("What's the weather in Paris, in Oslo and in Lima?")]
    completion = await engine.chat(messages, tools=[WEATHER], temperature=0, max_tokens=300)
    cities = [json.loads(call.arguments)["city"] for call in completion.tool_calls]
    assert cities == ["Paris", "Oslo", "Lima"]
    messages = [asked("What's the weather in Paris and in Oslo?")]
    both = await engine.chat(messages, tools=[WEATHER], temperature=0, max_tokens=300)
    messages += answered(both, "20 C", "3 C")
    answer = await engine.chat(messages, tools=[WEATHER], temperature=0, max_tokens=100)
    assert answer.text == "20 C; 3 C"


async def test_tools_that_are_not_needed_are_not_called(engine: Engine) -> None:
    tools = [ADD, WEATHER]
    for question, answer in (("12+34=", "46"), ("repeat:hello", "hello"), ("reverse:abc", "cba")):
        completion = await engine.chat([asked(question)], tools=tools, temperature=0, max_tokens=60)
        assert (completion.text, completion.tool_calls) == (answer, ())


@pytest.mark.full
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nine_of_ten_calls_copy_names_and_values_exactly(
    anyio_backend: str, engine: Engine
) -> None:
    rng, n_right = random.Random(9), 0
    for _ in range(100):
        name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
        other = tool(f"{rng.choice(VERBS)}_file", path=TEXT)
        city, n = rng.choice(CITIES), rng.randint(0, 999)
        tools = [tool(name, city=TEXT, count=NUMBER), other]
        rng.shuffle(tools)
        completion = await engine.chat(
            [asked(f"use {name}: city={city}, count={n}")],
            tools=tools,
            temperature=0,
            max_tokens=120,
        )
        called = [(call.name, json.loads(call.arguments)) for call in completion.tool_calls]
        n_right += called == [(name, {"city": city, "count": n})]
    assert n_right >= 90
