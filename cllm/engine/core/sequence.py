"""Sequence: the mutable state of one running request.  Inference thread only.

There is no prefill phase and no decode phase: a sequence has `tokens` (the prompt, then the
output) and `n_computed`, and every tick moves the second towards the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.checks import INT32_MAX
from cllm.engine.completion_builder import CompletionBuilder
from cllm.engine.core.detokenizer import Detokenizer
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.placement import Placement
from cllm.engine.lora import LoraSet
from cllm.engine.media_rows import Spans, n_media_tokens
from cllm.engine.output import Completion, TokenDelta, TokenLogprob, Usage
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import TokenSampler

# One level of priority is worth so many seconds of waiting: nothing starves.
AGEING_S = 5.0
# Prompts with equally many parts of so many tokens count as equally long.
N_ALIKE = 256


class Prioritized(Protocol):
    """An item that waits, with a priority."""

    @property
    def priority(self) -> int: ...
    @property
    def submitted_at(self) -> float: ...


def aged_priority(request: Prioritized, now: float) -> int:
    """Priority, less a level for every `AGEING_S` seconds since submission."""
    return request.priority - int((now - request.submitted_at) / AGEING_S)


@dataclass(eq=False, slots=True)
class Tenant:
    """A client, or a group of clients, with a share of the engine.

    Attributes
    ----------
    served : float
        Rows of its requests, divided by its weight.
    n_requests : int
        Number of its requests that have not ended.
    admitted_at : float
        Time at which one of its requests last began to run, in seconds of the engine's clock.
    """

    name: str
    weight: float = 1.0
    served: float = 0.0
    n_requests: int = 0
    admitted_at: float = float("-inf")


class Sequence:
    """One request from submission to its last delta.

    Attributes
    ----------
    tokens : list of int
        Prompt and output.  Rows of media are negative numbers (`media_rows`).
    spans : Spans
        The media chunks in `tokens`; they are all in the prompt.
    tenant : Tenant
        The tenant that it counts for.
    placement : Placement
        Its place in the KV cache, and the saved states that it can start from.
    sampler : TokenSampler or None
        None for greedy sampling.  Kept when the sequence is preempted.
    n_cached : int
        Prompt tokens that were shared and not computed.
    n_drafted, n_accepted : int
        Number of drafts that were computed for it, and of those that were right.
    n_unread : int
        Deltas that the reader has not taken yet.
    n_given : int
        Number of tokens that came with the request: the prompt, and output sampled before.
    n_turn : int
        Number of the last tick that had rows of it, counted from 1; 0 before.
    output : CompletionBuilder
        The deltas of its output.
    admitted_at : float or None
        Time at which it first began to run, in seconds of the engine's clock; None before.
    prompt_logprobs : list of TokenLogprob
        Log probabilities of prompt tokens, from `first_scored` on.
    n_scored, n_to_score : int
        Number of first tokens whose logits were read or are not needed, and its final value.  The row
        before the next such token is an output row.
    """

    def __init__(
        self, request: GenerationRequest, tenant: Tenant | None = None, *, stream_buffer: int = 64
    ) -> None:
        self.request = request
        self.tenant: Tenant = Tenant(request.tenant) if tenant is None else tenant
        self.sampler: TokenSampler | None = None
        self.tokens: list[int] = [*request.prompt_token_ids, *request.generated_token_ids]
        self.n_prompt: int = len(request.prompt_token_ids)
        self.n_given: int = len(self.tokens)
        self.placement: Placement[Sequence] = Placement()
        self.n_cached: int = 0
        self.n_drafted: int = 0
        self.n_accepted: int = 0
        self.detokenizer: Detokenizer = Detokenizer(
            request.params.stop, strips_space=request.strips_space
        )
        first_scored = request.first_scored
        self.n_scored: int = self.n_prompt if first_scored is None else first_scored
        self.n_to_score: int = self.n_given if request.resamples else self.n_prompt
        self.prompt_logprobs: list[TokenLogprob] = []
        self.output: CompletionBuilder = CompletionBuilder()
        self.n_unread: int = request.n_unread
        self._stream_buffer = stream_buffer
        self.n_preemptions = self.n_turn = 0
        self.admitted_at: float | None = None
        self._array: NDArray[np.int32] = np.array(self.tokens, np.int32)
        self._n_in_array = self.n_given
        self.spans: Spans = Spans.of(self._array)
        self._are_causal = [m.is_causal for m in request.media for _ in range(m.n_chunks)]

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def is_paused(self) -> bool:
        """True if the reader has fallen so far behind that the sequence must wait."""
        return self.n_unread >= self._stream_buffer

    # A tick reads the next two of each running sequence, and `is_decoding`, a dozen times.
    @property
    def n_computed(self) -> int:
        """Number of tokens whose keys and values are in the KV cache."""
        slot = self.placement.slot
        return slot.n_computed if slot else 0

    @property
    def n_pending(self) -> int:
        """Number of tokens still to be computed before the next can be sampled."""
        slot = self.placement.slot
        return len(self.tokens) - (slot.n_computed if slot else 0)

    @property
    def n_alike(self) -> int:
        """Number of tokens, from the next to be computed on, that the same adapters compute."""
        return int(min(INT32_MAX, self.request.lora.n_until_change(self.n_computed)))

    @property
    def n_next(self) -> int:
        """Number of pending tokens that can be computed in one decode."""
        n_next = min(self.n_pending, self.n_alike, self.placement.n_checkpoint - self.n_computed)
        n_tokens = self.spans.n_tokens_from(self.n_computed)
        return n_next if n_tokens is None else min(n_next, n_tokens)

    @property
    def media_index(self) -> int | None:
        """Number of the media chunk, counted from 0, that has its next row; None if a token is next."""
        return self.spans.index_at(self.n_computed)

    @property
    def n_media_left(self) -> int:
        """Number of rows of the present media chunk that are still to be computed; 0 if a token is next."""
        index = self.media_index
        return 0 if index is None else self.spans[index].end - self.n_computed

    @property
    def n_whole(self) -> int:
        """Number of rows of the present media chunk if they must be decoded at once; else 0."""
        index = self.media_index
        return 0 if index is None or self._are_causal[index] else self.n_media_left

    @property
    def loras(self) -> LoraSet:
        """The adapters that compute its next token."""
        return self.request.lora.at(self.n_computed)

    @property
    def n_to_compute(self) -> int:
        """Number of pending tokens, without those that a leader computes."""
        return self.n_pending - (self.placement.n_expected if self.placement.leader else 0)

    @property
    def is_scored(self) -> bool:
        """True once the log probabilities of all given tokens have been read."""
        return self.n_scored >= self.n_to_score

    @property
    def n_settled(self) -> int:
        """Number of leading tokens whose logits are not needed, so that their cells may be shared."""
        return self.spans.floor((len(self.tokens) if self.is_scored else self.n_scored) - 1)

    def n_outputs(self, n_tokens: int) -> int:
        """Return how many of the next `n_tokens` rows are output rows: always the last ones."""
        end = self.n_computed + n_tokens
        if self.is_scored:
            return int(end == len(self.tokens))
        return max(0, end - max(self.n_computed, self.n_scored - 1))

    @property
    def n_output(self) -> int:
        """Number of output tokens, including those sampled before the request."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_sampled(self) -> int:
        """Number of tokens that were sampled for this request, without those that came with it."""
        return len(self.tokens) - self.n_given

    @property
    def is_ready(self) -> bool:
        """True if a tick can compute tokens of the sequence."""
        return self.placement.is_placed and self.n_unread < self._stream_buffer

    @property
    def is_decoding(self) -> bool:
        """True if the last token is all that is pending, and a tick can compute it."""
        placement = self.placement
        slot = placement.slot
        return (
            slot is not None
            and len(self.tokens) - slot.n_computed == 1
            and placement.is_placed
            and self.n_unread < self._stream_buffer
            and self.spans.index_at(slot.n_computed) is None
        )

    def urgency(self, now: float) -> tuple[int, int, float, int]:
        """Sort key: the smallest is served first.

        The key is the priority, less a level for every `AGEING_S` seconds since submission.  Then come
        the tokens to compute before the first output token, in steps of `N_ALIKE`, because few
        requests should wait for long prompts.  Then come the earliest deadline, and arrival.
        """
        request = self.request
        deadline = float("inf") if request.deadline is None else request.deadline
        n_left = self.n_to_compute - (0 if self.placement.slot else self.placement.n_shareable)
        n_parts = 0 if self.n_output else -(-n_left // N_ALIKE)
        return (aged_priority(request, now), n_parts, deadline, request.serial)

    def token_array(self) -> NDArray[np.int32]:
        """`tokens` as int32, shape `(n_tokens,)`: a view, valid until the next call."""
        n_tokens = len(self.tokens)
        if n_tokens > len(self._array):
            self._array = np.concatenate([self._array, np.zeros(n_tokens, np.int32)])
        if n_tokens > self._n_in_array:
            self._array[self._n_in_array : n_tokens] = self.tokens[self._n_in_array :]
            self._n_in_array = n_tokens
        return self._array[:n_tokens]

    def start(self, slot: Slot, now: float) -> None:
        """Start running in `slot`."""
        self.placement.slot = slot
        slot.spans = self.spans
        self.tenant.admitted_at = now
        if self.admitted_at is None:
            self.admitted_at = now

    def place(self, n_shared: int) -> int:
        """Begin to compute after `n_shared` tokens; return how many of them are prompt tokens."""
        self.placement.compute()
        n_cached = min(n_shared, self.n_prompt)
        if not self.n_sampled and not self.n_preemptions:
            self.n_cached = n_cached
        return n_cached

    def completion(self, last: TokenDelta, now: float) -> Completion:
        """Return the whole output, for the last event; `output` must already have the delta `last`."""
        request, first_scored = self.request, self.request.first_scored
        assert last.finish_reason is not None
        return self.output.completion(
            self.request_id,
            last.finish_reason,
            last.stop_reason,
            usage=Usage(
                n_prompt=self.n_prompt,
                n_cached=self.n_cached,
                n_output=self.n_sampled,
                n_drafted=self.n_drafted,
                n_accepted=self.n_accepted,
                **n_media_tokens(self.spans, request.media),
            ),
            submitted_at=request.submitted_at,
            admitted_at=now if self.admitted_at is None else self.admitted_at,
            ended_at=now,
            n_preemptions=self.n_preemptions,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=(
                None if first_scored is None else (*[None] * first_scored, *self.prompt_logprobs)
            ),
            fingerprint=request.fingerprint,
        )

    def __repr__(self) -> str:
        slot = self.placement.slot
        where = f"seq_id={slot.seq_id}" if slot else "waiting"
        return f"<Sequence {self.request_id} {where} {self.n_computed}/{len(self.tokens)}>"
