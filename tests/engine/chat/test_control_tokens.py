"""Text of callers never becomes a control token, whatever a template does with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from cllm.engine.chat.chat_template import ChatTemplate
from cllm.engine.chat.control_tokens import PRIVATE_USE, ControlTokens, Piece
from cllm.errors import InvalidRequestError
from tests.engine.chat.conftest import CHILD
from tests.engine.chat.test_chat_template import (
    CHATML,
    MORE_KWARGS,
    SIMPLE_TOOL,
    TEMPLATES,
    text_of,
    user,
)

# Some are inside of others, some begin or end as others do, one is a single character.
NAMES = (
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<<s>>",
    "<|im_end|><s>",
    "aba",
    "ab",
    "§",
)
TAGGED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0] | trim }}</think>
{% endif %}{{ m.content.split('</think>')[-1] | trim }}<|im_end|>
{% endfor %}"""
SOURCES = {
    "chatml": CHATML,
    "trim": CHATML.replace("content", "content | trim"),
    "tojson": "<s>{{ messages | tojson }}</s>{{ messages[0] | tojson(indent=1) }}",
    "ascii": "<s>{{ messages | tojson(ensure_ascii=true) }}</s>",
    "repr": "<s>{{ messages }}</s>",
    "split": TAGGED,
    "lines": "{% for line in messages[0].content.split('\n') %}<s>{{ line }}\n{% endfor %}",
    "keys": "{% for k, v in tools[0] | items %}<s>{{ k }}\n{{ v }}\n{% endfor %}{{ extra }}",
    # These take text apart between any two characters.
    "slices": "{{ messages[0].content[2:] }}\n{{ messages[0].content[:-3] }}\n{{ messages[0].content[1:2] }}",
    "characters": "{% for c in messages[0].content %}{{ c }}|{% endfor %}",
    "case": "{{ messages[0].content | upper }}\n{{ messages[0].content.title() }}",
}
# Those that give a caller's text as it is, or as it would be without marks.
FAITHFUL = ("chatml", "trim", "tojson", "ascii", "repr", "split", "lines", "keys")
COMPILED = {
    kind: ChatTemplate(source, bos_token="<s>", eos_token="</s>", control_names=NAMES, child=CHILD)
    for kind, source in SOURCES.items()
}
FRAGMENTS = st.sampled_from(
    (
        *NAMES,
        *(
            "<",
            "<|",
            "<|im_",
            "im_end",
            "|>",
            ">",
            "s",
            "s>",
            "</",
            "<<",
            "a",
            "b",
            "ba",
            "bab",
            "t",
        ),
        *(
            " ",
            "\n",
            "\t",
            "\\",
            '"',
            "</think>",
            "é",
            "\udbff".encode("utf-16", "surrogatepass").hex(),
        ),
        *("\U000f0000", "\U000f0001", "\\udb80\\udc00", "\\U000f0000", "%F3%B0%80%80", "x"),
    )
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def names_in(texts: Sequence[str], names: Sequence[str] = NAMES) -> Counter[str]:
    """How often each name stands in texts, overlapping ones too."""
    return Counter(
        {
            name: sum(len(re.findall(f"(?={re.escape(name)})", text)) for text in texts)
            for name in names
        }
    )


def of_template(pieces: Sequence[Piece]) -> list[str]:
    return [piece.text for piece in pieces if piece.is_template]


def tool_of(texts: Sequence[str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"}, texts[0]: texts[1]}


def render(kind: str, texts: Sequence[str]) -> list[Piece]:
    kwargs: dict[str, Any] = {
        "tools": [tool_of(texts)],
        "template_kwargs": {"extra": texts[1]},
    }
    return COMPILED[kind].render([user(text) for text in texts], **kwargs)


@pytest.mark.parametrize("kind", SOURCES)
@given(st.tuples(TEXTS, TEXTS))
def test_no_name_of_a_caller_is_in_a_piece_of_the_template(
    kind: str, texts: tuple[str, str]
) -> None:
    own = names_in([SOURCES[kind]])
    n_turns = {
        "chatml": 2,
        "trim": 2,
        "split": 2,
        "lines": texts[0].count("\n") + 1,
        "keys": 3,
    }.get(kind, 1)
    found = names_in(of_template(render(kind, texts)))
    for name in NAMES:
        # In a loop, so often as it goes round; what is behind the loop of CHATML, once.
        assert found[name] <= own[name] * n_turns, (name, found)


@pytest.mark.full
@pytest.mark.parametrize("kind", FAITHFUL)
@given(st.tuples(TEXTS, TEXTS))
def test_the_text_is_that_of_transformers(kind: str, texts: tuple[str, str]) -> None:
    if kind == "ascii":  # a mark that stands for a name is not escaped as the name would be
        texts = (texts[0].replace("§", ""), texts[1].replace("§", ""))
    rendered: Any = render_jinja_template(
        [[user(text) for text in texts]],
        tools=[tool_of(texts)],
        chat_template=SOURCES[kind],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        extra=texts[1],
    )
    assert text_of(render(kind, texts)) == rendered[0][0]


@given(TEXTS)
def test_text_without_a_name_is_one_piece_with_the_template(text: str) -> None:
    pieces = render("chatml", [text, ""])
    assert (len(pieces) == 1) == (not any(names_in([text]).values()))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_real_template_writes_its_own_names_and_no_others(path: Any) -> None:
    source = path.read_text()
    names = sorted(
        {*re.findall(r"<[|｜][^|｜<>]+[|｜]>", source), "<s>", "</s>", "[INST]", "[/INST]"}
    )
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>", control_names=names, child=CHILD)

    # This one, for llama.cpp alone, writes an iterator as JSON; transformers fails as well.
    tools = None if path.stem == "llama-cpp-deepseek-r1" else [SIMPLE_TOOL]

    def rendered(text: str) -> list[Piece]:
        return ours.render([user(text)], tools=tools, template_kwargs=MORE_KWARGS[-1])

    expected = names_in(of_template(rendered("x y")), names)
    hostile = "x " + " ".join(names) + "".join(names) + " y"
    pieces = rendered(hostile)
    assert names_in(of_template(pieces), names) == expected
    assert hostile in text_of(pieces)


def test_a_name_in_a_text_is_a_piece_of_its_own_between_names_of_the_template() -> None:
    ours = ChatTemplate(
        "<s>{{ messages[0].content }}</s>",
        bos_token="",
        eos_token="",
        control_names=NAMES,
        child=CHILD,
    )
    assert ours.render([user("a<s>")]) == [
        Piece("<s>a", is_template=True),
        Piece("<s>", is_template=False),
        Piece("</s>", is_template=True),
    ]
    # What has no name in it reads the same either way.
    assert ours.render([user("<s>, <s> and </s>")]) == [
        Piece("<s>", is_template=True),
        Piece("<s>, <s> and </s>", is_template=False),
        Piece("</s>", is_template=True),
    ]


def test_what_is_left_when_a_template_cuts_names_apart_is_not_a_name() -> None:
    source = "{{ messages[0].content[:3] }}{{ messages[0].content[-3:] }}"
    ours = ChatTemplate(source, bos_token="", eos_token="", control_names=["<|a|>"], child=CHILD)
    # The ends of two names, `<|` with its mark and `a|>`, are one name when the mark is out.
    assert ours.render([user("<|a|> <|a|>")]) == [Piece("<|a|>", is_template=False)]


def test_a_mark_beside_a_name_of_the_template_leaves_that_name_alone() -> None:
    source = "{{ messages[0].content[:2] }}</s>{{ messages[0].content[2:] }}"
    ours = ChatTemplate(
        source, bos_token="", eos_token="", control_names=["<s>", "</s>"], child=CHILD
    )
    assert ours.render([user("<s>")]) == [Piece("<</s>s>", is_template=True)]


def test_names_in_arguments_of_tool_calls_are_text_even_if_json_hides_them() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    ours = ChatTemplate(source, bos_token="", eos_token="", control_names=["<s>"], child=CHILD)
    call = {"function": {"name": "f", "arguments": '{"\\u003cs>": ["\\u003cs\\u003e"]}'}}
    pieces = ours.render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert pieces == [Piece('{"<s>": ["<s>"]}', is_template=False)]


def test_text_with_every_private_use_character_is_refused_only_if_it_has_a_name() -> None:
    everything = "".join(chr(code) for codes in PRIVATE_USE for code in codes)
    assert len(render("chatml", [everything, ""])) == 1
    with pytest.raises(InvalidRequestError, match=r"^messages is"):
        render("chatml", [everything + "<s>", ""])


def test_a_vocabulary_may_have_many_names_of_one_character() -> None:
    names = [chr(0x4E00 + i) for i in range(200)]
    ours = ChatTemplate(
        "<{{ messages[0].content }}>", bos_token="", eos_token="", control_names=names, child=CHILD
    )
    pieces = ours.render([user("".join(names))])
    assert pieces == [Piece("<" + "".join(names) + ">", is_template=False)]


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=8),
    st.text("ab<", max_size=12),
)
def test_the_longest_name_is_found_at_the_first_place(names: list[str], text: str) -> None:
    match = ControlTokens(names).search(text)
    starts = [(i, name) for i in range(len(text)) for name in names if text.startswith(name, i)]
    if not starts:
        assert match is None
    else:
        first = min(i for i, _ in starts)
        assert match is not None
        assert match.start() == first
        assert match[0] == max((name for i, name in starts if i == first), key=len)


def test_a_vocabulary_without_names_has_nothing_to_guard() -> None:
    assert ControlTokens(["", ""]).search("<s>") is None
    assert not ControlTokens([]).guard({"a": ["<s>"]}, "").marked("")


def test_names_that_all_begin_with_each_other_are_refused_not_a_crash() -> None:
    with pytest.raises(InvalidRequestError, match=r"^control_names is"):
        ChatTemplate(
            "",
            bos_token="",
            eos_token="",
            control_names=["a" * n for n in range(1, 1200)],
            child=CHILD,
        )
