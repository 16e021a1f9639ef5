"""Conversations of clients, adapted to the abilities of a chat template.  Pure.

As in llama-server, `developer` becomes `system`, and content that is null becomes empty.  A call without a
result gets one if the template would not accept what follows it.  A system message that the template does
not accept is put into the next user message.  Consecutive messages that the template does not accept are
merged.  Tools, calls and results that the template leaves out are written as text: calls in the model's
syntax if it is known, otherwise in that of `DEFAULT_CALLS`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.engine.chat.call_literals import PythonCalls
from cllm.engine.chat.call_syntax import CallSyntax, JsonCalls, NamedCalls
from cllm.engine.chat.message_checks import REASONING_FIELDS, RESULTS
from cllm.engine.chat.named_formats import DEFAULT_CALLS
from cllm.engine.chat.template_abilities import TemplateAbilities

SYSTEMS = ("system", "developer")
MAX_PLAIN_DEPTH = 16  # levels of a schema in `plain_tools`
CUT_OFF = "_cut_off"  # key for arguments that are not a JSON object
NO_RESULT = "The call has no result."
TOOL_PROMPT = """You may call one or more of these tools, each given with a JSON schema of its \
arguments:
<tools>
{tools}
</tools>
To call a tool, answer with its name and its arguments as a JSON object in <tool_call> tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def mended(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    abilities: TemplateAbilities,
    calls: CallSyntax | None = None,
) -> list[dict[str, Any]]:
    """Return the messages in the form that the template takes; `messages` are not changed.

    Parameters
    ----------
    calls : CallSyntax, optional
        Syntax for calls as text, if the template does not write calls; default: `DEFAULT_CALLS`.
    """
    names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
    one_each = abilities.tool_calls and not abilities.parallel_tool_calls
    said = _with_ids(messages)
    said = _one_call_each(said) if one_each else said
    # If roles alternate, a call without a result leaves two messages of the user side by side.
    if abilities.tool_calls and not abilities.user_after_result:
        said = _with_results(said)
    chat = [
        mended_one
        for message in said
        for mended_one in _mended_message(dict(message), names, abilities, calls)
    ]
    if tools and not abilities.tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        n = next((i for i, m in enumerate(chat) if m["role"] not in SYSTEMS), len(chat))
        chat.insert(n, {"role": "system", "content": TOOL_PROMPT.format(tools=listed)})
    return _joined(_with_systems(chat, abilities), abilities)


def _with_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids for calls and results without one, which are matched in order.

    Many templates require ids.
    """
    said: list[dict[str, Any]] = []
    open_ids: OrderedDict[str, None] = OrderedDict()  # of calls whose results have not come
    for message in messages:
        if message["role"] in RESULTS:
            given = message.get("tool_call_id")
            if given is None and open_ids:
                message = {**message, "tool_call_id": next(iter(open_ids))}
            open_ids.pop(message.get("tool_call_id", ""), None)
        elif calls := message.get("tool_calls"):
            made = [{"id": f"call{len(said):03}{i:02}", **call} for i, call in enumerate(calls)]
            message = {**message, "tool_calls": made}
            open_ids = OrderedDict.fromkeys(call["id"] for call in made)
        said.append(message)
    return said


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a result for each call that has none, such as one that was cut off."""
    said: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for message in messages:
        if message["role"] in RESULTS:
            open_ids = [each for each in open_ids if each != message.get("tool_call_id")]
        elif message["role"] not in SYSTEMS:
            said += [
                {"role": "tool", "tool_call_id": each, "content": NO_RESULT} for each in open_ids
            ]
            open_ids = [call["id"] for call in message.get("tool_calls") or ()]
        said.append(message)
    return said


