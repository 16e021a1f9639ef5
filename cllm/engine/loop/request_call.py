"""Checks of a request before it is submitted.  Pure.

Each check raises a `RequestError` that names the field, the value and the limit.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

import anyio

from cllm.checks import (
    INT32_MAX,
    MAX_SEED,
    check_bool,
    check_int,
    check_lengths,
    check_tenant,
    check_timeout,
    closest,
    encode_text,
)
from cllm.engine.audio import Audio
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.core.detokenizer import Detokenizer
from cllm.engine.image import Image
from cllm.engine.lora import check_lora
from cllm.engine.media_source import MediaSource, NamedMedia
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.engine.vocabulary import OutputVocabulary, spelled_piece
from cllm.errors import (
    DeadlineError,
    InvalidRequestError,
    PromptTooLongError,
)

T = TypeVar("T")

# A text, token ids, or texts, images and audio in order.
Prompt = str | Sequence[int | str | Image | Audio]


def new_request_id() -> str:
    """Return an id that no other request has."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, eq=False)
class MixedPrompt:
    """Texts, images and audio, in order."""

    parts: tuple[str | NamedMedia, ...]

    @classmethod
    def of(cls, parts: Iterable[str | MediaSource]) -> MixedPrompt:
        """Return a prompt of these parts, with names for the media."""
        return cls(
            tuple(
                part if isinstance(part, str) else NamedMedia(part, f"prompt[{i}]")
                for i, part in enumerate(parts)
            )
        )


@dataclass(frozen=True, slots=True)
class Urgency:
    """Checked priority and timeout of a request.

    Attributes
    ----------
    priority : int
    timeout : float or None
        Seconds; None: no limit.
    begun_at : float
        Time of the call, as `time.perf_counter` in seconds.
    """

    priority: int = 0
    timeout: float | None = None
    begun_at: float = field(default_factory=time.perf_counter, compare=False)

    def __post_init__(self) -> None:
        error = InvalidRequestError
        priority = check_int("priority", self.priority, -(2**31), INT32_MAX, error)
        object.__setattr__(self, "priority", priority)
        object.__setattr__(self, "timeout", check_timeout(self.timeout, error))

    @property
    def deadline(self) -> float | None:
        """Time at which the request ends, as `begun_at`; None: no limit."""
        return None if self.timeout is None else self.begun_at + self.timeout

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, not negative; None: no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.perf_counter())

    async def prepared(self, call: Awaitable[T]) -> T:
        """Return the result of a call that prepares the request, such as tokenization.

        Raises
        ------
        DeadlineError
            The deadline passed before the call returned.
        """
        with anyio.move_on_after(self.left_s):
            return await call
        raise DeadlineError("the deadline passed before the text was tokenized")


