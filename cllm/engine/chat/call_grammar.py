"""Grammars in llguidance's Lark for answers that contain tool calls.  Pure.

A *stretch* is the text after a trigger, including the end marker: one call, or a section of calls.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cllm.engine.chat.argument_text import ANY_TEXT, literal, literals_of, quoted_text
from cllm.engine.chat.call_literals import NO_KEY, QUOTE, ElementCalls, GemmaCalls, PythonCalls
from cllm.engine.chat.call_syntax import CallSyntax, JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.routed_turn import RoutedTurn
from cllm.engine.chat.tool_schema import ToolParameters, parameters_of
from cllm.engine.chat.value_grammar import (
    COMMA,
    STRING,
    Notation,
    ValueGrammar,
    WriteMember,
    json_of,
    plain_key,
)
from cllm.engine.json_schema import TYPES, enforceable
from cllm.errors import InvalidRequestError

ONE_CALL = r"\bcall\b(?![\"\w])"  # the rule `call` in the body of the rule `stretch`
GAP = r"gap: /[ \n]{0,2}/"
ATTRIBUTE = r'/ [a-z_]{1,20}="[^"<>&]{0,40}"/'  # may follow the name of a tool
SPACES = r"/[ \t\r\n]*/"
PYTHON = Notation(
    quote="'",
    # A character class, because the automaton of `~(…)` becomes too large with a large `maxLength`.
    writable=r"/[^\x00-\x1f\x7f'\\]*/",
    constants={"null": "None", "true": "True", "false": "False"},
    json_strings=True,
    escaped=r"""([^\x00-\x1f\x7f'\\]|\\[\\'"nrt])*""",
)
GEMMA = Notation(
    quote=QUOTE,
    writable=f"~({ANY_TEXT} {literal(QUOTE)} {ANY_TEXT})",
    constants={name: name for name in ("null", "true", "false")},
)


@dataclass(frozen=True, slots=True)
class ValueForm:
    """Notation of values of some types.

    Attributes
    ----------
    types : set of str
        Types of the values, a subset of `TYPES`.
    before, end : str
        Lark before the value; plain text after it.
    is_text : bool
        True if a string is written without quotation marks; otherwise a value is JSON.
    """

    types: frozenset[str]
    before: str = ""
    end: str = ""
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """Notation of one argument, in Lark.

    Attributes
    ----------
    head : str
        Lark before the value, including the key.
    values : tuple of ValueForm
        Alternatives for the value.
    newline : bool
        True if a line end precedes and follows the value.
    premature : str
        Terminal for strings in which a parser would find the end of the value too early.
    """

    head: str
    values: tuple[ValueForm, ...]
    newline: bool = False
    premature: str = ""

    @property
    def is_mixed(self) -> bool:
        """True if text and JSON can only be told apart by their content."""
        return len({form.before for form in self.values}) == 1 and len(self.values) > 1


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of the calls in one answer.

    Parameters
    ----------
    syntax : CallSyntax
    tools : sequence of ToolParameters or mapping
        Tools that may be called.
    parallel : bool
        True if several calls are allowed.
    spelled : mapping of int to bytes
        Names of control tokens, by the ids of the tokens.
    """

    syntax: CallSyntax
    tools: Sequence[ToolParameters]
    parallel: bool
    spelled: Mapping[int, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", parameters_of(self.tools))

    def required(self) -> str:
        """Return a grammar for one call or more, without other text."""
        return "\n".join(["start: calls", *self.rules()])

    def or_else(self, schema: str) -> str:
        """Return a grammar for calls, or for JSON that satisfies `schema`, a schema as JSON text."""
        answer = enforceable("json_schema", json.loads(schema))
        otherwise = f"otherwise: %json {json_of(answer, is_strict=True)}"
        return "\n".join(["start: calls | otherwise", otherwise, *self.rules()])

    def strict(self) -> str:
        """Return a grammar for text with any number of calls, each of which satisfies its tool's schema."""
        syntax = self.syntax
        # Behind an object without an end marker, the parser takes another object for a call.
        is_open = isinstance(syntax, JsonCalls) and not (syntax.is_list or syntax.ends)
        before = "OPEN" if syntax.is_bare else "TEXT"
        behind = "OPEN" if syntax.is_bare or is_open else "TEXT"
        rules = [r"TEXT: /(.|\n)*/", r"OPEN: /[ \t\r\n]*([^ \t\r\n\[{,;](.|\n)*)?/"]
        start = before
        if parts := self._stretches_behind("first", before, rules):
            more = self._stretches_behind("next", behind, rules)
            start = f"({parts}) gap (({more}) gap)* {behind} | {before}"
        if syntax.is_bare:
            start = f"({self._trigger()} stretch gap)* ({start})"
        return "\n".join([f"start: {start}", *rules, *self.rules()[1:]])

    def _stretches_behind(self, name: str, text: str, rules: list[str]) -> str:
        """Return Lark for text up to any trigger and its stretch of calls, and add the rules that it uses."""
        triggers = [*filter(None, self.syntax.triggers)]
        # A call may also stand by itself, without the marker that begins a section.
        stretches = ["stretch", "call"] if self._has_sections else ["stretch"] * len(triggers)
        parts = []
        for i, trigger in enumerate(triggers):
            begin = self._literal(trigger)
            lazy = "" if begin.startswith("<[") else "[lazy]"
            rules.append(f"{name}_{i}{lazy}: {text} {begin}")
            parts.append(f"{name}_{i} {stretches[i]}")
        return " | ".join(parts)

    @property
    def _has_sections(self) -> bool:
        is_named = isinstance(self.syntax, NamedCalls | TaggedCalls)
        return is_named and len(self.syntax.triggers) > 1

    def _trigger(self) -> str:
        """Return the trigger of calls in Lark; it is optional if calls may be bare, without a trigger."""
        begin = self._begin
        return f"({begin})?" if begin and self.syntax.is_bare else begin

    @property
    def _begin(self) -> str:
        """The trigger that calls are to have in Lark; empty without one."""
        return self._literal(next(filter(None, self.syntax.triggers), ""))

    def rules(self) -> list[str]:
        """Return the rule `calls`, then the rules that it uses."""
        # Only the first stretch may be bare: after a call, only the trigger begins another stretch.
        begin = self._begin
        more = f" (gap {begin} stretch)*" if self.parallel and begin else ""
        rules = [f"calls: gap {self._trigger()} stretch{more}", GAP]
        names = " | ".join(f"call_{i}" for i in range(len(self.tools)))
        stretch, call = _WRITERS[type(self.syntax)](self)
        rules += [f"stretch: {stretch}", f"call: {names}"]
        return [*rules, *(rule for i in range(len(self.tools)) for rule in call(i))]

    def alone(self, i: int) -> tuple[str, list[str]]:
        """Return Lark for the trigger and a single call of tool `i`, and the rules that it uses."""
        stretch, call = _WRITERS[type(self.syntax)](self)
        return f"{self._trigger()} {re.sub(ONE_CALL, f'call_{i}', stretch)}", call(i)

    def _several(self, between: str) -> str:
        """Return Lark for one call, or for calls separated by `between` if several are allowed."""
        return f"call ({between} call)*" if self.parallel else "call"

    # --- JSON -------------------------------------------------------------------------------
    def _json_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, JsonCalls)
        end = self._literal(syntax.ends[0]) if syntax.ends else ""
        end = f"({end})?" if end and syntax.is_bare else end
        calls = f'"[" {self._several(COMMA)} "]"' if syntax.is_list else "call"
        return f"gap {calls} gap {end}", self._json_call

    def _json_call(self, i: int) -> list[str]:
        tool, syntax = self.tools[i], self.syntax
        assert isinstance(syntax, JsonCalls)
        arguments = tool.json()
        definitions = arguments.pop("$defs", {})
        if syntax.name_is_key:
            members: dict[str, Any] = {tool.name: arguments}
        else:
            members = {syntax.name_key: {"const": tool.name}, syntax.arguments_key: arguments}
        whole = {
            "type": "object",
            "properties": members,
            "required": list(members),
            "additionalProperties": False,
            "$defs": definitions,
        }
        return [f"call_{i}: %json {json_of(whole, is_strict=tool.is_strict)}"]

    def _named_calls(self) -> Writing:
        assert isinstance(self.syntax, NamedCalls)
        return self._in_section(self.syntax), self._named_call

    def _in_section(self, syntax: NamedCalls | TaggedCalls) -> str:
        if not syntax.section_start:
            return "call"
        start, end = self._literal(syntax.call_start), self._literal(syntax.section_end)
        return f"gap {start} {self._several(f'gap {start}')} gap {end}"

    def _named_call(self, i: int) -> list[str]:
        tool, syntax = self.tools[i], self.syntax
        assert isinstance(syntax, NamedCalls)
        head = syntax.name_written.format(name=tool.name)
        match = re.fullmatch(syntax.name, head, re.DOTALL)
        if (
            match is None
            or match["name"] != tool.name
            or any(end and end in head for end in (*syntax.separators, syntax.id_start, "{"))
        ):
            raise unwritable(tool, tool.name)
        # Digits of `name_written` around the name are the number of the call: any number is allowed.
        before, _, after = syntax.name_written.partition("{name}")
        said = " ".join(
            "/[0-9]{1,3}/" if part.isdecimal() else self._literal(part)
            for part in (*re.split(r"(\d+)", before), tool.name, *re.split(r"(\d+)", after))
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
            f"arguments_{i}: %json {json_of(tool.json(), is_strict=tool.is_strict)}",
        ]

    # --- Arguments one by one ---------------------------------------------------------------
    def _tagged_calls(self) -> Writing:
        assert isinstance(self.syntax, TaggedCalls)
        return self._in_section(self.syntax), self._tagged_call

    def _tagged_call(self, i: int) -> list[str]:
        syntax, tool = self.syntax, self.tools[i]
        assert isinstance(syntax, TaggedCalls)
        ends = (syntax.name_end,) if syntax.name_end else (syntax.key_start, *syntax.call_ends)
        head = self._literal(self._name(tool, tool.name, *ends) + syntax.name_end)
        if syntax.header_end:
            head += f" {ATTRIBUTE}? {self._literal(syntax.header_end)}"
        end = self._literal(syntax.call_ends[0])
        return self._tagged(i, head, self._tagged_argument, f"gap {end}")

    def _tagged_argument(self, tool: ToolParameters, key: str | None, free: str) -> ArgumentForm:
        syntax = self.syntax
        assert isinstance(syntax, TaggedCalls)
        marks = " | ".join(map(literal, filter(None, (syntax.key_start, *syntax.call_ends))))
        end = literal(syntax.value_end)
        premature = f"({ANY_TEXT} {end} {SPACES} ({marks}) {ANY_TEXT})"
        if syntax.has_cdata:
            premature = f"({premature} | {SPACES} {literal('<![CDATA[')} {ANY_TEXT})"
        start, kinds = self._literal(syntax.value_start), _kinds_of(syntax.attribute)
        if not kinds:
            before = f"gap {start}" if start else ""
            kinds = (("", STRING), ("", TYPES - STRING))
        else:
            before = start
        return ArgumentForm(
            f"{self._literal(syntax.key_start)} {self._key(tool, key, free, syntax.key_end)}"
            f" {self._literal(syntax.key_end)}",
            tuple(
                ValueForm(
                    types, f"{self._literal(text)} {before}", syntax.value_end, types == STRING
                )
                for text, types in kinds
            ),
            newline=syntax.trims_newline,
            premature=premature,
        )

    def _element_calls(self) -> Writing:
        assert isinstance(self.syntax, ElementCalls)
        start = literal(self.syntax.call_start)
        return f"gap {start} {self._several(f'gap {start}')} gap {literal(self.syntax.end)}", (
            self._element_call
        )

    def _element_call(self, i: int) -> list[str]:
        syntax, tool = self.syntax, self.tools[i]
        assert isinstance(syntax, ElementCalls)
        head = literal(self._name(tool, tool.name, syntax.name_end) + syntax.name_end)
        end = f"gap {literal(syntax.call_end)}"
        return self._tagged(i, head, self._element_argument, end)

    def _element_argument(
        self, tool: ToolParameters, key: str | None, free: str
    ) -> ArgumentForm | None:
        syntax = self.syntax
        assert isinstance(syntax, ElementCalls)
        if key is None:  # the key would have to be the same in both tags
            return None
        start, end = syntax.tags_of(self._name(tool, key, ">", "/"))
        premature = f"({ANY_TEXT} {literal(syntax.mark + '<')} {ANY_TEXT})"
        text, other = ValueForm(STRING, "", end, True), ValueForm(TYPES - STRING, "", end)
        return ArgumentForm(literal(start), (text, other), premature=premature)

    def _python_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, PythonCalls)
        end = "".join(self._literal(text) for text in syntax.ends[:1])
        end = f"({end})?" if end else ""
        return f'"[" {self._several(COMMA)} "]" {end}', self._python_call

    def _python_call(self, i: int) -> list[str]:
        tool = self.tools[i]
        head = self._literal(self._name(tool, tool.name, "(") + "(")
        return self._native_call(i, head, "=", PYTHON, ")")

    def _gemma_calls(self) -> Writing:
        syntax = self.syntax
        assert isinstance(syntax, GemmaCalls)
        return f"call {self._literal(syntax.call_end)}", self._gemma_call

    def _gemma_call(self, i: int) -> list[str]:
        tool = self.tools[i]
        head = self._literal("call:" + self._name(tool, tool.name, "{") + "{")
        return self._native_call(i, head, ":", GEMMA, "}")

    def _native_call(
        self, i: int, head: str, behind_key: str, notation: Notation, end: str
    ) -> list[str]:
        """Return the rules of a call with values in the model's own notation."""
        tool, values = self.tools[i], self._values(i)

        def write(key: str | None, free: str, schema: object) -> str:
            if key is not None and behind_key == "=" and NO_KEY.search(key):
                raise unwritable(tool, key)
            name = free
            if key is not None:
                name = self._literal(key if behind_key == "=" else plain_key(key))
            value = values.native(schema, notation)
            return values.add(values.name("argument"), f"{name} {literal(behind_key)} {value}")

        members = self._kinds(tool, values, write, ("", COMMA))
        return [f"call_{i}: {head} ({members}) {literal(end)}", *values.rules]

    def _values(self, i: int) -> ValueGrammar:
        return ValueGrammar(self.tools[i], str(i), partial(literals_of, spelled=self.spelled))

    def _kinds(
        self,
        tool: ToolParameters,
        values: ValueGrammar,
        write: WriteMember,
        between: tuple[str, str],
    ) -> str:
        """Return the names of the rules for all kinds of arguments, separated by `|`."""
        # The parser reads a key that any kind names with types of its own: it cannot be a free key.
        named = {key for kind in tool.objects for key in kind.properties}
        found = [values.members(kind, write, between, named) for kind in tool.objects]
        if tool.objects and all(kind.others for kind in tool.objects):
            tool.document.cannot("const or enum of all arguments")
        names = [name for name in found if name is not None]
        if not names:
            raise InvalidRequestError(
                tool.field, "its schema", "a schema of arguments that the model can write"
            )
        return " | ".join(names)

    def _key(self, tool: ToolParameters, key: str | None, free: str, *ends: str) -> str:
        """Return a key in Lark; if `key` is None, the rule `free`, for keys that the schema does not name."""
        return free if key is None else self._literal(self._name(tool, key, *ends))

    def _name(self, tool: ToolParameters, name: str, *ends: str) -> str:
        """Return a name as it is written before one of `ends`, escaped for HTML if the syntax is.

        Raises
        ------
        InvalidRequestError
            A parser would read another name.
        """
        unescapes = getattr(self.syntax, "unescapes", False)
        has_end = not unescapes and any(end in name for end in ends)
        if name != name.strip() or not name or has_end:
            raise unwritable(tool, name)
        return html.escape(name) if unescapes else name

    def _tagged(self, i: int, head: str, form_of: FormOf, end: str) -> list[str]:
        """Return the rules of a call with arguments in tags."""
        tool, values = self.tools[i], self._values(i)

        def write(key: str | None, free: str, schema: object) -> str | None:
            form = form_of(tool, key, free)
            # A parser knows the key, and not which kind of arguments it reads.
            read = tool.document.types(schema)
            if key is not None or len(tool.objects) > 1:
                read |= tool.value.member(free if key is None else key).types
            return None if form is None else self._argument(values, tool, form, schema, read)

        members = self._kinds(tool, values, write, ("gap", "gap"))
        return [f"call_{i}: {head} ({members}) {end}", *values.rules]

    def _argument(
        self,
        values: ValueGrammar,
        tool: ToolParameters,
        form: ArgumentForm,
        schema: object,
        read: frozenset[str],
    ) -> str | None:
        """Return the name of a rule for an argument and its value; None if no value can be written.

        `read` has the types with which a parser reads the value.
        """
        types = tool.document.types(schema)
        newline = r'"\n"' if form.newline else ""
        # Text that would be read as something else is written as JSON.
        is_mixed = form.is_mixed and types >= STRING and read > STRING
        quoted = quoted_text(read - STRING) if is_mixed else ""
        written = []
        for value in form.values:
            head, end = (
                f"{form.head} {value.before} {newline}",
                f"{newline} {self._literal(value.end)}",
            )
            if not types & value.types:
                if quoted:
                    written.append(f"{head} {values.quoted(schema, quoted)} {end}")
                continue
            if not value.is_text:
                written.append(f"{head} {values.json(schema, value.types, quoted)} {end}")
                continue
            bad = [form.premature, *([f"/{quoted}/"] if quoted else [])]
            writable = f"~({' | '.join(bad)})"
            if (text := values.text(schema, value.end, writable, newline=newline)) is not None:
                written.append(f"{head} {text}")
        return values.add(values.name("argument"), " | ".join(written)) if written else None

    def _literal(self, text: str) -> str:
        return _joined(text, self.spelled)


