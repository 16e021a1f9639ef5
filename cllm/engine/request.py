"""One request and what it gives: frozen values, made by the engine, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cllm.engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


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
    """

    request_id: str
    serial: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    submitted_at: float
    deadline: float | None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one tick added to an output.

    Attributes
    ----------
    text : str
        Whole characters that can no longer change; may be empty.
    token_ids : tuple of int
        Every sampled token, the end-of-generation token included.
    finish_reason : FinishReason or None
        None until the last delta.
    stop_reason : str, int or None
        For `stop`: the stop string or the token id; for `length`: "max_tokens" or "context".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: given, taken from a shared prefix, sampled."""

    n_prompt: int
    n_cached: int
    n_output: int


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
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float | None
    total_s: float
    itl_p50_s: float | None
    itl_max_s: float | None
    n_preemptions: int


@dataclass(frozen=True, slots=True)
class Completion:
    """All of one output; for a request that ended early, what there was of it."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model.

    Attributes
    ----------
    size_bytes : int
        Of all tensors.
    n_ctx : int
        Positions that one sequence can have in this engine.
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
    n_ctx: int
