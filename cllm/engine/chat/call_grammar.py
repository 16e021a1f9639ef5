"""Calls as a grammar, in llguidance's Lark: what an answer has to be where a call is wanted.  Pure.

A *stretch* is what stands between the trigger of calls and their end: one call, or a section of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cllm.engine.chat.call_literals import QUOTE, GemmaCalls, PythonCalls
from cllm.engine.chat.call_syntax import (
    CallSyntax,
    JsonCalls,
    NamedCalls,
    TaggedCalls,
    member_schema,
    types_of,
)
from cllm.engine.chat.routed_turn import RoutedTurn
from cllm.errors import InvalidRequestError

# One space or line end between the tokens of JSON: a run of them would use up `max_tokens`.
COMPACT = {"x-guidance": {"whitespace_pattern": r"[ \n]?"}}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What the calls of one answer may be.

    Parameters
    ----------
    syntax : CallSyntax
    tools : sequence of mapping
        Those that may be called.
    parallel : bool
        Several calls are allowed.
    spelled : mapping of int to bytes
        Control tokens by their names.
    """

    syntax: CallSyntax
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    spelled: Mapping[int, bytes]

    def required(self) -> str:
        """At least one call, and nothing else."""
        return "\n".join(["start: calls", *self._rules()])

    def or_else(self, schema: str) -> str:
        """Calls, or JSON of a schema."""
        otherwise = f"otherwise: %json {_compact(json.loads(schema))}"
        return "\n".join(["start: calls | otherwise", otherwise, *self._rules()])

    def strict(self) -> str:
        """Text with any number of calls in it, all of which are right."""
        begin = self._literal(next(filter(None, self.syntax.triggers), ""))
        lazy = "" if begin.startswith("<[") else "[lazy]"
        rules = [
            "start: (free stretch gap)* tail",
            f"free{lazy}: TEXT {begin}",
            "tail: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
        return "\n".join([*rules, *self._rules()[1:]])

    def _trigger(self) -> str:
        """What begins a stretch, in Lark; optional where calls may be bare."""
        begin = self._literal(next(filter(None, self.syntax.triggers), ""))
        return f"({begin})?" if begin and self.syntax.is_bare else begin

    def _rules(self) -> list[str]:
        """`calls` first, then what it is made of."""
        begin = self._trigger()
        more = f" (gap {begin} stretch)*" if self.parallel and begin else ""
        rules = [f"calls: gap {begin} stretch{more}", r"gap: /[ \n]{0,2}/"]
        names = " | ".join(f"call_{i}" for i in range(len(self.tools)))
        write = _WRITERS.get(type(self.syntax))
        if write is None:
            raise not_wanted()
        stretch, call, shared = write(self)
        rules += [f"stretch: {stretch}", f"call: {names}", *shared]
        return [*rules, *(rule for i in range(len(self.tools)) for rule in call(i))]

    def _several(self, between: str) -> str:
        """One call, or several with this between them."""
        return f"call ({between} call)*" if self.parallel else "call"

    def _json_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, JsonCalls)
        end = self._literal(syntax.ends[0]) if syntax.ends else ""
        end = f"({end})?" if end and syntax.is_bare else end
        calls = f'"[" {self._several(_COMMA)} "]"' if syntax.is_list else "call"
        return f"gap {calls} gap {end}", self._json_call, []

    def _named_calls(self) -> Writing:
        assert isinstance(self.syntax, NamedCalls)
        return self._in_section(self.syntax), self._named_call, []

    def _tagged_calls(self) -> Writing:
        assert isinstance(self.syntax, TaggedCalls)
        return self._in_section(self.syntax), self._tagged_call, []

    def _in_section(self, syntax: NamedCalls | TaggedCalls) -> str:
        if not syntax.section_start:
            return "call"
        start, end = self._literal(syntax.call_start), self._literal(syntax.section_end)
        return f"gap {start} {self._several(f'gap {start}')} gap {end}"

    def _python_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, PythonCalls)
        end = "".join(self._literal(text) for text in syntax.ends[:1])
        end = f"({end})?" if end else ""
        return f'"[" {self._several(_COMMA)} "]" {end}', self._python_call, _PYTHON_VALUES

    def _python_call(self, i: int) -> list[str]:
        name, schema = self._function(i)
        members = self._members(schema, "={}", _PYTHON_TYPES, quote="'")
        return [f"call_{i}: {self._literal(name + '(')} {members} {self._literal(')')}"]

    def _gemma_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, GemmaCalls)
        quote = self._literal(QUOTE)
        values = [f"text: {quote} /(.|\\n)*/ {quote}"]
        if not quote.startswith("<["):
            values = [f"text: {quote} rest_of_text", f"rest_of_text[lazy]: /(.|\\n)*/ {quote}"]
        return f"call {self._literal(syntax.call_end)}", self._gemma_call, [*values, *_GEMMA_VALUES]

    def _gemma_call(self, i: int) -> list[str]:
        name, schema = self._function(i)
        members = self._members(schema, ":{}", _GEMMA_TYPES, quote=QUOTE)
        return [f"call_{i}: {self._literal(f'call:{name}' + '{')} {members} {self._literal('}')}"]

    def _members(
        self, schema: Mapping[str, Any], written: str, kinds: Mapping[str, str], *, quote: str
    ) -> str:
        """Keys with values: those that are required, then any of the others, in their order."""
        required = schema.get("required", ())
        given = schema.get("properties") or {}
        said = {}
        for key in sorted(given, key=lambda key: key not in required):
            member = member_schema(schema, key)
            types = types_of(member)
            kind = kinds.get(next(iter(types)), "value") if len(types) == 1 else "value"
            if types == {"string"} and (choices := choices_of(member)):
                texts = (self._literal(f"{quote}{choice}{quote}") for choice in choices)
                kind = f"({' | '.join(texts)})"
            said[key] = f"{self._literal(key + written.format(''))} {kind}"
        text = f" {_COMMA} ".join(said[key] for key in said if key in required)
        for key in said:
            if key not in required:
                text = f"{text} ({_COMMA} {said[key]})?" if text else f"({said[key]})?"
        return text

    def _function(self, i: int) -> tuple[str, dict[str, Any]]:
        function = self.tools[i]["function"]
        return function["name"], _arguments(function)

    def _json_call(self, i: int) -> list[str]:
        name, schema = self._function(i)
        syntax = self.syntax
        assert isinstance(syntax, JsonCalls)
        if syntax.name_is_key:
            members: dict[str, Any] = {name: schema}
        else:
            members = {syntax.name_key: {"const": name}, syntax.arguments_key: schema}
        whole = {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
        }
        return [f"call_{i}: %json {_compact(_hoisted(whole, schema))}"]

    def _named_call(self, i: int) -> list[str]:
        name, schema = self._function(i)
        syntax = self.syntax
        assert isinstance(syntax, NamedCalls)
        # A number in what is written around the name counts the calls.
        written = re.split(r"(\d+)", syntax.name_written.format(name="\0"))
        said = " ".join(
            "/[0-9]{1,3}/" if part.isdecimal() else self._literal(part.replace("\0", name))
            for part in written
            if part
        )
        between = self._literal(syntax.separators[0])
        if syntax.id_start:
            between = f"({self._literal(syntax.id_start)} /[a-zA-Z0-9]{{9}}/)? {between}"
        if syntax.id_first:
            said = f"/[a-zA-Z0-9]{{1,32}}/ {self._literal(syntax.id_first)} {said}"
        end = self._literal(syntax.call_ends[0]) if syntax.call_ends else ""
        return [
            f"call_{i}: {said} gap {between} gap arguments_{i} gap {end}",
            f"arguments_{i}: %json {_compact(schema)}",
        ]

    def _tagged_call(self, i: int) -> list[str]:
        name, schema = self._function(i)
        syntax = self.syntax
        assert isinstance(syntax, TaggedCalls)
        required = schema.get("required", ())
        rules, said = [], []
        for k, key in enumerate(schema.get("properties") or {}):
            said.append(f"gap argument_{i}_{k}" if key in required else f"(gap argument_{i}_{k})?")
            rules += self._tagged_argument(f"{i}_{k}", key, member_schema(schema, key))
        head = self._literal(name + syntax.name_end)
        if syntax.header_end:
            head += f" /[^<>]{{0,40}}/ {self._literal(syntax.header_end)}"
        end = self._literal(syntax.call_ends[0])
        return [f"call_{i}: {head} {' '.join(said)} gap {end}", *rules]

    def _tagged_argument(self, number: str, key: str, schema: Mapping[str, Any]) -> list[str]:
        syntax = self.syntax
        assert isinstance(syntax, TaggedCalls)
        is_text = types_of(schema) == {"string"}
        types = types_of(schema)
        types |= {"number"} if "integer" in types else set()
        named = [text for text, _ in syntax.attribute if text in types]
        fitting = [text for text, is_string in syntax.attribute if is_string == is_text]
        kind = next(iter((*named, *fitting)), "")
        head = self._literal(syntax.key_start + key + syntax.key_end + kind)
        if syntax.value_start:
            head += f" {'' if kind else 'gap '}{self._literal(syntax.value_start)}"
        newline = ' "\\n"' if syntax.trims_newline else ""
        end = self._literal(syntax.value_end)
        if not is_text:
            value = f"value_{number}: %json {_compact(schema)}"
            return [f"argument_{number}: {head}{newline} value_{number}{newline} {end}", value]
        if choices := choices_of(schema):
            value = " | ".join(self._literal(choice) for choice in choices)
            rule = f"argument_{number}: {head}{newline} ({value}){newline} {end}"
            return [rule]
        if end.startswith("<["):
            return [f"argument_{number}: {head}{newline} /(.|\\n)*/ {end}"]
        text = f"value_{number}[lazy]: /(.|\\n)*/{newline} {end}"
        return [f"argument_{number}: {head}{newline} value_{number}", text]

    def _literal(self, text: str) -> str:
        return literal_of(text, self.spelled)