def _kinds_of(attribute: Sequence[tuple[str, bool]]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the attributes that name the type of a value, each with the types that it stands for."""
    found: list[tuple[str, frozenset[str]]] = []
    left = TYPES - STRING
    for text, is_string in attribute:
        named = frozenset({"integer", "fraction"} if text == "number" else {text}) & left
        if is_string:
            found.append((text, STRING))
        elif named or text not in (*TYPES, "number"):
            found.append((text, named or left))
            left -= named or left
    if attribute:
        found += [
            ("number" if kind == "fraction" else kind, frozenset({kind})) for kind in sorted(left)
        ]
    return tuple(found)


def _joined(text: str, spelled: Mapping[int, bytes]) -> str:
    return " ".join(literals_of(text, spelled))


@dataclass(frozen=True, slots=True)
class RoutedCallGrammar:
    """Grammar of the call in one answer, for models that write a call as a message with a header.

    Parameters
    ----------
    turn : RoutedTurn
    tools, spelled
        As for `CallGrammar`.
    parallel : bool
        Not used: an answer ends with its first call.
    continues : bool
        True if the prompt ends inside a message, which the answer continues.
    """

    turn: RoutedTurn
    tools: Sequence[ToolParameters]
    parallel: bool
    spelled: Mapping[int, bytes]
    continues: bool = False

    def required(self) -> str:
        """Return the grammar of one call, after an optional thought."""
        self._check_begins()
        return "\n".join([f"start: {self._thought()} call", *self._rules()])

    def strict(self) -> str:
        """Return the grammar of any number of messages, then an answer or one valid call."""
        turn = self.turn
        headers = " | ".join(map(self._literal, (turn.answer_written, *turn.others_written)))
        behind = self._up_to(turn.between, "more")
        start = f"start: (header {behind})* (header TEXT | call)"
        if self.continues:
            start = f"start: TEXT | {behind} (header {behind})* (header TEXT | call)"
        return "\n".join([start, f"header: {headers}", *self._rules()])

    def or_else(self, schema: str) -> str:
        """Return the grammar of one call, or of JSON that satisfies `schema`, after an optional thought."""
        self._check_begins()
        answer = json_of(enforceable("json_schema", json.loads(schema)), is_strict=True)
        begin = self._literal(self.turn.answer_written)
        start = f"start: {self._thought()} (call | {begin} otherwise)"
        return "\n".join([start, f"otherwise: %json {answer}", *self._rules()])

    def _check_begins(self) -> None:
        if self.continues:
            limit = "false where a call or an answer of a schema is asked for"
            raise InvalidRequestError("continue_final_message", True, limit)

    def _thought(self) -> str:
        before, after = self.turn.thought_written
        return f"({self._literal(before)} {self._up_to(after, 'free')})?" if before else ""

    def _up_to(self, end: str, name: str) -> str:
        """Return Lark for text up to and including `end`.

        This is the rule `name` of `_rules`, unless `end` begins with a control token.
        """
        literal = self._literal(end)
        return f"TEXT {literal}" if literal.startswith("<[") else name

    def _literal(self, text: str) -> str:
        return _joined(text, self.spelled)

    def _rules(self) -> list[str]:
        """Return the rule `call`, and the rules that it and the messages before it use."""
        turn = self.turn
        names = " | ".join(f"routed_{i}" for i in range(len(self.tools)))
        rules = [r"TEXT: /(.|\n)*/", f"call: {names}", GAP]
        for name, end in (("free", turn.thought_written[1]), ("more", turn.between)):
            if end and self._up_to(end, name) == name:
                rules.append(f"{name}[lazy]: TEXT {self._literal(end)}")
        inner = CallGrammar(turn.calls, self.tools, False, self.spelled) if turn.calls else None
        for i, tool in enumerate(self.tools):
            header = turn.call_written.format(name=tool.name)
            match = re.search(turn.call_route, header.partition(turn.message)[0])
            if match is None or match["name"] != tool.name:
                raise unwritable(tool, tool.name)
            if inner is None:
                arguments = f"arguments_{i}"
                schema = json_of(tool.json(), is_strict=tool.is_strict)
                rules.append(f"{arguments}: %json {schema}")
            else:
                arguments, others = inner.alone(i)
                rules += others
            rules.append(f"routed_{i}: {self._literal(header)} {arguments}")
        return rules


def unwritable(tool: ToolParameters, name: str) -> InvalidRequestError:
    """Return the error for a name that a parser would read as another."""
    limit = "a name that calls of this model can have"
    return InvalidRequestError(tool.field.removesuffix(".parameters"), name, limit)


# Body of the rule `stretch`, and a function that returns the rules for a call of the i-th tool.
Writing = tuple[str, Callable[[int], list[str]]]
FormOf = Callable[[ToolParameters, str | None, str], ArgumentForm | None]
_WRITERS: dict[type, Callable[[CallGrammar], Writing]] = {
    JsonCalls: CallGrammar._json_calls,
    NamedCalls: CallGrammar._named_calls,
    TaggedCalls: CallGrammar._tagged_calls,
    ElementCalls: CallGrammar._element_calls,
    PythonCalls: CallGrammar._python_calls,
    GemmaCalls: CallGrammar._gemma_calls,
}
