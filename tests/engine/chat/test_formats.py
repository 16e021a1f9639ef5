"""Real templates: what they can do is found out, what they write is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cllm.bindings import Model
from cllm.engine.chat.call_literals import PythonCalls
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import ChatTokenizer
from cllm.engine.chat.conversation import NO_RESULT, mended, mended_tools
from cllm.engine.config import EMBEDDED_MODEL
from tests.engine.chat.test_chat_template import FEW_IN_FAST, TEMPLATES
from tests.engine.chat.test_output_parser import Channels, channels_of

Message = dict[str, Any]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Which?"},
                "n_days": {"type": "integer", "description": "How many?"},
                "units": {"type": "array", "items": {"type": "string"}, "description": "Which?"},
            },
            "required": ["city"],
        },
    },
}
USER: Message = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ARGUMENTS = [
    {"city": "Zürich", "n_days": 3, "units": ["°C", "m/s"]},
    {"city": 'New "York" <b>\\n{x}'},
    {"city": "a\nb", "n_days": -1},
]
THOUGHT = "I need the weather.\nLet me look it up."
pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="no source of llama.cpp in the cache: tools/make_model.py"
)


def call(arguments: object, call_id: str) -> Message:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool_loop(content: str | None, call_id: str = "call12345") -> list[Message]:
    """What OpenAI's client sends in the second turn."""
    called = call('{"city": "Paris", "n_days": 3}', call_id)
    return [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call_id, "content": "20 degrees"},
    ]


def two_calls(*ids: str | None) -> list[Message]:
    """Two calls in one turn, and their results in the order of these ids."""
    made = [call('{"city": "Paris"}', "a"), call('{"city": "Oslo"}', "b")]
    if ids == (None,):
        made = [{**one, "id": None} for one in made]
    told = [{"role": "tool", "content": f"{text} degrees"} for text in ("20", "3")]
    named = [{**one, "tool_call_id": i} for one, i in zip(told, ids, strict=False) if i]
    return [USER, {"role": "assistant", "content": None, "tool_calls": made}, *(named or told)]


