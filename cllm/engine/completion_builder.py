"""CompletionBuilder: builds the completion of a request from its deltas.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cllm.engine.output import (
    Completion,
    FinishReason,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    Usage,
)


@dataclass(eq=False, slots=True)
class CompletionBuilder:
    """The deltas of one output, joined as they come.

    Attributes
    ----------
    token_ids : list of int
    token_times : list of float
        Time of each token, in seconds of the caller's clock.
    """

    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _has_logprobs: bool = False
    _calls: dict[int, ToolCall] = field(default_factory=dict)

    def add(self, delta: TokenDelta, now: float) -> None:
        """Add the next delta; `now` is the time of its tokens, in seconds of the caller's clock."""
        for token in delta.token_ids:
            self.token_ids.append(token)
            self.token_times.append(now)
        if delta.text:
            self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.logprobs is not None:
            self._has_logprobs = True
            self._logprobs += delta.logprobs
        for call in delta.tool_calls:
            known = self._calls.get(call.index, ToolCall("", "", ""))
            self._calls[call.index] = ToolCall(
                call.id or known.id, call.name or known.name, known.arguments + call.arguments
            )

    def completion(
        self,
        request_id: str,
        finish_reason: FinishReason,
        stop_reason: str | int | None,
        *,
        usage: Usage,
        submitted_at: float,
        admitted_at: float,
        ended_at: float,
        n_preemptions: int = 0,
        prompt_token_ids: Sequence[int] = (),
        prompt_logprobs: Sequence[TokenLogprob | None] | None = None,
        fingerprint: str = "",
    ) -> Completion:
        """Return the completion with all deltas that were added.

        Parameters
        ----------
        usage : Usage
            Token counts of the request; `n_output` is replaced by the number of added tokens.
        submitted_at, admitted_at, ended_at : float
            Times by the clock of `add`, in seconds.
        """
        return Completion(
            request_id=request_id,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            prompt_token_ids=tuple(prompt_token_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=replace(usage, n_output=len(self.token_ids)),
            timings=Timings.of(
                submitted_at, admitted_at, self.token_times, ended_at, n_preemptions
            ),
            logprobs=tuple(self._logprobs) if self._has_logprobs else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            fingerprint=fingerprint,
        )
