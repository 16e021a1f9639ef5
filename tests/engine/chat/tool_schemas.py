"""Random schemas of tools, arguments that they allow, and calls of them as models write them."""

from __future__ import annotations

import html
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jsonschema
import numpy as np

from cllm.bindings import Model
from cllm.engine.chat.argument_text import is_quoted
from cllm.engine.chat.call_literals import QUOTE, ElementCalls, GemmaCalls, PythonCalls
from cllm.engine.chat.call_syntax import CallSyntax, JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.tool_schema import ToolParameters
from cllm.engine.json_schema import TYPES, type_of

Schema = Any
NAME = "book_trip"
# Texts that some notation could take for something else.
TEXTS = (
    "Oslo", "42", "-1.5", "true", "True", "null", "None", "", " a ", "a\nb", "\nlead", '"q"', "[1]",
    '{"a": 1}', "['a']", "it's", "back\\slash", "<b>x</b>", "</parameter", "é😀", "a, b=c", "f(x)",
    "{x}", "2024-01-31", "a </function> b", "\t", "x\r\ny",
)  # fmt: skip
PATTERNS = (
    ("^[0-9]{4}$", ("2024", "0000")), ("[a-z]+", ("abc", "1a\n")), ("^(a|b)x?$", ("a", "bx")),
    ("^\\w+/\\d+$", ("a/1", "_/22")), ("^$|^none$", ("", "none")), ("ab|cd$", ("xab\n", "cd")),
    ("^[^<>&]{2,5}$", ("ab", "12345")),
)  # fmt: skip
FORMATS = (
    ("date", "2024-02-28"), ("date-time", "2024-02-28T10:00:00Z"), ("time", "10:00:00Z"),
    ("uuid", "123e4567-e89b-12d3-a456-426614174000"), ("ipv4", "10.0.0.255"), ("ipv6", "::1"),
    ("email", "a.b@example.org"), ("hostname", "a-b.example"), ("uri", "https://a.b/c?d=e#f"),
    ("duration", "P1DT2H"), ("path", "/tmp/x y"), ("color", "#fff"),
)  # fmt: skip


def _with_kind(kind: str, draw: Callable[[], Any]) -> dict[str, Any]:
    return {"kind": kind, **draw()}


