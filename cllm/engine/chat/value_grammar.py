"""ValueGrammar: rules of Lark for values that a schema allows, as a model writes them.  Pure.

A value is written as JSON, as unescaped text, or in a `Notation` such as Python's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cllm.engine.chat.argument_text import ANY_TEXT, literal, narrowed, searched, text_terminal
from cllm.engine.chat.tool_schema import ToolParameters
from cllm.engine.json_schema import TYPES, ArraySchema, ObjectSchema
from cllm.errors import InvalidRequestError

STRING = frozenset({"string"})
NUMBERS = frozenset({"integer", "fraction"})
COMMA = '"," gap'
# At most one space or line end between the tokens of JSON: a run of them would use up `max_tokens`.
COMPACT = {"whitespace_pattern": r"[ \n]?"}
# Terminal for a key that the schema allows, but does not name.
FREE_KEY = "/[A-Za-z0-9_.$-]{1,64}/"
NO_ESCAPES = r"/[^\x00-\x1f\x7f\"\\]*/"
N_COUNTED_MAX = 64  # keys that a grammar counts for `minProperties` and `maxProperties`
N_RULES_MAX = 20_000
# Function of a member's key, a terminal, and the member's schema.  If the schema does not name the key,
# the key is None, and the terminal stands for it.  The result is a rule, None if none can be written.
WriteMember = Callable[[str | None, str, object], str | None]


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation of values other than JSON, also for the values inside them.

    Attributes
    ----------
    quote : str
        Quotation mark on both sides of a string without escapes.
    writable : str
        Terminal for strings that can be written without escapes.
    constants : mapping of str to str
        Spelling of `null`, `true` and `false`.
    json_strings : bool
        True if strings may be JSON, too; keys are quoted then.
    escaped : str
        Regular expression of any string with escapes; "" if the notation has no escapes.
    """

    quote: str
    writable: str
    constants: Mapping[str, str]
    json_strings: bool = False
    escaped: str = ""


