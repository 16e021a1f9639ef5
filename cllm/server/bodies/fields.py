"""The types that fields of bodies have, and what the OpenAPI document says of them.

pydantic checks types.  Ranges are checked where the values are used, so that the Python API and the HTTP
API reject the same values with the same message.  The OpenAPI document repeats those ranges.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from cllm import InvalidRequestError, SamplingOptions, SamplingParams
from cllm.engine.media_limits import is_audio
from cllm.engine.media_parts import TYPES, media_of
from cllm.engine.media_source import OF_URLS, MediaSource
from cllm.engine.sampling_params import CONSTRAINTS as CONSTRAINTS
from cllm.engine.sampling_params import (
    MAX_BIASES,
    MAX_SCHEMA_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SAMPLERS,
)
from cllm.sampling_limits import FLOAT_RANGES, INTEGER_RANGES, MAX_BREAKERS
from cllm.server.http.body import integral
from cllm.server.http.problems import invalid, problem_of

MAX_LORAS = 64
MEDIA_MARKER = "<__media__>"  # where an image or audio is, in a prompt of llama-server


def _tokens(data: object) -> Any:
    """Return a list of token ids, or raise `ValueError`; checked as a whole, as there may be a million."""
    if isinstance(data, list):
        kinds = set(map(type, data))
        if float in kinds and kinds <= {int, float}:
            data = list(map(integral, data))
            kinds = set(map(type, data))
        if kinds <= {int}:
            return data
    raise ValueError("must be token ids")


def _prompt(data: object) -> object:
    """Return one prompt: a text, or token ids."""
    return data if isinstance(data, str) else _tokens(data)


def _prompts(data: object) -> object:
    """Return one prompt, or a list of several."""
    if not isinstance(data, list) or set(map(type, data)) <= {int, float}:
        return _prompt(data)
    return [_prompt(one) for one in data]


def _media(part: object, field: str) -> MediaSource | None:
    try:
        return media_of(part, field)
    # A `ValueError`: pydantic would turn it into an error of the whole prompt.
    except InvalidRequestError as error:
        raise problem_of(error) from None


def _prompt_with_media(data: object) -> object:
    """Return one prompt: a text, token ids, or a list of texts, images and audio."""
    if not isinstance(data, list) or dict not in set(map(type, data)):
        return _prompt(data)
    parts: list[object] = []
    for i, part in enumerate(data):
        field = f"prompt[{i}]"
        found = part if isinstance(part, str) else _media(part, field)
        if found is None:
            raise invalid(field, "must be a text, or an object with an image or audio")
        parts.append(found)
    return parts


def _text_with_media(text: object, media: object) -> list[object]:
    """Return texts and media by turns for a prompt of llama-server with `multimodal_data`."""
    field = "prompt.multimodal_data"
    if not isinstance(text, str):
        raise invalid("prompt.prompt_string", "must be a text")
    texts = text.split(MEDIA_MARKER)
    if not isinstance(media, list) or len(media) != len(texts) - 1:
        raise invalid(field, f"must have one file for each {MEDIA_MARKER} of prompt_string")
    parts: list[object] = [texts[0]]
    for i, (file, after) in enumerate(zip(media, texts[1:], strict=True)):
        part = {"type": "audio" if _is_audio(file) else "image", "data": file}
        parts += [_media(part, f"{field}[{i}]"), after]
    return parts


def _is_audio(file: object) -> bool:
    """True if base64 text is a file of audio."""
    try:
        head = file[:64].strip()[:16] if isinstance(file, str) else ""
        return is_audio(binascii.a2b_base64(head.encode().translate(OF_URLS)))
    except ValueError:
        return False


def _mixed(data: object) -> object:
    """Return one prompt of llama-server: a text, or a list of token ids, texts, images and audio."""
    if isinstance(data, Mapping):
        if data.get("multimodal_data"):
            return _text_with_media(data.get("prompt_string"), data["multimodal_data"])
        data = data.get("prompt_string")
    if isinstance(data, list) and str in set(map(type, data)):
        return [part if isinstance(part, str) else _tokens([part])[0] for part in data]
    return _prompt(data)


def _all_mixed(data: object) -> list[object]:
    """Return the prompts of a request to llama-server; a list with a number in it is one prompt."""
    if not isinstance(data, list) or not data or {int, float} & set(map(type, data)):
        return [_mixed(data)]
    return [_mixed(one) for one in data]


def _check_schema(data: object) -> object:
    """Raise `Problem` for too many keys, before pydantic copies each of them."""
    if isinstance(data, Mapping) and len(data) > MAX_SCHEMA_BYTES // 2:
        raise invalid("json_schema", f"must be at most {MAX_SCHEMA_BYTES} bytes")
    return data


def _check_stop_tokens(data: object) -> object:
    if isinstance(data, list) and len(data) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"has {len(data)}, must have at most {MAX_STOP_TOKENS}")
    return data


def _check_biases(data: object) -> object:
    """Raise `Problem` for more than `MAX_BIASES` entries, before pydantic checks each of them."""
    if isinstance(data, Mapping) and len(data) > MAX_BIASES:
        raise invalid("logit_bias", f"has {len(data)} tokens, must have at most {MAX_BIASES}")
    return data


def _check_loras(data: object) -> object:
    """Raise `Problem` for too many entries, or fields of one, before pydantic checks each of them."""
    if isinstance(data, list | Mapping):
        if len(data) > MAX_LORAS:
            raise invalid("lora", f"has {len(data)}, must have at most {MAX_LORAS}")
        for i, each in enumerate(data):
            if isinstance(each, Mapping) and len(each) > 2:
                raise invalid(f"lora[{i}]", 'must be {"id": …, "scale": …}')
    return data


Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True), BeforeValidator(integral)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
_TOKEN_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT, _TOKENS = {"type": "string", "minLength": 1}, {**_TOKEN_LIST, "minItems": 1}
Tokens = Annotated[Any, BeforeValidator(_tokens), WithJsonSchema(_TOKEN_LIST)]
Prompt = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _TOKENS]}),
]
_MEDIA = {"type": "object", "properties": {"type": {"type": "string", "enum": [*TYPES]}}}
PromptWithMedia = Annotated[
    Any,
    BeforeValidator(_prompt_with_media),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _TOKENS,
                {"type": "array", "items": {"anyOf": [_TEXT, _MEDIA]}, "minItems": 1},
            ]
        }
    ),
]
Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _TOKENS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _TOKENS, "minItems": 1},
            ]
        }
    ),
]
_MIXED = {
    "type": "array",
    "items": {"anyOf": [_TEXT, {"type": "integer", "minimum": 0}]},
    "minItems": 1,
}
MixedPrompts = Annotated[
    Any,
    BeforeValidator(_all_mixed),
    WithJsonSchema({"anyOf": [_TEXT, _MIXED, {"type": "array", "items": _MIXED, "minItems": 1}]}),
]
# Validation stops at the first wrong item: a body may have a million, each with its own error.
Texts = Annotated[list[Text], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
# Names and scales, or llama-server's `[{"id": 0, "scale": 0.5}]`.
Loras = Annotated[
    dict[str, Number] | list[dict[str, Integer | Number]],
    BeforeValidator(_check_loras),
    Field(examples=[{"name": 1.0}]),
]
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

MAX_SEED = INTEGER_RANGES["seed"][1]
NO_LIMIT = INTEGER_RANGES["max_tokens"][1]  # of output tokens
SAMPLING_FIELDS = tuple(SamplingOptions.__annotations__)
# Types of the sampling fields that are not integers or numbers.
_TYPES: dict[str, Any] = {
    "dry_sequence_breakers": Texts,
    "samplers": Texts,
    "logit_bias": Biases,
    "stop": Text | Texts,
    "stop_token_ids": Annotated[Tokens, BeforeValidator(_check_stop_tokens)],
    "banned_strings": Text | Texts,
    "ignore_eos": Flag,
    "penalize_prompt": Flag,
    "speculation": Flag,
    "grammar": Text,
    "lark": Text,
    "json_schema": Annotated[dict[str, Any] | Text, BeforeValidator(_check_schema)],
    "regex": Text,
}
_LIMITS: dict[str, dict[str, Any]] = {
    "samplers": {"items": {"enum": list(SAMPLERS)}, "uniqueItems": True},
    "stop": {"minLength": 1, "maxItems": MAX_STOP_STRINGS},
    "banned_strings": {"minLength": 1, "maxItems": MAX_STOP_STRINGS},
    "dry_sequence_breakers": {"maxItems": MAX_BREAKERS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKENS},
    "logit_bias": {"maxProperties": MAX_BIASES, "propertyNames": {"pattern": "^[0-9]{1,6}$"}},
    "regex": {"minLength": 1},
    "grammar": {"description": "GBNF", "minLength": 1},
    "lark": {"description": "Lark, as llguidance reads it", "minLength": 1},
}
_DEFAULTS = SamplingParams()


def sampling_fields(without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for pydantic's `create_model`; null leaves the default."""
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
