"""Messages and tools as OpenAI's clients send them, checked and copied for a template.  Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import copysign, isfinite, isinf
from typing import Any, TypeVar

from cllm.checks import MAX_CHAT_BYTES, encode_text
from cllm.engine import media_parts
from cllm.engine.chat.json_scanner import MAX_DEPTH
from cllm.engine.chat.media_marks import MediaMarks
from cllm.engine.chat.readable import TEXTS, WORDS, text_of, words_of
from cllm.engine.media_parts import media_of
from cllm.engine.media_source import NamedMedia
from cllm.errors import InvalidRequestError, TooMuchTextError

T = TypeVar("T")
# Many templates write `<|` + role + `|>`: a role that is not in `ROLES` could forge a control token.
RESULTS = ("tool", "function")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 1 << 16
MAX_TOOLS = 256
MAX_NAME, MAX_ID = 128, 256  # characters
MAX_INTEGER_BITS = 1024
# The event loop copies so many values in 0.1 s.
MAX_VALUES = 1 << 18
# Types of values that need neither a check nor a copy.
PLAIN = (type(None), bool)
# Fields that may have a message's reasoning; transformers fills the first from the others.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def check_messages(messages: object, marks: MediaMarks | None = None) -> list[dict[str, Any]]:
    """Return a checked copy of OpenAI-style messages, as plain dicts, lists and scalars for a template.

    The text parts of a content become one string, one line each.  Arguments of tool calls become a
    mapping if they are a JSON object.

    Parameters
    ----------
    marks : MediaMarks, optional
        Takes the images and audio of users and of tools, which become marks in the text.  None: those of users are
        rejected, and words replace those of tools.

    Raises
    ------
    InvalidRequestError
        A message is invalid; the error names the field with its index: `messages[3].role`.
    """
    sequence = _sequence("messages", messages)
    if not 1 <= len(sequence) <= MAX_MESSAGES:
        raise InvalidRequestError("messages", f"{len(sequence)} messages", f"1 to {MAX_MESSAGES}")
    copier, arguments = Copier("messages"), Copier("messages")
    copied = [
        _message(f"messages[{i}]", message, copier, arguments, marks)
        for i, message in enumerate(sequence)
    ]
    _check_ids(copied)
    return copied


def _check_ids(messages: list[dict[str, Any]]) -> None:
    """Reject results of tools with an id that no earlier call has."""
    made: set[object] = set()
    for i, message in enumerate(messages):
        given = message.get("tool_call_id")
        if message["role"] == "tool" and given is not None and given not in made:
            limit = "the id of a call in a message before it"
            raise InvalidRequestError(f"messages[{i}].tool_call_id", given, limit)
        made.update(call.get("id") for call in message.get("tool_calls", ()))


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return a checked copy of OpenAI-style definitions of tools; None if there are none.

    Raises
    ------
    InvalidRequestError
        A definition is invalid; the error names the field with its index: `tools[3].function`.
    """
    if tools is None:
        return None
    sequence = _sequence("tools", tools)
    if len(sequence) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(sequence)} tools", f"at most {MAX_TOOLS}")
    copier = Copier("tools")
    copied = [_tool(f"tools[{i}]", tool, copier) for i, tool in enumerate(sequence)]
    names = [tool["function"]["name"] for tool in copied]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequestError(f"tools[{i}].function.name", name, "each name once")
    # Templates announce tools if `tools is not none`, so an empty list must become None.
    return copied or None


