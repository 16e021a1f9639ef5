"""The bodies of requests.  Types are checked here, ranges where the values are used.

The sampling fields are those of `SamplingParams`, with its names.  Fields of other servers that have no
effect here are accepted and ignored (`HARMLESS`, `NEUTRAL`).  Any other name is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from cllm import InvalidRequestError, SamplingOptions, SamplingParams
from cllm.checks import closest
from cllm.server.bodies.dialects import translated
from cllm.server.bodies.fields import (
    SAMPLING_FIELDS,
    Flag,
    Integer,
    Loras,
    Messages,
    MixedPrompts,
    Number,
    Objects,
    Prompt,
    Prompts,
    PromptWithMedia,
    ResponseFormat,
    Text,
    Texts,
    Tokens,
    sampling_fields,
)
from cllm.server.http.problems import invalid

# Fields of other servers that have no effect here.
HARMLESS = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "prediction",
        "cache_prompt",
        "id_slot",
        "return_tokens",
        "timings_per_token",
        "n_keep",
        "n_cache_reuse",
        "return_progress",
        "reasoning_format",
        "spaces_between_special_tokens",
        "keep_alive",
        "session_id",
        "chat_id",
        "conversation_id",
        "request_id",
        "cache_salt",
        "cache_control",
        "provider",
        "transforms",
        "models",
        "route",
        "usage",
        "plugins",
        "web_search_options",
        "moderation",
        "prompt_cache_options",
        "tool_stream",
        "features",
        "parallel_function_calling",
        "extra_headers",
    ]
)
# Fields that change answers of other servers, with the accepted values, which change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "n_indent": (None, 0),
    "t_max_predict_ms": (None, 0, -1),
    "thinking_forced_open": (None, False),
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "repetition_penalty": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "echo": (None, False),
    "include_reasoning": (None, True),
    "return_token_ids": (None, False),
    "reasoning_in_content": (None, False),
    "parse_tool_calls": (None, True),
    "add_special_tokens": (None, True),
    "safe_prompt": (None, False),
    "top_a": (None, 0),
    "n_probs": (None, 0),
    "extra_body": (None, {}),
    "audio": (None,),
}


# Fields of other servers, with the field or option that this server has instead.
HINTS = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "repetition_penalty": "repeat_penalty",
    "typ_p": "typical_p",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "structured_outputs": "json_schema, regex, grammar or lark",
    "functions": "tools",
    "function_call": "tool_choice",
    "enable_thinking": "chat_template_kwargs.enable_thinking or reasoning_effort",
    "thinking": "reasoning_effort",
    "thinking_budget": "reasoning_budget",
    "thinking_budget_tokens": "reasoning_budget",
    "chat_template": "--chat-template when the server is started",
    "n_probs": "logprobs",
}


MAX_RESPONSE_FIELDS = 256  # each is looked up in each output; an answer has about 80
PARSE_SPECIAL = "Parse the names of control tokens in a prompt as these tokens"


class Body(BaseModel):
    """Base of all bodies."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", protected_namespaces=())
    is_optional: ClassVar[bool] = False  # True: a request without a body has an empty one
    harmless: ClassVar[frozenset[str]] = HARMLESS
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _leave_aside(cls, data: object) -> object:
        """Drop fields without effect, and reject the first unknown one by name."""
        if not isinstance(data, Mapping):
            return data
        data = translated(data, cls.model_fields)
        for name in data:
            if name in cls.model_fields or name in cls.harmless or data[name] is None:
                continue
            if name in cls.neutral and name in HINTS and data[name] not in cls.neutral[name]:
                raise invalid(name, f"is not known: use {HINTS[name]}")
            if name not in cls.neutral:
                hint = ""
                if name in HINTS:
                    hint = f": use {HINTS[name]}"
                elif (near := closest(str(name)[:80], cls.model_fields)) is not None:
                    hint = f": did you mean {near}?"
                raise invalid(str(name)[:80], f"is not known{hint}")
            if data[name] not in cls.neutral[name]:
                raise invalid(name, "is not supported yet")
        return {
            name: value
            for name, value in data.items()
            # null is like an absent field: many clients send it for fields that are not set.
            if name in cls.model_fields
            and (value is not None or cls.model_fields[name].is_required())
        }