@dataclass
class Maker:
    """Draws schemas, and values that they allow; the draws depend on the seed alone.

    Attributes
    ----------
    samples : mapping
        Ways to draw a value, by the identity of its schema.
    """

    seed: int
    definitions: dict[str, Schema] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.samples: dict[int, Callable[[], Any]] = {}
        self._kept: list[Schema] = []

    def _known(self, schema: Schema, sample: Callable[[], Any]) -> Schema:
        self._kept.append(schema)
        self.samples[id(schema)] = sample
        return schema

    def draw(self, schema: Schema) -> Any:
        """Return a value that a schema of this maker allows."""
        return self.samples[id(schema)]()

    def value(self, depth: int) -> Schema:
        """Return a schema of a value."""
        r = self.random
        kinds: list[Callable[[int], Schema]] = [
            self._text,
            self._choice,
            self._number,
            self._constant,
        ]
        if depth:
            kinds += [self._nullable, self._array, self._object, self._reference, self._all_of]
            kinds += [self._map, self._one_of, self._union]
        made = r.choice(kinds)(max(depth - 1, 0))
        if r.random() < 0.2 and isinstance(made, dict):
            made.setdefault("description", "What it is.")
            made.setdefault("title", "It")
        return made

    def _text(self, depth: int) -> Schema:
        r = self.random
        kind = r.randrange(4)
        if kind == 0:
            return self._known({"type": "string"}, lambda: r.choice(TEXTS))
        if kind == 1:
            n_min, n_max = r.randrange(3), r.randrange(3, 8)
            schema = {"type": "string", "minLength": n_min, "maxLength": n_max}
            return self._known(schema, lambda: "ab é<'\""[: r.randint(n_min, n_max)])
        if kind == 2:
            pattern, texts = r.choice(PATTERNS)
            return self._known({"type": "string", "pattern": pattern}, lambda: r.choice(texts))
        name, text = r.choice(FORMATS)
        return self._known({"type": "string", "format": name}, lambda: text)

    def _choice(self, depth: int) -> Schema:
        r = self.random
        values: list[Any] = r.sample(["1", "2", "true", "a b", "a\nb", 'x"y', "null"], 3)
        schema: Schema = {"type": "string", "enum": values}
        kind = r.randrange(4)
        if kind == 1:
            values = [*values, None, 7]
            schema = {"enum": values}
        elif kind == 2:
            values = values[:1]
            schema = {"const": values[0]}
        elif kind == 3:
            schema = {"anyOf": [{"const": value} for value in values]}
        return self._known(schema, lambda: r.choice(values))

    def _number(self, depth: int) -> Schema:
        r = self.random
        low = r.randrange(-20, 20)
        high = low + r.randrange(9)
        whole = {"type": "integer", "minimum": low, "maximum": high}
        schemas: list[tuple[Schema, Callable[[], Any]]] = [
            ({"type": "integer"}, lambda: r.randrange(-1000, 1000)),
            (whole, lambda: r.randint(low, high)),
            ({"type": "number"}, lambda: r.choice([0, -3, 2.5, 100])),
            ({"type": "number", "exclusiveMinimum": 0, "maximum": 2}, lambda: r.choice([0.5, 2])),
        ]
        return self._known(*r.choice(schemas))

    def _constant(self, depth: int) -> Schema:
        r = self.random
        if r.random() < 0.2:
            return self._known({"const": True}, lambda: True)
        return self._known({"type": "boolean"}, lambda: r.random() < 0.5)

    def _nullable(self, depth: int) -> Schema:
        r, inner = self.random, self.value(depth)
        if set(inner) == {"type"} and isinstance(inner["type"], str) and r.random() < 0.5:
            schema: Schema = {"type": [inner["type"], "null"]}
        else:
            schema = {"anyOf": [inner, {"type": "null"}], "default": None}
        return self._known(schema, lambda: None if r.random() < 0.4 else self.draw(inner))

    def _union(self, depth: int) -> Schema:
        r, parts = self.random, [self._text(0), self._number(0), self.value(depth)]
        return self._known({"anyOf": parts}, lambda: self.draw(r.choice(parts)))

    def _array(self, depth: int) -> Schema:
        r, items = self.random, self.value(depth)
        n_min = r.randrange(3)
        n_max = max(n_min, r.randrange(1, 5))
        schema: Schema = {"type": "array", "items": items}
        if r.random() < 0.6:
            schema |= {"minItems": n_min, "maxItems": n_max, "uniqueItems": False}
        if r.random() < 0.2:
            first = self.value(depth)
            schema = {"type": "array", "prefixItems": [first], "items": items, "minItems": 1}
            return self._known(
                schema,
                lambda: [self.draw(first), *(self.draw(items) for _ in range(r.randrange(3)))],
            )
        return self._known(
            schema, lambda: [self.draw(items) for _ in range(r.randint(n_min, n_max))]
        )

    def _map(self, depth: int) -> Schema:
        r, inner = self.random, self.value(depth)
        kind = r.randrange(4)
        schema: Schema = {"type": "object", "additionalProperties": inner}
        keys = ["a", "b2"]
        if kind == 1:
            schema = {"type": "object", "patternProperties": {"^x-": inner}}
            schema |= {"additionalProperties": False}
            keys = ["x-1", "x-"]
        elif kind == 2:
            schema |= {"propertyNames": {"enum": keys}}
        elif kind == 3:
            schema |= {"minProperties": 1, "maxProperties": 2, "propertyNames": {"type": "string"}}
        n_min = schema.get("minProperties", 0)
        return self._known(
            schema, lambda: {key: self.draw(inner) for key in keys[: r.randint(n_min, 2)]}
        )

    def _one_of(self, depth: int) -> Schema:
        r, parts = self.random, [self.object(depth, ["x", "y"]) for _ in range(2)]
        for i, part in enumerate(parts):
            kind = self._known({"const": f"k{i}"}, partial(str, f"k{i}"))
            part["properties"] = {"kind": kind, **part["properties"]}
            part["required"] = ["kind", *part["required"]]
            drawn = self.samples[id(part)]
            self.samples[id(part)] = partial(_with_kind, f"k{i}", drawn)
        schema = {"oneOf": parts, "discriminator": {"propertyName": "kind"}}
        return self._known(schema, lambda: self.draw(r.choice(parts)))

    def _object(self, depth: int) -> Schema:
        return self.object(depth, self.random.sample(["x", "y", "in", "a-b", "z_1"], 3))

    def object(self, depth: int, keys: list[str]) -> Schema:
        """Return a schema of objects with these keys, some of which are required."""
        r = self.random
        properties = {key: self.value(depth) for key in keys}
        required = [key for key in keys if r.random() < 0.5]
        schema: Schema = {"type": "object", "properties": properties, "required": required}
        schema |= {"additionalProperties": False} if r.random() < 0.5 else {}
        if not required and r.random() < 0.3:
            schema["minProperties"] = 1

        def sample() -> dict[str, Any]:
            n_min = schema.get("minProperties", 0)
            while True:
                taken = [key for key in keys if key in required or r.random() < 0.5]
                if len(taken) >= n_min:
                    return {key: self.draw(properties[key]) for key in taken}

        return self._known(schema, sample)

    def _reference(self, depth: int) -> Schema:
        r = self.random
        if not self.definitions or r.random() < 0.5:
            name = f"D{len(self.definitions)}~/ %é"
            self.definitions[name] = {}  # may refer to itself
            inner = self.value(depth)
            self.definitions[name] = inner
        name = r.choice(sorted(self.definitions))
        target = self.definitions[name]
        if id(target) not in self.samples:  # still being made
            return self._text(0)
        if r.random() < 0.2 and "$anchor" not in target:
            target["$anchor"] = f"anchor{name.split('~')[0][1:]}"
        if "$anchor" in target:
            return self._known({"$ref": f"#{target['$anchor']}"}, lambda: self.draw(target))
        pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        return self._known({"$ref": f"#/$defs/{pointer}"}, lambda: self.draw(target))

    def _all_of(self, depth: int) -> Schema:
        inner = self.value(depth)
        return self._known({"allOf": [inner, {"title": "So"}]}, lambda: self.draw(inner))

    def parameters(self) -> tuple[Schema, Callable[[], dict[str, Any]]]:
        """Return a schema of arguments, and a function that draws arguments."""
        r = self.random
        keys = r.sample(["city", "from", "n", "opt", "class", "flags", "v"], r.randint(1, 4))
        inner = self.object(2, keys)
        kind = r.randrange(9)
        root = inner
        if kind == 6:
            inner["additionalProperties"] = True
        elif kind == 7:
            free = self.value(1)
            inner["additionalProperties"] = free
            return self._whole(inner), lambda: {**self.draw(inner), "zz": self.draw(free)}
        elif kind == 8:
            root = self._one_of(2)
            return self._whole(root), lambda: self.draw(root)
        if kind == 1:
            self.definitions["Root"] = inner
            root = {"$ref": "#/$defs/Root"}
        elif kind == 2:
            root = {"allOf": [inner]}
        elif kind == 3:
            other = self.object(1, ["kind", "w"])
            root = {"anyOf": [inner, other]}
            draw = lambda: self.draw(r.choice([inner, other]))  # noqa: E731
            return self._whole(root), draw
        elif kind == 4 and "tree" not in keys:
            child = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
            inner["properties"]["tree"] = child

            def tree(depth: int = 0) -> dict[str, Any]:
                drawn: dict[str, Any] = self.draw(inner)
                drawn.pop("tree", None)
                if depth < 2 and r.random() < 0.5:
                    drawn["tree"] = [tree(depth + 1) for _ in range(r.randrange(3))]
                return drawn

            return self._whole(root), tree
        return self._whole(root), lambda: self.draw(inner)

    def _whole(self, root: Schema) -> Schema:
        return {**root, "$defs": self.definitions} if self.definitions else root


