"""A chat becomes the text that transformers makes of it, and a bad chat an error with a name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from cllm.checks import MAX_CHAT_BYTES
from cllm.engine.chat import chat_template
from cllm.engine.chat.chat_template import ChatTemplate
from cllm.engine.chat.control_tokens import Piece
from cllm.engine.chat.message_checks import (
    MAX_MESSAGES,
    MAX_VALUES,
    check_messages,
    check_tools,
)
from cllm.errors import InvalidRequestError
from tests.conftest import few_in_fast
from tests.engine.chat.conftest import CHILD
from tools.make_model import MakeModelError, llama_cpp_source


def templates_of_llama_cpp() -> list[Path]:
    """Return the templates in the source of llama.cpp; none if it is not there."""
    try:
        return sorted((llama_cpp_source() / "models" / "templates").glob("*.jinja"))
    except MakeModelError:
        return []


# One translates: each message has to name two languages.  The other rejects an answer of the assistant
# without a thought, which clients do not send back.
NOT_FOR_CHATS = ("google-translategemma-4b-it", "IFM-K2-Horizon")
TEMPLATES = [path for path in templates_of_llama_cpp() if path.stem not in NOT_FOR_CHATS]
# One of each format of calls: in `make test`, where `make test-full` takes all.
FEW_TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "GLM-4.6", "Mistral-Small-3.2-24B-Instruct-2506",
    "LFM2-8B-A1B", "google-gemma-4-31B-it", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-V3.1",
    "meta-llama-Llama-3.1-8B-Instruct", "Kimi-K2-Instruct", "muse-glimmer", "MiniMax-M2",
    "google-gemma-2-2b-it", "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
}  # fmt: skip
FEW_IN_FAST = few_in_fast(TEMPLATES, lambda path: path.stem in FEW_TEMPLATES)
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Frozen(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> Frozen:
        return cls(2025, 7, 9, 13, 5, 6)


@pytest.fixture(autouse=True)
def frozen_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same day in both."""
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    monkeypatch.setattr(chat_template, "datetime", Frozen)


def template(source: str, names: Sequence[str] = ()) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", control_names=names, child=CHILD)


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def transformers_text(source: str, messages: object, tools: Any, **kwargs: Any) -> str:
    """What transformers renders; its errors as they are."""
    tokens: Any = {"bos_token": "<s>", "eos_token": "</s>"}
    texts: Any = chat_template_utils.render_jinja_template(
        [check_messages(messages)], tools=tools, chat_template=source, **tokens, **kwargs
    )
    text: str = texts[0][0]
    return text


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def called(name: str, arguments: object, id: str = "call00001") -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " You are a test.\n"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather «now» & <later>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Which?", "enum": ["Pärnu", "Oslo"]},
                    "days": {"type": ["integer", "null"], "default": None},
                    "units": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
# Some templates fail for more than this, others without any tool.
SIMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Say it again",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "What to say"}},
            "required": ["text"],
        },
    },
}
MORE_KWARGS: tuple[dict[str, Any], ...] = (
    {"enable_thinking": False, "documents": []},
    {"functions": "[]", "datetime": "Monday"},  # firefunction
)
WEATHER = called(
    "get_weather", '{"city": "Pärnu", "days": 2, "units": ["°C"], "deep": {"a": [null]}}'
)
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "7 °C"}
# They append to lists, or write lazy lists: llama.cpp's jinja lets them, and so does ours.
BEYOND_TRANSFORMERS = ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "llama-cpp-deepseek-r1")
# What to render, and with which tools.
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one message": ([user("Hi")], None),
    "system": ([SYSTEM, user("Hi")], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hi")], None),
    "turns": (
        [SYSTEM, user("a "), assistant(" b"), user("\nc"), assistant("d\n"), user("e")],
        None,
    ),
    "ends with assistant": ([user("Go on:"), assistant("Once upon")], None),
    "two users": ([user("a"), user("b")], None),
    "parts": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], None),
    "empty content": ([SYSTEM, user(""), assistant(""), user(" ")], None),
    "unicode": ([user("naïve 🙂 \u202e ｜ 日本語 \x00 <|x|> {{ 1 }} {% if %} \\n \"'")], None),
    "reasoning": ([user("q"), assistant("a", reasoning_content="r\n"), user("q2")], None),
    "thinking in text": ([user("q"), assistant("<think>\nr\n</think>\n\na"), user("q2")], None),
    "older reasoning": ([user("q"), assistant("a", thinking="r"), user("q2")], None),
    "tools": ([SYSTEM, user("Weather?")], TOOLS),
    "simple tool": ([user("Say hi")], [SIMPLE_TOOL]),
    "tool call": ([user("?"), assistant(None, tool_calls=[WEATHER])], TOOLS),
    "tool result": (
        [user("?"), assistant("", tool_calls=[WEATHER]), RESULT, assistant("7"), user("Thanks")],
        TOOLS,
    ),
    "two calls": (
        [
            *(SYSTEM, user("?")),
            assistant("Wait", tool_calls=[WEATHER, called("now", "", "call00002")]),
            *(RESULT, {**RESULT, "tool_call_id": "call00002", "name": "now", "content": "{}"}),
        ],
        TOOLS,
    ),
    "arguments that are no JSON": (
        [user("?"), assistant(None, tool_calls=[called("now", "x=1")])],
        TOOLS,
    ),
}


