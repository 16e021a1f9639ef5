"""Limits of JSON schemas: those that llguidance takes are kept, no others reach it."""

from __future__ import annotations

import json
import sys
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.json_schema import SchemaDocument, count_of
from cllm.engine.schema_limits import COUNTS, LOWER, UPPER
from cllm.errors import InvalidRequestError
from tests.conftest import examples
from tests.engine.test_json_schema import closed, takes

BOUNDS = (*LOWER, *UPPER)
INT64, UINT64, FLOAT32 = 2**63, 2**64, 3.4028234663852886e38
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**70), 2**70),
    st.sampled_from([*range(15, 20)]).flatmap(
        lambda e: st.sampled_from([s * 10**e + d for s in (-1, 1) for d in (-1, 0, 1)])
    ),
    st.sampled_from([s * v for s in (-1, 1) for v in (INT64, INT64 - 1, UINT64 - 1, FLOAT32)]),
    st.integers(-330, 308).map(lambda e: float(f"1e{e}")),
)


def grammar_of(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(schema)}"


@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, max_size=1),
)
@examples(2000)
def test_a_bound_that_llguidance_cannot_enforce_never_reaches_it(
    kind: str, bounds: dict[str, float]
) -> None:
    schema, ignored = closed({"type": kind, **bounds}, is_strict=False)
    assert not llguidance.LLMatcher.validate_grammar(grammar_of(schema))
    if ignored:
        with pytest.raises(InvalidRequestError, match=f"{next(iter(bounds))}.*cannot be enforced"):
            closed({"type": kind, **bounds})


@pytest.mark.parametrize("value", [0, 7, -1000.5, 2**53, -(2**53), 0.001, 1e15])
@pytest.mark.parametrize("keyword", BOUNDS)
def test_bounds_that_llguidance_enforces_are_kept(keyword: str, value: float) -> None:
    assert closed({"type": "number", keyword: value}) == ({"type": "number", keyword: value}, [])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1},
        {"type": "integer", "minimum": 0, "maximum": UINT64 - 1},
        {"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1.0, "maxItems": 2.0},
        {"type": "string", "minLength": 1.0, "maxLength": 4.0},
    ],
)
def test_limits_as_other_languages_write_them_are_enforced_in_strict_schemas(
    schema: dict[str, Any],
) -> None:
    grammar = grammar_of(closed(schema)[0])
    values = {
        "integer": (12, 3_000_000_000),
        "number": (1.5, -7),
        "array": ([1], [1, 2]),
        "string": ("a", "abcd"),
    }
    for value in values[schema["type"]]:
        assert takes(grammar, json.dumps(value))
    for wrong in ([], [1, 2, 3], "", "abcde"):
        assert not takes(grammar, json.dumps(wrong))


@pytest.mark.parametrize("divisor", [99_991, 2**17, 1_000_000_007, 10**12, 1e30, 0.007, 1e-20])
def test_a_divisor_whose_remainders_take_long_is_left_out_or_rejected(divisor: float) -> None:
    schema = {"type": "number", "multipleOf": divisor}
    assert closed(schema, is_strict=False) == ({"type": "number"}, [f"multipleOf: {divisor}"])
    with pytest.raises(InvalidRequestError, match=r"multipleOf.*cannot be enforced"):
        closed(schema)


@pytest.mark.parametrize("divisor", [1, 3.0, 7, 1000, 4096, 16384, 2**16, 10**6, 9973, 0.5, 0.01])
def test_usual_divisors_are_enforced(divisor: float) -> None:
    grammar = grammar_of(closed({"type": "number", "multipleOf": divisor})[0])
    assert takes(grammar, f"{3 * divisor:.9g}")
    assert not takes(grammar, f"{1.5 * divisor:.9g}")


@pytest.mark.parametrize("keyword", sorted(COUNTS))
def test_a_count_is_an_integer_in_the_grammar(keyword: str) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {}}, keyword: 2.0}
    found = SchemaDocument("x", schema, is_strict=False).closed(schema)
    assert isinstance(found[keyword], int)


@pytest.mark.parametrize("keyword", sorted(COUNTS))
@pytest.mark.parametrize("n", [2**31, 2**63 - 1])
def test_no_text_or_list_is_as_long_as_a_count_of_64_bits(keyword: str, n: int) -> None:
    schema = {"type": ["string", "array", "object"], keyword: n}
    found, ignored = closed(schema, is_strict=False)
    assert keyword not in found
    assert bool(ignored) == keyword.startswith("min")
    assert count_of(schema, keyword) is None


@pytest.mark.parametrize("pattern", [r"^(?!x)", r"\bword", r"(a)\1"])
def test_keys_of_a_pattern_that_is_not_regular_are_free_or_the_schema_is_rejected(
    pattern: str,
) -> None:
    schema = {
        "type": "object", "properties": {"n": {"type": "integer"}},
        "patternProperties": {pattern: {"type": "string"}}, "additionalProperties": False,
    }  # fmt: skip
    found, ignored = closed(schema, is_strict=False)
    assert ignored == [f"patternProperties: {pattern}"]
    assert takes(grammar_of(found), '{"n": 1, "a word": "x"}')
    assert not takes(grammar_of(found), '{"n": "1"}')
    with pytest.raises(InvalidRequestError, match="patternProperties"):
        closed(schema)
