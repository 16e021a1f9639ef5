"""The bodies of requests.  Types are checked here, ranges where the values are used.

The sampling fields are those of `SamplingParams`, by its names; what OpenAI or llama-server know
besides, and what changes nothing here, is taken and left aside.  Any other name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from cllm import SamplingOptions, SamplingParams
from cllm.server.problems import invalid

Number = Annotated[float, Field(strict=True)]
Integer = Annotated[int, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]

# As JSON has them; `grammar` only where the server allows it, `logprobs` means different things.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("max_tokens", "seed", "prompt_logprobs"), Integer | None),
    **dict.fromkeys(
        (
            "min_tokens", "top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n",
            "mirostat", "min_keep",
        ),
        Integer,
    ),
    "dry_sequence_breakers": list[Text],
    "samplers": list[Text],
    "logit_bias": dict[int, float | Literal[False]],
    "stop": Text | list[Text] | None,
    "stop_token_ids": list[Integer],
    "ignore_eos": Flag,
    "logprobs": Integer | None,
    "grammar": Text | None,
    "json_schema": dict[str, Any] | Text | None,
    "regex": Text | None,
}  # fmt: skip
SAMPLING_FIELDS = tuple(SamplingOptions.__annotations__)

# Names that others know and that change nothing here.
HARMLESS = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
        "parallel_tool_calls",
        "prediction",
        "modalities",
        "suffix",
        "best_of",
        "cache_prompt",
        "id_slot",
        "return_tokens",
        "timings_per_token",
        "n_keep",
        "n_indent",
        "n_cache_reuse",
        "t_max_predict_ms",
        "return_progress",
        "reasoning_format",
        "thinking_forced_open",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ]
)


class Body(BaseModel):
    """What every body has in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _leave_aside(cls, data: object) -> object:
        """Drop what changes nothing."""
        if not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if name not in HARMLESS}


def _sampling_fields(without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: (_TYPES.get(name, Number) | None, None)
        for name in SAMPLING_FIELDS
        if name not in without
    }


class _Request(Body):
    stream: Flag = False
    timeout: Number | None = Field(None, description="Seconds from submission")
    priority: Integer = Field(0, description="Lower is more urgent")


class GenerateFields(_Request):
    """`POST /generate`."""

    prompt: Text | list[Integer] = Field(description="Text, or token ids", examples=["1+1="])


GenerateBody: Any = create_model(
    "GenerateBody", __base__=GenerateFields, __doc__="A request.", **_sampling_fields()
)


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: Flag = False
    include_obfuscation: Flag = False


class CompletionFields(_Request):
    """`POST /v1/completions`."""

    model: Text | None = None
    prompt: Text | list[Integer] | list[Text] | list[list[Integer]]
    n: Integer = 1
    echo: Flag = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Integer | None = None
    response_format: dict[str, Any] | None = None


CompletionBody: Any = create_model(
    "CompletionBody", __base__=CompletionFields, __doc__="A completion.", **_sampling_fields()
)


class ChatFields(_Request):
    """`POST /v1/chat/completions`."""

    model: Text | None = None
    messages: list[dict[str, Any]]
    n: Integer = 1
    stream_options: StreamOptions | None = None
    max_completion_tokens: Integer | None = None
    response_format: dict[str, Any] | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True


ChatBody: Any = create_model(
    "ChatBody",
    __base__=ChatFields,
    __doc__="A chat.",
    **_sampling_fields(without=("logprobs", "prompt_logprobs")),
)


class TokenizeBody(Body):
    """`POST /tokenize`, as llama-server has it."""

    content: Text
    add_special: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeBody(Body):
    """`POST /detokenize`, as llama-server has it."""

    tokens: list[Integer] = Field(max_length=1 << 20)


def sampling_of(body: BaseModel, *, allow_grammar: bool, **changes: Any) -> SamplingParams:
    """The sampling parameters in a body; what it leaves out, or null, has its default.

    Raises
    ------
    Problem, InvalidRequestError
        Names the field.
    """
    values = {
        name: value
        for name in SAMPLING_FIELDS
        if (value := getattr(body, name, None)) is not None and name in body.model_fields_set
    }
    values.update(changes)
    if "grammar" in values and not allow_grammar:
        raise invalid("grammar", "raw grammars are off; start the server with --allow-grammar")
    if "logit_bias" in values:  # llama-server: false bans a token
        values["logit_bias"] = {
            token: float("-inf") if bias is False else bias
            for token, bias in values["logit_bias"].items()
        }
    return SamplingParams(**values)


def apply_response_format(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """OpenAI's `response_format` as sampling parameters."""
    if response_format is None:
        return {}
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": response_format.get("schema") or {"type": "object"}}
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise invalid("response_format.json_schema.schema", "must be an object")
        return {"json_schema": dict(schema)}
    raise invalid("response_format.type", "must be text, json_object or json_schema")