SAID: Message = {"role": "assistant", "content": "20 then."}
MORE: Message = {"role": "user", "content": "And in Oslo?"}
THOUGHT_ALONE: Message = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
CONVERSATIONS: dict[str, tuple[list[Message], bool]] = {
    "plain": ([SYSTEM, USER], False),
    "three turns": ([SYSTEM, USER, {"role": "assistant", "content": "20"}, USER], False),
    "developer": ([{**SYSTEM, "role": "developer"}, USER], False),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Paris"}]}], False),
    "tools": ([SYSTEM, USER], True),
    "content null": (tool_loop(None), True),
    "content empty": (tool_loop(""), True),
    "content": (tool_loop("Let me see."), True),
    "a long id": (tool_loop(None, "call_abcdefghijklmnop"), True),
    "goes on": ([SYSTEM, *tool_loop(None), {"role": "assistant", "content": "20"}, USER], True),
    "no tools any more": (tool_loop(None), False),
    "two systems": ([SYSTEM, {"role": "developer", "content": "Be kind."}, USER], False),
    "a system later": ([SYSTEM, USER, SAID, {"role": "system", "content": "Be kind."}, MORE], False),
    "a system at the end": ([USER, SAID, {"role": "system", "content": "Be kind."}], False),
    "two users": ([USER, MORE], False),
    "two answers": ([USER, SAID, {"role": "assistant", "content": "No, 21."}, MORE], False),
    "a user behind a result": ([*tool_loop(None), MORE], True),
    "a user behind a call": ([*tool_loop(None)[:2], MORE], True),
    "a user behind one result of two": ([*two_calls("a")[:3], MORE], True),
    "a thought alone": ([USER, THOUGHT_ALONE, MORE], False),
    "the result of a function": (
        [*tool_loop(None)[:2], {**tool_loop(None)[2], "role": "function"}], True,
    ),
    "results without ids": (two_calls(None), True),
    "results in another order": (two_calls("b", "a"), True),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(EMBEDDED_MODEL, vocab_only=True) as loaded:
        yield loaded


@pytest.fixture
def chat(model: Model, request: pytest.FixtureRequest) -> Iterator[ChatTokenizer]:
    made = ChatTokenizer(model.vocab, request.param.read_text(), None)
    yield made
    made.close()


each_template = pytest.mark.parametrize(
    "chat", FEW_IN_FAST, ids=lambda path: path.stem, indirect=True
)


def text_of(chat: ChatTokenizer, messages: list[Message], **options: Any) -> str:
    pieces = chat.render(ChatPrompt.of(messages, **options)).pieces
    return "".join(piece.text for piece in pieces)


@pytest.mark.full
@each_template
def test_text_and_thoughts_beside_a_call_never_cost_the_call(chat: ChatTokenizer) -> None:
    for fields in ({}, {"reasoning_content": THOUGHT}):
        user, called, result = tool_loop("Let me see.")
        text = text_of(chat, [user, {**called, **fields}, result], tools=[TOOL])
        behind = text.split(USER["content"])[-1]
        assert "get_weather" in behind, (fields, text)
        assert "Paris" in behind, (fields, text)
        assert "20 degrees" in behind, (fields, text)


@each_template
def test_every_conversation_is_rendered_and_nothing_of_it_is_left_out(chat: ChatTokenizer) -> None:
    for name, (messages, has_tools) in CONVERSATIONS.items():
        text = text_of(chat, messages, tools=[TOOL] if has_tools else None)
        for message in messages:
            content = message["content"]
            if content and message["role"] in ("tool", "function"):
                assert text.count(content) == 1, (name, text)
            said = content if isinstance(content, str) else (content or [{"text": ""}])[0]["text"]
            # What stands beside calls is left out by many templates themselves.
            assert said.rstrip(".") in text or message.get("tool_calls"), (name, message["role"])
            if message.get("tool_calls"):
                assert "get_weather" in text, name
                assert "Paris" in text, name
        if has_tools:
            assert "get_weather" in text, name
        assert NO_RESULT not in text or name in (
            "a user behind a call",
            "a user behind one result of two",
        ), name


@pytest.mark.parametrize(
    "chat", [p for p in TEMPLATES if "istral" in p.stem], ids=lambda path: path.stem, indirect=True
)
def test_a_call_whose_result_comes_after_a_system_message_has_that_result_alone(
    chat: ChatTokenizer,
) -> None:
    user, called, result = tool_loop(None)
    text = text_of(chat, [user, called, SYSTEM, result, MORE], tools=[TOOL])
    assert "20 degrees" in text
    assert NO_RESULT not in text


def read_back(chat: ChatTokenizer, message: Message) -> tuple[str, Channels]:
    """What the template writes for this turn of the assistant, and what the parser makes of it."""
    rendered = chat.render(ChatPrompt.of([USER], tools=[TOOL]))
    assert rendered.answer is not None
    head = "".join(piece.text for piece in rendered.pieces)
    known, tools = chat._plain, mended_tools([TOOL])
    turns = mended([USER, message], tools, known.abilities, known.output_format.calls)
    whole = "".join(piece.text for piece in known._pieces(turns, tools, False, {}))
    pairs = enumerate(zip(head, whole, strict=False))
    n = next((i for i, (a, b) in pairs if a != b), min(len(head), len(whole)))
    while whole[:n].rfind("<") > whole[:n].rfind(">"):  # not from inside of a marker on
        n = whole[:n].rfind("<")
    answer = replace(rendered.answer, prefix=rendered.answer.output_format.opening(whole[:n]))
    return whole[n:], channels_of(answer.parser("x"), [whole[n:]])


@pytest.mark.sampled(2)
@each_template
@pytest.mark.parametrize("n_calls", [1, pytest.param(2, marks=pytest.mark.full)])
def test_calls_and_reasoning_that_a_template_writes_are_read_back(
    chat: ChatTokenizer, n_calls: int
) -> None:
    abilities = chat.abilities
    for i in range(len(ARGUMENTS)):
        wanted = [ARGUMENTS[(i + k) % len(ARGUMENTS)] for k in range(n_calls)]
        if isinstance(chat.output_format.calls, PythonCalls) and abilities.tool_calls:
            # LFM2.5's template writes backslashes as they are, which then are escapes.
            wanted = [json.loads(json.dumps(given).replace("\\\\n", "")) for given in wanted]
        calls = [call(arguments, f"call1234{k}") for k, arguments in enumerate(wanted)]
        message: Message = {"role": "assistant", "content": None, "tool_calls": calls}
        if abilities.thinking:
            message["reasoning_content"] = THOUGHT
        if n_calls > 1 and abilities.tool_calls and not abilities.parallel_tool_calls:
            return  # such a template is given one call at a time
        text, (content, reasoning, found) = read_back(chat, message)
        assert [name for name, _ in found] == ["get_weather"] * n_calls, text
        assert [json.loads(arguments) for _, arguments in found] == wanted
        assert reasoning == (THOUGHT if THOUGHT in text else "")
        assert "get_weather" not in content
