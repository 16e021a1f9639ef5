"""What comes out of a parser: the same however the text was cut, and all of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.chat.call_literals import PythonCalls
from cllm.engine.chat.call_syntax import JsonCalls, NamedCalls, TaggedCalls
from cllm.engine.chat.message_checks import MAX_ID, MAX_NAME, check_messages
from cllm.engine.chat.named_formats import DEFAULT_CALLS, NAMED, THINK
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.output_parser import OutputParser
from cllm.engine.chat.routed_turn import HARMONY
from tests.conftest import examples

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
    for name in ("save", "look_up")
]
HERMES = OutputFormat(THINK, DEFAULT_CALLS, name="hermes")
CODER = OutputFormat(
    THINK,
    TaggedCalls(
        call_start="<function=",
        name_end=">",
        key_start="<parameter=",
        key_end=">",
        value_end="</parameter>",
        call_ends=("</function>",),
        trims_newline=True,
        section_start="<tool_call>",
        section_end="</tool_call>",
    ),
    name="coder",
)
GLM = OutputFormat(
    THINK,
    TaggedCalls(
        call_start="<tool_call>",
        name_end="",
        key_start="<arg_key>",
        key_end="</arg_key>",
        value_start="<arg_value>",
        value_end="</arg_value>",
        call_ends=("</tool_call>",),
    ),
    name="glm",
)
MISTRAL = OutputFormat(
    ("[THINK]", "[/THINK]"),
    NamedCalls("[TOOL_CALLS]", ("[ARGS]",), id_start="[CALL_ID]"),
    name="mistral",
)
NEMO = OutputFormat(None, JsonCalls(("[TOOL_CALLS]",)), name="nemo")
SELF_BEGUN = OutputFormat(
    ("", "[BEGIN FINAL RESPONSE]"), JsonCalls(("<tool_calls>",)), name="apriel"
)
FORMATS = [HERMES, CODER, GLM, MISTRAL, NEMO, SELF_BEGUN, OutputFormat()]
ALL = FORMATS + list(NAMED.values())
NAMES = [found.name for found in FORMATS] + list(NAMED)

Channels = tuple[str, str, list[tuple[str, str]]]


def parsed(output_format: OutputFormat, parts: Iterable[str]) -> Channels:
    """Content, reasoning and calls of a text that comes in these parts."""
    prefix = output_format.turn.start if output_format.turn else ""
    return channels_of(OutputParser(output_format, TOOLS, prefix=prefix), parts)


def channels_of(parser: OutputParser, parts: Iterable[str]) -> Channels:
    """What a parser makes of these parts."""
    content, reasoning, calls = "", "", list[list[str]]()
    for told in (*map(parser.push, parts), parser.finish()):
        content += told.content
        reasoning += told.reasoning
        for delta in told.tool_calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                assert delta.id
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def fragments_of(output_format: OutputFormat) -> list[str]:
    """What an answer in this format is made of, and what only looks so."""
    own = [marker for marker in output_format.markers if marker]
    calls, turn = output_format.calls, output_format.turn
    for syntax in (calls, turn, turn.calls if turn else None):
        for name in getattr(type(syntax), "__slots__", ()):
            value = getattr(syntax, name)
            values = value if isinstance(value, tuple) else (value,)
            own += [one for one in values if isinstance(one, str) and one]
    whole = [
        '{"name": "save", "arguments": {"text": "a b", "n": 7}}',
        '[{"name": "look_up", "arguments": {"text": "</tool_call>"}}]',
        'save', '{"text": "x"}', '{"n": [1, {"a": null}]}', '"', "'", "{", "}", "[", "]", ",", ":", "\\",
        "[save(text='a', n=3)]", "text", "n", "7", "true", "\n", "  ", "<", "<|", "</", ">", "é🌸",
        "assistant", " to=functions.save", "analysis", "final", "commentary", "all\n", "x" * 300,
    ]  # fmt: skip
    return own + whole


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[int, str, list[str]]:
    """A format, a text, and the same text in parts."""
    number = draw(st.integers(0, len(ALL) - 1))
    fragments = draw(st.lists(st.sampled_from(fragments_of(ALL[number])), max_size=14))
    text = "".join(fragments)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return number, text, parts


@examples(300)
@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(case: tuple[int, str, list[str]]) -> None:
    number, text, parts = case
    whole = parsed(ALL[number], [text])
    assert parsed(ALL[number], parts) == whole, NAMES[number]
    assert parsed(ALL[number], text) == whole, NAMES[number]


@examples(300)
@given(cut_texts(), st.data())
def test_no_word_is_lost_or_said_twice(
    case: tuple[int, str, list[str]], data: st.DataObject
) -> None:
    number, text, _ = case
    # Words that are in nothing else, at any places of the text.
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5, unique=True)))
    for i, place in reversed(list(enumerate(places))):
        text = f"{text[:place]}⟦{i}⟧{text[place:]}"
    content, reasoning, calls = parsed(ALL[number], [text])
    told = content + reasoning + "".join(name + arguments for name, arguments in calls)
    told = told.encode().decode("unicode_escape") if "\\u" in told else told
    for i in range(len(places)):
        assert told.count(f"⟦{i}⟧") == 1, (NAMES[number], text, i)


# --- What was wrong once ---------------------------------------------------------------------
def named(name: str) -> OutputFormat:
    return ALL[NAMES.index(name)]


SAVE = "<|channel|>commentary to=functions.save<|message|>"
MARK = "]<]minimax[>["
DEEP = "[" * 100_000
ONCE: dict[str, tuple[str, str, Channels]] = {
    "a call that failed is taken back": (
        "harmony",
        f'{SAVE}oops<|end|><|start|>assistant{SAVE}{{"text": "x"}}<|call|>',
        (f"{SAVE}oops<|end|>", "", [("save", '{"text": "x"}')]),
    ),
    "so are its arguments": (
        "harmony",
        f'{SAVE}{{"text": oops}}<|call|><|start|>assistant{SAVE}{{"n": 1}}<|call|>',
        (f'{SAVE}{{"text": oops}}<|call|><|start|>', "", [("save", '{"n": 1}')]),
    ),
    "functionary's too": (
        "functionary-v3.2",
        'save\nnot json>>>save\n{"n": 1}',
        ("save\nnot json>>>", "", [("save", '{"n": 1}')]),
    ),
    "functions in functions": ("hermes", "<tool_call>" + '{"function":' * 600, ("", "", [])),
    "brackets in a text": (
        "hermes", f'<tool_call>{{"name":"save","arguments":"{DEEP}"}}</tool_call>', ("", "", []),
    ),
    "a marker in the JSON of a value": (
        "coder",
        '<tool_call>\n<function=save>\n<parameter=obj>\n{"a": "see </function> here"}\n'
        "</parameter>\n</function>\n</tool_call>",
        ("", "", [("save", '{"obj": {"a": "see </function> here"}}')]),
    ),
    "a marker in a list": (
        "glm",
        '<tool_call>save<arg_key>obj</arg_key><arg_value>["</tool_call>", 1]</arg_value></tool_call>',
        ("", "", [("save", '{"obj": ["</tool_call>", 1]}')]),
    ),
    "an answer that is an empty list": ("llama-3", "[]", ("[]", "", [])),
    "and one that begins with it": ("lfm2", "[] and more", ("[] and more", "", [])),
    "a parameter that is called item": (
        "minimax-m3",
        f'{MARK}<tool_call>\n{MARK}<invoke name="save">{MARK}<item>5{MARK}</item>'
        f"{MARK}</invoke>\n{MARK}</tool_call>",
        ("", "", [("save", '{"item": 5}')]),
    ),
    "a word that is a trigger too": ("firefunction", "Use functools", ("Use functools", "", [])),
    "a line end inside a string of a value": (
        "coder",
        '<tool_call>\n<function=save>\n<parameter=obj>\n[{"old": "a\nb"}]\n</parameter>\n'
        "</function>\n</tool_call>",
        ("", "", [("save", '{"obj": [{"old": "a\\nb"}]}')]),
    ),
    "a line end inside a string of arguments that are a string": (
        "hermes",
        '<tool_call>{"name": "save", "arguments": "{\\"text\\": \\"a\\nb\\"}"}</tool_call>',
        ("", "", [("save", '{"text": "a\\nb"}')]),
    ),
    "a number beyond all floats": (
        "minimax-m3",
        f'{MARK}<tool_call>\n{MARK}<invoke name="save">{MARK}<n>1e999{MARK}</n>'
        f"{MARK}</invoke>\n{MARK}</tool_call>",
        ("", "", [("save", f'{{"n": {sys.float_info.max!r}}}')]),
    ),
    "a half of a character in an escape": (
        "hermes",
        '<tool_call>{"name":"\\ud800","arguments":{}}</tool_call>',
        ("", "", [("?", "{}")]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONCE)
def test_what_was_wrong_once_is_right(case: str) -> None:
    name, text, expected = ONCE[case]
    content, reasoning, calls = parsed(named(name), [text])
    if not expected[0] and not expected[2]:  # no call: then it is text, to the last character
        assert (content, calls) == (text, [])
        return
    assert (content, reasoning, calls) == expected
    assert parsed(named(name), text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("mistral", "[TOOL_CALLS]" * 20_000 + "[ARGS]x", marks=pytest.mark.full),
        ("kimi-k2", "<|tool_call_begin|>" * 10_000 + "<|tool_call_argument_begin|>x"),
        ("mistral", "[TOOL_CALLS]a" + " " * 200_000 + "b[ARGS]{}"),
        ("coder", "<tool_call>\n<function=" * 20_000 + ">x"),
        ("coder", "<tool_call>\n<function=save>\n<parameter=a>" * 8_000
         + "</parameter>\n<parameter=" + "x" * 1000),
        pytest.param(
            "gemma-4", "<|tool_call>call:save{a:1," * 8_000 + "}x", marks=pytest.mark.full
        ),
    ],
)  # fmt: skip
def test_what_looks_like_calls_for_ever_is_looked_at_a_few_times(name: str, text: str) -> None:
    """So many steps as there are characters: with the square of them, this would take minutes."""
    content, _, calls = parsed(named(name), [text])
    assert content.strip() == text.strip() or calls


def test_a_marker_inside_of_a_longer_one_waits_for_it() -> None:
    found = OutputFormat(dropped=("x<b>y", "<b>"))
    assert parsed(found, ["1x<b>y2"]) == parsed(found, "1x<b>y2") == ("12", "", [])
    assert parsed(found, ["1x<b>z2"]) == parsed(found, "1x<b>z2")


def in_all_cuts(text: str, make: Callable[[], OutputParser]) -> Channels:
    """Return the channels of a text; check that cuts do not change them."""
    whole = channels_of(make(), [text])
    assert channels_of(make(), list(text)) == whole
    for n in range(len(text)):
        assert channels_of(make(), [text[:n], text[n:]]) == whole
    return whole


@pytest.mark.parametrize(
    "found", [each for each in FORMATS if each.reasoning and each.reasoning[0]]
)
def test_an_answer_may_name_the_markers_of_thoughts(found: OutputFormat) -> None:
    assert found.reasoning is not None
    start, end = found.reasoning
    answer = f"A thought begins with `{start}`, and then follows the rest."
    for thought in ("", "Hm."):
        text = f"{start}\n{thought}\n{end}\n\n{answer}" if thought else answer
        told = in_all_cuts(text, lambda: OutputParser(found, TOOLS))
        assert told == (answer, thought, [])
    late = f"Sure.\n{start}\nHm.\n{end}\n\nSo it is."  # one that begins a line is a thought
    content, thought, calls = in_all_cuts(late, lambda: OutputParser(found, TOOLS))
    assert (content.split(), thought, calls) == (["Sure.", "So", "it", "is."], "Hm.", [])


def test_an_answer_that_names_the_marker_of_a_section_goes_on_at_once() -> None:
    parser = OutputParser(CODER, TOOLS)
    first = "Calls are written as `<tool_call>` and a function. " + "And so on. " * 40
    told = parser.push(first).content
    assert len(first) - len(told) < 20
    assert parser.push("More.").content.endswith("More.")
    call = "<tool_call>\n<function=save>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    content, _, calls = in_all_cuts(first + call, lambda: OutputParser(CODER, TOOLS))
    assert (content, calls) == (first.rstrip(), [("save", '{"n": 7}')])


@pytest.mark.parametrize("name", ["fs/read", "ns::f", "a:1", "srv#tool", "x@y", "é"])
def test_a_call_of_harmony_leaves_nothing_of_its_name_in_the_content(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    found = OutputFormat(turn=HARMONY)
    for route in (f"functions.{name}", name):
        text = f'<|channel|>commentary to={route} <|constrain|>json<|message|>{{"a": 1}}<|call|>'
        for written in (
            text,
            f' to={route}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>',
        ):
            told = in_all_cuts(written, lambda: OutputParser(found, tools, prefix=HARMONY.start))
            assert told == ("", "", [(name, '{"a": 1}')])


@pytest.mark.parametrize(
    ("found", "call"),
    [
        (HERMES, '<tool_call>\n{"name": "save", "arguments": {"text": "%s"}}\n</tool_call>'),
        (
            CODER,
            "<tool_call>\n<function=save>\n<parameter=text>\n%s\n</parameter>\n</function>\n</tool_call>",
        ),
        (MISTRAL, '[TOOL_CALLS]save[ARGS]{"text": "%s"}'),
        (
            OutputFormat(turn=HARMONY),
            '<|start|>assistant<|channel|>commentary to=functions.save <|constrain|>json<|message|>{"text": "%s"}<|call|>',
        ),
    ],
)
def test_further_calls_are_left_out_where_one_is_allowed(found: OutputFormat, call: str) -> None:
    prefix = found.turn.start if found.turn else ""
    text = "".join(call % (str(n) * 700) for n in range(3)).removeprefix(prefix)
    first = len(call % ("0" * 700))
    for end in (*range(first, first + 50), *range(first + 50, len(text), 97), len(text)):
        for parts in ([text[:end]], [text[:end:][i : i + 7] for i in range(0, end, 7)]):
            parser = OutputParser(found, TOOLS, prefix=prefix, allows_several=False)
            content, _, calls = channels_of(parser, parts)
            assert calls == [("save", json.dumps({"text": "0" * 700}))]
            assert len(content) < 70  # the beginning of a call that is cut off in its name, at most


@pytest.mark.parametrize("text", ["a\r\nb", "a\rb", "a\nb", "a\0b", "a\tb"])
def test_a_string_of_a_python_call_may_have_raw_control_characters(text: str) -> None:
    found = OutputFormat(
        calls=PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), is_bare=True)
    )
    written = f"<|tool_call_start|>[save(text='{text}')]<|tool_call_end|>"
    content, _, calls = in_all_cuts(written, lambda: OutputParser(found, TOOLS))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("save", {"text": text})
    ]


def hermes_call(name: str, arguments: object, **others: object) -> str:
    called = {"name": name, "arguments": arguments, **others}
    return f"<tool_call>{json.dumps(called, ensure_ascii=False)}</tool_call>"


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        hermes_call("x" * MAX_NAME, {}), hermes_call("save", {}, id="i" * MAX_ID),
        hermes_call("save", {}, id="i" * (MAX_ID + 1)), hermes_call("save", nested(60)),
        hermes_call("save", {"n": 10**308 - 1}), hermes_call("save", {"n": -(10**307) + 1}),
        '<tool_call>{"name": "save", "arguments": {"n": 1e999}}</tool_call>',
    ],
    ids=range(7),
)  # fmt: skip
def test_a_call_can_be_sent_back(text: str) -> None:
    parser = OutputParser(HERMES, TOOLS)
    content, _, calls = channels_of(parser, [text])
    assert content == ""
    ((name, arguments),) = calls
    function = {"name": name, "arguments": arguments}
    call = {"id": "i" * MAX_ID, "type": "function", "function": function}
    check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "text",
    [
        hermes_call("x" * (MAX_NAME + 1), {}), hermes_call("get\nweather", {}),
        hermes_call("save", nested(70)), hermes_call("save", {"n": 10**400}),
    ],
    ids=range(4),
)  # fmt: skip
def test_a_call_that_could_not_be_sent_back_is_content(text: str) -> None:
    assert parsed(HERMES, [text]) == (text, "", [])
