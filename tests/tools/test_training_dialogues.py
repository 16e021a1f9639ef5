"""What the embedded model learns of agents is, byte for byte, what the chat template makes of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cllm.bindings import Model
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.chat.chat_tokenizer import ChatTokenizer
from cllm.engine.config import EMBEDDED_MODEL
from tools.tiny_vocabulary import CHAT_TEMPLATE, END, START
from tools.training_dialogues import (
    MAX_TOKENS,
    Tool,
    dialogue_example,
    encode_dialogue,
    make_dialogue,
)

ANSWER = [START, *b"assistant\n"]
SCALARS = {"num": "number", "bool": "boolean", "str": "string"}


def schema_of(shape: str) -> dict[str, Any]:
    """The JSON schema that the template shows as this shape."""
    if shape.startswith("["):
        return {"type": "array", "items": schema_of(shape[1:-1])}
    if shape.startswith("{"):
        return members_of(shape[1:-1])
    if "|" in shape:
        return {"type": "string", "enum": shape.split("|")}
    return {"type": SCALARS[shape]}


def members_of(shape: str) -> dict[str, Any]:
    """The JSON schema of `key:shape,key?:shape`."""
    properties, required, depth, part = {}, [], 0, ""
    for character in shape + ",":
        depth += (character in "[{") - (character in "]}")
        if character != "," or depth:
            part += character
            continue
        if part:
            key, _, inner = part.partition(":")
            if not key.endswith("?"):
                required.append(key)
            properties[key.removesuffix("?")] = schema_of(inner)
        part = ""
    return {"type": "object", "properties": properties, "required": required}


def definition_of(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": members_of(tool.shape)}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module")
def chat() -> Any:
    with Model(EMBEDDED_MODEL) as model:
        chat = ChatTokenizer(model.vocab, CHAT_TEMPLATE, None)
        yield chat
        chat.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_dialogue_is_what_the_template_makes_of_its_messages(
    seed: int, chat: ChatTokenizer
) -> None:
    rng = random.Random(seed)
    tools, turns = make_dialogue(rng)
    turns = [turn for turn in turns if len(turn.results) == len(turn.calls)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn.asked})
        thought = {"reasoning_content": turn.thought}
        if turn.calls:
            calls = [
                {"id": f"call{number}x{i}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(turn.calls)
            ]  # fmt: skip
            messages.append({"role": "assistant", "content": None, "tool_calls": calls, **thought})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, turn.results, strict=True)
            ]
            thought["reasoning_content"] = (
                "I have the result." if len(calls) == 1 else "I have the results."
            )
        messages.append({"role": "assistant", "content": turn.answer, **thought})
    options: dict[str, Any] = {"tools": [definition_of(tool) for tool in tools]}
    prompt = ChatPrompt.of(messages, add_generation_prompt=False, **options)
    never_cut = _NeverCut(seed)
    example = encode_dialogue(never_cut, tools, turns, thinks=True, system="Be brief.")
    assert example.tokens == chat.tokenize(chat.render(prompt).pieces)


class _NeverCut(random.Random):
    """No dialogue ends before a result."""

    def random(self) -> float:
        return 1.0


def test_what_is_learned_is_the_assistants_and_fits() -> None:
    rng = random.Random(1)
    for _ in range(200):
        example = dialogue_example(rng)
        tokens, is_asked = example.tokens, example.asked
        assert len(tokens) == len(is_asked) <= MAX_TOKENS
        learned = [tokens[i + 1] for i, asked in enumerate(is_asked[:-1]) if asked]
        begun = [tokens[i : i + len(ANSWER)] for i in range(len(tokens))].count(ANSWER)
        assert learned.count(END) == begun > 0
        assert not is_asked[-1]
