"""The types that fields of bodies have, and what the OpenAPI document says of them.

Types are checked by pydantic; ranges where the values are used, so that the API of Python and that
of HTTP refuse the same values in the same words.  The document repeats those ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cllm import SamplingOptions, SamplingParams
from cllm.engine.sampling_params import (
    FLOAT_RANGES,
    INTEGER_RANGES,
    MAX_BIASES,
    MAX_BREAKERS,
    MAX_STOP_STRINGS,
    SAMPLERS,
)
from cllm.server.problems import invalid


def _integral(data: object) -> object:
    """JSON has one kind of number: 5.0 is an integer."""
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _integral_all(data: object) -> object:
    if isinstance(data, list) and any(type(item) is float for item in data):
        return list(map(_integral, data))
    return data


def _check_biases(data: object) -> object:
    """Refuse too many before each is looked at."""
    if isinstance(data, Mapping) and len(data) > MAX_BIASES:
        raise invalid("logit_bias", f"has {len(data)} tokens, must have at most {MAX_BIASES}")
    return data


Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True), BeforeValidator(_integral)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Token = Annotated[int, Field(strict=True, json_schema_extra={"minimum": 0})]
# The first wrong item is enough: a body has room for a million, and each would be described.
Tokens = Annotated[list[Token], Field(fail_fast=True), BeforeValidator(_integral_all)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Biases = Annotated[dict[int, Number | Literal[False]], BeforeValidator(_check_biases)]

_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
}
Messages = Annotated[
    Objects,
    Field(
        json_schema_extra={"items": _MESSAGE, "minItems": 1},
        examples=[[{"role": "user", "content": "1+1="}]],
    ),
]
ResponseFormat = Annotated[
    dict[str, Any],
    Field(
        json_schema_extra={
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        }
    ),
]

SAMPLING_FIELDS = tuple(SamplingOptions.__annotations__)
# Those that are not integers or numbers; `grammar` is taken only where the server allows it.
_TYPES: dict[str, Any] = {
    "dry_sequence_breakers": Texts,
    "samplers": Texts,
    "logit_bias": Biases,
    "stop": Text | Texts,
    "stop_token_ids": Tokens,
    "ignore_eos": Flag,
    "grammar": Text,
    "json_schema": dict[str, Any] | Text,
    "regex": Text,
}
_LIMITS: dict[str, dict[str, Any]] = {
    "samplers": {"items": {"enum": list(SAMPLERS)}, "uniqueItems": True},
    "stop": {"minLength": 1, "maxItems": MAX_STOP_STRINGS},
    "dry_sequence_breakers": {"maxItems": MAX_BREAKERS},
    "logit_bias": {"maxProperties": MAX_BIASES, "propertyNames": {"pattern": "^[0-9]{1,6}$"}},
    "regex": {"minLength": 1},
    "grammar": {"description": "GBNF; only with --allow-grammar"},
}
_DEFAULTS = SamplingParams()


def sampling_fields(without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of `SamplingParams`, for pydantic's `create_model`; null leaves the default."""
    return {
        name: (_type_of(name) | None, Field(None, json_schema_extra=_documented(name)))
        for name in SAMPLING_FIELDS
        if name not in without
    }


def _type_of(name: str) -> Any:
    return _TYPES.get(name, Integer if name in INTEGER_RANGES else Number)


def _documented(name: str) -> dict[str, Any]:
    said: dict[str, Any] = dict(_LIMITS.get(name, {}))
    ranges: Mapping[str, tuple[float, float]] = {**INTEGER_RANGES, **FLOAT_RANGES}
    if name in ranges:
        said["minimum"], said["maximum"] = ranges[name]
    default = getattr(_DEFAULTS, name)
    if isinstance(default, int | float | tuple):
        said["default"] = list(default) if isinstance(default, tuple) else default
    return said