class ValueGrammar:
    """Rules for the arguments of one tool.

    Parameters
    ----------
    tool : ToolParameters
    number : str
        Part of the names of rules, different for each tool.
    literals : callable
        Returns the parts of a text in Lark, as `literals_of` does.

    Attributes
    ----------
    rules : list of str
        Rules in Lark that were added so far.
    """

    def __init__(
        self, tool: ToolParameters, number: str, literals: Callable[[str], list[str]]
    ) -> None:
        self.rules: list[str] = []
        self._tool = tool
        self._document = tool.document
        self._number = number
        self._literals = literals
        self._n_names = 0
        self._natives: dict[tuple[int, int], tuple[str, object]] = {}  # keeps the schemas alive

    def name(self, kind: str) -> str:
        """Return an unused name for a rule."""
        self._n_names += 1
        return f"{kind}_{self._number}_{self._n_names}"

    def add(self, name: str, body: str) -> str:
        """Add a rule, and return its name.

        Raises
        ------
        InvalidRequestError
            The grammar has `N_RULES_MAX` rules already.
        """
        if len(self.rules) >= N_RULES_MAX:
            raise InvalidRequestError(self._tool.field, "its schema", "a smaller schema")
        self.rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """Return a text in Lark."""
        return " ".join(self._literals(text))

    def json(self, schema: object, types: frozenset[str] = TYPES, quoted: str = "") -> str:
        """Add a rule for values of `types` as JSON, and return its name; `quoted` is as in `narrowed`."""
        closed = self._document.closed(schema)
        if not self._document.types(schema) <= types:
            closed = narrowed(closed, types, quoted)
        body = f"%json {json_of(closed, is_strict=self._tool.is_strict)}"
        return self.add(self.name("value"), body)

    def quoted(self, schema: object, quoted: str) -> str:
        """Add a terminal for JSON strings without escapes that `schema` and `quoted` allow; return its name."""
        text = text_terminal(self._document, schema) or ANY_TEXT
        body = f"""'"' ({text} & /{quoted}/ & {NO_ESCAPES}) '"'"""
        return self.add(self.name("TEXT"), body.replace("'\"'", r'"\""'))

    def text(
        self, schema: object, end: str, writable: str, *, newline: str = "", start: str = ""
    ) -> str | None:
        """Add a rule for an unescaped string up to `end`, and return its name; None if no string is allowed.

        Parameters
        ----------
        end : str
            Plain text that ends the string.
        writable : str
            Terminal for strings that can be written.
        newline : str
            Lark before the end.
        start : str
            Plain text before the string.
        """
        text = text_terminal(self._document, schema)
        if text is None:
            return None
        first, *behind = self._literals(end)
        terminal = self.name("TEXT")
        body = f"({text} & {writable}) {newline}"
        if first.startswith("<["):
            self.add(terminal, body)
            return self.add(
                self.name("text"), " ".join([self.literal(start), terminal, first, *behind])
            )
        # `start` is in the same terminal: a model cannot begin a string if none can be written.
        self.add(terminal, f"{literal(start) if start else ''} {body} {first}")
        begun = self.add(self.name("begun") + "[lazy]", terminal)
        return self.add(self.name("text"), " ".join([begun, *behind]))

    # --- Objects ----------------------------------------------------------------------------
    def members(
        self,
        kind: ObjectSchema,
        write: WriteMember,
        between: tuple[str, str],
        others: Collection[str] = (),
    ) -> str | None:
        """Add rules for the members of one kind of objects, in the order of the schema.

        Parameters
        ----------
        write : callable
            Adds the rule of one member; see `WriteMember`.
        between : (str, str)
            Lark before the first member, and before each further member.
        others : collection of str
            Keys that a member cannot have unless the schema names it.

        Returns
        -------
        str or None
            Name of the first rule; None if no object of this kind can be written.
        """
        n_min, n_max = kind.n_min, kind.n_max
        if max(n_min, n_max or 0) > N_COUNTED_MAX:
            self._document.cannot("minProperties" if n_min > N_COUNTED_MAX else "maxProperties")
            n_min, n_max = 0, None
        top = max(n_min, n_max or 0, int(between[0] != between[1]))  # counted up to this
        keys, written = list(kind.properties), dict[str, str]()
        for key in keys:
            schema = self._document.joined(kind.properties[key])
            if self._document.types(schema) and (rule := write(key, "", schema)):
                written[key] = rule
        free = self._free_members(kind, write, others)
        number = self.name("members")
        names: list[str | None] = []
        for k in range(len(keys), -1, -1):
            behind, names = names, []
            for count in range(top + 1):
                after = min(count + 1, top)
                separator = between[min(count, 1)] if top else between[0]
                may_take = n_max is None or count < n_max
                choices: list[str] = []
                name = f"{number}_{k}_{count}"
                if k == len(keys):
                    if free and may_take:
                        choices.append(f"{separator} {free} {number}_{k}_{after}")
                    choices += ['""'] if count >= n_min else []
                else:
                    if keys[k] in written and may_take and behind[after]:
                        choices.append(f"{separator} {written[keys[k]]} {behind[after]}")
                    if keys[k] not in kind.required and behind[count]:
                        choices.append(str(behind[count]))
                names.append(self.add(name, " | ".join(choices)) if choices else None)
        return names[0]

    def _free_members(self, kind: ObjectSchema, write: WriteMember, others: Collection[str]) -> str:
        """Return a rule for a member that the schema does not name; "" if it allows none."""
        known = [literal(key) for key in sorted({*others, *kind.properties})]
        texts = {pattern: searched(pattern) for pattern in kind.patterns}
        for pattern in (pattern for pattern, text in texts.items() if text is None):
            self._document.cannot(f"patternProperties: {pattern}")
        patterns = [(f"/{text}/", kind.patterns[key]) for key, text in texts.items() if text]
        rest = kind.rest
        if len(patterns) < len(texts):  # any key may be one of the pattern
            patterns, rest = [], True
        taken = [(text, schema, known) for text, schema in patterns]
        taken.append((FREE_KEY, rest, known + [text for text, _ in patterns]))
        found: list[str] = []
        for terminal, schema, bad in taken:
            key = self.name("FREE")
            rule = write(None, key, schema) if self._document.types(schema) else None
            if rule is not None:
                excluded = f" & ~({' | '.join(bad)})" if bad else ""
                self.add(key, f"{FREE_KEY} & {terminal}{excluded}")
                found.append(rule)
        return self.add(self.name("free"), " | ".join(found)) if found else ""

    # --- Values in a notation -----------------------------------------------------------------
    def native(self, schema: object, notation: Notation) -> str:
        """Return the name of a rule for values in a notation; `InvalidRequestError` if no value is possible."""
        key = (id(schema), id(notation))
        if key not in self._natives:
            name = self.name("native")
            self._natives[key] = name, schema
            choices = [choice for choice in self._native_choices(schema, notation) if choice]
            if not choices:
                raise InvalidRequestError(
                    self._tool.field, schema, "a schema that a value can satisfy"
                )
            self.add(name, " | ".join(choices))
        return self._natives[key][0]

    def _native_choices(self, schema: object, notation: Notation) -> list[str | None]:
        document, types = self._document, self._document.types(schema)
        constants = {"null": None, "true": True, "false": False}
        choices: list[str | None] = [
            literal(notation.constants[name])
            for name, value in constants.items()
            if document.takes_constant(schema, value)
        ]
        if types & NUMBERS:
            choices.append(self.json(schema, NUMBERS))
        if types & STRING:
            choices.append(self._native_text(schema, notation))
            choices += [self.json(schema, STRING)] if notation.json_strings else []
        for kind in document.arrays(schema):
            choices.append(self._native_array(schema, kind, notation))
        for kind_of_object in document.objects(schema):
            choices.append(self._native_object(schema, kind_of_object, notation))
        return choices

    def _native_text(self, schema: object, notation: Notation) -> str | None:
        quote = self.literal(notation.quote)
        if notation.escaped and text_terminal(self._document, schema) == ANY_TEXT:
            return f"{quote} /{notation.escaped}/ {quote}"
        return self.text(schema, notation.quote, notation.writable, start=notation.quote)

    def _native_object(self, schema: object, kind: ObjectSchema, notation: Notation) -> str | None:
        if kind.others:
            return self.json(schema, frozenset({"object"}))

        def write(key: str | None, free: str, member: object) -> str:
            value = self.native(member, notation)
            quoted = f"'{free}'" if key is None else repr(key)
            if key is None:
                name = f'"\'" {free} "\'"' if notation.json_strings else free
            elif notation.json_strings:
                name = f"({literal(json.dumps(key, ensure_ascii=False))} | {literal(quoted)})"
            else:
                name = self.literal(plain_key(key))
            return self.add(self.name("member"), f'{name} ":" gap {value}')

        if not all(
            self._document.types(self._document.joined(kind.properties[key]))
            for key in kind.required
        ):
            return None
        members = self.members(kind, write, ("", COMMA))
        return None if members is None else f'"{{" {members} "}}"'

    def _native_array(self, schema: object, kind: ArraySchema, notation: Notation) -> str | None:
        if kind.others:
            return self.json(schema, frozenset({"array"}))

        def item(i: int) -> str | None:
            one = self._document.joined(kind.at(i))
            return self.native(one, notation) if self._document.types(one) else None

        n_first, n_max = len(kind.first), kind.n_max
        if n_max is not None and kind.n_min > n_max:
            return None
        rest = item(n_first) if n_max is None or n_max > n_first else None
        n_more = max(kind.n_min - n_first, 0)
        limit = None if n_max is None else n_max - n_first
        body: str | None
        if rest is None:
            body = "" if n_more == 0 else None
        elif n_first:
            body = f"({COMMA} {rest}){{{n_more},{'' if limit is None else limit}}}"
        else:
            most = "" if limit is None else limit - 1
            # llguidance rejects a repetition of at most 0.
            more = f" ({COMMA} {rest}){{{max(n_more - 1, 0)},{most}}}" if most != 0 else ""
            body = f"{rest}{more}" if n_more else f"({rest}{more})?"
        for i in range(n_first - 1, -1, -1):
            value = item(i) if n_max is None or i < n_max else None
            separator = COMMA if i else ""
            taken = f"{separator} {value} {body}" if value and body is not None else None
            body = (f"({taken})?" if taken else "") if i >= kind.n_min else taken
        return None if body is None else f'"[" {body} "]"'


def plain_key(key: str) -> str:
    """Return a key without quotes, or quoted if it would be read as another one."""
    is_plain = key and key == key.strip() and not re.search(r'[:"{}<>,\[\]\n]', key)
    return key if is_plain else json.dumps(key, ensure_ascii=False)


def json_of(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a schema as JSON text for llguidance."""
    # llguidance ignores remaining keywords that it does not enforce, if the schema is not strict.
    options = COMPACT if is_strict else {**COMPACT, "lenient": True}
    options = {**options, **schema.get("x-guidance", {})}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