class Queued(Body):
    """Base of requests that wait in the queue."""

    priority: Integer = Field(0, description="Lower is more urgent")
    tenant: Text = Field(
        "", description="Tenant that the request counts for; the header X-Tenant overrides it"
    )

    @property
    def turn(self) -> dict[str, Any]:
        """Return the arguments of `Engine.stream` about the queue."""
        return {"priority": self.priority, "tenant": self.tenant}


class _ModelRequest(Queued):
    model: Text | None = None
    lora: Loras | None = Field(
        None,
        description="LoRA adapters: names and scales, or llama-server's list of `id` and `scale`",
    )
    timeout: Number | None = Field(None, description="Seconds from submission to the deadline")

    @property
    def turn(self) -> dict[str, Any]:
        """See `Queued`."""
        return {**super().turn, "timeout": self.timeout}


class _Request(_ModelRequest):
    stream: Flag | None = False


class ChatOptionFields(_Request):
    """Options of a chat."""

    tools: Objects | None = None
    tool_choice: Text | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    parallel_tool_calls: Flag | None = None
    reasoning_effort: Text | None = None
    reasoning_budget: Integer | None = Field(None, description="Tokens that the model may think")


CHAT_OPTIONS = ChatOptionFields.model_fields.keys() - _Request.model_fields.keys()


class GenerateFields(ChatOptionFields):
    """`POST /generate`."""

    prompt: PromptWithMedia | None = Field(
        None, description="Text, token ids, or texts, images and audio", examples=["1+1="]
    )
    messages: Messages | None = Field(None, description="A chat, in place of a prompt")
    parse_special: Flag = Field(True, description=PARSE_SPECIAL)
    generated: Tokens = Field((), description="Token ids of the output's beginning, to continue")
    return_prompt_token_ids: Flag = Field(False, description="Return the token ids of the prompt")


GenerateBody: Any = create_model(
    "GenerateBody", __base__=GenerateFields, __doc__="A request.", **sampling_fields()
)


class ScoreBody(_ModelRequest):
    """`POST /generate/score`."""

    prompt: Prompt = Field(description="Text, or token ids", examples=["1+1="])
    continuation: Prompt = Field(description="Text, or token ids", examples=["2"])


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    harmless: ClassVar[frozenset[str]] = frozenset(["continuous_usage_stats"])

    include_usage: Flag = False
    include_obfuscation: Flag = False


Choices = Annotated[Integer, Field(json_schema_extra={"minimum": 1}, examples=[1])]


class CompletionFields(_Request):
    """`POST /v1/completions`."""

    prompt: Prompts
    parse_special: Flag = Field(True, description=PARSE_SPECIAL)
    n: Choices | None = 1
    echo: Flag | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Integer | None = None
    response_format: ResponseFormat | None = None


CompletionBody: Any = create_model(
    "CompletionBody",
    __base__=CompletionFields,
    __doc__="A completion.",
    **sampling_fields(without=("prompt_logprobs",)),
)


class LlamaServerFields(_Request):
    """Fields that `/completion` and `/infill` share."""

    harmless: ClassVar[frozenset[str]] = HARMLESS | {
        "t_max_prompt_ms",
        "n_discard",
        "sse_ping_interval",
        "verbose",
        "backend_sampling",
    }
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL | {
        "post_sampling_probs": (None, False)
    }

    n_predict: Integer | None = Field(None, description="As `max_tokens`; 0: only the prompt")
    n_cmpl: Integer | None = Field(None, description="Outputs of each prompt")
    n: Choices | None = None
    n_probs: Integer | None = Field(None, description="As `logprobs`")
    return_tokens: Flag = False
    response_fields: Annotated[Texts, Field(max_length=MAX_RESPONSE_FIELDS)] | None = Field(
        None, description="Fields to return; inner ones as `outer/inner`", examples=[["content"]]
    )
    n_indent: Integer = Field(
        0, description="Indent of each line but the first; a line with less ends the output"
    )
    t_max_predict_ms: Integer = Field(
        0, description="Milliseconds of output after which a line break ends it; 0: never"
    )


class LlamaServerCompletionFields(LlamaServerFields):
    """`POST /completion`."""

    prompt: MixedPrompts


LlamaServerCompletionBody: Any = create_model(
    "LlamaServerCompletionBody",
    __base__=LlamaServerCompletionFields,
    __doc__="A completion, as llama-server has it.",
    **sampling_fields(without=("prompt_logprobs",)),
)


