"""Calls in notations of their own: Python's, Gemma's, MiniMax's.  Pure; see `call_syntax`."""

from __future__ import annotations

import ast
import json
import re
from ast import literal_eval as literal_of
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cllm.engine.chat.call_syntax import MAX_NAME, MAX_PYTHON, CallSink, section, typed_json
from cllm.engine.chat.message_checks import finite
from cllm.engine.chat.text_reader import EndOfTextError, MismatchError, Step, TextReader
from cllm.engine.chat.tool_schema import ValueSchema
from cllm.engine.json_schema import TYPES

MAX_DEPTH = 64
# What Python's parser does not take inside a string.
ESCAPED = str.maketrans({"\n": "\\n", "\r": "\\r", "\0": "\\x00"})
QUOTE = '<|"|>'
NO_KEY = re.compile(r"""[\s"'()\[\]{},=]""")  # characters that a key before `=` cannot have


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`[tool(key="value"), other()]`, as Llama 4 and LFM2 write them.

    Attributes
    ----------
    starts, ends : tuple of str
        Markers around the list.
    is_bare : bool
        Such a list at the beginning of an answer needs no marker, if it calls tools that were offered.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return self.starts

    def write(self, name: str, arguments: str) -> str:
        """Return a call in this syntax; `arguments` is the text of a JSON object."""
        given = ", ".join(
            f"{key}={_written(value)}" for key, value in json.loads(arguments).items()
        )
        return f"{''.join(self.starts[:1])}[{name}({given})]{''.join(self.ends[:1])}"

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        yield from reader.skip_space()
        yield from reader.expect("[")
        yield from reader.skip_space()
        calls: list[tuple[str, str]] = []  # reported when the list is complete
        while not (yield from reader.accept("]")):
            if calls:
                yield from reader.expect(",")
                yield from reader.skip_space()
            calls.append((yield from self._call(reader)))
            yield from reader.skip_space()
        if not (calls or trigger):
            raise MismatchError  # an answer that is an empty list
        for name, arguments in calls:
            sink.begin(name, must_be_known=not trigger)
            sink.arguments(arguments)
            sink.end()
        yield from reader.skip_space()
        yield from reader.accept_any(self.ends)

    def _call(self, reader: TextReader) -> Step[tuple[str, str]]:
        """Read one call: its name, and its arguments as JSON text."""
        name = (yield from reader.until("(", limit=MAX_NAME))[0].strip()
        arguments: dict[str, str] = {}
        yield from reader.skip_space()
        while not (yield from reader.accept(")")):
            if arguments:
                yield from reader.expect(",")
                yield from reader.skip_space()
                if (yield from reader.accept(")")):
                    break
            key = (yield from reader.until("=", limit=MAX_NAME))[0].strip()
            if not key or NO_KEY.search(key):
                raise MismatchError
            arguments[key] = yield from _python_value(reader)
            yield from reader.skip_space()
        members = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items())
        return name, f"{{{', '.join(members)}}}"


def _written(value: object) -> str:
    """Return a value as JSON; a value that is itself a constant is written as in Python (`True`, `None`)."""
    constants = {True: "True", False: "False", None: "None"}
    is_constant = value is None or isinstance(value, bool)
    return constants[value] if is_constant else json.dumps(value, ensure_ascii=False)  # type: ignore[index]


