"""Patterns mean the same to llguidance as to JSON Schema."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.chat.argument_text import searched
from cllm.engine.patterns import with_escapes
from tests.conftest import examples
from tests.engine.test_json_schema import closed, takes

# Each with texts that match, and texts that do not.
PATTERNS = {
    "a bracket in a class": (r"^[^[]$", "a]", "["),
    "both brackets": (r"^[[\]]$", "[]", "a^"),
    "ampersands": (r"^[a&&b]$", "a&b", "c"),
    "tildes": (r"^[a~~b]$", "a~b", "c"),
    "a range to a hyphen": (r"^[*--/]$", "*+,-/", ".0"),
    "a hyphen after a range": (r"^[a-c-e]$", "abc-e", "d"),
    "a hyphen after a set": (r"^[\w-.]$", "a-._", "/"),
    "a hyphen before a set": (r"^[x-\d]$", "x-7", "w"),
    "a hyphen at the beginning": (r"^[-a]$", "-a", "b"),
    "a hyphen at the end": (r"^[^a-]$", "b", "a-"),
    "letters": (r"^[\p{Lu}-]$", "AÉ-", "a{"),
    "a brace": (r"^[a]{1}{$", [r"a{"], "a"),
    "a brace in a word": (r"^a{,3}$", ["a{,3}"], "a"),
    "angles": (r"^\<\>$", ["<>"], "<"),
    "angles in a class": (r"^[^\<\>]$", "a[", "<>"),
    "any character": (r"^[^]$", "a]\n", ["ab"]),
    "no character": (r"^a[]?$", "a", ["a]", "]"]),
    "a bracket that closes an empty class": (r"^(?:b|[]a])$", "b", "]a"),
    "a code": (r"^\u{41}\x42\p{Nd}{2}$", ["AB12"], ["AB1"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_means_what_it_means_in_a_schema(name: str) -> None:
    pattern, right, wrong = PATTERNS[name]
    grammar = f"start: %json {json.dumps(closed({'type': 'string', 'pattern': pattern})[0])}"
    free = f"start: /{searched(pattern)}/"
    for text in right:
        assert takes(grammar, json.dumps(text, ensure_ascii=False)), text
        assert takes(free, text), text
    for text in wrong:
        assert not takes(grammar, json.dumps(text, ensure_ascii=False)), text
        assert not takes(free, text), text


@pytest.mark.filterwarnings("ignore:Possible")  # Python warns of sets that it may have one day
@given(
    st.lists(
        st.sampled_from([*"ab-^[&~<", r"\d", r"\\", r"\]", r"\<"]), min_size=1, max_size=6
    ).map("".join),
    st.sampled_from("ab-^\\[]&~7<"),
)
@examples(2000)
def test_a_class_has_the_characters_that_it_has_in_python(inner: str, char: str) -> None:
    pattern = f"^[{inner}]$"
    text = searched(pattern)
    try:
        expected = re.search(pattern, char) is not None
    except re.error:
        return
    if inner != "^":  # Python takes the bracket that ends it for one of its characters
        assert takes(f"start: /{text}/", char) == expected


@given(st.lists(st.sampled_from([*"[]{}()\\^-a,1", r"\p{L}", r"\u{41}"]), max_size=40).map("".join))
@examples(1000)
def test_any_pattern_is_rewritten_and_none_twice(pattern: str) -> None:
    once = with_escapes(pattern)
    assert with_escapes(once) == once


@pytest.mark.parametrize("part", ["[", r"\p{L}", "{1", "[^", "-", "a"])
def test_no_pattern_takes_long_however_it_is_repeated(part: str) -> None:
    """A pattern is rewritten in the process that serves.  Backtracking would take hours for these."""
    assert len(with_escapes("[" + part * 20_000)) >= 20_000