def choices_of(schema: Mapping[str, Any]) -> list[str]:
    """The texts of which a value is one; empty if it may be others."""
    choices = schema.get("enum")
    is_known = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    return choices if is_known else []  # type: ignore[return-value]


def literal_of(text: str, spelled: Mapping[int, bytes]) -> str:
    """A text as Lark has it, of which some parts may be control tokens."""
    ids = {name.decode(): token for token, name in spelled.items()}
    if not text or not ids:
        return json.dumps(text, ensure_ascii=False) if text else ""
    names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part, ensure_ascii=False)
        for part in parts
    )


@dataclass(frozen=True, slots=True)
class RoutedCallGrammar:
    """The same for calls that are messages with headers; arguments as for `CallGrammar`."""

    turn: RoutedTurn
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    spelled: Mapping[int, bytes]

    def required(self) -> str:
        """One call, behind a thought where the model thinks."""
        turn = self.turn
        if not turn.call_written:
            raise not_wanted()
        literal = partial(literal_of, spelled=self.spelled)
        thought, (before, after) = "", turn.thought_written
        if before:
            begin, end = literal(before), literal(after)
            is_token = end.startswith("<[")
            free = "/(.|\\n)*/ " + end if is_token else "free"
            thought = f"({begin} {free})?"
        rules = [f"start: {thought} call", r"gap: /[ \n]{0,2}/"]
        if thought.endswith("free)?"):
            rules.append(f"free[lazy]: /(.|\\n)*/ {literal(turn.thought_written[1])}")
        names = " | ".join(f"call_{i}" for i in range(len(self.tools)))
        rules.append(f"call: {names}")
        for i, tool in enumerate(self.tools):
            function = tool["function"]
            schema = _arguments(function)
            written = literal(turn.call_written.format(name=function["name"]))
            rules += [
                f"call_{i}: {written} arguments_{i}",
                f"arguments_{i}: %json {_compact(schema)}",
            ]
        return "\n".join(rules)

    def strict(self) -> str:
        """Not wanted of this kind."""
        raise not_wanted()

    def or_else(self, schema: str) -> str:
        """Not wanted of this kind."""
        raise not_wanted()


