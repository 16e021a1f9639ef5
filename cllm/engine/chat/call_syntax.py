"""Notations of tool calls: JSON objects, names before JSON, arguments in tags.  Pure.

Each syntax is a frozen dataclass.  Its `read` reads one stretch of calls from a `TextReader` in steps
(see `text_reader`), and reports them to a `CallSink`.  Markers are stored without the white space around
them, which is skipped.
"""

from __future__ import annotations

import html
import json
import re
from ast import literal_eval as literal_of
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cllm.engine.chat.argument_text import is_quoted
from cllm.engine.chat.message_checks import finite
from cllm.engine.chat.text_reader import EndOfTextError, MismatchError, Step, TextReader
from cllm.engine.chat.tool_schema import ValueSchema
from cllm.engine.json_schema import TYPES, type_of

NAME_KEYS = ("name", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "tool_call_id", "call_id")
OTHER_KEYS = ("type", "index")
MAX_NAME = 256
MAX_BEFORE_CALL = 256  # characters between the start of a section and its first call
MAX_PYTHON = 1 << 16  # characters of one value in Python's notation
# Attributes after the name in a tag, and the `/` that may end the tag.
ATTRIBUTES = re.compile(r"""(?:\s*[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*/?""")
PYTHON_LITERALS: dict[str, bool | None] = {"True": True, "False": False, "None": None}


class CallSink(Protocol):
    """Receiver of parsed calls."""

    def begin(self, name: str, call_id: str | None = None, *, must_be_known: bool = False) -> None:
        """Begin a call of a tool.  `MismatchError` if a tool cannot have this name, or it must be known and is not."""

    def arguments(self, piece: str) -> None:
        """Add the next piece of the call's arguments, as JSON text."""

    def end(self) -> None:
        """End the call, which is complete."""

    def between(self, text: str) -> None:
        """Add text between two calls as content."""

    def parameters_of(self, name: str) -> ValueSchema:
        """Return the schema of a tool's parameters; for an unknown tool, one that allows anything."""


class CallSyntax(Protocol):
    """One way to write calls."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts that begin a call or a section of calls."""

    @property
    def is_bare(self) -> bool:
        """True if a call may begin an answer without a trigger."""

    def read(self, trigger: str, reader: TextReader, sink: CallSink) -> Step[None]:
        """Read one stretch of calls after its trigger; `trigger` is "" for bare calls.

        Raises
        ------
        MismatchError
            The text is not a call.  Calls that were ended before remain valid.
        """


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one object, several or a list.

    Attributes
    ----------
    starts, ends : tuple of str
        Alternatives for the marker before the calls, and for the marker after them.
    name_is_key : bool
        True if a call is `{"name of the tool": {…}}`.
    is_bare : bool
        True if objects at the beginning of an answer are calls without a marker.  Every call must
        then name a tool that was offered.
    is_list : bool
        True if the model writes a list even for one call.
    name_key, arguments_key : str
        Keys that the model writes.  `read` accepts `NAME_KEYS` and `ARGUMENT_KEYS` instead.
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
        """Return a call in this syntax; `arguments` is the text of a JSON object."""
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
        else:  # perhaps misspelled arguments: no call is better than a call without arguments
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
    """Return arguments as the text of a JSON object; raise `MismatchError` if they are something else.

    Some models write the object as a JSON string, or null if there are no arguments.
    """
    value = json.loads(text)
    if isinstance(value, str):
        try:
            value, text = _parsed(value or "{}")
        except (ValueError, RecursionError):
            raise MismatchError from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise MismatchError
    return text