@pytest.mark.skipif(
    not TEMPLATES, reason="no source of llama.cpp in the cache: tools/make_model.py"
)
def test_there_are_many_real_templates() -> None:
    assert len(TEMPLATES) >= 60


@pytest.mark.full
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_real_template_gives_the_text_of_transformers(path: Path) -> None:
    source = path.read_text()
    ours = template(source)
    n_rendered = 0
    ways = [(True, {}), (False, {}), *((True, kwargs) for kwargs in MORE_KWARGS)]
    for name, (messages, tools) in CHATS.items():
        for prompt, kwargs in ways:
            try:
                expected = transformers_text(
                    source, messages, tools, add_generation_prompt=prompt, **kwargs
                )
            except Exception:
                if path.stem in BEYOND_TRANSFORMERS:
                    continue
                with pytest.raises(InvalidRequestError, match=r"^messages is"):
                    ours.render(messages, tools=tools, template_kwargs=kwargs)
                continue
            pieces = ours.render(
                messages, tools=tools, add_generation_prompt=prompt, template_kwargs=kwargs
            )
            assert pieces == [Piece(expected, is_template=True)], name
            n_rendered += 1
    assert n_rendered >= 4


# What real templates do not do, but others may.
SOURCES = {
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.revindex }}"
    " {{ loop.first }} {{ loop.last }} {{ loop.previtem.role }} {{ loop.nextitem.role }}"
    " {{ loop.changed(m.role) }} {{ loop.cycle('x', 'y') }}{% else %}none{% endfor %}",
    "recursive loop": "{% for x in [1, [2, [3]], 4] recursive %}{{ loop.depth }}"
    "{{ loop(x) if x is iterable else x }}{% endfor %}",
    "loop control": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "unpacked loop": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "macros": "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}"
    "{% endmacro %}{{ m(1) }}{{ m(1, 3, 4, c=5) }}{% call m(6) %}inside{% endcall %}",
    "blocks": "{% block a %}x{{ self.b() }}{% endblock %}{% block b %}y{% endblock %}",
    "set block": "{% set x %} a {{ messages|length }}{% endset %}{{ x|trim|upper }}{{ x }}",
    "filter block": "{% filter upper %}abc{{ 'd' }}{% endfilter %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(a=[], n=0) %}{% for m in messages %}{% set ns.a = ns.a + [m.role] %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.a }}{{ ns.n }}{{ ns.missing }}{{ ns.b is defined }}",
    "operators": "{{ 1 + 2 * 3 ** 2 // 4 % 5 - -1 }}{{ 7 / 2 }}{{ 'a' * 3 ~ 1 ~ none ~ [1, 'x'] }}"
    "{{ [1] + [2] }}{{ 1 < 2 <= 2 != 3 }}{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ 2 not in [1] }}",
    "formats": "{{ '%s %05d %.2f %%' % ('a', 3, 2.5) }}{{ '%(a)s' % {'a': 1} }}{{ '{:>5}{a!r}'.format(1, a='x') }}"
    "{{ '%s-%s'|format('a', 'b') }}{{ '{a}'.format_map({'a': 2}) }}",
    "text": "{{ ' a b '.strip().split() }}{{ 'abc'[1:][::-1] }}{{ 'x'.center(5) }}{{ ','.join(['a', 'b']) }}"
    "{{ 'aXbX'.replace('X', '-', 1) }}{{ 'a\tb'.expandtabs(4) }}{{ 'Ab'.swapcase() }}{{ '7'.zfill(3) }}"
    "{{ 'a.b'.rpartition('.') }}{{ 'ab'.startswith(('x', 'a')) }}",
    "filters": "{{ [3, 1, 2]|sort|join(',') }}{{ range(5)|batch(2, 'x')|list }}{{ range(5)|slice(2)|list }}"
    "{{ [1, 1, 2]|unique|list }}{{ messages|map(attribute='role')|list }}{{ messages|selectattr('role', 'eq',"
    " 'user')|list|length }}{{ messages|groupby('role')|length }}{{ {'b': 1, 'a': 2}|dictsort }}"
    "{{ 'a b'|title|indent(3, true) }}{{ [1, 2]|sum }}{{ 2.55|round(1, 'floor') }}{{ 'x'|default('y') }}"
    "{{ ''|default('y', true) }}{{ 'abc'|list|reverse|first }}{{ '12'|int + 1 }}{{ [1, 2]|max }}{{ 'a<b'|e }}"
    "{{ 'abcdef ghi'|truncate(6, true, '..', 0) }}{{ ['a']|map('upper')|join }}{{ 'abc'|wordcount }}"
    "{{ 1024|filesizeformat }}{{ 'ä b'|urlencode }}{{ {'a': 1}|items|list }}{{ 'abcabc'|replace('b', 'x', 1) }}",
    "lazy filters are true": "{{ 'yes' if messages|selectattr('role', 'eq', 'nobody') else 'no' }}"
    "{{ [1, 2]|map('string') is iterable }}{{ [1]|select is sequence }}",
    "tojson": "{{ messages|tojson }}{{ messages[0]|tojson(indent=2) }}{{ 'é<'|tojson(ensure_ascii=true) }}"
    "{{ {'b': 1, 'a': [true, none, 1.5]}|tojson(sort_keys=true, separators=(',', ':')) }}",
    "tests": "{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 1 is in [1] }}{{ 'a' is lower }}{{ x is undefined }}"
    "{{ none is none }}{{ [] is sequence }}{{ {} is mapping }}{{ 1 is number }}{{ 2 is gt 1 }}{{ 'a' is string }}",
    "globals": "{{ dict(a=1) }}{{ dict.fromkeys([1, 2]) }}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}"
    "{% set j = joiner(', ') %}{{ j() }}{{ j() }}{{ strftime_now('%d %b %Y') }}{{ documents is none }}",
    "missing": "{{ nothing }}{{ messages[0].nothing }}{{ messages[99] is defined }}{{ tools is none }}",
    "whitespace": "{%- if true -%}\n  a\n  {% if true %}\n  b\n  {% endif %}\n{%- endif %}\n  {# c #}\nd\n",
    "raises": "{{ raise_exception('no') }}",
    "raises without an exception of its own": "{{ messages[0].content + 1 }}",
    "undefined": "{{ nothing.at.all }}",
    "private": "{{ ''.__class__ }}",
    "called private": "{{ ''.__class__() }}",
    "private attribute": "{% set ns = namespace() %}{% set ns.__x = 1 %}",
    "not a loop": "{% for x in 5 %}{% endfor %}",
    "no loader": "{% include 'x' %}",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_any_template_gives_the_text_of_transformers(source: str) -> None:
    messages = [SYSTEM, user("Hi "), assistant("é", reasoning="r"), user("bye")]
    try:
        expected = transformers_text(source, messages, None)
    except Exception:
        with pytest.raises(InvalidRequestError, match=r"^messages is"):
            template(source).render(messages)
    else:
        assert text_of(template(source).render(messages)) == expected


