"""Abilities of a chat template, found by rendering test messages once.  Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from cllm.engine.chat.chat_template import unless_rejected
from cllm.engine.chat.format_detection import (
    IDS,
    KEY,
    NAME,
    OTHER_KEY,
    QUESTION,
    SECOND_VALUE,
    TOOL,
    VALUE,
    call,
    turn,
)

INSTRUCTION, RESULT = "PROBE-INSTRUCTION", "PROBE-RESULT"
MORE, SAID, LATER = "PROBE-MORE", "PROBE-SAID", "PROBE-LATER"
LONG_ID = "call_0123456789"


class RenderProbe(Protocol):
    """Renders with a template; may raise `InvalidRequestError`."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **template_kwargs: object,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Parts of a conversation that a template renders.  Parts that it does not render are rewritten for it.

    Attributes
    ----------
    system, developer : bool
        True if it renders messages of this role.
    system_later : bool
        True if it renders system messages after other messages.
    repeated_roles : bool
        True if it renders two consecutive user messages.
    empty_content : bool
        True if it accepts an answer without text.
    tools, tool_calls, parallel_tool_calls, tool_results : bool
        True if it renders, respectively, offered tools, calls, several calls in one turn, and results.
    user_after_result : bool
        True if it renders a user message directly after the result of a tool.
    text_with_calls, thought_with_calls : bool
        True if a turn with calls may also have text, and both text and reasoning.
    text_arguments : bool
        True if the arguments of calls must be JSON text; otherwise they are objects.
    any_ids : bool
        True if it accepts any ids of calls; otherwise they must be nine letters and digits.
    thinking : bool
        True if the model thinks, and its thought can be separated from the answer.
    thinking_switch, reasoning_effort : bool
        True if the variable `enable_thinking`, or `reasoning_effort`, changes the prompt.
    """

    system: bool
    developer: bool
    system_later: bool
    repeated_roles: bool
    empty_content: bool
    tools: bool
    tool_calls: bool
    parallel_tool_calls: bool
    tool_results: bool
    user_after_result: bool
    text_with_calls: bool
    thought_with_calls: bool
    text_arguments: bool
    any_ids: bool
    thinking: bool
    thinking_switch: bool
    reasoning_effort: bool


def find_abilities(source: str, render: RenderProbe, *, thinking: bool) -> TemplateAbilities:
    """Return the abilities of a template, found by rendering test messages."""

    def shows(text: str, *messages: dict[str, Any], tools: bool = True) -> bool:
        offered = [TOOL] if tools else None
        rendered = unless_rejected(lambda: render(list(messages), offered, False))
        return text in (rendered or "")

    def with_kwargs(**kwargs: object) -> str:
        return unless_rejected(lambda: render([QUESTION], None, True, **kwargs)) or ""

    def with_id(message: dict[str, Any], call_id: str) -> dict[str, Any]:
        return {**message, "tool_calls": [{**message["tool_calls"][0], "id": call_id}]}

    arguments = {KEY: VALUE, OTHER_KEY: 7}
    first = call(0, **arguments)
    objects, texts = turn(tool_calls=[first]), turn(tool_calls=[_with_text(first)])
    takes_objects = shows(VALUE, QUESTION, objects)
    calls = takes_objects or shows(VALUE, QUESTION, texts)
    second = call(1, **{KEY: SECOND_VALUE, OTHER_KEY: 8})
    both = [first, second] if takes_objects else [_with_text(first), _with_text(second)]
    result = {"role": "tool", "tool_call_id": IDS[0], "name": NAME, "content": RESULT}
    asked = objects if takes_objects else texts
    system = {"role": "system", "content": INSTRUCTION}
    long = {**result, "tool_call_id": LONG_ID}
    more = {**QUESTION, "content": MORE}
    said = {**asked, "content": SAID}
    later = [system, QUESTION, turn(content=SAID), {**system, "content": LATER}, more]
    return TemplateAbilities(
        system=shows(INSTRUCTION, system, QUESTION, tools=False),
        developer="<|channel|>" in source,
        system_later=all(shows(text, *later, tools=False) for text in (INSTRUCTION, LATER, MORE)),
        repeated_roles=all(
            shows(text, QUESTION, more, tools=False) for text in (QUESTION["content"], MORE)
        ),
        empty_content=shows(MORE, QUESTION, turn(), more, tools=False),
        tools=shows(NAME, QUESTION),
        tool_calls=calls,
        parallel_tool_calls=calls and shows(SECOND_VALUE, QUESTION, turn(tool_calls=both)),
        tool_results=shows(RESULT, QUESTION, asked, result),
        user_after_result=shows(MORE, QUESTION, asked, result, more),
        text_with_calls=not calls or shows(VALUE, QUESTION, said, result),
        thought_with_calls=not calls or shows(VALUE, QUESTION, {**said, **_thought()}, result),
        text_arguments=calls and not takes_objects,
        any_ids=not calls or shows(RESULT, QUESTION, with_id(asked, LONG_ID), long),
        thinking=thinking,
        thinking_switch=with_kwargs(enable_thinking=True) != with_kwargs(enable_thinking=False),
        reasoning_effort=with_kwargs(reasoning_effort="low")
        != with_kwargs(reasoning_effort="high"),
    )


def _thought() -> dict[str, str]:
    return dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "PROBE-THOUGHT")


def _with_text(tool_call: dict[str, Any]) -> dict[str, Any]:
    function = tool_call["function"]
    return {**tool_call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
