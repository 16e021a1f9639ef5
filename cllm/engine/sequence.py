"""Sequence: the mutable state of one running request.  Inference thread only.

There is no prefill phase and no decode phase: a sequence has `tokens` (the prompt, then the
output) and `n_computed`, and every tick moves the second towards the first.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Protocol

from cllm.engine.detokenizer import Detokenizer
from cllm.engine.kv_cache import Slot
from cllm.engine.request import (
    Completion,
    FinishReason,
    GenerationRequest,
    Timings,
    Usage,
)
from cllm.engine.sampling import TokenSampler


class Sequence:
    """One request from submission to its last delta.

    Attributes
    ----------
    tokens : list of int
        Prompt and output; the position of a token is its index.
    slot : Slot or None
        Its place in the KV cache while it is running; None while it waits.
    sampler : TokenSampler or None
        None for greedy sampling.  Kept when the sequence is preempted.
    is_paused : bool
        Its reader has stopped reading.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.sampler: TokenSampler | None = None
        self.tokens = list(request.prompt_token_ids)
        self.n_prompt = len(self.tokens)
        self.slot: Slot | None = None
        self.detokenizer = Detokenizer(request.params.stop)
        self.is_paused = False
        self.n_preemptions = 0
        self._texts: list[str] = []
        self._admitted_at: float | None = None
        self._token_times: list[float] = []

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def n_computed(self) -> int:
        """Tokens whose keys and values are in the KV cache."""
        return self.slot.n_computed if self.slot else 0

    @property
    def n_pending(self) -> int:
        """Tokens still to be computed before the next can be sampled."""
        return len(self.tokens) - self.n_computed

    @property
    def n_output(self) -> int:
        """Sampled tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key: the smallest is served first."""
        deadline = self.request.deadline
        infinite = float("inf")
        return (
            self.request.priority,
            infinite if deadline is None else deadline,
            self.request.serial,
        )

    def admit(self, slot: Slot, now: float) -> None:
        """Start running in `slot`."""
        self.slot = slot
        if self._admitted_at is None:
            self._admitted_at = now

    def append(self, token: int, now: float) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self._token_times.append(now)

    def say(self, text: str) -> str:
        """Record text on its way to the caller."""
        if text:
            self._texts.append(text)
        return text

    def completion(
        self, reason: FinishReason, stop_reason: str | int | None, now: float
    ) -> Completion:
        """All of the output, for the last event."""
        return Completion(
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=tuple(self.tokens[self.n_prompt :]),
            prompt_token_ids=self.request.prompt_token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(n_prompt=self.n_prompt, n_cached=0, n_output=self.n_output),
            timings=self._timings(now),
        )

    def _timings(self, now: float) -> Timings:
        submitted = self.request.submitted_at
        times = self._token_times
        admitted = now if self._admitted_at is None else self._admitted_at
        first = times[0] if times else now
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Timings(
            queued_s=admitted - submitted,
            prefill_s=first - admitted,
            decode_s=times[-1] - first if times else 0.0,
            ttft_s=first - submitted if times else None,
            total_s=now - submitted,
            itl_p50_s=median(gaps) if gaps else None,
            itl_max_s=max(gaps, default=None),
            n_preemptions=self.n_preemptions,
        )

    def __repr__(self) -> str:
        where = f"seq_id={self.slot.seq_id}" if self.slot else "waiting"
        return f"<Sequence {self.request_id} {where} {self.n_computed}/{len(self.tokens)}>"


class Vocabulary(Protocol):
    """What a tick asks about tokens."""

    def piece(self, token: int) -> bytes: ...
    def is_eog(self, token: int) -> bool: ...