class InfillFields(LlamaServerFields):
    """`POST /infill`."""

    input_prefix: Text
    input_suffix: Text
    input_extra: Objects = Field(
        [], description="Parts of other files: `filename` and `text`, the nearest last"
    )
    prompt: Text = Field("", description="Beginning of the text in the gap, which is continued")


InfillBody: Any = create_model(
    "InfillBody",
    __base__=InfillFields,
    __doc__="Text around a gap.",
    **sampling_fields(without=("prompt_logprobs",)),
)


class ChatFields(ChatOptionFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    n: Choices | None = 1
    stream_options: StreamOptions | None = None
    max_completion_tokens: Integer | None = None
    response_format: ResponseFormat | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None


ChatBody: Any = create_model(
    "ChatBody",
    __base__=ChatFields,
    __doc__="A chat.",
    **sampling_fields(without=("logprobs", "prompt_logprobs")),
)


class TokenizeBody(Body):
    """`POST /tokenize`, as llama-server has it, or as vLLM has it: with a `prompt`."""

    content: Text | None = None
    add_special: Flag = False
    parse_special: Flag = True
    with_pieces: Flag = False
    prompt: Text | None = None
    add_special_tokens: Flag = True


class DetokenizeBody(Body):
    """`POST /detokenize`, as llama-server has it."""

    tokens: Tokens


class Constraint(NamedTuple):
    """Constraint of an output, as its client states it.

    Attributes
    ----------
    changes : mapping
        Sampling parameters; empty for text.
    names : mapping
        The client's names of these parameters, for errors.
    """

    changes: dict[str, Any]
    names: dict[str, str]


def sampling_of(
    body: BaseModel,
    defaults: SamplingOptions,
    names: Callable[[str], str] = str,
    **changes: Any,
) -> SamplingParams:
    """Return the sampling parameters of a body; missing fields and null have the defaults.

    Parameters
    ----------
    defaults : mapping
        Defaults of the model.
    names : callable
        Returns the client's name of a parameter, for errors.
    **changes
        Parameters that replace those of the body.

    Raises
    ------
    InvalidRequestError
        Names the field, the value and the limit.
    """
    values: dict[str, Any] = dict(defaults)
    values |= {
        name: value
        for name in SAMPLING_FIELDS
        if (value := getattr(body, name, None)) is not None and name in body.model_fields_set
    }
    values.update(changes)
    if "logit_bias" in values:  # llama-server: false bans a token
        values["logit_bias"] = {
            token: float("-inf") if bias is False else bias
            for token, bias in values["logit_bias"].items()
        }
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise type(error)(names(error.field), error.value, error.limit) from None


def constraint_of(response_format: object, field: str = "response_format") -> Constraint:
    """Return the constraint that a body's `response_format`, `text.format` or `output_config.format` states.

    A keyword of a schema that cannot be enforced is ignored, unless the format is strict, as with OpenAI.
    """
    if response_format is None:
        return Constraint({}, {})
    if not isinstance(response_format, Mapping):
        raise invalid(field, "must be an object")
    kind = response_format.get("type")
    if kind == "text":
        return Constraint({}, {})
    if kind == "json_object":
        schema = response_format.get("schema") or {"type": "object"}
        return Constraint({"json_schema": lenient(schema)}, {"json_schema": f"{field}.schema"})
    if kind == "json_schema":
        # Chat Completions have the schema in an object of its own; Responses, Anthropic and llama-server have it here.
        inner: object = response_format
        place = f"{field}.schema"
        is_here = response_format.get("schema") is not None or field != "response_format"
        if not is_here or "json_schema" in response_format:
            inner, place = response_format.get("json_schema"), f"{field}.json_schema.schema"
        stated = inner if isinstance(inner, Mapping) else {}
        if not isinstance(schema := stated.get("schema"), Mapping):
            raise invalid(place, "must be an object")
        made = dict(schema) if stated.get("strict") is True else lenient(schema)
        return Constraint({"json_schema": made}, {"json_schema": place})
    raise invalid(f"{field}.type", "must be text, json_object or json_schema")


def lenient(schema: object) -> object:
    """Return a schema in which keywords that cannot be enforced are ignored."""
    if not isinstance(schema, Mapping):
        return schema  # the engine rejects it
    options = schema.get("x-guidance")
    given = options if isinstance(options, Mapping) else {}
    return {**schema, "x-guidance": {"lenient": True, **given}}