def test_a_chat_without_a_name_is_one_piece() -> None:
    pieces = template(CHATML, ["<|im_start|>", "<|im_end|>"]).render([user("Hi")])
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert pieces == [Piece(text, is_template=True)]
    assert template("", ["<s>"]).render([user("Hi")]) == [Piece("", is_template=True)]


def test_what_a_template_refuses_says_what_it_said() -> None:
    source = "{{ raise_exception('roles must alternate after ' ~ messages[0].content) }}"
    with pytest.raises(InvalidRequestError) as caught:
        template(source, ["<s>"]).render([user("<s>" + "x" * 999)])
    error = caught.value
    assert error.field == "messages"
    assert error.value == ["user"]
    assert error.limit.startswith(
        "messages that the chat template accepts: roles must alternate after <s>xx"
    )
    assert len(error.limit) < 400


def test_template_kwargs_reach_the_template_and_cannot_replace_an_argument() -> None:
    ours = template("{{ thinking }}{{ documents[0].title }}")
    kwargs = {"thinking": 7, "documents": [{"title": "T"}]}
    assert text_of(ours.render([user("")], template_kwargs=kwargs)) == "7T"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"):
        with pytest.raises(InvalidRequestError) as caught:
            ours.render([user("")], template_kwargs={name: "x"})
        assert caught.value.field == f"chat_template_kwargs.{name}"
    bad: Any = ["x"]
    with pytest.raises(InvalidRequestError, match=r"^chat_template_kwargs is"):
        ours.render([user("")], template_kwargs=bad)
    with pytest.raises(InvalidRequestError, match=r"^add_generation_prompt is"):
        ours.render([user("")], add_generation_prompt=bad)


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [user("?"), assistant(None, tool_calls=[called("f", '{"a": 1}')])]
    before = repr(messages)
    copy = check_messages(messages)
    template(CHATML, ["?"]).render(messages)
    assert repr(messages) == before
    assert copy[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert check_messages(copy) == copy


def test_empty_tool_calls_and_tools_are_none() -> None:
    assert check_messages([assistant("a", tool_calls=[]), assistant("a", tool_calls=None)]) == [
        assistant("a"),
        assistant("a"),
    ]
    assert check_tools([]) is None
    assert check_messages([assistant("", tool_calls=[called("f", "")])])[0]["tool_calls"] == [
        called("f", {})
    ]


DEEP: Any = []
for _ in range(80):
    DEEP = [DEEP]
MANY = (
    '"a": [' + "0," * (MAX_VALUES // 3) + "0]"
)  # values of arguments, which are text until they are read
BAD_MESSAGES: list[tuple[object, str]] = [
    (None, "messages"),
    ("Hi", "messages"),
    ([], "messages"),
    ([user("")] * (MAX_MESSAGES + 1), "messages"),
    ([user("x" * MAX_CHAT_BYTES)], "messages"),
    ([user(""), {**user(""), "numbers": [1] * (MAX_VALUES + 1)}], "messages"),
    ([user(""), {**user(""), "texts": [""] * (MAX_VALUES + 1)}], "messages"),
    ([{**user(""), "x": {"y": ["a", "\ud800"]}}], "messages[0].x.y[1]"),
    ([{**user(""), "x": [1.5, None, 1 << 1025]}], "messages[0].x[2]"),
    ([{**user(""), "x": range(10**30)}], "messages"),
    ([assistant(None, tool_calls=[called("f", f"{{{MANY}}}")] * 3)], "messages"),
    (["Hi"], "messages[0]"),
    ([{1: 2}], "messages[0]"),
    ([user("\ud800")], "messages[0].content"),
    ([user(""), {"content": ""}], "messages[1].role"),
    ([{"role": "user|>", "content": ""}], "messages[0].role"),
    ([{"role": ["user"], "content": ""}], "messages[0].role"),
    ([user(None)], "messages[0].content"),
    ([{"role": "user"}], "messages[0].content"),
    ([user(5)], "messages[0].content"),
    ([user({"type": "text"})], "messages[0].content"),
    ([user(["x"])], "messages[0].content[0]"),
    ([{**user(""), "tool_call_id": []}], "messages[0].tool_call_id"),
    ([{**assistant(""), "reasoning_content": 5}], "messages[0].reasoning_content"),
    ([{**assistant(""), "thinking": {}}], "messages[0].thinking"),
    ([user([{"type": "text", "text": ""}, {"type": "image_url"}])], "messages[0].content[1]"),
    ([user([{"type": "text", "text": 1}])], "messages[0].content[0].text"),
    ([assistant("", tool_calls="x")], "messages[0].tool_calls"),
    (
        [assistant("", tool_calls=[called("f", '{"a": "\\ud800"}')])],
        "messages[0].tool_calls[0].function.arguments.a",
    ),
    ([{**user(""), "name": b"x"}], "messages[0].name"),
    ([{**user(""), "a": {"b": [1, {2}]}}], "messages[0].a.b[1]"),
    ([{**user(""), "n": 1 << 2000}], "messages[0].n"),
    ([{**user(""), "n": float("inf")}], "messages[0].n"),
    ([{**user(""), "n": [float("nan")]}], "messages[0].n[0]"),
    ([{**user(""), "deep": DEEP}], "messages[0].deep" + "[0]" * 63),
]


@pytest.mark.parametrize(("messages", "field"), BAD_MESSAGES)
def test_bad_messages_are_named(messages: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages(messages)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("x", "tools"),
        ([{}] * 257, "tools"),
        ([{"a": "x" * MAX_CHAT_BYTES}], "tools"),
        ([SIMPLE_TOOL, 5], "tools[1]"),
        ([{}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a\nb"}}], "tools[0].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 5}}],
            "tools[0].function.parameters",
        ),
        ([{"type": "hammer", "function": {"name": "f"}}], "tools[0].type"),
        ([SIMPLE_TOOL, SIMPLE_TOOL], "tools[1].function.name"),
        ([{"a": {"b": {3: 4}}}], "tools[0].a.b"),
        ([{"a": {"maxLength": float("inf")}}], "tools[0].a.maxLength"),
        ([{"a": DEEP}], "tools[0].a" + "[0]" * 63),
    ],
)
def test_bad_tools_are_named(tools: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools(tools)
    assert caught.value.field == field


def test_without_jinja2_a_chat_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'cllm\[chat\]'"):
        template(CHATML)
