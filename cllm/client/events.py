"""Server-sent events of `POST /generate`, as the engine's values.  Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cllm.engine.request import (
    Completion,
    FinishReason,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

LOWEST = -9999.0  # a server's stand-in for -inf, which is not JSON
DONE = b"[DONE]"


class EventReader:
    """Bytes as they arrive, to the data of whole events; what is cut off is none."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are whole with this."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for event in whole:
            lines = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
            if lines:
                yield b"\n".join(lines)


def object_of(data: bytes) -> dict[str, Any]:
    """The object in an event.

    Raises
    ------
    ValueError
        It is none of cllm's.
    """
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def delta_of(event: Mapping[str, Any]) -> TokenDelta:
    """The delta that an event is.

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none of cllm's.
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


@dataclass(slots=True)
class Answer:
    """What there is of an answer, however many servers it came from.

    Attributes
    ----------
    token_ids : list of int
    token_times : list of float
        When each arrived.
    """

    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] | None = None
    _calls: dict[int, ToolCall] = field(default_factory=dict)

    def add(self, delta: TokenDelta, now: float) -> None:
        """The next delta."""
        self.token_ids += delta.token_ids
        self.token_times += [now] * len(delta.token_ids)
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        if delta.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *delta.logprobs]
        for call in delta.tool_calls:
            known = self._calls.get(call.index, ToolCall("", "", ""))
            self._calls[call.index] = ToolCall(
                call.id or known.id, call.name or known.name, known.arguments + call.arguments
            )

    def completion(
        self,
        request_id: str,
        last: TokenDelta,
        account: Mapping[str, Any],
        *,
        submitted: float,
        ended: float,
        n_moves: int,
    ) -> Completion:
        """All of it; `account` is what the last event says of usage and times, if there was one."""
        usage, timings = account.get("usage", {}), account.get("timings", {})
        queued_s = (timings.get("queued_ms") or 0.0) / 1000.0
        assert last.finish_reason is not None
        return Completion(
            request_id=request_id,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            prompt_token_ids=tuple(account.get("prompt_token_ids", ())),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=Usage(
                n_prompt=usage.get("prompt_tokens", 0),
                n_cached=usage.get("cached_tokens", 0),
                n_output=len(self.token_ids),
                n_reasoning=usage.get("reasoning_tokens", 0),
            ),
            timings=replace(
                Timings.of(
                    submitted,
                    submitted + queued_s,
                    self.token_times,
                    ended,
                    timings.get("n_preemptions", 0),
                ),
                n_moves=n_moves,
            ),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            fingerprint=account.get("fingerprint", ""),
        )