def not_wanted() -> InvalidRequestError:
    """Calls of a kind that has no grammar are asked for, or are to be strict."""
    limit = "auto or none: calls of this model's kind cannot be asked for"
    return InvalidRequestError("tool_choice", "required or strict", limit)


# The rule of a stretch, what makes the rules of a call, rules that all calls share.
Writing = tuple[str, Callable[[int], list[str]], list[str]]
_COMMA = '"," gap'
_PYTHON_VALUES = [
    r"""STR: /"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/""",
    r"NUM: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    r"INT: /-?(0|[1-9][0-9]{0,17})/",
    'value: STR | NUM | "True" | "False" | "None" | list | object',
    f'list: "[" (value ({_COMMA} value)*)? "]"',
    f'object: "{{" (STR ":" gap value ({_COMMA} STR ":" gap value)*)? "}}"',
    'flag: "True" | "False"',
]
_PYTHON_TYPES = {
    "string": "STR",
    "integer": "INT",
    "number": "NUM",
    "boolean": "flag",
    "array": "list",
    "object": "object",
    "null": '"None"',
}
_GEMMA_VALUES = [
    r"NUM: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
    r"INT: /-?(0|[1-9][0-9]{0,17})/",
    r"KEY: /[^:{}\[\],<>\n]{1,64}/",
    'value: text | NUM | flag | "null" | list | object',
    f'list: "[" (value ({_COMMA} value)*)? "]"',
    f'object: "{{" (KEY ":" value ({_COMMA} KEY ":" value)*)? "}}"',
    'flag: "true" | "false"',
]
_GEMMA_TYPES = {
    "string": "text",
    "integer": "INT",
    "number": "NUM",
    "boolean": "flag",
    "array": "list",
    "object": "object",
    "null": '"null"',
}
_WRITERS: dict[type, Callable[[CallGrammar], Writing]] = {
    JsonCalls: CallGrammar._json_calls,
    NamedCalls: CallGrammar._named_calls,
    TaggedCalls: CallGrammar._tagged_calls,
    PythonCalls: CallGrammar._python_calls,
    GemmaCalls: CallGrammar._gemma_calls,
}


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments may be: what a tool does not name, it does not take."""
    schema = function.get("parameters") or {"properties": {}}
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema}


def _compact(schema: Mapping[str, Any]) -> str:
    return json.dumps({**COMPACT, **schema}, ensure_ascii=False)


def _hoisted(whole: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Definitions that references of the inner schema point to, where they point."""
    found = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**whole, **found}