def _with_systems(chat: list[dict[str, Any]], abilities: TemplateAbilities) -> list[dict[str, Any]]:
    """Return the messages with system messages where the template takes them, or inside the next user message."""
    n_first = next((i for i, m in enumerate(chat) if m["role"] not in SYSTEMS), len(chat))
    first, rest = chat[:n_first], chat[n_first:]
    if first:
        text = "\n\n".join(message["content"] for message in first)
        first = [{**first[0], "content": text}]
    kept: list[dict[str, Any]] = first if abilities.system else []
    held = [] if abilities.system else [message["content"] for message in first]
    for message in rest:
        if message["role"] in SYSTEMS and not abilities.system_later:
            held.append(message["content"])
            continue
        if held and message["role"] == "user":
            message = {**message, "content": "\n".join([*held, message["content"]])}
            held = []
        elif held and not kept:
            kept, held = [{"role": "user", "content": "\n".join(held)}], []
        kept.append(message)
    if held:
        kept.append({"role": "user", "content": "\n".join(held)})
    return kept


def _joined(chat: list[dict[str, Any]], abilities: TemplateAbilities) -> list[dict[str, Any]]:
    """Return the messages; consecutive ones that the template does not accept are merged."""
    kept: list[dict[str, Any]] = []
    for message in chat:
        before = kept[-1]["role"] if kept else ""
        joins = message["role"] == "user" and (
            (before == "user" and not abilities.repeated_roles)
            or (before == "tool" and not abilities.user_after_result)
        )
        joins |= (
            message["role"] == before == "assistant"
            and not abilities.repeated_roles
            and not (message.get("tool_calls") or kept[-1].get("tool_calls"))
        )
        if joins:
            text = f"{kept[-1]['content']}\n\n{message['content']}"
            kept[-1] = {**kept[-1], "content": text}
        else:
            kept.append(message)
    return kept


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with turns of several calls split: one call each, followed by its result."""
    said: list[dict[str, Any]] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            said.append(message)
            continue
        results: dict[str, list[dict[str, Any]]] = {call["id"]: [] for call in calls}
        others: list[dict[str, Any]] = []
        while left and left[0]["role"] in RESULTS:
            result = left.popleft()
            results.get(result.get("tool_call_id", ""), others).append(result)
        for i, call in enumerate(calls):
            begin = {"role": "assistant", "content": ""} if i else message
            said.append({**begin, "tool_calls": [call]})
            said += results.pop(call["id"], ())
        said += others
    return said


def mended_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools, with an empty description and empty parameters where they are missing."""
    if tools is None:
        return None
    optional = {"description": "", "parameters": {"type": "object", "properties": {}}}
    functions = [
        {name: tool["function"].get(name) or default for name, default in optional.items()}
        for tool in tools
    ]
    return [
        {**tool, "function": {**tool["function"], **function}}
        for tool, function in zip(tools, functions, strict=True)
    ]


