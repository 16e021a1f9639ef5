"""Notations of tool calls: JSON objects, names before JSON, arguments in tags.  Pure.

Each syntax is a frozen value with a `read` that takes one stretch of calls from a `TextReader`, as
steps (`text_reader`), and tells a `CallSink`.  Markers are without the white space around them, which
is skipped.
"""

from __future__ import annotations

import html
import json
import re
from ast import literal_eval as literal_of
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cllm.engine.chat.argument_text import is_quoted
from cllm.engine.chat.text_reader import EndOfTextError, MismatchError, Step, TextReader
from cllm.engine.chat.tool_schema import ValueSchema
from cllm.engine.json_schema import TYPES, type_of

NAME_KEYS = ("name", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "tool_call_id", "call_id")
OTHER_KEYS = ("type", "index")
MAX_NAME = 256
MAX_PYTHON = 1 << 16  # characters that are parsed as Python's at once
# What may stand in a tag behind a name.
ATTRIBUTES = re.compile(r"""(?:\s*[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*/?""")
PYTHON_LITERALS: dict[str, bool | None] = {"True": True, "False": False, "None": None}


class CallSink(Protocol):
    """Receiver of parsed calls."""

    def begin(self, name: str, call_id: str | None = None, *, must_be_known: bool = False) -> None:
        """A call of this tool; `MismatchError` if the name cannot be one."""

    def arguments(self, piece: str) -> None:
        """The next piece of its arguments, JSON text."""

    def end(self) -> None:
        """The call is complete."""

    def between(self, text: str) -> None:
        """Text between two calls that belongs to none: content."""

    def parameters_of(self, name: str) -> ValueSchema:
        """Return the schema of a tool's parameters; anything for an unknown tool."""


class CallSyntax(Protocol):
    """One way to write calls."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts that begin a section of calls."""

    @property
    def is_bare(self) -> bool:
        """True if a call may begin an answer without a trigger."""

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """One stretch of calls, behind its trigger, "" for a bare one.

        Raises
        ------
        MismatchError
            They are none; what has ended by then are calls all the same.
        """


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one object, several or a list.

    Attributes
    ----------
    starts, ends : tuple of str
    name_is_key : bool
        `{"name of the tool": {…}}`.
    is_bare : bool
        Such objects at the beginning of an answer are calls without any marker, if they name a
        tool that was offered.
    is_list : bool
        The model writes a list even for one call.
    name_key, arguments_key : str
        What the model calls these; all that are usual are read.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    name_is_key: bool = False
    is_bare: bool = False
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return self.starts

    def write(self, name: str, arguments: str) -> str:
        """A call in this syntax, of arguments as JSON text."""
        start, end = self.starts[-1:] or ("",), self.ends[-1:] or ("",)
        if self.name_is_key:
            return f"{start[0]}[{{{json.dumps(name)}: {arguments}}}]{end[0]}"
        call = f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}'
        call = f"[{call}]" if self.is_list else call
        return f"{start[0]}\n{call}\n{end[0]}"

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        yield from reader.skip_space()
        is_list = yield from reader.accept("[")
        yield from reader.skip_space()
        if is_list and (yield from reader.accept("]")):
            if not trigger:
                raise MismatchError  # an answer that is an empty list
            yield from self._close(reader)
            return
        while True:
            yield from self._call(reader, sink)
            if not (yield from self._goes_on(reader, is_list=is_list)):
                break
        yield from self._close(reader)

    def _goes_on(self, reader: TextReader, *, is_list: bool) -> Step[bool]:
        """Return True if another call follows, and read up to it."""
        yield from reader.skip_space()
        if is_list:
            if (yield from reader.accept("]")):
                return False
            yield from reader.expect(",")
            yield from reader.skip_space()
            return True
        if (yield from reader.accept_any((",", ";"))):
            yield from reader.skip_space()
        return (yield from reader.peek()) == "{"

    def _close(self, reader: TextReader) -> Step[None]:
        yield from reader.skip_space()
        yield from reader.accept_any(self.ends)

    def _call(self, reader: TextReader, sink: CallSink) -> Step[None]:
        call = _JsonCall(sink, must_be_known=self.is_bare, name_is_key=self.name_is_key)
        yield from call.read(reader)
        call.complete()


