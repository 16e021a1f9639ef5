"""One reading of a schema: its references, its types, and what of it is enforced."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jsonschema
import llguidance
import pytest

from cllm.engine.chat.argument_text import FORMAT_PATTERNS, searched, text_terminal
from cllm.engine.json_schema import FORMATS, TYPES, SchemaDocument, enforceable, say_ignored
from cllm.errors import InvalidRequestError

Schema = Any
NODE: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
# Schemas with references, a value that each allows, and one that it does not.
REFERENCES: dict[str, tuple[Schema, Any, Any]] = {
    "$defs": (
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}},
        {"a": "x"}, {"a": 1},
    ),
    "definitions that refer to themselves": (
        {
            "properties": {"a": {"$ref": "#/definitions/A"}},
            "definitions": {"A": {"type": "object", "properties": {"b": {"$ref": "#/definitions/A"}}}},
        },
        {"a": {"b": {}}}, {"a": {"b": 1}},
    ),
    "properties": (
        {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
        {"b": 1}, {"b": "x"},
    ),
    "items of a property": (
        {"properties": {"a": {"items": {"type": "null"}}, "b": {"$ref": "#/properties/a/items"}}},
        {"b": None}, {"b": 1},
    ),
    "the root": (NODE, {"name": "a", "next": {"name": "b"}}, {"name": "a", "next": {"next": None}}),
    "a root that is a reference": ({"$ref": "#/$defs/N", "$defs": {"N": {"const": 1}}}, 1, 2),
    "an anchor": (
        {"properties": {"a": {"$ref": "#it"}}, "$defs": {"A": {"$anchor": "it", "type": "string"}}},
        {"a": "x"}, {"a": 1},
    ),
    "an $id": (
        {
            "$id": "https://example.org/a",
            "properties": {"a": {"$ref": "https://example.org/b"}, "c": {"$ref": "b#/$defs/C"}},
            "$defs": {"B": {"$id": "b", "type": "string", "$defs": {"C": {"type": "null"}}}},
        },
        {"a": "x", "c": None}, {"a": 1},
    ),
    "a place of no keyword": (
        {"properties": {"a": {"$ref": "#/components/schemas/A"}},
         "components": {"schemas": {"A": {"type": "string"}}}},
        {"a": "x"}, {"a": 1},
    ),
    "escapes": (
        {"properties": {"a": {"$ref": "#/$defs/A~1B%20~0%25"}},
         "$defs": {"A/B ~%": {"type": "string"}}},
        {"a": "x"}, {"a": 1},
    ),
    "a property that is called $ref": (
        {"properties": {"$ref": {"type": "string"}, "format": {"type": "integer"}}},
        {"$ref": "x", "format": 1}, {"$ref": 1},
    ),
    "data that looks like a reference": (
        {"properties": {"a": {"const": {"$ref": "#/nowhere", "format": "path"}}}},
        {"a": {"$ref": "#/nowhere", "format": "path"}}, {"a": {}},
    ),
    "a description beside a reference": (
        {"properties": {"a": {"$ref": "#/$defs/A", "description": "It.", "default": 3}},
         "$defs": {"A": {"type": "integer"}}},
        {"a": 3}, {"a": "3"},
    ),
}  # fmt: skip


class Bytes:
    """A vocabulary of bytes."""

    eos_token_id, bos_token_id = 256, None
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
    special_token_ids = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


BYTES = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def takes(grammar: str, text: str) -> bool:
    """Whether a grammar in Lark has this text."""
    compiled = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(BYTES, compiled, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def closed(schema: Schema, *, is_strict: bool = True) -> tuple[dict[str, Any], list[str]]:
    document = SchemaDocument("parameters", schema, is_strict=is_strict)
    return document.closed(schema), document.ignored


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_means_the_same_wherever_the_schema_is_put(name: str) -> None:
    schema, right, wrong = REFERENCES[name]
    inner = closed(schema)[0]
    definitions = inner.pop("$defs", {})
    elsewhere = {"properties": {"call": inner}, "required": ["call"], "$defs": definitions}
    validator = jsonschema.Draft202012Validator(elsewhere)
    assert validator.is_valid({"call": right})
    assert not validator.is_valid({"call": wrong})
    said = {"type": "object", **elsewhere, "additionalProperties": False}
    grammar = f"start: %json {json.dumps(said)}"
    assert takes(grammar, json.dumps({"call": right}))
    assert not takes(grammar, json.dumps({"call": wrong}))


@pytest.mark.parametrize("reference", ["#/nowhere", "#nowhere", "#/properties/a/0", "#/type/0/x"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_reference_to_nothing_is_an_error_that_names_it(reference: str, is_strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
    with pytest.raises(InvalidRequestError, match=re.escape(f"parameters is '$ref: {reference}'")):
        closed(schema, is_strict=is_strict)


ANNOTATIONS: list[Schema] = [
    {"type": "string", "format": "path"}, {"type": "string", "format": "password"},
    {"type": "string", "format": "uuid4"}, {"type": "array", "uniqueItems": False},
    {"unevaluatedProperties": True}, {"dependentRequired": {}}, {"not": False},
    {"contains": {"type": "string"}, "minContains": 0}, {"if": {"type": "string"}},
    {"propertyNames": {"type": "string"}}, {"nullable": True}, {"deprecated": True},
    {"contentMediaType": "application/json", "contentSchema": {"type": "object"}},
    {"discriminator": {"propertyName": "a"}}, {"x-anything": [1]}, {"then": {"type": "string"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ANNOTATIONS, ids=json.dumps)
def test_what_asserts_nothing_is_left_out_and_not_rejected(schema: Schema) -> None:
    found, ignored = closed(schema)
    assert ignored == []
    assert found == {key: value for key, value in schema.items() if key == "type"}


ASSERTIONS: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "uniqueItems": True}, "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}}, "contains": {"contains": {}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "pattern: ^(?!x)": {"type": "string", "pattern": "^(?!x)"},
    "pattern: \\bx": {"type": "string", "pattern": "\\bx"},
    "$ref: https://example.org/x": {"$ref": "https://example.org/x"},
    "propertyNames": {"propertyNames": {"minLength": 3}, "properties": {"abc": {}}},
    "minProperties": {"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a"]},
    "maxProperties": {"maxProperties": 1, "properties": {"a": {}, "b": {}}, "required": ["a"]},
}  # fmt: skip


@pytest.mark.parametrize("keyword", ASSERTIONS)
def test_what_cannot_be_enforced_is_named_where_the_schema_is_strict_and_noted_where_not(
    keyword: str,
) -> None:
    schema = {"properties": {"inner": ASSERTIONS[keyword]}}
    with pytest.raises(InvalidRequestError, match=re.escape(repr(keyword))):
        closed(schema)
    found, ignored = closed(schema, is_strict=False)
    assert ignored == [keyword]
    compiled = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(found))
    assert not llguidance.LLMatcher(BYTES, compiled, log_level=0).is_error()


def test_what_is_ignored_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in (0, 1):
            say_ignored(f"tools[{number}].function.parameters", ["a keyword of this test"])
    assert [record.message for record in caplog.records] == [
        "tools.function.parameters: a keyword of this test cannot be enforced and is ignored"
    ]


def test_names_of_properties_are_enforced_as_properties() -> None:
    schema = {"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a", "b"]}}
    validator = jsonschema.Draft202012Validator(closed(schema)[0])
    assert validator.is_valid({"a": 1})
    assert not validator.is_valid({"c": 1})
    assert not validator.is_valid({"a": "x"})
    pattern = {"additionalProperties": {"type": "integer"}, "propertyNames": {"pattern": "^x-"}}
    validator = jsonschema.Draft202012Validator(closed(pattern)[0])
    assert validator.is_valid({"x-1": 1})
    assert not validator.is_valid({"y": 1})


TYPES_OF: list[tuple[Schema, set[str]]] = [
    (True, set(TYPES)), (False, set()), ({}, set(TYPES)), ({"type": "string"}, {"string"}),
    ({"type": "number"}, {"integer", "fraction"}), ({"type": ["integer", "null"]}, {"integer", "null"}),
    ({"enum": ["1", None, 2, 2.0, 2.5]}, {"string", "null", "integer", "fraction"}),
    ({"const": True}, {"boolean"}), ({"type": "number", "enum": ["a", 1]}, {"integer"}),
    ({"$ref": "#/$defs/V"}, {"string"}), ({"allOf": [{"$ref": "#/$defs/V"}]}, {"string"}),
    ({"anyOf": [{"$ref": "#/$defs/V"}, {"type": "null"}]}, {"string", "null"}),
    ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, {"null"}),
    ({"$ref": "#/$defs/Loop"}, {"null"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "types"), TYPES_OF, ids=lambda v: str(sorted(v) if isinstance(v, set) else v)
)
def test_the_types_of_a_value_are_found_through_references_and_unions(
    schema: Schema, types: set[str]
) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}
    root = {"properties": {"v": schema}, "$defs": {"V": {"enum": ["1", "2"]}, "Loop": loop}}
    document = SchemaDocument("parameters", root, is_strict=True)
    assert document.types(schema) == types
    assert document.types(document.member(root, "v")) == types


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "oneOf"])
@pytest.mark.parametrize("leaf", [{"type": "object"}, {"type": "string"}, {"type": "boolean"}])
def test_a_schema_of_which_each_part_is_there_twice_is_read_or_rejected_without_trying_all(
    keyword: str, leaf: Schema
) -> None:
    definitions: dict[str, Schema] = {"D60": leaf}
    for n in range(60):
        twice = {"$ref": f"#/$defs/D{n + 1}"}
        definitions[f"D{n}"] = {keyword: [twice, dict(twice)]}
    root = {"properties": {"v": {"$ref": "#/$defs/D0"}}, "required": ["v"], "$defs": definitions}
    document = SchemaDocument("parameters", root, is_strict=False)
    assert document.types({"$ref": "#/$defs/D0"}) == {leaf["type"]}
    reads: tuple[Callable[[], object], ...] = (
        lambda: document.objects({"$ref": "#/$defs/D0"}),
        lambda: document.takes_constant({"$ref": "#/$defs/D0"}, True),
        lambda: text_terminal(document, {"$ref": "#/$defs/D0"}),
        lambda: document.closed(root),
        lambda: document.member(root, "v"),
    )
    for read in reads:
        with suppress(InvalidRequestError):
            read()


HOSTILE: list[Schema] = [
    {"propertyNames": {"$ref": "#/$defs/A"}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
    {"patternProperties": {"^(a+)+$": {}}, "required": ["a" * 60 + "!"]},
    {"patternProperties": {"a{99999999999999999999}": {}}, "required": ["a"]},
    {"patternProperties": {"(" * 5000: {}}, "required": ["a"]},
    {"format": []}, {"minProperties": 1, "required": [{}]}, {"required": [[1]]}, {"pattern": 5},
    {"propertyNames": {"pattern": []}}, {"propertyNames": {}, "properties": [1]}, {"minLength": "0"},
    {"$id": "http://[", "properties": {"a": {"$id": "x"}}}, {"type": {}}, {"anyOf": 3}, {"maxItems": -1},
    {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"type": "object"}}}]},
    {"$ref": "#/allOf/0", "allOf": [{"$ref": "#"}]}, {"enum": {}}, {"$ref": ""}, {"minItems": True},
    *(
        {"properties": {"a" * 200: {}}, "patternProperties": {pattern: {}}}
        for pattern in ("a?" * 40 + "b", "(a|a)" * 40 + "b", "a*a*a*b", "(a*)*b", "a{1,90}a{1,90}b")
    ),
    {"properties": {f"a{n}": {} for n in range(4000)},
     "patternProperties": {f"a*{n}": {} for n in range(100)}},
    {"oneOf": [{"oneOf": [{"type": "object", "properties": {f"{m}": {"const": n}}}
                          for n in range(20)]} for m in range(100)]},
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=lambda schema: json.dumps(schema)[:60])
def test_a_hostile_schema_is_read_or_rejected_by_name(schema: Schema) -> None:
    for is_strict in (True, False):
        with suppress(InvalidRequestError):
            document = SchemaDocument("parameters", schema, is_strict=is_strict)
            document.closed(schema)
            document.objects(schema)
            document.arrays(schema)
            text_terminal(document, schema)
            document.member(schema, "a")


@pytest.mark.parametrize("key", ["const", "enum"])
def test_many_parts_that_one_key_tells_apart_are_enforced(key: str) -> None:
    parts = [
        {"type": "object", "properties": {"k": {key: n if key == "const" else [n, -n - 1]}},
         "required": ["k"]}
        for n in range(1000)
    ]  # fmt: skip
    for schema, keyword in (({"oneOf": parts}, "allOf"), ({"oneOf": [*parts, parts[7]]}, "oneOf")):
        closed = SchemaDocument("parameters", schema, is_strict=False).closed(schema)
        assert keyword in closed  # as `anyOf`, or as it is


def test_types_are_found_through_a_long_chain_of_references_both_ways() -> None:
    last = 4000
    definitions: dict[str, Schema] = {
        f"X{n}": {"anyOf": [{"$ref": f"#/$defs/X{n + 1}"}, {"$ref": f"#/$defs/X{n - 1}"}]}
        for n in range(2, last)
    }
    definitions["X1"] = {"anyOf": [{"$ref": "#/$defs/X2"}, {"type": "null"}]}
    definitions[f"X{last}"] = {"anyOf": [{"$ref": f"#/$defs/X{last - 1}"}, {"type": "string"}]}
    root = {"properties": {"v": {"$ref": "#/$defs/X1"}}, "$defs": definitions}
    document = SchemaDocument("parameters", root, is_strict=True)
    assert document.types({"$ref": "#/$defs/X2000"}) == {"null", "string"}


@pytest.mark.parametrize("pattern", ["x?" * 30, "(x|y)" * 30, "x*x*x*z", "(x+)+z", "(?x)(x+) +z"])
def test_a_pattern_whose_search_could_be_slow_is_rejected_by_name_where_names_need_the_search(
    pattern: str,
) -> None:
    schema = {"properties": {"x" * 60: {}}, "patternProperties": {pattern: {"type": "null"}}}
    with pytest.raises(InvalidRequestError, match="its search could be slow"):
        SchemaDocument("parameters", schema, is_strict=True).objects(schema)
    lenient = SchemaDocument("parameters", schema, is_strict=False)
    lenient.objects(schema)
    assert len(lenient.ignored) == 1
    assert pattern in closed(schema)[0]["patternProperties"]  # llguidance searches in linear time
    unnamed: Schema = {"patternProperties": {pattern: {}}}  # no name to search in
    SchemaDocument("parameters", unnamed, is_strict=True).objects(unnamed)


ITEMS: list[tuple[Schema, list[Any], list[Any]]] = [
    ({"prefixItems": [{"type": "integer"}], "additionalItems": False, "minItems": 1},
     [[1], [1, "x"]], [["x"], []]),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [[1], []], [["x"], [1, 2]]),
    ({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}},
     [[1], [1, None]], [[1, 2]]),
    ({"items": {"type": "integer"}, "additionalItems": False}, [[1, 2]], [["x"]]),
    ({"items": [{"type": "integer"}], "anyOf": [{"minItems": 1}], "additionalItems": False},
     [[1]], [[1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), ITEMS, ids=str)
def test_items_are_those_of_either_draft(
    schema: Schema, right: list[Any], wrong: list[Any]
) -> None:
    grammar = f"start: %json {json.dumps(closed({'type': 'array', **schema})[0])}"
    assert [takes(grammar, json.dumps(value)) for value in right] == [True] * len(right)
    assert [takes(grammar, json.dumps(value)) for value in wrong] == [False] * len(wrong)


NAMES: list[tuple[Schema, list[Any], list[Any]]] = [
    ({"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a$": {"type": "integer"}},
      "additionalProperties": False}, [{"a": 1}, {}], [{"a": "x"}, {"b": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"type": "integer"}},
      "additionalProperties": {"type": "null"}}, [{"a": 1, "b": None}], [{"b": 1}, {"c": None}]),
    ({"propertyNames": {"type": "string", "title": "It"}, "patternProperties": {"^x": {"const": 1}}},
     [{"x": 1}, {"y": 2}], [{"x": 2}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), NAMES, ids=str)
def test_the_schema_of_a_key_stays_beside_the_schema_of_all_keys(
    schema: Schema, right: list[Any], wrong: list[Any]
) -> None:
    grammar = f"start: %json {json.dumps(closed({'type': 'object', **schema})[0])}"
    assert [takes(grammar, json.dumps(value)) for value in right] == [True] * len(right)
    assert [takes(grammar, json.dumps(value)) for value in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("names", [
    {"enum": ["a", "b"], "not": {"const": "b"}}, {"enum": ["a", "b"], "const": "a"},
    {"pattern": "^x", "not": {"const": "xy"}}, {"pattern": "^x", "minLength": 3},
    {"$ref": "#/$defs/N", "not": {"const": "b"}},
], ids=str)  # fmt: skip
def test_a_schema_of_keys_with_several_assertions_is_not_cut_down_to_one(names: Schema) -> None:
    schema = {"propertyNames": names, "$defs": {"N": {"enum": ["a", "b"]}}}
    with pytest.raises(InvalidRequestError, match="propertyNames"):
        closed(schema)


def test_more_patterns_than_can_be_looked_for_are_rejected_by_name() -> None:
    patterns: Schema = {f"^{n}$": {} for n in range(101)}
    with pytest.raises(InvalidRequestError, match="at most 100 patterns"):
        SchemaDocument("parameters", {"patternProperties": patterns}, is_strict=False)


@pytest.mark.parametrize("pattern", [
    "^[0-9]{4}$", "[a-z]+", "^(a|b)x?$", "ab|cd$", "^$|^none$", "^\\w+/\\d+$", "^[^/\\]]*$", "a\\|b",
    "^\\^\\$", "\\.", "[\\d_]", "^a$|^$", "x$",
])  # fmt: skip
def test_a_pattern_finds_the_same_texts_as_a_terminal(pattern: str) -> None:
    expression = searched(pattern)
    assert expression is not None
    for text in (
        "2024",
        "abc",
        "A",
        "bx",
        "xab",
        "cd",
        "cdx",
        "",
        "none",
        "a/1",
        "a|b",
        "^$",
        ".",
        "_",
        "x",
        "a",
    ):
        assert takes(f"start: T\nT: /{expression}/", text) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", ["(^a|b)", "a(b$)c", "(?=a)", "\\1(a)", "\\bx"])
def test_a_pattern_that_looks_around_has_no_terminal(pattern: str) -> None:
    assert searched(pattern) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_a_format_allows_as_text_llguidance_allows_as_json(name: str) -> None:
    examples = {
        "date": ["2024-02-28", "1999-12-31"], "time": ["23:59:59Z", "00:00:00.5+01:30"],
        "date-time": ["2024-01-31T10:00:00Z"], "duration": ["P1Y2M3D", "PT5M", "P2W", "P1DT2H3M4S"],
        "email": ["a.b+c@example.org"], "hostname": ["a", "a-b.c"], "ipv4": ["0.0.0.0", "255.10.1.9"],
        "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
        "uri": ["http://a.b:80/c/d?e=f#g", "mailto:a@b.c", "urn:x:y", "http://a"],
    }[name]  # fmt: skip
    for text in examples:
        schema = json.dumps({"type": "string", "format": name})
        assert takes(f"start: %json {schema}", json.dumps(text)), text
        document = SchemaDocument("parameters", json.loads(schema), is_strict=True)
        assert takes(f"start: T\nT: {text_terminal(document, document.root)}", text), text
        assert not takes(f"start: T\nT: {text_terminal(document, document.root)}", f"{text} "), text
        assert re.fullmatch(FORMAT_PATTERNS[name], text)


def test_a_lenient_schema_keeps_its_options() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_pattern": " ?"}, "not": {"type": "null"}}
    assert enforceable("json_schema", schema) == {"x-guidance": schema["x-guidance"]}
    with pytest.raises(InvalidRequestError, match="json_schema is 'not'"):
        enforceable("json_schema", {"not": {"type": "null"}})
