"""Output values: frozen dataclasses that an engine returns.

This module imports nothing of cllm, because the errors in `cllm.errors` carry these values.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

N_SHOWN = 200  # characters of a text that a `repr` has


class FinishReason(StrEnum):
    """Reason for the end of a request.

    `STOP`: an end-of-generation token, a stop token or a stop string.  `LENGTH`: `max_tokens` or a full
    context.  `TOOL_CALLS`: as `STOP`, after whole tool calls.  `ERROR`: the request failed; its stream raises.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token, before any sampler.

    Attributes
    ----------
    text : str
        Text in the vocabulary: a control token has its name, a part of a character is U+FFFD.
    bytes : bytes
        Bytes that the token adds to a text; empty for a control token.
    logprob : float
        Natural logarithm of the probability; -inf for 0.
    top : tuple of TokenLogprob
        The most likely tokens at this position, most likely first; they may include the token itself.
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
        Index of the call in the answer, from 0.
    id, name : str or None
        Set in the first piece of a call; None in the others.
    arguments : str
        Next piece of the JSON text of the arguments.
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
        JSON text of an object; incomplete if the output was cut off inside it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """A sampled token, and the text that became final with it.

    Attributes
    ----------
    text : str
        Whole characters that can no longer change; may be empty.  In a chat, the content without reasoning
        and calls.
    token_ids : tuple of int
        One token, perhaps an end-of-generation token.  Empty if the request ended without a token.
    finish_reason : FinishReason or None
        None until the last delta.
    stop_reason : str, int or None
        For `stop`: the stop string or the token id; for `length`: "max_tokens" or "context".
    logprobs : tuple of TokenLogprob or None
        One for each of `token_ids`; None unless asked for.
    reasoning : str
        In a chat: reasoning of the model.
    tool_calls : tuple of ToolCallDelta
        In a chat: pieces of calls.
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
        Prompt tokens, and how many of them were taken from a shared prefix.
    n_output, n_reasoning : int
        Sampled tokens, and how many of them are reasoning.
    n_drafted, n_accepted : int
        Drafted tokens that were computed (speculation), and how many of them were right.
    n_image_tokens, n_audio_tokens : int
        Prompt tokens that are rows of media, and of audio.
    """

    n_prompt: int
    n_cached: int
    n_output: int
    n_reasoning: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_image_tokens: int = 0
    n_audio_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request in seconds.

    Attributes
    ----------
    queued_s, prefill_s, decode_s, total_s : float
        From submission to admission, from admission to the first token, from the first to the last token,
        from submission to the end.
    ttft_s : float or None
        From submission to the first token; None without a token.
    itl_p50_s, itl_max_s : float or None
        Median and largest time between tokens; None with fewer than two tokens.
    n_preemptions : int
    n_moves : int
        Number of times that the stream continued on another server or connection (`cllm.client`).
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
        """Return the timings of a request; `tokens` are the times of each token."""
        first = tokens[0] if tokens else ended
        gaps = sorted(later - earlier for earlier, later in pairwise(tokens))
        n = len(gaps)  # without `statistics`, which takes longer to import than all of this
        return cls(
            queued_s=admitted - submitted,
            prefill_s=first - admitted,
            decode_s=tokens[-1] - first if tokens else 0.0,
            ttft_s=first - submitted if tokens else None,
            total_s=ended - submitted,
            itl_p50_s=(gaps[(n - 1) // 2] + gaps[n // 2]) / 2 if gaps else None,
            itl_max_s=gaps[-1] if gaps else None,
            n_preemptions=n_preemptions,
        )


def _cut(text: str) -> str:
    return text if len(text) <= N_SHOWN else text[:N_SHOWN] + "…"


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of a request; the partial output if it ended early.

    For a request with `generated` tokens it has only the output after them.  `tool_calls` also has the calls
    in those tokens.

    Attributes
    ----------
    prompt_token_ids : tuple of int
        Tokens of the prompt.  Each row of media is a negative number, which no other request takes as a
        token.
    logprobs : tuple of TokenLogprob or None
        One for each of `token_ids`; None unless requested.
    prompt_logprobs : tuple or None
        One for each of `prompt_token_ids`, with None for the first; None unless requested.  Shorter if the
        request ended before its prompt was computed.
    reasoning : str
        In a chat: reasoning of the model.
    tool_calls : tuple of ToolCall
        In a chat: the calls.
    fingerprint : str
        Short hash of model, library, CPU features and settings.  A `deterministic` engine with the same
        fingerprint gives the same answer to the same request.
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

    def __repr__(self) -> str:
        text = _cut(self.text)
        calls = "".join(f", {_cut(f'{call.name}({call.arguments})')}" for call in self.tool_calls)
        n_tokens = f"{self.usage.n_prompt} + {self.usage.n_output} tokens"
        return f"Completion({text!r}{calls}, {self.finish_reason.value!r}, {n_tokens})"

    def _repr_markdown_(self) -> str | None:
        """Return the text, and the calls as code, as Jupyter shows them; None, for the `repr`, if there are none."""
        calls = [f"```\n{call.name}({call.arguments})\n```" for call in self.tool_calls]
        return "\n\n".join(part for part in (self.text, *calls) if part) or None

    def as_message(self) -> dict[str, Any]:
        """Return the assistant's message in OpenAI's form, for the next turn of a chat."""
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
