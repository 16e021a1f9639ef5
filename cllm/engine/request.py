"""One request and what it gives: frozen values, made by the engine, no behaviour."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any

from cllm.engine.constraint import CompiledConstraint
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import FileContent
from cllm.engine.lora import NO_LORA, LoraInfo, LoraUse
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import ClosedError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an output thinks before it answers.

    Attributes
    ----------
    start, ends : bytes, tuple of bytes
        What begins it, empty if it begins by itself; what ends it.
    is_open : bool
        The prompt has begun it.
    budget : int or None
        Tokens that it may have.
    ending : tuple of int
        Tokens that end it, as the template writes it.
    """

    start: bytes
    ends: tuple[bytes, ...]
    is_open: bool
    budget: int | None
    ending: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What the KV cache held for a sequence, in host memory.

    Attributes
    ----------
    data : bytes
        llama.cpp's, behind a checksum: of the same model, library and context parameters.
    n_tokens : int
        Positions that it holds, from 0 on.
    """

    data: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One request as the engine works on it.

    Attributes
    ----------
    serial : int
        Order of arrival.
    submitted_at, deadline : float
        Seconds of `time.perf_counter`; the deadline may be None.
    priority : int
        Lower is more urgent.
    first_scored : int or None
        The first prompt token whose log probability is wanted, counted from 1 on; None: of none.
    strips_space : bool
        Whether the output begins a text, in a vocabulary that puts a space before a text.
    constraint : CompiledConstraint or None
        The compiled constraint of `params`, or of the calls that the chat must make.
    spelled : mapping of int to bytes
        Control tokens that are text in this output.
    thinking : Thinking or None
        What its constraint begins after, and how long that may take.
    fingerprint : str
        Of the engine; see `Completion`.
    generated_token_ids : tuple of int
        The beginning of its output, which was sampled elsewhere: the request goes on after it.
    resamples : bool
        Whether its sampler has to see the logits that these were sampled from.
    seed : int or None
        Of what is drawn: that of `params`, or one that was drawn itself, so that it can be drawn again;
        None: any.
    n_unread : int
        Deltas of before that its reader has not taken yet.
    lora : LoraUse
        The adapters that compute it.
    state : SequenceState or None
        What the KV cache held of its first tokens when it was suspended.
    excluded : tuple of int
        What the first token after the generated ones must not be.
    tenant : str
        The tenant that it counts for.
    """

    request_id: str
    serial: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    submitted_at: float
    deadline: float | None
    first_scored: int | None = None
    strips_space: bool = False
    constraint: CompiledConstraint | None = None
    spelled: Mapping[int, bytes] = field(default_factory=dict)
    thinking: Thinking | None = None
    fingerprint: str = ""
    generated_token_ids: tuple[int, ...] = ()
    resamples: bool = False
    seed: int | None = None
    n_unread: int = 0
    lora: LoraUse = NO_LORA
    state: SequenceState | None = None
    excluded: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held a token to be, before any sampler.

    Attributes
    ----------
    text : str
        As the vocabulary spells it: a control token by its name, U+FFFD for a part of a character.
    bytes : bytes
        What it adds to a text that it stands in; nothing for a control token.
    logprob : float
        Natural logarithm of its probability; -inf if it had none.
    top : tuple of TokenLogprob
        The most likely tokens in its place, itself among them if it was one, most likely first.
    """

    token_id: int
    text: str
    bytes: builtins.bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a call of a tool.

    Attributes
    ----------
    index : int
        Which call of the answer, from 0 on.
    id, name : str or None
        With the first piece of a call; None with the others.
    arguments : str
        The next piece of the JSON text of its arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes
    ----------
    arguments : str
        JSON text: an object, unless the output was cut off inside of it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one tick added to an output.

    Attributes
    ----------
    text : str
        Whole characters that can no longer change; may be empty.  Of a chat: what a reader is shown.
    token_ids : tuple of int
        Every sampled token, the end-of-generation token included.
    finish_reason : FinishReason or None
        None until the last delta.
    stop_reason : str, int or None
        For `stop`: the stop string or the token id; for `length`: "max_tokens" or "context".
    logprobs : tuple of TokenLogprob or None
        One for each of `token_ids`; None unless asked for.
    reasoning : str
        Of a chat: what the model thinks.
    tool_calls : tuple of ToolCallDelta
        Of a chat: pieces of calls.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes
    ----------
    n_prompt, n_cached : int
        Given, and those of them that were taken from a shared prefix.
    n_output, n_reasoning : int
        Sampled, and those of them that are reasoning.
    n_drafted, n_accepted : int
        Computed as guesses of the output (speculation), and those of them that were right.
    """

    n_prompt: int
    n_cached: int
    n_output: int
    n_reasoning: int = 0
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request in seconds.

    Attributes
    ----------
    queued_s, prefill_s, decode_s, total_s : float
        Submit to admission, admission to the first token, first to last token, submit to end.
    ttft_s : float or None
        Submit to the first token; None if there was none.
    itl_p50_s, itl_max_s : float or None
        Between tokens: median and largest; None with fewer than two tokens.
    n_preemptions : int
    n_moves : int
        How often it was taken up on another server, or on another connection (`cllm.client`).
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    total_s: float
    itl_p50_s: float | None
    itl_max_s: float | None
    n_preemptions: int
    n_moves: int = 0

    @classmethod
    def of(
        cls,
        submitted: float,
        admitted: float,
        tokens: Sequence[float],
        ended: float,
        n_preemptions: int = 0,
    ) -> Timings:
        """From when things happened; `tokens` are the times of each."""
        first = tokens[0] if tokens else ended
        gaps = [later - earlier for earlier, later in pairwise(tokens)]
        return cls(
            queued_s=admitted - submitted,
            prefill_s=first - admitted,
            decode_s=tokens[-1] - first if tokens else 0.0,
            ttft_s=first - submitted if tokens else None,
            total_s=ended - submitted,
            itl_p50_s=median(gaps) if gaps else None,
            itl_max_s=max(gaps, default=None),
            n_preemptions=n_preemptions,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """All of one output; for a request that ended early, what there was of it.

    Of one that went on after `generated` tokens: what came after them, but all of its calls.

    Attributes
    ----------
    logprobs : tuple of TokenLogprob or None
        One for each of `token_ids`; None unless asked for.
    prompt_logprobs : tuple or None
        One for each of `prompt_token_ids`, None for the first, which follows nothing; None unless
        asked for.  What there is of it, if the request ended before its prompt was computed.
    reasoning : str
        Of a chat: what the model thought.
    tool_calls : tuple of ToolCall
        Of a chat.
    fingerprint : str
        Of model, library, CPU features and settings: while it is the same, a `deterministic` engine
        gives the same answer to the same request.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    fingerprint: str = ""

    def as_message(self) -> dict[str, Any]:
        """The assistant's message, as OpenAI has it, for the next turn of a chat."""
        content = self.text if self.text or not self.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt that a chat became: its text, and its tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is, token by token.

    Attributes
    ----------
    token_ids : tuple of int
        Of the continuation.
    logprobs : tuple of float
        Of each, after the prompt and those before it.
    total : float
        Their sum.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float

    @classmethod
    def of(cls, completion: Completion) -> Score:
        """The score of a request that was made to be scored.

        Raises
        ------
        ClosedError
            It ended before it was.
        """
        scored = [score for score in completion.prompt_logprobs or () if score is not None]
        if len(completion.prompt_logprobs or ()) < len(completion.prompt_token_ids):
            raise ClosedError("the engine was closed")
        logprobs = tuple(score.logprob for score in scored)
        return cls(tuple(score.token_id for score in scored), logprobs, sum(logprobs))


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The control tokens with which a model fills in text: "fill in the middle".

    Attributes
    ----------
    prefix, suffix, middle : int
        Come before the text that is there before the gap, after it, and in it.
    begin : int or None
        Begins a prompt.
    repository, file : int or None
        Come before a repository's name, and before a file's name and text.
    """

    prefix: int
    suffix: int
    middle: int
    begin: int | None = None
    repository: int | None = None
    file: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model.

    Attributes
    ----------
    size_bytes : int
        Of all tensors.
    chat_template, tool_chat_template : str or None
        Jinja; the second for chats with tools, if the model has another for them.
    n_ctx : int
        Positions that one sequence can have in this engine.
    sampling : mapping
        Sampling fields that a request has where it says nothing.
    fingerprint : str
        What `Completion.fingerprint` is.
    state_key : str
        The same wherever what a sequence holds in the KV cache can be put back.
    generates : bool
        False of an encoder, and where only vectors are wanted.
    embedding : EmbeddingInfo or None
        What it does with whole texts; None where neither its file nor the settings name a pooling.
    rank_template : str or None
        The text in which a reranker wants `{query}` and `{document}`, if it wants more than both.
    loras : tuple of LoraInfo
        The adapters that are loaded.
    fim : FimTokens or None
        None of a model that does not fill in text.
    bos_token, eos_token : str or None
        Text of the token that begins a prompt, and of the one that ends an answer; None without one.
    files : tuple of FileContent
        What was loaded: the model's file or files, adapters, the models that draft and embed.
    """

    path: str
    name: str
    description: str
    architecture: str
    n_params: int
    size_bytes: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    chat_template: str | None
    tool_chat_template: str | None
    n_ctx: int
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    fingerprint: str = ""
    state_key: str = ""
    generates: bool = True
    embedding: EmbeddingInfo | None = None
    rank_template: str | None = None
    loras: tuple[LoraInfo, ...] = ()
    fim: FimTokens | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    files: tuple[FileContent, ...] = ()