@dataclass(frozen=True, slots=True)
class RequestCall:
    """Arguments of `Engine.stream`, checked as far as possible without the model.

    Attributes
    ----------
    first_scored : int or None
        See `GenerationRequest`.
    generated : tuple of int
        Output so far.
    lora : mapping or None
        Names and scales of adapters.
    seed : int or None
        Seed that replaces that of `params`; None: that of `params`, or any.
    ids_seed : str
        Seed of the ids of tool calls; empty: any.
    call_ids : tuple of str
        Ids of tool calls in `generated`, instead of those of the seed.
    excluded : tuple of int
        See `GenerationRequest`.
    parse_special : bool
        True if names of control tokens in a text are these tokens.
    tenant : str
        See `GenerationRequest`.
    given : tuple of str
        Fields of `params` that the caller set; the others are defaults.
    """

    prompt: str | tuple[int, ...] | MixedPrompt | ChatPrompt
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    request_id: str = field(default_factory=new_request_id)
    first_scored: int | None = None
    generated: tuple[int, ...] = ()
    lora: Mapping[str, float] | None = None
    seed: int | None = None
    ids_seed: str = ""
    call_ids: tuple[str, ...] = ()
    excluded: tuple[int, ...] = ()
    parse_special: bool = False
    tenant: str = ""
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        error = InvalidRequestError
        if not isinstance(self.params, SamplingParams):
            raise error("params", self.params, "a SamplingParams")
        urgency = Urgency(self.priority, self.timeout)
        checked: dict[str, object] = {
            "priority": urgency.priority,
            "timeout": urgency.timeout,
            "lora": check_lora(self.lora),
            "generated": token_ids_of("generated", self.generated),
            "excluded": token_ids_of("excluded", self.excluded),
        }
        if not isinstance(self.request_id, str) or not 1 <= len(self.request_id) <= 256:
            raise error("request_id", self.request_id, "a string of 1 to 256 characters")
        encode_text("request_id", self.request_id, error)
        if self.first_scored is not None:
            checked["first_scored"] = check_int(
                "first_scored", self.first_scored, 0, INT32_MAX, error
            )
        if self.seed is not None:
            checked["seed"] = check_int("seed", self.seed, 0, MAX_SEED, error)
        for name, value in checked.items():  # numbers as `int` and `float`, whatever was given
            object.__setattr__(self, name, value)
        check_bool("parse_special", self.parse_special, error)
        check_tenant("tenant", self.tenant, error)

    @classmethod
    def of(
        cls,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams | None,
        options: Mapping[str, Any],
        defaults: SamplingOptions,
    ) -> RequestCall:
        """Return a call from the arguments that all methods share.

        Parameters
        ----------
        options : mapping
            Options as in `PromptOptions`.
        defaults : SamplingOptions
            Sampling fields for those that are neither in `params` nor in `options`.

        Raises
        ------
        TypeError
            There are `params` and single sampling fields.
        InvalidRequestError
            Names the field, the value and the limit.
        """
        is_chat = isinstance(prompt, ChatPrompt)
        known = _CALL_OPTIONS if is_chat else _CALL_OPTIONS | {"parse_special"}
        sampling = {name: value for name, value in options.items() if name not in known}
        own = {name: value for name, value in options.items() if name in known}
        if params is not None and sampling:
            raise TypeError("params cannot be combined with single sampling fields")
        given = _SAMPLING_FIELDS if params is not None else tuple(sampling)
        if params is None:
            params = params_from({**defaults, **sampling})  # type: ignore[typeddict-item]
        if own.get("request_id") is None:
            own["request_id"] = new_request_id()
        own["generated"] = token_ids_of("generated", own.get("generated", ()))
        if isinstance(lora := own.get("lora"), Mapping):
            own["lora"] = dict(lora)
        call = cls(
            _constrained(prompt, params)
            if isinstance(prompt, ChatPrompt)
            else mixed_prompt_of(prompt) or check_prompt(prompt),
            params,
            given=given,
            **own,
        )
        call.check_generated()
        return call

    def check_generated(self) -> None:
        """Reject `generated` if it has `max_tokens` tokens or more, because the output is complete then."""
        n_generated, n_most = len(self.generated), self.params.max_tokens
        if n_most is not None and n_generated and n_generated >= n_most:
            limit = f"fewer tokens than max_tokens, which is {n_most}"
            raise InvalidRequestError("generated", n_generated, limit)


