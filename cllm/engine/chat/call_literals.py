"""Calls in notations of their own: Python's, Gemma's, MiniMax's.  Pure; see `call_syntax`."""

from __future__ import annotations

import ast
import json
from ast import literal_eval as literal_of
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cllm.engine.chat.call_syntax import (
    MAX_NAME,
    MAX_PYTHON,
    CallSink,
    member_schema,
    section,
    typed_json,
)
from cllm.engine.chat.text_reader import MismatchError, Step, TextReader

MAX_DEPTH = 64
QUOTE = '<|"|>'


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
        """A call in this syntax, of arguments as JSON text."""
        given = ", ".join(f"{key}={value!r}" for key, value in json.loads(arguments).items())
        return f"{''.join(self.starts[:1])}[{name}({given})]{''.join(self.ends[:1])}"

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        yield from reader.skip_space()
        calls = _calls_of((yield from _bracketed(reader)))
        if not (calls or trigger):
            raise MismatchError  # an answer that is an empty list
        for name, arguments in calls:
            sink.begin(name, must_be_known=not trigger)
            sink.arguments(json.dumps(arguments, ensure_ascii=False))
            sink.end()
        yield from reader.skip_space()
        yield from reader.accept_any(self.ends)


def _bracketed(reader: TextReader) -> Step[str]:
    """A Python list, up to the bracket that ends it."""
    yield from reader.expect("[")
    parts, depth, quote, n = ["["], 1, "", 0
    while depth:
        text, mark = yield from reader.until("[", "]", '"', "'", "\\")
        # A line end in a string is taken for what it is, where Python wants an escape.
        parts += (text.replace("\n", "\\n") if quote else text, mark)
        if mark == "\\":
            parts.append((yield from reader.peek()))
            reader.at += 1 if parts[-1] else 0
        elif quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        else:
            depth += 1 if mark == "[" else -1
        n += len(text) + 1
        if n > MAX_PYTHON:
            raise MismatchError
    return "".join(parts)


def _calls_of(text: str) -> list[tuple[str, dict[str, object]]]:
    """Names and arguments of calls that are written as a Python list."""
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.List):
            raise MismatchError
        return [_call_of(call) for call in node.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MismatchError from None


def _call_of(call: ast.expr) -> tuple[str, dict[str, object]]:
    if not isinstance(call, ast.Call) or call.args:
        raise MismatchError
    arguments: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise MismatchError
        # JSON's names of constants are taken as well.
        arguments[keyword.arg] = literal_of(_Constants().visit(keyword.value))
    json.dumps(arguments, allow_nan=False)
    return ast.unparse(call.func), arguments


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
    """What is between brackets, the end included."""
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
        emit(typed_json(text.strip(), {}))


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """`<invoke name="tool"><key>value</key></invoke>` with one mark before each tag: MiniMax-M3.

    Values may have elements of their own; those in a list are called `item`.
    """

    mark: str = "]<]minimax[>["
    is_bare: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (f"{self.mark}<tool_call>",)

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        start, end = f'{self.mark}<invoke name="', f"{self.mark}</tool_call>"
        yield from section(reader, sink, start, end, self._call)

    def _call(self, reader: TextReader, sink: CallSink) -> Step[None]:
        name = (yield from reader.until('">', limit=MAX_NAME))[0]
        schema = sink.schema_of(name)
        sink.begin(name)
        value = yield from self._element(reader, "invoke", schema, 0)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise MismatchError from None
        sink.arguments(text)
        sink.end()

    def _element(
        self, reader: TextReader, tag: str, schema: Mapping[str, Any], depth: int
    ) -> Step[Any]:
        """The value of an element, its end included."""
        if depth > MAX_DEPTH:
            raise MismatchError
        members: list[tuple[str, Any]] = []
        text = ""
        while True:
            before, _ = yield from reader.until(f"{self.mark}<")
            text += before
            inner = (yield from reader.until(">", limit=MAX_NAME))[0]
            if inner == f"/{tag}":
                break
            if inner.startswith("/"):
                raise MismatchError
            inner_schema = _inner_schema(schema, inner)
            value = yield from self._element(reader, inner, inner_schema, depth + 1)
            members.append((inner, value))
        if not members:
            if not text.strip() and schema.get("type") == "array":
                return []
            if not text.strip() and (tag == "invoke" or schema.get("type") == "object"):
                return {}
            if tag == "invoke":
                raise MismatchError
            return json.loads(typed_json(text, schema))
        if tag != "invoke" and all(name == "item" for name, _ in members):
            return [value for _, value in members]
        if text.strip() or len(dict(members)) < len(members):
            raise MismatchError  # what a mapping has no place for
        return dict(members)


def _inner_schema(schema: Mapping[str, Any], tag: str) -> Mapping[str, Any]:
    items = schema.get("items")
    if tag == "item" and isinstance(items, Mapping):
        return items
    return member_schema(schema, tag)
