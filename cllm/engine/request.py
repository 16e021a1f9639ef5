"""Frozen values that the engine makes: a request, and the description of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cllm.engine.constraint import CompiledConstraint
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import FileContent
from cllm.engine.lora import NO_LORA, LoraInfo, LoraUse
from cllm.engine.media import MediaInput
from cllm.engine.output import Completion, FinishReason
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import ClosedError, DeadlineError


@dataclass(frozen=True, slots=True)
class Thinking:
    """Form and limit of the reasoning before an answer.

    Attributes
    ----------
    start, ends : bytes, tuple of bytes
        Text that begins the reasoning (may be empty), and the texts that end it.
    is_open : bool
        True if the prompt ends inside the reasoning.
    budget : int or None
        Largest number of reasoning tokens; None: no limit.
    ending : tuple of int
        Tokens that end the reasoning, as the chat template writes them.
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
        Times by `time.perf_counter`, in seconds; a deadline of None means no limit.
    priority : int
        Lower is more urgent.
    first_scored : int or None
        Index of the first prompt token whose log probability is requested, at least 1; None: no token.
    strips_space : bool
        True if the output begins a text, and the vocabulary puts a space before texts.
    constraint : CompiledConstraint or None
        The compiled constraint of `params`, or of the calls that the chat must make.
    spelled : mapping of int to bytes
        Text of the control tokens that count as text in this output, by token id.
    thinking : Thinking or None
        Reasoning before the answer; the constraint begins after it.
    fingerprint : str
        Fingerprint of the engine; see `Completion`.
    generated_token_ids : tuple of int
        Beginning of the output, sampled before: the request continues after it.
    resamples : bool
        True if the sampler needs the logits from which `generated_token_ids` were sampled.
    seed : int or None
        Seed of the random numbers: that of `params`, or a random one that continuations use again.  None:
        the sampler chooses one.
    n_unread : int
        Number of earlier deltas that the reader has not taken.
    lora : LoraUse
        Adapters of the request.
    state : SequenceState or None
        KV state of the first tokens, saved when the request was suspended.
    excluded : tuple of int
        Tokens that must not be sampled first, directly after `generated_token_ids`.
    tenant : str
        Tenant of the request.
    media : tuple of MediaInput
        Images and audio of the prompt, in order.
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
    media: tuple[MediaInput, ...] = ()


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
        Natural logarithm of the probability of each token, after the prompt and the tokens before it.
    total : float
        Sum of `logprobs`.
    n_computed : int
        Tokens of the prompt and the continuation that were computed, and not in the prefix cache; 0 from a
        server.  Equal scores may differ in it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    n_computed: int = field(default=0, compare=False)

    @classmethod
    def of(cls, completion: Completion) -> Score:
        """Return the score from the completion of a scored request.

        Raises
        ------
        DeadlineError
            The deadline passed before the continuation was scored.
        ClosedError
            The request was cancelled, or the engine was closed, before the continuation was scored.
        """
        scored = [score for score in completion.prompt_logprobs or () if score is not None]
        if len(completion.prompt_logprobs or ()) < len(completion.prompt_token_ids):
            if completion.finish_reason is FinishReason.DEADLINE:
                raise DeadlineError("the deadline passed before the continuation was scored")
            raise ClosedError("the engine was closed")
        logprobs = tuple(score.logprob for score in scored)
        tokens = tuple(score.token_id for score in scored)
        usage = completion.usage
        return cls(tokens, logprobs, sum(logprobs), usage.n_prompt - usage.n_cached)


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
        Properties for vectors of texts; None if no pooling is named, or the model cannot compute vectors.
    rank_template : str or None
        Prompt of a reranker with `{query}` and `{document}`, if it has one.
    loras : tuple of LoraInfo
        Loaded adapters.
    fim : FimTokens or None
        Tokens for filling in text; None if the model has none.
    bos_token, eos_token : str or None
        Text of the token that begins a prompt, and of the token that ends an answer; None without one.
    files : tuple of FileContent
        Loaded files: of the model, the adapters, the models that draft and embed, and the projector.
    modalities : tuple of str
        Kinds of content that prompts may have: "text", "image", "audio".
    audio_sample_rate : int
        Samples a second of the audio that the model takes; 0 if it takes none.
    devices : tuple of str
        GPUs that compute, each as "NAME: DESCRIPTION"; empty if only processors do.
    tuned : mapping
        Fields of `EngineConfig` that tuning has changed: see `EngineConfig.tune`.
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
    modalities: tuple[str, ...] = ("text",)
    audio_sample_rate: int = 0
    devices: tuple[str, ...] = ()
    tuned: Mapping[str, bool | int] = field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{self.n_params:,} parameters, {self.size_bytes >> 20} MiB, n_ctx={self.n_ctx}"
        return f"ModelInfo({self.name or self.path!r}, {self.architecture}, {size})"
