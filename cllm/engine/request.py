"""One request and what it gives: frozen values, made by the engine, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cllm.engine.constraint import CompiledConstraint
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import FileContent
from cllm.engine.lora import NO_LORA, LoraInfo, LoraUse
from cllm.engine.output import Completion
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import ClosedError


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
    """KV state of a sequence, in host memory.

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
class RenderedPrompt:
    """The prompt that a chat became: its text, and its tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Log probability of a continuation, token by token.

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