def allowed(schema: Schema, value: Any) -> bool:
    """Return True if a schema allows a value, according to jsonschema."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def cases(seed: int, n: int) -> Iterator[tuple[Schema, list[dict[str, Any]]]]:
    """Yield schemas with arguments that they allow."""
    for i in range(n):
        maker = Maker(seed * 1_000_003 + i)
        schema, draw = maker.parameters()
        drawn = [draw() for _ in range(6)]
        yield json.loads(json.dumps(schema)), [one for one in drawn if allowed(schema, one)]


# --- Calls as they are written ------------------------------------------------------------------
def written(output_format: OutputFormat, tool: ToolParameters, arguments: Mapping[str, Any]) -> str:
    """Return a call in a format, with its trigger."""
    turn, name, text = output_format.turn, tool.name, json.dumps(arguments, ensure_ascii=False)
    if turn is not None:
        inner = text if turn.calls is None else _in_syntax(turn.calls, tool, arguments)
        return turn.call_written.format(name=name) + inner
    assert output_format.calls is not None
    return _in_syntax(output_format.calls, tool, arguments)


def _in_syntax(syntax: CallSyntax, tool: ToolParameters, arguments: Mapping[str, Any]) -> str:
    name, text = tool.name, json.dumps(arguments, ensure_ascii=False)
    begin = next(filter(None, syntax.triggers), "")
    if isinstance(syntax, JsonCalls):
        call = f'{{"{syntax.name_key}": "{name}", "{syntax.arguments_key}": {text}}}'
        call = f'{{"{name}": {text}}}' if syntax.name_is_key else call
        call = f"[{call}]" if syntax.is_list else call
        return f"{begin}{call}{''.join(syntax.ends[:1])}"
    if isinstance(syntax, NamedCalls):
        said = syntax.name_written.format(name=name)
        said = f"abcd{syntax.id_first}{said}" if syntax.id_first else said
        call = f"{said}{syntax.separators[0]}{text}{''.join(syntax.call_ends[:1])}"
        call = f"{syntax.call_start}{call}" if syntax.section_start else call
        return f"{begin}{call}{syntax.section_end}"
    if isinstance(syntax, PythonCalls):
        given = ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
        return f"{begin}[{name}({given})]{''.join(syntax.ends[:1])}"
    if isinstance(syntax, GemmaCalls):
        members = ",".join(f"{key}:{_gemma(value)}" for key, value in arguments.items())
        return f"{begin}call:{name}{{{members}}}{syntax.call_end}"
    if isinstance(syntax, ElementCalls):
        said = "".join(
            f"{syntax.tags_of(key)[0]}{_plain(tool, key, value)}{syntax.tags_of(key)[1]}"
            for key, value in arguments.items()
        )
        return (
            f"{begin}{syntax.call_start}{name}{syntax.name_end}{said}{syntax.call_end}{syntax.end}"
        )
    assert isinstance(syntax, TaggedCalls)
    said = "".join(_tagged(syntax, tool, key, value) for key, value in arguments.items())
    head = f"{name}{syntax.name_end}{syntax.header_end}"
    call = f"{head}{said}{syntax.call_ends[0]}"
    call = f"{syntax.call_start}{call}" if syntax.section_start else call
    return f"{begin}{call}{syntax.section_end}"


def _plain(tool: ToolParameters, key: str, value: Any) -> str:
    """Return a string as it is if it is read back as a string; otherwise the value as JSON."""
    others = tool.value.member(key).types - {"string"}
    if isinstance(value, str) and not (others and is_quoted(value, others)):
        return value
    return json.dumps(value, ensure_ascii=False)


def _tagged(syntax: TaggedCalls, tool: ToolParameters, key: str, value: Any) -> str:
    key_said = html.escape(key) if syntax.unescapes else key
    kind, said = "", _plain(tool, key, value)
    if syntax.attribute:
        is_text = isinstance(value, str)
        said = value if is_text else json.dumps(value, ensure_ascii=False)
        names = {text for text, is_string in syntax.attribute if is_string == is_text}
        name = {"integer": "number", "fraction": "number"}.get(type_of(value), type_of(value))
        kind = name if name in names or not names & {*TYPES, "number"} else sorted(names)[0]
        kind = kind if kind in names else next(iter(names))
    newline = "\n" if syntax.trims_newline else ""
    head = f"{syntax.key_start}{key_said}{syntax.key_end}{kind}{syntax.value_start}"
    return f"{head}{newline}{said}{newline}{syntax.value_end}"


def _python(value: Any) -> str:
    if isinstance(value, str):
        is_plain = value.isprintable() and not set(value) & {"'", "\\"}
        return repr(value) if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_python(one)}' for key, one in value.items())}}}"
    return repr(value)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def is_writable(output_format: OutputFormat, tool: ToolParameters, arguments: Any) -> bool:
    """Return True if these arguments can be written in a format.

    A text must not contain the end of its value.  Elements have only keys that the schema names.
    """
    syntax = output_format.calls if output_format.turn is None else output_format.turn.calls
    named = {key for kind in tool.objects for key in kind.properties}
    if isinstance(syntax, ElementCalls) and not named >= arguments.keys():
        return False
    ends = {QUOTE} if isinstance(syntax, GemmaCalls) else set()
    if isinstance(syntax, TaggedCalls):
        ends = {"\n" * syntax.trims_newline + syntax.value_end}
    texts = json.dumps(arguments, ensure_ascii=False)
    return not any(end and json.dumps(end, ensure_ascii=False)[1:-1] in texts for end in ends)


# --- What a grammar writes ------------------------------------------------------------------------
def walk(matcher: Any, model: Model, seed: int, n_max: int = 400) -> str | None:
    """Return a random text that the grammar allows; None if it does not end within `n_max` tokens."""
    draw = np.random.default_rng(seed)
    again, text = matcher.deep_copy(), b""
    n_vocab = model.vocab.n_tokens
    for n in range(n_max):
        bits = np.frombuffer(again.compute_bitmask(), np.uint8)
        allowed_tokens = np.unpackbits(bits, count=n_vocab, bitorder="little").nonzero()[0]
        is_open = [token for token in allowed_tokens if not model.vocab.is_eog(int(token))]
        if again.is_accepting() and (not is_open or draw.random() < 0.3):
            return text.decode()
        assert is_open, f"nothing may follow {text!r}"
        pieces = {int(token): model.vocab.piece(int(token)) for token in is_open}
        # Tokens that close something become more likely as the text grows.
        closing = [t for t, piece in pieces.items() if piece[:1] in b'"<]})\n|' or not piece]
        pool = closing if closing and draw.random() < n / 60 else list(pieces)
        token = int(pool[draw.integers(len(pool))])
        if not again.consume_token(token):
            raise AssertionError(f"{token} is allowed, and is not taken: {again.get_error()}")
        text += pieces[token] or model.vocab.spelling(token) or b""
    return None
