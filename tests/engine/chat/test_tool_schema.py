"""One reading of a tool's parameters, by every format of calls."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import cllm
from cllm.engine.chat.argument_text import is_quoted
from cllm.engine.chat.call_grammar import CallGrammar
from cllm.engine.chat.call_literals import ElementCalls, GemmaCalls, PythonCalls
from cllm.engine.chat.call_syntax import CallSyntax, JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.named_formats import NAMED
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.output_parser import OutputParser
from cllm.engine.chat.tool_schema import ToolParameters, parameters_of
from cllm.errors import InvalidRequestError
from tests.engine.chat.test_output_parser import channels_of
from tests.engine.test_json_schema import takes

CODER = TaggedCalls(
    call_start="<function=",
    name_end=">",
    key_start="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_ends=("</function>",),
    trims_newline=True,
    section_start="<tool_call>",
    section_end="</tool_call>",
)
SYNTAXES: dict[str, CallSyntax] = {
    "tags": CODER,
    "JSON": JsonCalls(("<tool_call>",), ("</tool_call>",)),
    "names": NamedCalls("[TOOL_CALLS]"),
    "Python": PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "Gemma": GemmaCalls(),
    "elements": ElementCalls(),
    "types in tags": NAMED["kimi-k3"].calls,  # type: ignore[dict-item]
    "text or not in tags": NAMED["deepseek-v3.2"].calls,  # type: ignore[dict-item]
}
# Words of a schema that only the module which reads schemas may look for.
WORDS = {
    "parameters",
    "properties",
    "$defs",
    "definitions",
    "$ref",
    "enum",
    "anyOf",
    "allOf",
    "required",
}
FORMATS = (
    "call_grammar", "call_literals", "call_syntax", "format_detection", "named_formats",
    "output_parser", "routed_turn", "chat_tokenizer",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_does_not_read_a_schema_itself(name: str) -> None:
    tree = ast.parse((Path(cllm.__file__).parent / "engine" / "chat" / f"{name}.py").read_text())
    read = [
        node.args[0] if isinstance(node, ast.Call) else node.slice
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        or (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args)
    ]
    words = {node.value for node in read if isinstance(node, ast.Constant)}
    assert not words & WORDS


def tool_of(schema: Any, *, is_strict: bool = False, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "parameters": schema, "strict": is_strict}
    return {"type": "function", "function": function}


def grammar_of(syntax: CallSyntax, tool: dict[str, Any] | ToolParameters) -> str:
    return CallGrammar(syntax, parameters_of([tool]), False, {}).required()


def in_tags(schema: Any, text: str, **others: Any) -> Any:
    """What a value in tags is read as."""
    parameters = {"type": "object", "properties": {"v": schema}, **others}
    said = (
        f"<tool_call>\n<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    parser = OutputParser(OutputFormat(calls=CODER), [tool_of(parameters)])
    ((_, arguments),) = channels_of(parser, [said])[2]
    return json.loads(arguments)["v"]


DEFINITIONS = {"Digits": {"type": "string", "enum": ["1", "2", "true"]}, "Text": {"type": "string"}}
READ: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "123", "123"), ({"type": "string"}, '"q"', '"q"'),
    ({"$ref": "#/$defs/Digits"}, "1", "1"), ({"$ref": "#/$defs/Digits"}, "true", "true"),
    ({"allOf": [{"$ref": "#/$defs/Digits"}]}, "1", "1"),
    ({"anyOf": [{"$ref": "#/$defs/Digits"}, {"type": "null"}]}, "2", "2"),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "42", "42"),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, '"null"', "null"),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, '"a b"', '"a b"'),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]}, "['a']", "['a']"),
    ({"enum": ["1", "2", None]}, "1", "1"), ({"enum": ["1", "2", None]}, "null", None),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "42", "42"),
    ({"type": ["string", "integer"]}, "42", 42), ({"type": ["string", "integer"]}, "4x", "4x"),
    ({"type": "integer"}, "5.0", 5), ({"type": "number"}, "5", 5), ({"type": "boolean"}, "True", True),
    ({"type": "array"}, "['a', 1]", ["a", 1]), ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({}, "42", 42), ({}, "True", True), ({}, "Oslo", "Oslo"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), READ, ids=str)
def test_a_value_in_tags_has_the_type_that_the_resolved_schema_says(
    schema: Any, text: str, value: Any
) -> None:
    found = in_tags(schema, text, **{"$defs": DEFINITIONS})
    assert found == value
    assert type(found) is type(value)


def test_a_schema_that_is_wrong_leaves_a_call_as_it_is_written() -> None:
    for schema in (
        {"$ref": "#/nowhere"},
        {"$ref": 3},
        {"type": "none"},
        {"anyOf": 1},
        "x",
        None,
        [1],
    ):
        assert in_tags(schema, "Oslo") == "Oslo", schema
    for root in ({"$ref": "#"}, {"properties": 3}, {"allOf": [{"$ref": "#/x"}]}):
        assert in_tags({}, "Oslo", **root) == "Oslo", root


OBJECT = {
    "type": "object", "properties": {"q": {"type": "string", "maxLength": 3}}, "required": ["q"],
}  # fmt: skip
ROOTS: dict[str, Any] = {
    "$ref": {"$ref": "#/$defs/A", "$defs": {"A": OBJECT}},
    "allOf": {"allOf": [{"$ref": "#/$defs/A"}, {"required": ["q"]}], "$defs": {"A": OBJECT}},
    "anyOf": {"anyOf": [OBJECT, {"type": "null"}]},
    "oneOf": {"oneOf": [OBJECT, {**OBJECT, "properties": {"p": {}}, "required": ["p"]}]},
    "a key that has no property": {"type": "object", "properties": {}, "required": ["q"]},
    "its own": {**OBJECT, "properties": {**OBJECT["properties"], "next": {"$ref": "#"}}},  # type: ignore[dict-item]
}
CALLS = {
    "tags": "<tool_call><function=f><parameter=q>\nab\n</parameter></function></tool_call>",
    "JSON": '<tool_call>{"name": "f", "arguments": {"q": "ab"}}</tool_call>',
    "names": '[TOOL_CALLS]f{"q": "ab"}',
    "Python": "<|tool_call_start|>[f(q='ab')]<|tool_call_end|>",
    "Gemma": '<|tool_call>call:f{q:<|"|>ab<|"|>}<tool_call|>',
    "elements": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<q>ab]<]minimax[>[</q>'
    "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "types in tags": '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="q" type="string"<|sep|>ab'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "text or not in tags": '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="q" string="true">ab'
    "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
}


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("root", ROOTS)
def test_every_format_takes_arguments_of_every_root_and_no_call_without_them(
    name: str, root: str
) -> None:
    grammar = grammar_of(SYNTAXES[name], tool_of(ROOTS[root]))
    assert takes(grammar, CALLS[name])
    nothing = {
        "tags": "<parameter=q>\nab\n</parameter>", "JSON": '"q": "ab"', "names": '"q": "ab"', "Python": "q='ab'",
        "Gemma": 'q:<|"|>ab<|"|>', "elements": "]<]minimax[>[<q>ab]<]minimax[>[</q>",
        "types in tags": '<|open|>argument key="q" type="string"<|sep|>ab<|close|>argument<|sep|>',
        "text or not in tags": '<｜DSML｜parameter name="q" string="true">ab</｜DSML｜parameter>',
    }  # fmt: skip
    assert nothing[name] in CALLS[name]
    assert not takes(grammar, CALLS[name].replace(nothing[name], ""))
    if root not in ("a key that has no property",):
        assert not takes(grammar, CALLS[name].replace("ab", "abcd"))


@pytest.mark.parametrize("name", SYNTAXES)
def test_every_format_names_what_it_cannot_enforce(name: str) -> None:
    schema = {"type": "object", "properties": {"v": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(
        InvalidRequestError, match=r"tools\[0\]\.function\.parameters is 'uniqueItems'"
    ):
        grammar_of(SYNTAXES[name], tool_of(schema, is_strict=True))
    tool = ToolParameters(tool_of(schema))
    grammar_of(SYNTAXES[name], tool)
    assert tool.document.ignored == ["uniqueItems"]


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("wrong", [
    {"type": "none"}, {"$ref": "#"}, False, {"type": "string"}, {"$ref": "#/nowhere"},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
])  # fmt: skip
def test_parameters_that_no_call_satisfies_are_rejected_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.function\.parameters"):
        grammar_of(SYNTAXES[name], tool_of(wrong))


@pytest.mark.parametrize(("name", "key"), [
    ("tags", "a>b"), ("tags", " a"), ("Python", "a=b"), ("Python", "a b"), ("elements", "a/b"),
    ("text or not in tags", 'a" string="b'),
])  # fmt: skip
def test_a_key_that_would_be_read_as_another_is_rejected_by_name(name: str, key: str) -> None:
    schema = {"type": "object", "properties": {key: {"type": "null"}}, "required": [key]}
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.function is .*a name that calls"):
        grammar_of(SYNTAXES[name], tool_of(schema))


@pytest.mark.parametrize("text", ["null", "None", " null", "nullable", '"a"', '"'])
def test_text_that_reads_as_a_value_is_written_as_json(text: str) -> None:
    assert is_quoted(text, {"null"})
    schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert in_tags(schema, json.dumps(text)) == text
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    grammar = grammar_of(CODER, tool_of(parameters))
    call = "<tool_call><function=f><parameter=v>\n{}\n</parameter></function></tool_call>"
    assert takes(grammar, call.format(json.dumps(text)))
    assert not jsonschema.Draft202012Validator(schema).is_valid(3)
    assert takes(grammar, call.format("a null"))


BARE = [name for name in NAMED if getattr(NAMED[name].calls, "is_bare", False)]


@pytest.mark.parametrize("name", BARE)
def test_only_the_first_of_parallel_calls_may_be_bare(name: str) -> None:
    syntax = NAMED[name].calls
    assert isinstance(syntax, (PythonCalls, JsonCalls))
    in_json = '{"name": "f", "parameters": {"q": "a"}}'
    call = '[f(q="a")]' if isinstance(syntax, PythonCalls) else in_json
    tools = [tool_of(OBJECT)]
    grammar = CallGrammar(syntax, parameters_of(tools), True, {}).required()
    begun, ended = syntax.triggers[0], (syntax.ends or ("",))[0]
    assert not takes(grammar, call + call)
    for text in (call + begun + call + ended, (begun + call + ended) * 2):
        assert takes(grammar, text)
        calls = channels_of(OutputParser(NAMED[name], tools), [text])[2]
        assert [json.loads(arguments) for _, arguments in calls] == [{"q": "a"}] * 2


NULL = [
    "required",
    "enum",
    "items",
    "additionalProperties",
    "anyOf",
    "maxLength",
    "pattern",
    "type",
    "$defs",
]


@pytest.mark.parametrize("keyword", NULL)
@pytest.mark.parametrize("name", SYNTAXES)
def test_a_keyword_that_is_null_says_nothing(name: str, keyword: str) -> None:
    # Go writes a list that has not been set as null.
    inner = {"type": "string", "maxLength": 3}
    inner = {**{key: value for key, value in inner.items() if key != keyword}, keyword: None}
    schema = {**OBJECT, "properties": {"q": inner}, "not": None}
    for is_strict in (False, True):
        grammar = grammar_of(
            SYNTAXES[name], tool_of({**schema, "$defs": None}, is_strict=is_strict)
        )
        assert takes(grammar, CALLS[name])
    at_root = {"type": "object", "properties": {"q": {"type": "string"}}, keyword: None}
    assert takes(grammar_of(SYNTAXES[name], tool_of(at_root)), CALLS[name])
