"""Log probabilities and constraints of `SamplingParams`: what they may be, and what they become."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import FrozenInstanceError, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.sampling_params import SamplingParams
from cllm.errors import InvalidRequestError, RequestError
from tests.conftest import type_name

NAN, INFINITE = math.nan, math.inf
GRAMMAR, REGEX, SCHEMA = 'root ::= "a"', "[0-9]+", {"type": "object"}
KIB = 1 << 10
LIMITS = {"grammar": 64 * KIB, "lark": 64 * KIB, "json_schema": 256 * KIB, "regex": 16 * KIB}


def refused(**options: Any) -> InvalidRequestError:
    """Why these parameters are refused, in few words."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    error = caught.value
    assert isinstance(error, RequestError)
    assert str(error).startswith(f"{error.field} is ")
    assert len(str(error)) < 300, "a long value is shown in part"
    return error


def test_a_schema_of_too_many_parts_is_rejected_before_it_is_written_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop would take a second for a body of 32 MiB."""
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("it was written"))
    error = refused(json_schema={"enum": [0] * (128 * KIB + 1)})
    assert error.limit == f"at most {256 * KIB} bytes"


class Shown:
    """A value whose text is counted."""

    n_shown = 0

    def __repr__(self) -> str:
        Shown.n_shown += 1
        return "x"


@pytest.mark.parametrize(
    "value", [[Shown()] * 9000, [[[Shown()] * 90] * 90], {n: (Shown(),) * 90 for n in range(90)}]
)
def test_a_message_reads_only_as_much_of_a_rejected_value_as_it_shows(value: object) -> None:
    Shown.n_shown = 0
    error = InvalidRequestError("field", value, "small")
    assert error.value is value
    assert str(error).endswith("..., must be small")
    assert len(str(error)) < 120
    assert Shown.n_shown <= 80


def test_a_message_shows_a_value_that_contains_itself() -> None:
    inside: list[object] = [0]
    inside.append(inside)
    assert (
        str(InvalidRequestError("field", inside, "small")) == "field is [0, [...]], must be small"
    )


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels, the number at the bottom included."""
    schema: Any = 1
    for level in range(depth - 1):
        schema = {"a": schema} if level % 2 or level == depth - 2 else [schema]
    assert isinstance(schema, dict)
    return schema


# --- logprobs, prompt_logprobs ------------------------------------------------------------------
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (-1, "0 to 256"),
        (257, "0 to 256"),
        (10**30, "0 to 256"),
        (True, "an integer"),
        (False, "an integer"),
        (1.0, "an integer"),
        ("5", "an integer"),
        ([], "an integer"),
    ],
)
def test_a_number_of_alternatives_is_an_integer_of_at_most_256(
    field: str, value: object, limit: str
) -> None:
    error = refused(**{field: value})
    assert (error.field, error.value, error.limit) == (field, value, limit)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [None, 0, 1, 256])
def test_none_and_0_to_256_alternatives_are_accepted(field: str, value: int | None) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_nothing_is_scored_or_constrained_by_default() -> None:
    params = SamplingParams()
    given = (params.logprobs, params.prompt_logprobs, params.grammar, params.json_schema)
    assert (*given, params.regex, params.lark) == (None,) * 6