class _JsonCall:
    """One object with a name and arguments, in any order."""

    def __init__(self, sink: CallSink, *, must_be_known: bool, name_is_key: bool) -> None:
        self._sink = sink
        self._must_be_known = must_be_known
        self._name_is_key = name_is_key
        self._id: str | None = None
        self._has_begun = False
        self._early: str | None = None  # arguments that came before the name
        self._is_inner = False
        self._has_arguments = False

    def read(self, reader: TextReader) -> Step[None]:
        yield from reader.expect("{")
        yield from reader.skip_space()
        if (yield from reader.accept("}")):
            return
        while True:
            yield from self._member(reader)
            yield from reader.skip_space()
            if (yield from reader.accept("}")):
                return
            yield from reader.expect(",")
            yield from reader.skip_space()

    def _member(self, reader: TextReader) -> Step[None]:
        key = yield from _json_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        first = yield from reader.peek()
        if self._name_is_key:
            self._begin(key)
            yield from self._arguments(reader)
        elif key in NAME_KEYS or (key == "function" and first == '"'):
            self._begin((yield from _json_string(reader)))
        elif key == "function" and first == "{" and not self._is_inner:
            self._is_inner = True
            yield from self.read(reader)
        elif key in ARGUMENT_KEYS:
            yield from self._arguments(reader)
        elif key in ID_KEYS or key in OTHER_KEYS:
            value = json.loads((yield from reader.json_text()))
            if key in ID_KEYS and isinstance(value, str) and not value.isdecimal():
                self._id = value
        else:  # it might be the arguments, misspelled: no call at all is better than one without
            raise MismatchError

    def _begin(self, name: str) -> None:
        if self._has_begun:
            raise MismatchError
        self._has_begun = True
        self._sink.begin(name, self._id, must_be_known=self._must_be_known)
        if self._early is not None:
            self._sink.arguments(self._early)

    def _arguments(self, reader: TextReader) -> Step[None]:
        if self._has_arguments:
            raise MismatchError
        self._has_arguments = True
        if (yield from reader.peek()) == "{" and self._has_begun:
            yield from reader.json(self._sink.arguments)
            return
        text = _object_text((yield from reader.json_text()))
        if self._has_begun:
            self._sink.arguments(text)
        else:
            self._early = text

    def complete(self) -> None:
        if not self._has_begun:
            raise MismatchError
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._sink.end()


def _json_string(reader: TextReader) -> Step[str]:
    if (yield from reader.peek()) != '"':
        raise MismatchError
    text: str = json.loads((yield from reader.json_text()))
    return text