def _tool(field: str, value: object, copier: Copier) -> dict[str, Any]:
    tool = copier.mapping(field, value)
    if tool.setdefault("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", tool["type"], '"function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{field}.function", function, "a mapping")
    _check_name(f"{field}.function.name", function.get("name"))
    _check_schema(f"{field}.function.parameters", function.get("parameters"))
    return tool


def _check_schema(field: str, schema: object) -> None:
    """Check the form of a tool's schema of arguments; remove `properties` and `required` if they are null.

    Other keywords are not checked.

    Raises
    ------
    InvalidRequestError
        The schema or its `properties` is not a mapping, or `required` is not a list of names.
    """
    if not isinstance(schema, dict | None):
        raise InvalidRequestError(field, schema, "a mapping")
    if schema is None:
        return
    for name in [name for name in ("properties", "required") if schema.get(name, 0) is None]:
        del schema[name]
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise InvalidRequestError(f"{field}.properties", properties, "a mapping")
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise InvalidRequestError(f"{field}.required", required, "a list of names")


def is_name(name: str) -> bool:
    """Return True if a tool, or a call, may have this name."""
    return 1 <= len(name) <= MAX_NAME and name.isprintable()


def _check_name(field: str, name: object) -> None:
    if not isinstance(name, str) or not is_name(name):
        raise InvalidRequestError(field, name, f"1 to {MAX_NAME} printable characters")


class Copier:
    """Copies JSON-like values to plain ones, at most `MAX_CHAT_BYTES` of text and `MAX_VALUES` values in all.

    `whole` is the field that the error of too much names.
    """

    def __init__(self, whole: str) -> None:
        self._whole = whole
        self._n_bytes_left = MAX_CHAT_BYTES
        self._n_values_left = MAX_VALUES

    def mapping(self, field: str, value: object) -> dict[str, Any]:
        """Return a copy of a mapping; `InvalidRequestError` for another value."""
        if not isinstance(value, Mapping):
            raise InvalidRequestError(field, value, "a mapping")
        copy: dict[str, Any] = self.copy(field, value)
        return copy

    def copy(self, field: str, value: object, depth: int = 0) -> Any:
        """Return a copy of a JSON-like value; `field` is its name in errors."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(field, value)
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                value = f"a number of {value.bit_length()} bits"
                raise InvalidRequestError(field, value, f"at most {MAX_INTEGER_BITS} bits")
            return int(value)
        if isinstance(value, float):
            if not isfinite(value):
                raise InvalidRequestError(field, value, "a finite number")
            return float(value)
        if depth >= MAX_DEPTH:
            raise InvalidRequestError(
                field, "deeper nesting", f"at most {MAX_DEPTH} mappings and lists inside each other"
            )
        # Names of fields are made for few values: they take more time than the copies.
        if isinstance(value, Mapping):
            return {
                self._text(field, key): item
                if self._is_plain(item)
                else self.copy(f"{field}.{key!s:.40}", item, depth + 1)
                for key, item in self._taken(value.items())
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [
                item if self._is_plain(item) else self.copy(f"{field}[{i}]", item, depth + 1)
                for i, item in enumerate(self._taken(value))
            ]
        raise InvalidRequestError(field, value, "a JSON value")

    def _taken(self, items: Iterable[T]) -> list[T]:
        """Return the items of a container, which are counted."""
        taken = list(islice(items, self._n_values_left + 1))
        self._n_values_left -= len(taken)
        if self._n_values_left < 0:
            limit = f"at most {MAX_VALUES} values"
            raise TooMuchTextError(self._whole, f"more than {MAX_VALUES} values", limit)
        return taken

    def _is_plain(self, value: object) -> bool:
        """Return True if a value needs no check and no copy; the bytes of a text are counted."""
        if type(value) is int:
            return value.bit_length() <= MAX_INTEGER_BITS
        if type(value) is str:
            try:
                n_bytes = len(value) if value.isascii() else len(value.encode())
            except UnicodeEncodeError:  # `_text` names its field
                return False
            self._count(n_bytes)
            return True
        if type(value) is float:
            return isfinite(value)
        return type(value) in PLAIN

    def _text(self, field: str, text: object) -> str:
        if not isinstance(text, str):
            raise InvalidRequestError(field, text, "a mapping with string keys")
        is_ascii = text.isascii()
        self._count(len(text) if is_ascii else len(encode_text(field, text, InvalidRequestError)))
        return str.__str__(text)  # of a subclass only the text

    def _count(self, n_bytes: int) -> None:
        self._n_bytes_left -= n_bytes
        if self._n_bytes_left < 0:
            limit = f"at most {MAX_CHAT_BYTES} bytes of text"
            raise TooMuchTextError(self._whole, f"more than {MAX_CHAT_BYTES} bytes", limit)


def _sequence(field: str, value: object) -> Sequence[object]:
    """Return the value if it is a sequence other than text or bytes; otherwise raise `InvalidRequestError`."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise InvalidRequestError(field, value, "a list of mappings")
    return value


def _message(
    field: str, value: object, copier: Copier, arguments: Copier, marks: MediaMarks | None
) -> dict[str, Any]:
    if isinstance(value, Mapping) and value.get("role") in ROLES:
        # The content becomes text before it is counted: an image in a result may have megabytes.
        value = {**value, "content": _content(f"{field}.content", value, marks)}
    message = copier.mapping(field, value)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("tool_call_id", *REASONING_FIELDS):
        if not isinstance(message.get(name), str | None):
            raise InvalidRequestError(f"{field}.{name}", message[name], "text")
    _parse_arguments(f"{field}.tool_calls", message, arguments)
    return message


def _content(field: str, message: Mapping[str, Any], marks: MediaMarks | None) -> str | None:
    """Return the content as text; None if an assistant's message has calls or a thought alone."""
    role, content = message["role"], message.get("content")
    if role in RESULTS:
        return words_of(content, mark_of=None if marks is None else partial(_mark, field, marks))
    if role == "assistant":
        if content is not None:
            return words_of(content)
        has_others = any(message.get(name) for name in ("tool_calls", *REASONING_FIELDS))
        return None if has_others else ""
    if isinstance(content, Sequence) and not isinstance(content, str | bytes | bytearray):
        return _text_of_parts(field, content, marks if role == "user" else None)
    if not isinstance(content, str):
        raise InvalidRequestError(field, content, "text or a list of text parts")
    return content


def _text_of_parts(field: str, content: Sequence[object], marks: MediaMarks | None) -> str:
    """Return a content as text: texts one line each, and marks of media without lines of their own."""
    written, follows_text = "", False
    for i, part in enumerate(content):
        name = f"{field}[{i}]"
        media = None if marks is None else media_of(part, name)
        if marks is not None and media is not None:
            written += marks.add(NamedMedia(media, name))
        elif (text := text_of(part)) is not None:
            written += ("\n" if follows_text else "") + text
        else:
            raise _wrong_part(name, part)
        follows_text = media is None
    return written


def _mark(field: str, marks: MediaMarks, part: object) -> str | None:
    """Return the mark of the media in a part of a tool's result; None if the part has none that can be read."""
    try:
        media = media_of(part, field)
    except InvalidRequestError:
        return None
    return None if media is None else marks.add(NamedMedia(media, field, is_optional=True))


def _wrong_part(field: str, part: Any) -> InvalidRequestError:
    if not isinstance(part, Mapping):
        return InvalidRequestError(field, part, "a mapping")
    kind = part.get("type")
    if isinstance(kind, str) and kind in TEXTS:
        return InvalidRequestError(f"{field}.{TEXTS[kind]}", part.get(TEXTS[kind]), "a string")
    if kind in media_parts.TYPES:
        limit = "left out: only messages of users and results of tools have images and audio"
        return InvalidRequestError(field, WORDS[kind], limit)
    return InvalidRequestError(f"{field}.type", kind, "text, an image or audio")


def _parse_arguments(field: str, message: dict[str, Any], copier: Copier) -> None:
    """Convert the arguments of tool calls to mappings; OpenAI's clients send them as JSON text.

    transformers documents a mapping.  With text, a template with `tojson` would quote it again, and
    others fail.  As in vLLM, empty text means no arguments.  Empty `tool_calls` are removed, because
    some templates only test for the key.
    """
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list):
        raise InvalidRequestError(field, calls, "a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{field}[{i}].function", function, "a mapping")
        _check_name(f"{field}[{i}].function.name", function.get("name"))
        call.setdefault("type", "function")
        given = call.get("id")
        if given is not None and not (isinstance(given, str) and len(given) <= MAX_ID):
            raise InvalidRequestError(f"{field}[{i}].id", given, f"up to {MAX_ID} characters")
        if given is None:
            call.pop("id", None)
        text = function.get("arguments")
        if not isinstance(text, str):
            is_object = isinstance(text, dict | None)
            function["arguments"] = (text or {}) if is_object else json.dumps(text)
            continue
        try:
            arguments = json.loads(text or "{}")
            if isinstance(arguments, str):  # encoded twice
                arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            name = f"{field}[{i}].function.arguments"
            # Copied again with its checks: JSON text can have lone surrogates and deep nesting.
            function["arguments"] = copier.copy(name, finite(arguments))


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning as `reasoning_content` and `thinking`, which templates read."""
    values = (message[field] for field in REASONING_FIELDS if message.get(field) is not None)
    reasoning = next(values, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def finite(value: Any) -> Any:
    """Return a value with the largest float in place of infinity: Python reads that from 1e999."""
    if isinstance(value, float) and isinf(value):
        return copysign(sys.float_info.max, value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