def _python_value(reader: TextReader) -> Step[str]:
    """Read a value in JSON's notation or in Python's, and return it in JSON's."""
    yield from reader.skip_space()
    mark = reader.at
    try:
        text = yield from reader.json_text()
        if (yield from reader.is_before((",", ")"))):
            return text
    except EndOfTextError:
        raise
    except MismatchError:
        pass
    reader.at = mark
    text = yield from _python_text(reader)
    try:
        # `true`, `false` and `null` are accepted as well.
        node = _Constants().visit(ast.parse(text, mode="eval").body)
        return json.dumps(finite(literal_of(node)), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MismatchError from None


def _python_text(reader: TextReader) -> Step[str]:
    """Read and return the text of a value, up to the comma or `)` after it, which is not read."""
    parts: list[str] = []
    depth, quote, n = 0, "", 0
    while True:
        text, mark = yield from reader.until(*"()[]{},\"'\\")
        parts.append(text.translate(ESCAPED) if quote else text)
        if not (quote or depth) and mark in ",)":
            reader.at -= 1
            return "".join(parts).strip()
        parts.append(mark)
        if mark == "\\":
            parts.append((yield from reader.peek()))
            reader.at += 1 if parts[-1] else 0
        elif quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        else:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(mark, 0)
        n += len(text) + 1
        if n > MAX_PYTHON:
            raise MismatchError


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`, as Gemma 4 writes them."""

    start: str = "<|tool_call>"
    call_end: str = "<tool_call|>"
    is_bare: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.start,)

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        yield from reader.skip_space()
        yield from reader.expect("call:")
        name = (yield from reader.until("{", limit=MAX_NAME))[0].strip()
        sink.begin(name)
        sink.arguments("{")
        yield from _gemma_members(reader, sink.arguments, "}", 0)
        yield from reader.skip_space()
        yield from reader.expect(self.call_end)
        sink.end()


def _gemma_members(
    reader: TextReader, emit: Callable[[str], None], end: str, depth: int
) -> Step[None]:
    """Read the members of an object or a list and the closing bracket `end`, and emit them as JSON."""
    if depth > MAX_DEPTH:
        raise MismatchError
    yield from reader.skip_space()
    is_first = True
    while not (yield from reader.accept(end)):
        if not is_first:
            yield from reader.expect(",")
            yield from reader.skip_space()
            emit(", ")
        is_first = False
        if end == "}":
            emit((yield from _gemma_key(reader)) + ": ")
        yield from _gemma_value(reader, emit, end, depth)
        yield from reader.skip_space()
    emit(end)


def _gemma_key(reader: TextReader) -> Step[str]:
    if (yield from reader.peek()) == '"':
        key_text = yield from reader.json_text()
        yield from reader.skip_space()
        yield from reader.expect(":")
        return key_text
    if (yield from reader.accept(QUOTE)):
        key = (yield from reader.until(QUOTE, limit=MAX_NAME))[0]
        yield from reader.skip_space()
        yield from reader.expect(":")
    else:
        key = (yield from reader.until(":", limit=MAX_NAME))[0].strip()
    return json.dumps(key, ensure_ascii=False)


def _gemma_value(
    reader: TextReader, emit: Callable[[str], None], end: str, depth: int
) -> Step[None]:
    yield from reader.skip_space()
    if (yield from reader.accept(QUOTE)):
        emit('"')
        yield from reader.until(
            QUOTE, emit=lambda text: emit(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        emit('"')
    elif (bracket := (yield from reader.accept_any(("{", "[")))) is not None:
        emit(bracket)
        yield from _gemma_members(reader, emit, "}" if bracket == "{" else "]", depth + 1)
    elif (yield from reader.peek()) == '"':
        yield from reader.json(emit)
    else:
        text, mark = yield from reader.until(",", end)
        reader.at -= len(mark)
        emit(typed_json(text.strip(), TYPES))


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """`<invoke name="tool"><key>value</key></invoke>` with a mark before each tag, as MiniMax-M3 writes calls.

    A value may contain elements.  The elements of a list are named `item`.
    """

    mark: str = "]<]minimax[>["
    is_bare: bool = False
    name_end: str = '">'

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (f"{self.mark}<tool_call>",)

    @property
    def call_start(self) -> str:
        """Text before the name, with the mark and the quotation mark; `<tool_call>` is a trigger."""
        return f'{self.mark}<invoke name="'

    @property
    def call_end(self) -> str:
        """Text behind the arguments."""
        return f"{self.mark}</invoke>"

    @property
    def end(self) -> str:
        """Text behind all calls."""
        return f"{self.mark}</tool_call>"

    def tags_of(self, key: str) -> tuple[str, str]:
        """Return the start tag and the end tag of an argument."""
        return f"{self.mark}<{key}>", f"{self.mark}</{key}>"

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        yield from section(reader, sink, self.call_start, self.end, self._call)

    def _call(self, reader: TextReader, sink: CallSink) -> Step[None]:
        name = (yield from reader.until(self.name_end, limit=MAX_NAME))[0]
        parameters = sink.parameters_of(name)
        sink.begin(name)
        value = yield from self._element(reader, "invoke", parameters, 0)
        try:
            text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise MismatchError from None
        sink.arguments(text)
        sink.end()

    def _element(self, reader: TextReader, tag: str, schema: ValueSchema, depth: int) -> Step[Any]:
        """Read an element after its start tag, up to and including its end tag; return its JSON value."""
        if depth > MAX_DEPTH:
            raise MismatchError
        members: list[tuple[str, Any]] = []
        text, is_call = "", depth == 0
        while True:
            before, _ = yield from reader.until(f"{self.mark}<")
            text += before
            inner = (yield from reader.until(">", limit=MAX_NAME))[0]
            if inner == f"/{tag}":
                break
            if inner.startswith("/"):
                raise MismatchError
            is_item = inner == "item" and "array" in schema.types and not is_call
            inner_schema = schema.item() if is_item else schema.member(inner)
            value = yield from self._element(reader, inner, inner_schema, depth + 1)
            members.append((inner, value))
        if not members:
            if not text.strip() and schema.types == {"array"}:
                return []
            if not text.strip() and (is_call or schema.types == {"object"}):
                return {}
            if is_call:
                raise MismatchError
            return json.loads(typed_json(text, schema.types))
        if not is_call and all(name == "item" for name, _ in members):
            return [value for _, value in members]
        if text.strip() or len(dict(members)) < len(members):
            raise MismatchError  # a mapping cannot have text between its members, or a key twice
        return dict(members)
