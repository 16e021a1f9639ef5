"""Server-sent events of `POST /generate`, as the engine's values.  Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

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
    LookupError, TypeError, ValueError, AttributeError
        A field is missing or has a wrong type or value.
    """
    reason, logprobs = event["finish_reason"], event.get("logprobs")
    return TokenDelta(
        text=_text(event["text"]),
        token_ids=tuple(map(int, _list(event["token_ids"]))),
        finish_reason=None if reason is None else FinishReason(reason),
        stop_reason=event.get("stop_reason"),
        logprobs=None if logprobs is None else tuple(map(_logprob_of, logprobs)),
        reasoning=_text(event.get("reasoning") or ""),
        tool_calls=tuple(
            ToolCallDelta(call["index"], call.get("id"), call.get("name"), _text(call["arguments"]))
            for call in event.get("tool_calls") or ()
        ),
    )


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is no text")
    return value


def _logprob_of(told: Mapping[str, Any]) -> TokenLogprob:
    logprob = told["logprob"]
    return TokenLogprob(
        told["token_id"],
        told["text"],
        bytes(told["bytes"]),
        -math.inf if logprob == LOWEST else logprob,
        tuple(map(_logprob_of, told["top"])),
    )


class Account(NamedTuple):
    """Account of a request in the last event of its answer; empty if the event did not come."""

    usage: Usage = Usage(0, 0, 0)
    queued_s: float = 0.0
    n_preemptions: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""


def account_of(event: Mapping[str, Any]) -> Account:
    """Return the account in the last event of `POST /generate`; raise what `delta_of` raises."""
    usage, timings = event.get("usage") or {}, event.get("timings") or {}
    names = ("prompt_tokens", "cached_tokens", "reasoning_tokens", "image_tokens", "audio_tokens")
    n_prompt, n_cached, n_reasoning, n_images, n_audio = (int(usage.get(n) or 0) for n in names)
    return Account(
        Usage(
            n_prompt=n_prompt,
            n_cached=n_cached,
            n_output=0,
            n_reasoning=n_reasoning,
            n_image_tokens=n_images,
            n_audio_tokens=n_audio,
        ),
        float(timings.get("queued_ms") or 0.0) / 1000.0,
        int(timings.get("n_preemptions") or 0),
        tuple(map(int, event.get("prompt_token_ids") or ())),
        str(event.get("fingerprint") or ""),
    )


def completion_of(
    answer: CompletionBuilder,
    request_id: str,
    last: TokenDelta,
    account: Account,
    *,
    submitted_at: float,
    ended_at: float,
    n_moves: int,
) -> Completion:
    """Return the completion of an answer."""
    assert last.finish_reason is not None
    done = answer.completion(
        request_id,
        last.finish_reason,
        last.stop_reason,
        usage=account.usage,
        submitted_at=submitted_at,
        admitted_at=submitted_at + account.queued_s,
        ended_at=ended_at,
        n_preemptions=account.n_preemptions,
        prompt_token_ids=account.prompt_token_ids,
        fingerprint=account.fingerprint,
    )
    return replace(done, timings=replace(done.timings, n_moves=n_moves))