def _object_text(text: str) -> str:
    """Arguments as the text of a JSON object: some models quote them, or write null for none."""
    value = json.loads(text)
    if isinstance(value, str):
        try:
            inner = json.loads(value or "{}", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise MismatchError from None
        value, text = inner, value or "{}"
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise MismatchError
    return text


def _no_constant(_: str) -> None:
    raise ValueError


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`<start>name<separator>{…}<end>`: the name by itself, the arguments as JSON.

    Attributes
    ----------
    call_start : str
    separators : tuple of str
        Between name and arguments; "" where the JSON follows at once.
    call_ends : tuple of str
    section_start, section_end : str
        Around all calls; "" if nothing is.
    id_start, id_end : str
        Around an id that may stand between the name and the separator, or before the name
        (`id_first`).
    name : str
        A regular expression; its group "name" is the tool in what stands where the name is.
    name_written : str
        How that is written, with `{name}` in it.
    """

    call_start: str
    separators: tuple[str, ...] = ("",)
    call_ends: tuple[str, ...] = ()
    section_start: str = ""
    section_end: str = ""
    id_start: str = ""
    id_first: str = ""
    name: str = r"\s*(?P<name>.*?)\s*"
    name_written: str = "{name}"
    is_bare: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(filter(None, (self.section_start, self.call_start)))

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        if trigger == self.section_start and trigger != self.call_start:
            yield from section(reader, sink, self.call_start, self.section_end, self._call)
        else:
            yield from self._call(reader, sink)

    def _call(self, reader: TextReader, sink: CallSink) -> Step[None]:
        call_id = None
        if self.id_first:
            call_id = (yield from reader.until(self.id_first, limit=MAX_NAME))[0].strip()
        name = yield from self._name(reader)
        if self.id_start and name[1] == self.id_start:
            call_id = (yield from reader.until(*self.separators, limit=MAX_NAME))[0].strip()
        match = re.fullmatch(self.name, name[0], re.DOTALL)
        if match is None:
            raise MismatchError
        sink.begin(match["name"], match.groupdict().get("id") or call_id)
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from reader.json(sink.arguments)
        elif (yield from reader.peek()) == '"':
            sink.arguments(_object_text((yield from reader.json_text())))
        else:
            raise MismatchError
        yield from reader.skip_space()
        has_end = not self.call_ends or (yield from reader.accept_any(self.call_ends))
        if not (has_end or (yield from reader.is_at_end())):
            raise MismatchError
        sink.end()

    def write(self, name: str, arguments: str) -> str:
        """A call in this syntax, of arguments as JSON text."""
        said = self.name_written.format(name=name)
        end = self.call_ends[0] if self.call_ends else ""
        call = f"{self.call_start}{said}{self.separators[0]}\n{arguments}\n{end}"
        return f"{self.section_start}{call}{self.section_end}"

    def _name(self, reader: TextReader) -> Step[tuple[str, str]]:
        """Return the text of the name, and the marker that ended it."""
        if self.separators == ("",):
            parts: list[str] = []
            while (first := (yield from reader.peek())) not in ("{", ""):
                parts.append(first)
                reader.at += 1
                if len(parts) > MAX_NAME:
                    raise MismatchError
            return "".join(parts), ""
        ends = (*self.separators, *filter(None, [self.id_start]))
        return (yield from reader.until(*ends, limit=MAX_NAME))


def section(
    reader: TextReader,
    sink: CallSink,
    call_start: str,
    section_end: str,
    read_call: Callable[[TextReader, CallSink], Step[None]],
) -> Step[None]:
    """Calls until the end of their section."""
    ends = tuple(filter(None, (section_end,)))
    while True:
        yield from reader.skip_space()
        if (yield from reader.is_at_end()):
            return
        noise, marker = yield from reader.until(call_start, *ends)
        if noise.strip():
            sink.between(noise)
        if marker in ends:
            return
        yield from read_call(reader, sink)


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Names and arguments in tags: `<function=name><parameter=key>value</parameter></function>`.

    Attributes
    ----------
    call_start, call_ends : str, tuple of str
        With `call_start` begins what ends in the name.
    name_end : str
        Behind the name; "" where white space, a key or the end of the call follows.
    header_end : str
        Behind attributes that follow the name; "" if none do.
    key_start, key_end : str
    value_start : str
        Behind the key, or behind its attribute; "" if that is `key_end`.
    value_end : str
    attribute : mapping
        Text between `key_end` and `value_start` that says whether the value is a string.
    trims_newline : bool
        A line end behind `value_start` and one before `value_end` belong to the tags.
    section_start, section_end : str
        Around all calls; "" if nothing is.
    unescapes : bool
        Names and keys have HTML's escapes.
    has_cdata : bool
        A value may be in `<![CDATA[…]]>`.
    is_lenient : bool
        Text may end with the call, where the end of its value was left out.
    """

    call_start: str
    name_end: str
    key_start: str
    key_end: str
    value_end: str
    call_ends: tuple[str, ...]
    value_start: str = ""
    attribute: tuple[tuple[str, bool], ...] = ()
    trims_newline: bool = False
    section_start: str = ""
    section_end: str = ""
    header_end: str = ""
    unescapes: bool = False
    has_cdata: bool = False
    is_lenient: bool = False
    is_bare: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(filter(None, (self.section_start, self.call_start)))

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """See `CallSyntax`."""
        if trigger == self.section_start and trigger != self.call_start:
            yield from section(reader, sink, self.call_start, self.section_end, self._call)
        else:
            yield from self._call(reader, sink)
            # The end of a section that was never begun.
            yield from reader.accept_behind_space(self.section_end)

    def _call(self, reader: TextReader, sink: CallSink) -> Step[None]:
        name = yield from self._name(reader)
        attributes = ""
        if self.header_end:
            attributes = (yield from reader.until(self.header_end, limit=MAX_NAME))[0]
        if not ATTRIBUTES.fullmatch(attributes):
            raise MismatchError
        sink.begin(name)
        sink.arguments("{")
        parameters = sink.parameters_of(name)
        n_arguments = 0
        while not attributes.endswith("/"):  # `<invoke name="f"/>` has no arguments
            yield from reader.skip_space()
            if (yield from reader.accept_any(self.call_ends)):
                break
            if not (yield from reader.accept(self.key_start)):
                raise MismatchError
            sink.arguments(", " if n_arguments else "")
            yield from self._argument(reader, sink, parameters)
            n_arguments += 1
        sink.arguments("}")
        sink.end()

    def _name(self, reader: TextReader) -> Step[str]:
        if self.name_end:
            return self._spelled((yield from reader.until(self.name_end, limit=MAX_NAME))[0])
        mark = reader.at
        text, _ = yield from reader.until(self.key_start, *self.call_ends, limit=MAX_NAME)
        reader.at = mark + len(text)
        return self._spelled(text)

    def _spelled(self, text: str) -> str:
        return html.unescape(text.strip()) if self.unescapes else text.strip()

    def _argument(self, reader: TextReader, sink: CallSink, parameters: ValueSchema) -> Step[None]:
        key = self._spelled((yield from reader.until(self.key_end, limit=MAX_NAME))[0])
        is_string: bool | None = None
        if self.value_start:
            yield from reader.skip_space()
            between = (yield from reader.until(self.value_start, limit=MAX_NAME))[0].strip()
            is_string = dict(self.attribute).get(between)
            if is_string is None and between and not (self.attribute and between.isidentifier()):
                raise MismatchError
        sink.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        types = parameters.member(key).types
        if is_string is False:
            types -= {"string"}
        if is_string is None:
            is_string = types == {"string"}
        value = _Value(sink, is_string=is_string, trims_newline=self.trims_newline)
        if not is_string and (yield from self._json_value(reader, value)):
            value.end(types)
            return
        ends = (
            self.value_end,
            *(self.call_ends if self.is_lenient or "string" not in types else ()),
        )
        if self.has_cdata and (yield from reader.accept("<![CDATA[")):
            yield from reader.until("]]>", emit=value.add)
            yield from reader.skip_space()
            yield from reader.expect(self.value_end)
            value.end(types)
            return
        while True:
            _, end = yield from reader.until(*ends, emit=value.add)
            if end != self.value_end:
                reader.at -= len(end)  # the end of the value was left out
                break
            # A value may have such a text in it: only before a key or the end it is one.
            if (yield from reader.is_before((self.key_start, *self.call_ends))):
                break
            value.add(end)
        value.end(types)

    def _json_value(self, reader: TextReader, value: _Value) -> Step[bool]:
        """Read a value in JSON, with markers inside strings as data; read nothing otherwise."""
        mark = reader.at
        try:
            yield from reader.skip_space()
            if (yield from reader.peek()) in ("{", "[", '"'):
                yield from reader.json_text()
                text = reader.since(mark)
                if (yield from reader.is_before((self.value_end, *self.call_ends))):
                    value.add(text)
                    yield from reader.accept_behind_space(self.value_end)
                    return True
        except EndOfTextError:
            if not self.is_lenient:
                raise
        except MismatchError:
            pass
        reader.at = mark
        return False


class _Value:
    """The text of one argument on its way to JSON."""

    def __init__(self, sink: CallSink, *, is_string: bool, trims_newline: bool) -> None:
        self._sink = sink
        self._is_string = is_string
        self._trims_newline = trims_newline
        self._is_first = True
        self._newline = ""  # at the end so far
        self._parts: list[str] = []
        if is_string:
            sink.arguments('"')

    def add(self, text: str) -> None:
        if self._trims_newline:
            text = text.removeprefix("\n") if self._is_first else self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
            self._is_first = False
        if self._is_string:
            self._sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)

    def end(self, types: frozenset[str]) -> None:
        text = '"' if self._is_string else typed_json("".join(self._parts), types)
        self._sink.arguments(text)


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: its types decide between text and anything else."""
    stripped = text.strip()
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if stripped in PYTHON_LITERALS and ("string" not in types or types == TYPES):
        return json.dumps(PYTHON_LITERALS[stripped])
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        is_possible = {"[": "array", "{": "object"}.get(stripped[:1]) in types
        found = _python_json(stripped) if is_possible else None
        return found or json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) and types != TYPES:
        is_written_so = "string" not in types or is_quoted(value, types - {"string"})
        return stripped if is_written_so else json.dumps(text, ensure_ascii=False)
    if "string" in types and type_of(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    if "fraction" not in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return stripped.replace("\n", " ").replace("\r", " ")


def _python_json(text: str) -> str | None:
    """Python's notation of a list or a mapping as JSON: some templates write that."""
    if not text.startswith(("[", "{")) or len(text) > MAX_PYTHON:
        return None
    try:
        return json.dumps(literal_of(text), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