def _parsed(text: str) -> tuple[Any, str]:
    """Return the value of JSON and its text, with control characters inside strings escaped.

    Raises
    ------
    ValueError
        The text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_constant), text
    except ValueError:
        value = json.loads(text, parse_constant=_no_constant, strict=False)
        return value, json.dumps(finite(value), ensure_ascii=False)


def _no_constant(_: str) -> None:
    raise ValueError


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`<start>name<separator>{…}<end>`: the name by itself, the arguments as JSON.

    Attributes
    ----------
    call_start : str
    separators : tuple of str
        Alternatives for the text between name and arguments; ("",) if the JSON follows directly.
    call_ends : tuple of str
        Alternatives for the text after the arguments.
    section_start, section_end : str
        Text around all calls; "" if there is none.
    id_start : str
        Marker between the name and an id that a separator ends; "" if no id follows the name.
    id_first : str
        Marker between an id and the name after it; "" if no id precedes the name.
    name : str
        Regular expression for the text in place of the name.  Group "name" is the tool, "id" an id.
    name_written : str
        Text that is written in place of the name, with `{name}` for the tool.
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
        """Return a call in this syntax; `arguments` is the text of a JSON object."""
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
    """Read calls up to `section_end` or the end of the text; text between them is content.

    Raises
    ------
    MismatchError
        No call is near the start: an answer that names the marker of sections.
    """
    ends = tuple(filter(None, (section_end,)))
    is_first = True
    while True:
        yield from reader.skip_space()
        if (yield from reader.is_at_end()):
            return
        if is_first:
            noise, marker = yield from reader.until(call_start, *ends, limit=MAX_BEFORE_CALL)
            if noise.strip():
                sink.between(noise)
        else:
            _, marker = yield from reader.until(call_start, *ends, emit=sink.between)
        if marker in ends:
            return
        yield from read_call(reader, sink)
        is_first = False


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Names and arguments in tags: `<function=name><parameter=key>value</parameter></function>`.

    Attributes
    ----------
    call_start, call_ends : str, tuple of str
        Text before the name; alternatives for the text after the arguments.
    name_end : str
        Text after the name; "" if the next key or the end of the call ends it.
    header_end : str
        Text after the attributes that follow the name; "" if there are no attributes.
    key_start, key_end : str
        Text around a key.
    value_start : str
        Text between `key_end`, or the attribute, and the value; "" if `key_end` ends the tag.
    value_end : str
        Text after the value.
    attribute : tuple of (str, bool)
        Texts between `key_end` and `value_start`, each with True if the value is then a string.
    trims_newline : bool
        True if a line end after `value_start` and one before `value_end` belong to the tags.
    section_start, section_end : str
        Text around all calls; "" if there is none.
    unescapes : bool
        True if names and keys are escaped as in HTML.
    has_cdata : bool
        True if a value may be in `<![CDATA[…]]>`.
    is_lenient : bool
        True if a string without `value_end` may end at the end of the call.
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
            # A model may write the end of a section without its start.
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
            # A value may contain `value_end`: it ends the value only before a key or the call's end.
            if (yield from reader.is_before((self.key_start, *self.call_ends))):
                break
            value.add(end)
        value.end(types)

    def _json_value(self, reader: TextReader, value: _Value) -> Step[bool]:
        """Read a JSON object, array or string, and return True; otherwise read nothing, and return False.

        Markers inside its strings are data.
        """
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
    """Writer of one argument's value as JSON, from pieces of its text."""

    def __init__(self, sink: CallSink, *, is_string: bool, trims_newline: bool) -> None:
        self._sink = sink
        self._is_string = is_string
        self._trims_newline = trims_newline
        self._is_first = True
        self._newline = ""  # a line end at the end of the text so far, held back
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
    """Return the text of a value as JSON; `types`, which its schema allows, decide if it is a string."""
    stripped = text.strip()
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if stripped in PYTHON_LITERALS and ("string" not in types or types == TYPES):
        return json.dumps(PYTHON_LITERALS[stripped])
    try:
        value, stripped = _parsed(stripped)
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
    """Return a list or a mapping in Python's notation as JSON, as some templates write it; None otherwise."""
    if not text.startswith(("[", "{")) or len(text) > MAX_PYTHON:
        return None
    try:
        return json.dumps(finite(literal_of(text)), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