def plain_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with simplified schemas, for a template that cannot write the original ones.

    Each schema has one type, a description, and the keywords of its type.  Nested objects also have
    `additionalProperties`, strings by default.  Only the prompt uses these schemas: calls are constrained
    by the original ones.
    """
    return [
        {**tool, "function": {**function, "parameters": _plain_schema(function["parameters"])}}
        for tool in tools
        for function in [tool["function"]]
    ]


def _plain_schema(schema: object, depth: int = 0) -> dict[str, Any]:
    given = dict(schema) if isinstance(schema, Mapping) and depth < MAX_PLAIN_DEPTH else {}
    options = given.pop("anyOf", None) or given.pop("oneOf", None)
    for option in options if isinstance(options, list) else ():
        if isinstance(option, Mapping) and option.get("type") != "null":
            given = {**option, **given}
            break
    kinds = given.get("type")
    if isinstance(kinds, list):
        kinds = next((kind for kind in kinds if kind != "null"), None)
    if not isinstance(kinds, str):
        kinds = "object" if not depth or "properties" in given or "$ref" in given else "string"
    plain = {**given, "type": kinds, "description": given.get("description") or ""}
    if kinds == "object":
        members = given.get("properties")
        members = members if isinstance(members, Mapping) else {}
        plain["properties"] = {k: _plain_schema(v, depth + 1) for k, v in members.items()}
        plain["required"] = given.get("required") or []
        if depth:
            rest = _plain_schema(given.get("additionalProperties"), depth + 1)
            plain["additionalProperties"] = rest
    elif kinds == "array":
        plain["items"] = _plain_schema(given.get("items"), depth + 1)
    return plain


def _mended_message(
    message: dict[str, Any],
    names: dict[str, str],
    abilities: TemplateAbilities,
    syntax: CallSyntax | None,
) -> list[dict[str, Any]]:
    """Return the message, or two if the template would drop a part of it."""
    role = message["role"]
    if message.get("content") is None:
        message["content"] = ""
    if role == "developer" and not abilities.developer:
        message["role"] = "system"
    if role == "assistant" and not (message["content"] or abilities.empty_content):
        message["content"] = message["content"] if message.get("tool_calls") else " "
    if role == "assistant" and message.get("tool_calls"):
        return _parts_of(_mended_calls(message, names, abilities, syntax), abilities)
    if role in RESULTS:
        return [_mended_result({**message, "role": "tool"}, names, abilities)]
    return [message]


def _parts_of(message: dict[str, Any], abilities: TemplateAbilities) -> list[dict[str, Any]]:
    """Return a turn with calls in the form that the template takes."""
    text = message["content"]
    if not text or not message.get("tool_calls"):
        return [message]
    if not abilities.text_with_calls:
        first = {name: value for name, value in message.items() if name != "tool_calls"}
        return [first, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]
    thought = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if thought is not None and not abilities.thought_with_calls:
        others = {name: v for name, v in message.items() if name not in REASONING_FIELDS}
        return [{**others, "content": "", "reasoning_content": f"{thought}\n{text}"}]
    return [message]


def _mended_calls(
    message: dict[str, Any],
    names: dict[str, str],
    abilities: TemplateAbilities,
    syntax: CallSyntax | None,
) -> dict[str, Any]:
    calls = [_mended_call(call, names, abilities) for call in message["tool_calls"]]
    if abilities.tool_calls:
        return {**message, "tool_calls": calls}
    del message["tool_calls"]
    said = [message["content"], *(_call_in_words(call, syntax) for call in calls)]
    return {**message, "content": "\n".join(filter(None, said))}


def _mended_call(
    call: dict[str, Any], names: dict[str, str], abilities: TemplateAbilities
) -> dict[str, Any]:
    function = call["function"]
    if "id" in call:
        names[call["id"]] = function["name"]
        call = {**call, "id": _id(call["id"], abilities)}
    arguments = function.get("arguments", {})
    if abilities.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not abilities.text_arguments:
        # Not a JSON object: it was cut off, or changed by the client.  Most templates need a mapping.
        arguments = {CUT_OFF: arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _call_in_words(call: dict[str, Any], syntax: CallSyntax | None) -> str:
    function = call["function"]
    arguments = given = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if isinstance(syntax, PythonCalls) and isinstance(given, str):
        syntax = None  # `PythonCalls` can only write a JSON object
    if isinstance(syntax, JsonCalls | NamedCalls | PythonCalls):
        return syntax.write(function["name"], arguments)
    return DEFAULT_CALLS.write(function["name"], arguments)


def _mended_result(
    message: dict[str, Any], names: dict[str, str], abilities: TemplateAbilities
) -> dict[str, Any]:
    given = message.get("tool_call_id")
    if given is not None:
        message["tool_call_id"] = _id(given, abilities)
        if given in names:
            message.setdefault("name", names[given])
    if abilities.tool_results:
        return message
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    return {"role": "user", "content": text}


def _id(given: str, abilities: TemplateAbilities) -> str:
    """Return an id that the template takes, always the same for the same id."""
    if abilities.any_ids or (len(given) == 9 and given.isalnum() and given.isascii()):
        return given
    digest = hashlib.sha256(given.encode("utf-8", "replace")).digest()
    return base64.b32encode(digest).decode()[:9].lower()
