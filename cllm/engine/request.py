"""One request and what it gives: frozen values, made by the engine, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cllm.engine.constraint import CompiledConstraint
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import FileContent
from cllm.engine.lora import NO_LORA, LoraInfo, LoraUse
from cllm.engine.output import Completion, FinishReason
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import ClosedError, DeadlineError


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an output thinks before it answers.

    Attributes
    ----------
    start, ends : bytes, tuple of bytes
        Text that begins the thought, empty if it needs none, and texts that end it.
    is_open : bool
        True if the prompt has begun the thought.
    budget : int or None
        Tokens of the thought at most.
    ending : tuple of int
        Tokens that end the thought, as the template writes it.
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
        llama.cpp's state after a checksum; for the same model, library and context parameters only.
    n_tokens : int
        Number of positions, from 0 on.
    """

    data: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request inside the engine.

    Attributes
    ----------
    serial : int
        Order of arrival.
    submitted_at, deadline : float
        Seconds of `time.perf_counter`; the deadline may be None.
    priority : int
        Lower is more urgent.
    first_scored : int or None
        Number of the first prompt token whose log probability is requested, from 1; None: of none.
    strips_space : bool
        True if the output begins a text, and the vocabulary puts a space before texts.
    constraint : CompiledConstraint or None
        The compiled constraint of `params`, or of the calls that the chat must make.
    spelled : mapping of int to bytes
        Control tokens that are text in this output.
    thinking : Thinking or None
        Thought after which the constraint begins, and its budget.
    fingerprint : str
        Fingerprint of the engine; see `Completion`.
    generated_token_ids : tuple of int
        Beginning of the output, sampled before: the request continues after it.
    resamples : bool
        True if the sampler needs the logits from which these were sampled.
    seed : int or None
        Seed of the random numbers: that of `params`, or a random one that is kept for continuations; None:
        any.
    n_unread : int
        Number of earlier deltas that the reader has not taken.
    lora : LoraUse
        Adapters of the request.
    state : SequenceState or None
        KV state of its first tokens from its suspension.
    excluded : tuple of int
        Tokens that must not follow the generated ones.
    tenant : str
        Tenant of the request.
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
    """Prompt of a chat: its text and its tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Log probability of a continuation, token by token.

    Attributes
    ----------
    token_ids : tuple of int
        Tokens of the continuation.
    logprobs : tuple of float
        Log probability of each token, after the prompt and the tokens before it.
    total : float
        Sum of `logprobs`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float

    @classmethod
    def of(cls, completion: Completion) -> Score:
        """Return the score from the completion of a scored request.

        Raises
        ------
        DeadlineError
            The deadline passed before the continuation was scored.
        ClosedError
            The engine was closed before.
        """
        scored = [score for score in completion.prompt_logprobs or () if score is not None]
        if len(completion.prompt_logprobs or ()) < len(completion.prompt_token_ids):
            if completion.finish_reason is FinishReason.DEADLINE:
                raise DeadlineError("the deadline passed before the continuation was scored")
            raise ClosedError("the engine was closed")
        logprobs = tuple(score.logprob for score in scored)
        return cls(tuple(score.token_id for score in scored), logprobs, sum(logprobs))


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Control tokens for filling in text ("fill in the middle").

    Attributes
    ----------
    prefix, suffix, middle : int
        Tokens before the text in front of the gap, behind it, and in it.
    begin : int or None
        Token that begins a prompt.
    repository, file : int or None
        Tokens before a repository's name, and before a file's name and text.
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
        Bytes of all tensors.
    chat_template, tool_chat_template : str or None
        Jinja templates; the second is for chats with tools, if the model has one.
    n_ctx : int
        Number of positions of one sequence in this engine.
    sampling : mapping
        Sampling fields of requests that leave them out.
    fingerprint : str
        Value of `Completion.fingerprint`.
    state_key : str
        Hash of everything that a KV state depends on.
    generates : bool
        False for an encoder, and for an `Embedder`.
    embedding : EmbeddingInfo or None
        Abilities with whole texts; None if neither the file nor the settings name a pooling.
    rank_template : str or None
        Prompt of a reranker with `{query}` and `{document}`, if it has one.
    loras : tuple of LoraInfo
        Loaded adapters.
    fim : FimTokens or None
        Tokens for filling in text; None if the model has none.
    bos_token, eos_token : str or None
        Text of the token that begins a prompt, and of the token that ends an answer; None without one.
    files : tuple of FileContent
        Loaded files: of the model, the adapters, and the models that draft and embed.
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