# --- grammar, lark, regex -----------------------------------------------------------------------
@pytest.mark.parametrize("field", ["grammar", "lark", "regex"])
@pytest.mark.parametrize("value", ["", b"bytes", 7, 1.5, True, ["a"], {"a": 1}])
def test_grammars_and_a_regex_are_texts_that_are_not_empty(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert (error.field, error.value, error.limit) == (field, value, "text that is not empty")


@pytest.mark.parametrize("field", ["grammar", "lark", "regex"])
@pytest.mark.parametrize("letter", ["x", "é", "你", "🙂"])
def test_a_text_may_be_as_long_as_its_limit_in_bytes(field: str, letter: str) -> None:
    n_bytes = len(letter.encode())
    n_fit = LIMITS[field] // n_bytes
    text = letter * n_fit
    assert getattr(SamplingParams(**{field: text}), field) == text  # type: ignore[arg-type]
    error = refused(**{field: text + letter})
    assert error.field == field
    assert error.value == f"{(n_fit + 1) * n_bytes} bytes"
    assert error.limit == f"at most {LIMITS[field]} bytes"


@pytest.mark.parametrize("field", ["grammar", "lark", "regex", "json_schema"])
@pytest.mark.parametrize("text", ["\ud800", '{"const": "\udfff"}', "a" * 1000 + "\udc80"])
def test_a_text_has_no_lone_surrogates(field: str, text: str) -> None:
    error = refused(**{field: text})
    assert (error.field, error.limit) == (field, "text without lone surrogates")


# --- json_schema --------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [b"{}", 7, 1.5, True, [], ["a"], {"a"}, object()], ids=type_name)
def test_a_schema_is_a_mapping_or_a_text(value: object) -> None:
    error = refused(json_schema=value)
    assert (error.field, error.value) == ("json_schema", value)
    assert error.limit == "a mapping, or one as JSON text"


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null", "true", "false", " [{}] "])
def test_a_schema_as_text_is_an_object(text: str) -> None:
    error = refused(json_schema=text)
    assert (error.field, error.value, error.limit) == ("json_schema", text, "an object")


@pytest.mark.parametrize(
    "value",
    [
        "{", "{}}", "{'a': 1}", "{a: 1}", '{"a": 01}', '{"a": 1,}', "\x00", "x" * 1000, '{"a"}',
        '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": ' + "1" * 5000 + "}",
        {"a": NAN}, {"a": [INFINITE]}, {"a": {"b": -INFINITE}}, {NAN: 1},
        {"a": {1, 2}}, {"a": b"bytes"}, {("a",): 1}, {"a": object()}, {"a": 1j},
        {"a": MappingProxyType({})},
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_a_schema_is_json(value: object) -> None:
    error = refused(json_schema=value)
    assert (error.field, error.value) == ("json_schema", value)
    assert error.limit.startswith("JSON (")


def test_a_schema_without_end_is_refused() -> None:
    direct: dict[str, Any] = {}
    direct["a"] = direct
    around: dict[str, Any] = {"a": [{"b": []}]}
    around["a"][0]["b"].append(around)
    for schema in (direct, around):
        error = refused(json_schema=schema)
        assert (error.field, error.limit) == ("json_schema", "JSON (Circular reference detected)")


def test_a_schema_has_at_most_64_levels() -> None:
    for depth in (2, 63, 64):
        as_text = SamplingParams(json_schema=json.dumps(nested(depth)))
        assert SamplingParams(json_schema=nested(depth)) == as_text
    for depth in (65, 66, 100):
        for schema in (nested(depth), json.dumps(nested(depth))):
            error = refused(json_schema=schema)
            assert (error.field, error.limit) == (
                "json_schema",
                "at most 64 levels deep, the innermost value counted",
            )


def test_tuples_in_a_schema_are_levels_like_the_lists_that_they_become() -> None:
    value: tuple[object, ...] = ()
    for _ in range(100):
        value = (value,)
    assert (
        refused(json_schema={"a": value}).limit
        == "at most 64 levels deep, the innermost value counted"
    )


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"a":['])
def test_a_text_of_100_000_levels_is_refused_and_nothing_breaks(opening: str) -> None:
    closing = {"[": "]", "{": "}"}
    levels = opening * (100_000 // len(opening))
    text = levels + "1" + "".join(closing[c] for c in reversed(levels) if c in closing)
    for schema in (text, levels):
        error = refused(json_schema=schema)
        assert (error.field, error.value) == ("json_schema", schema)
        assert error.limit.startswith(("JSON (", "at most"))


def test_a_value_of_100_000_levels_is_refused_and_nothing_breaks() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    assert refused(json_schema=schema).field == "json_schema"


def test_a_number_of_5000_digits_is_refused_by_its_field() -> None:
    assert refused(json_schema={"a": 10**5000}).field == "json_schema"


def test_a_schema_may_be_as_long_as_its_limit_in_bytes() -> None:
    limit = LIMITS["json_schema"]
    for n_letters in (limit - 16, limit):
        schema = {"a": "x" * n_letters}
        for form in (schema, json.dumps(schema)):
            if n_letters < limit:
                assert SamplingParams(json_schema=form).json_schema is not None
            else:
                error = refused(json_schema=form)
                assert (error.field, error.limit) == ("json_schema", f"at most {limit} bytes")


@pytest.mark.parametrize(
    "text",
    [
        '{"enum":[' + ",".join(["1"] * 100_000) + "]}",
        '{"const":"' + "你" * 80_000 + '"}',
    ],
    ids=["without spaces", "not ASCII"],
)
def test_a_text_within_the_limit_is_accepted_however_it_is_written(text: str) -> None:
    assert len(text.encode()) < LIMITS["json_schema"]
    assert SamplingParams(json_schema=text).json_schema is not None


@pytest.mark.parametrize(
    "schema",
    [{"const": "\ud800"}, {"\udfff": 1}, '{"const": "\\ud800"}', '{"enum": ["\\udc00\\ud800"]}'],
)
def test_a_schema_has_no_lone_surrogates_however_they_are_written(schema: Any) -> None:
    assert refused(json_schema=schema).field == "json_schema"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_a_schema_is_the_same_as_a_value_and_as_any_text_of_it(
    schema: dict[str, Any], indent: int | None, ensure_ascii: bool
) -> None:
    as_value = SamplingParams(json_schema=schema)
    text = json.dumps(schema, indent=indent, ensure_ascii=ensure_ascii)
    assert isinstance(as_value.json_schema, str)
    assert json.loads(as_value.json_schema) == schema
    for same in (SamplingParams(json_schema=text), replace(as_value)):
        assert same == as_value
        assert hash(same) == hash(as_value)


def test_any_mapping_is_a_schema() -> None:
    expected = SamplingParams(json_schema=SCHEMA)
    for mapping in (MappingProxyType(SCHEMA), OrderedDict(SCHEMA), '{"type" : "object"}'):
        assert SamplingParams(json_schema=mapping) == expected


def test_changing_a_schema_afterwards_changes_no_parameters() -> None:
    schema: dict[str, Any] = {"enum": [1]}
    params = SamplingParams(json_schema=schema)
    schema["enum"].append(2)
    schema["const"] = 3
    assert params == SamplingParams(json_schema={"enum": [1]})


# --- Together -----------------------------------------------------------------------------------
ALL: dict[str, Any] = {
    "grammar": GRAMMAR, "lark": 'start: "a"', "json_schema": SCHEMA, "regex": REGEX,
}  # fmt: skip


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_only_one_constraint_can_be_given(first: str, second: str) -> None:
    if first == second:
        params = SamplingParams(**{first: ALL[first]})
        assert [name for name in ALL if getattr(params, name) is not None] == [first]
        return
    error = refused(**{first: ALL[first], second: ALL[second]})
    kept, refused_one = sorted((first, second), key=list(ALL).index)
    assert (error.field, error.limit) == (refused_one, f"left out beside {kept}")


def test_all_constraints_at_once_are_refused() -> None:
    assert refused(**ALL).limit == "left out beside grammar"


@pytest.mark.parametrize("name", ALL)
def test_parameters_with_constraints_can_be_compared_and_hashed_and_not_changed(name: str) -> None:
    options: dict[str, Any] = {name: ALL[name], "logprobs": 5, "prompt_logprobs": 0}
    params = SamplingParams(**options)
    assert params == SamplingParams(**options)
    assert (
        len({params, SamplingParams(**options), SamplingParams(), replace(params, logprobs=4)}) == 3
    )
    for field in (*ALL, "logprobs", "prompt_logprobs"):
        with pytest.raises(FrozenInstanceError):
            setattr(params, field, None)
