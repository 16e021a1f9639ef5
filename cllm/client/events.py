"""Server-sent events of `POST /generate`, as the engine's values.  Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cllm.engine.completion_builder import CompletionBuilder
from cllm.engine.output import (
    Completion,
    FinishReason,
    TokenDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

LOWEST = -9999.0  # a server's stand-in for -inf, which is not JSON
DONE = b"[DONE]"


class EventReader:
    """Decoder from bytes to the data of whole events; an incomplete event is kept until its rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes, and yield the data of each event that is now complete."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            lines = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
            if lines:
                yield b"\n".join(lines)


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in the data of an event.

    Raises
    ------
    ValueError
        The data is not JSON, or not an object.
    """
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("the event is not a JSON object of cllm")
    return value


def delta_of(event: Mapping[str, Any]) -> TokenDelta:
    """Return the delta in an event of `POST /generate`.

    Raises
    ------
    KeyError, TypeError, ValueError
        A field is missing or has a wrong type or value.
    """
    reason, logprobs = event["finish_reason"], event.get("logprobs")
    return TokenDelta(
        text=event["text"],
        token_ids=tuple(event["token_ids"]),
        finish_reason=None if reason is None else FinishReason(reason),
        stop_reason=event.get("stop_reason"),
        logprobs=None if logprobs is None else tuple(map(_logprob_of, logprobs)),
        reasoning=event.get("reasoning", ""),
        tool_calls=tuple(
            ToolCallDelta(call["index"], call.get("id"), call.get("name"), call["arguments"])
            for call in event.get("tool_calls", ())
        ),
    )


def _logprob_of(told: Mapping[str, Any]) -> TokenLogprob:
    logprob = told["logprob"]
    return TokenLogprob(
        told["token_id"],
        told["text"],
        bytes(told["bytes"]),
        -math.inf if logprob == LOWEST else logprob,
        tuple(map(_logprob_of, told["top"])),
    )


def completion_of(
    answer: CompletionBuilder,
    request_id: str,
    last: TokenDelta,
    account: Mapping[str, Any],
    *,
    submitted_at: float,
    ended_at: float,
    n_moves: int,
) -> Completion:
    """Return the completion of an answer; `account` has usage and times from the last event, if it came."""
    usage, timings = account.get("usage", {}), account.get("timings", {})
    assert last.finish_reason is not None
    done = answer.completion(
        request_id,
        last.finish_reason,
        last.stop_reason,
        usage=Usage(
            n_prompt=usage.get("prompt_tokens", 0),
            n_cached=usage.get("cached_tokens", 0),
            n_output=0,
            n_reasoning=usage.get("reasoning_tokens", 0),
            n_image_tokens=usage.get("image_tokens", 0),
            n_audio_tokens=usage.get("audio_tokens", 0),
        ),
        submitted_at=submitted_at,
        admitted_at=submitted_at + (timings.get("queued_ms") or 0.0) / 1000.0,
        ended_at=ended_at,
        n_preemptions=timings.get("n_preemptions", 0),
        prompt_token_ids=account.get("prompt_token_ids", ()),
        fingerprint=account.get("fingerprint", ""),
    )
    return replace(done, timings=replace(done.timings, n_moves=n_moves))