class ChatPromptOptions(TypedDict, total=False):
    """Options of a chat besides its messages; see `Engine.stream_chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    reasoning_effort: str | None
    reasoning_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None


class BatchOptions(SamplingOptions, total=False):
    """Keyword arguments of several requests: how they are queued, and sampling fields."""

    priority: int
    timeout: float | None
    lora: Mapping[str, float] | None
    tenant: str


class RequestOptions(BatchOptions, total=False):
    """Keyword arguments of every request that generates text; see `Engine.stream`."""

    request_id: str | None
    generated: Sequence[int]


class PromptOptions(RequestOptions, total=False):
    """Keyword arguments of a request with a raw prompt."""

    parse_special: bool


class ChatOptions(ChatPromptOptions, RequestOptions, total=False):
    """Keyword arguments of a chat: for its rendering, and those of every request."""


_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
_OPTIONS = (*ChatOptions.__annotations__, "parse_special")
_CALL_OPTIONS = RequestOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()


def chat_prompt_of(
    messages: Sequence[Mapping[str, Any]], options: ChatOptions | ChatPromptOptions
) -> tuple[ChatPrompt, dict[str, Any]]:
    """Return the chat, and the options that are not in `ChatPromptOptions`.

    Raises
    ------
    InvalidRequestError
        Names the message and the field.
    """
    given: dict[str, Any] = dict(options)
    known = ChatPromptOptions.__annotations__
    chat = {name: given.pop(name) for name in known.keys() & given.keys()}
    chat["template_kwargs"] = chat.pop("chat_template_kwargs", None)
    return ChatPrompt.of(messages, **chat), given


def _constrained(prompt: ChatPrompt, params: SamplingParams) -> ChatPrompt:
    """Return a chat with tools with the `json_schema` of `params`; reject other constraints beside tools."""
    if not prompt.tools or not isinstance(params, SamplingParams):
        return prompt
    for name in ("grammar", "lark", "regex"):
        if (given := getattr(params, name)) is not None:
            raise InvalidRequestError(name, given, "left out beside tools")
    if params.json_schema is None:
        return prompt
    return replace(prompt, json_schema=str(params.json_schema))


def params_from(sampling: SamplingOptions) -> SamplingParams:
    """Return sampling parameters from keyword arguments; an unknown name is rejected."""
    for name, value in sampling.items():
        if name not in _SAMPLING_FIELDS:
            near = closest(name, _OPTIONS)
            limit = f"one of {', '.join(sorted(_SAMPLING_FIELDS))}"
            if name in _OPTIONS:
                limit = f"left out: it is an option of {'chats' if name in ChatPromptOptions.__annotations__ else 'raw prompts'}"
            elif near is not None:
                limit = f"called {near!r}"
            raise InvalidRequestError(name, value, limit)
    return SamplingParams(**sampling)


def check_prompt(prompt: Prompt, field: str = "prompt") -> str | tuple[int, ...]:
    """Return the checked prompt, as text or as token ids."""
    if isinstance(prompt, str):
        return prompt
    if mixed_prompt_of(prompt) is not None:
        raise InvalidRequestError(
            field, "with an image or audio", "a string or a sequence of token ids"
        )
    return token_ids_of(field, prompt, "a string or a sequence of token ids")


def mixed_prompt_of(prompt: object) -> MixedPrompt | None:
    """Return a prompt with images or audio as its parts; None if it has none.

    Raises
    ------
    InvalidRequestError
        There are images or audio, and something else than texts, images and audio.
    """
    if isinstance(prompt, MediaSource):
        return MixedPrompt((NamedMedia(prompt, "prompt"),))
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return None
    # The parts of a prompt of token ids, perhaps many, have one type.
    if not any(issubclass(kind, MediaSource) for kind in set(map(type, prompt))):
        return None
    for part in prompt:
        if not isinstance(part, str | MediaSource):
            raise InvalidRequestError("prompt", part, "texts, images and audio")
    return MixedPrompt.of(prompt)


def token_ids_of(
    field: str, ids: object, limit: str = "a sequence of token ids"
) -> tuple[int, ...]:
    """Return token ids, checked as far as possible without a vocabulary."""
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
        raise InvalidRequestError(field, ids, limit)
    if ids and isinstance(ids[0], str):
        raise InvalidRequestError(field, ids[0], "token ids, or one text that is in no list")
    if (
        set(map(type, ids)) <= {int}
        and min(ids, default=0) >= 0
        and max(ids, default=0) <= INT32_MAX
    ):
        return tuple(ids)  # as fast as possible: there may be many, and the event loop waits
    return tuple(check_int(field, token, 0, INT32_MAX, InvalidRequestError) for token in ids)


def check_length(text: str, n_ctx: int, field: str = "prompt") -> None:
    """Reject a text before it is tokenized.

    Raises
    ------
    PromptTooLongError
        The text has more than 64 characters per token of the context.
    TooMuchTextError
        The text has more than 1 MiB.
    """
    check_lengths([text], n_ctx, field)


def check_tokens(
    tokens: tuple[int, ...],
    params: SamplingParams,
    n_ctx: int,
    n_vocab: int,
    generated: tuple[int, ...] = (),
) -> None:
    """Reject an empty prompt, too many tokens for the context, and token ids outside the vocabulary.

    The prompt is `tokens` with `generated` after it.  Token ids of `params` are checked, too.
    """
    if not tokens:
        raise InvalidRequestError("prompt", "", "at least one token")
    if (n_tokens := len(tokens) + len(generated)) > n_ctx:
        raise PromptTooLongError(n_tokens, n_ctx)
    for name, ids in (
        ("prompt", tokens),
        ("generated", generated),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
    ):
        if ids and max(ids) >= n_vocab:
            raise InvalidRequestError(name, max(ids), f"token ids 0 to {n_vocab - 1}")


def texts_told(
    generated: tuple[int, ...],
    params: SamplingParams,
    vocabulary: OutputVocabulary,
    *,
    spelled: Mapping[int, bytes],
    strips_space: bool,
) -> list[str]:
    """Return the text that the reader of an output received for each of these tokens.

    Raises
    ------
    InvalidRequestError
        One of the tokens ends the output.
    """
    detokenizer, texts = Detokenizer(params.stop, strips_space=strips_space), []
    for token in generated:
        is_end = vocabulary.is_eog(token) or token in params.stop_token_ids
        if not is_end:
            texts.append(detokenizer.push(spelled_piece(spelled, vocabulary, token)))
        if is_end or detokenizer.stop_match is not None:
            raise InvalidRequestError("generated", token, "tokens of an output that has not ended")
    return texts
