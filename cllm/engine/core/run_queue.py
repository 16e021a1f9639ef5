"""RunQueue: every request from its submission to its last event, while it waits, runs and ends.

However a request ends, `finish` removes its sequence from the KV cache and checks that it is gone.
Only `fail_all` leaves the KV cache as it is, because the engine has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from cllm.engine.core import scheduler
from cllm.engine.core.commands import Event, Finished
from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.media_store import MediaStore
from cllm.engine.core.recovery import Recovery
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.core.tenants import Tenants, may_yield, yielding
from cllm.engine.core.tick_cost import TickCost
from cllm.engine.lora import NO_LORA
from cllm.engine.output import FinishReason, TokenDelta
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.engine.sampling.batch_sampler import TokenSampler
from cllm.engine.vocabulary import OutputVocabulary, spelled_piece
from cllm.errors import EngineFailedError, GenerationError

logger: logging.Logger = logging.getLogger("cllm.engine")

MakeSampler = Callable[[GenerationRequest], TokenSampler | None]


class RunQueue:
    """All requests.

    Attributes
    ----------
    waiting, running : list of Sequence
        Sequences without a seq_id, and sequences with one.
    events : list of Event
        Events since they were last taken, oldest first.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        recovery: Recovery,
        tick_cost: TickCost,
        recorder: Recorder,
        make_sampler: MakeSampler,
        vocabulary: OutputVocabulary,
        *,
        stream_buffer: int,
        clock: Callable[[], float],
        tenants: Tenants,
        media: MediaStore | None = None,
    ) -> None:
        self._manager = manager
        self._recovery = recovery
        self._tick_cost = tick_cost
        self._recorder = recorder
        self._make_sampler = make_sampler
        self._vocabulary = vocabulary
        self._stream_buffer = stream_buffer
        self._clock = clock
        self._tenants = tenants
        self._media = media
        self._by_id: dict[str, Sequence] = {}
        self._n_with_loras = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.events: list[Event] = []

    # --- Commands ----------------------------------------------------------------------------
    def submit(self, request: GenerationRequest) -> None:
        """Take a request into the queue."""
        tenant = self._tenants.enter(request.tenant)
        sequence = Sequence(request, tenant, stream_buffer=self._stream_buffer)
        self._by_id[request.request_id] = sequence
        self._n_with_loras += request.lora != NO_LORA
        self.waiting.append(sequence)
        try:
            sequence.sampler = self._make_sampler(request)
            recall(sequence, self._vocabulary)
        except Exception as error:
            self.finish(sequence, last_delta(FinishReason.ERROR), cause=error)
            return
        if self._media is not None:
            self._media.enter(sequence)
        if request.state is not None:
            self._manager.adopt(sequence, request.state)
        sequence.placement.n_shareable, prefix = self._manager.shareable(sequence, self.running)
        self._manager.prefetch(sequence, prefix)
        logger.debug("request %s: new, %d prompt tokens", request.request_id, sequence.n_prompt)

    def cancel(self, request_id: str, *, saves_state: bool = False) -> None:
        """Cancel a request; with `saves_state`, its `Finished` has its KV state, if that can be saved.

        Unknown ids are ignored.
        """
        if sequence := self._by_id.get(request_id):
            state = self._manager.save(sequence) if saves_state else None
            self.finish(sequence, last_delta(FinishReason.CANCELLED), state=state)

    def cancel_all(self) -> None:
        """End every request."""
        for request_id in list(self._by_id):
            self.cancel(request_id)

    def read(self, request_id: str, n_deltas: int) -> None:
        """Note that the reader of a request has taken more deltas."""
        if sequence := self._by_id.get(request_id):
            sequence.n_unread -= n_deltas

    # --- What there is -----------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """True if a sequence wants tokens; one that is paused, or waits for a file or an encode, does not."""
        return any(not (s.is_paused or _is_loading(s)) for s in self._by_id.values())

    @property
    def has_loras(self) -> bool:
        """True if adapters compute any request."""
        return self._n_with_loras > 0

    def n_using(self, lora: str) -> int:
        """Return the number of requests, running or waiting, that this adapter computes."""
        return sum(s.request.lora.uses(lora) for s in self._by_id.values())

    @property
    def n_paused(self) -> int:
        """Number of requests whose reader has stopped."""
        return sum(s.is_paused for s in self._by_id.values())

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of any request, paused ones included."""
        deadlines = (s.request.deadline for s in self._by_id.values())
        return min((d for d in deadlines if d is not None), default=None)

    # --- Who runs ----------------------------------------------------------------------------
    def expire(self, now: float) -> None:
        """End the requests past their deadline."""
        deadlines = ((s, s.request.deadline) for s in self._by_id.values())
        due = [s for s, deadline in deadlines if deadline is not None and deadline <= now]
        for sequence in due:
            self.finish(sequence, last_delta(FinishReason.DEADLINE))

    def admit(self, now: float) -> None:
        """Start the most urgent waiting sequences while there is room."""
        if self._media is not None:
            self._media.request(self.waiting)
        n_seats = self._manager.n_seats if self._tenants.are_several else 0  # 0: no shares
        while self._has_seat:
            first = scheduler.next_admitted(self.waiting, now, self.running, n_seats)
            if first is None or not self._start(first, now):
                break
        self._manager.place_followers(self.running, now)

    @property
    def _has_seat(self) -> bool:
        """True if a seq_id is free, or a running sequence may have to give up its own."""
        return (
            self._manager.has_seat(self.running)
            or (self._tenants.are_several and may_yield(self.waiting, self.running))
            or any(s.is_paused for s in self.running)
        )

    def _start(self, first: Sequence, now: float) -> bool:
        """Start a waiting sequence, and preempt others if needed; return False without room."""
        while not self._manager.allocate(first, self.running, now):
            if not (preempted := self._in_the_way(first)):
                return False
            for sequence in preempted:
                self.preempt(sequence, keep=True)
        self.waiting.remove(first)
        self.running.append(first)
        logger.debug("request %s: prefill in %r", first.request_id, first.placement.slot)
        return True

    def _in_the_way(self, first: Sequence) -> list[Sequence]:
        """Return the running sequences to preempt for a waiting one; empty if it still would not fit."""
        could_allocate = self._manager.could_allocate
        # Readers that have stopped must not keep the queue waiting.
        paused = [s for s in self.running if s.is_paused]
        active = [s for s in self.running if not s.is_paused]
        if paused and could_allocate(first, active, paused):
            return [scheduler.choose_preempted(paused)]
        yielded: list[Sequence] = []
        for sequence in yielding(first, self.running):
            yielded.append(sequence)
            if could_allocate(first, [s for s in self.running if s not in yielded], yielded):
                return yielded
        return []

    def make_room(self, n_rows: int, now: float) -> None:
        """Evict prefixes for `n_rows` rows at most, and preempt until every decoding sequence has a cell."""
        manager, cells = self._manager, self._manager.cells
        cells.evict_until(scheduler.n_rows_wanted(self.running, n_rows))
        while any(s.is_ready for s in self.running):
            n_needed = max(1, scheduler.n_rows_needed(self.running))
            holders = [s for s in self.running if s.n_computed]
            if cells.kv_cache.n_free >= n_needed or len(self.running) == 1 or not holders:
                return
            self.preempt(scheduler.choose_preempted(holders))
            manager.place_followers(self.running, now)

    def preempt(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Preempt a sequence: it waits with all its tokens and resumes later."""
        recompute_s = self._tick_cost.recompute_s(sequence.n_computed)
        self._manager.preempt(sequence, recompute_s, keep=keep)
        self._requeue(sequence)
        sequence.n_preemptions += 1
        self._recorder.n_preemptions += 1
        logger.debug("request %s: preempted", sequence.request_id)

    def restart_all(self) -> None:
        """Send all running sequences back to the queue, after the KV cache was emptied."""
        for sequence in list(self.running):
            sequence.placement.leave()
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.append(sequence)

    # --- Endings -----------------------------------------------------------------------------
    def finish(
        self,
        sequence: Sequence,
        delta: TokenDelta,
        *,
        cause: Exception | None = None,
        state: SequenceState | None = None,
    ) -> None:
        """End a request: remove its sequence from the KV cache, then report `Finished`.

        Parameters
        ----------
        delta : TokenDelta
            Last delta, with its finish reason; text that was held back is added.
        cause : Exception, optional
            Error with which the request failed.
        state : SequenceState, optional
            KV state for the `Finished` event.
        """
        # What a failed request computed is not to be trusted.
        self._manager.leave(sequence, keep=cause is None)
        error = None
        if cause is not None:
            self._manager.saved.distrust(sequence)
            error = GenerationError.of(sequence.request_id, cause)
        self._report(sequence, delta, error, state)

    def fail_all(self, cause: BaseException) -> None:
        """End every request with an `EngineFailedError` of this cause; the KV cache is not changed."""
        for sequence in list(self._by_id.values()):
            self._report(sequence, last_delta(FinishReason.ERROR), EngineFailedError.of(cause))

    def _report(
        self,
        sequence: Sequence,
        delta: TokenDelta,
        error: GenerationError | EngineFailedError | None,
        state: SequenceState | None = None,
    ) -> None:
        del self._by_id[sequence.request_id]
        self._tenants.leave(sequence.tenant)
        self._n_with_loras -= sequence.request.lora != NO_LORA
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._manager.saved.forget(sequence)
        self._recovery.forget(sequence)
        if self._media is not None:
            self._media.leave(sequence)
        # An error here is only logged: it can cost held-back text, but the request ends all the same.
        try:
            delta = replace(delta, text=delta.text + sequence.detokenizer.flush())
            if delta.logprobs is None and sequence.request.params.logprobs is not None:
                delta = replace(delta, logprobs=())
            if sequence.sampler is not None:
                sequence.sampler.close()
        except Exception:
            logger.exception("request %s: error after its end", sequence.request_id)
        now = self._clock()
        sequence.output.add(delta, now)
        completion = sequence.completion(delta, now)
        if error is not None:
            error.completion = completion
        self.events.append(Finished(sequence.request_id, delta, completion, error, state))
        self._recorder.count_finished(completion.finish_reason)
        logger.debug(
            "request %s: finished, %s (%s), %d output tokens",
            sequence.request_id, delta.finish_reason, delta.stop_reason, sequence.n_output,
        )  # fmt: skip


def _is_loading(sequence: Sequence) -> bool:
    """Return True if a sequence, or the one that computes a prefix for it, waits for a file or an encode."""
    leader = sequence.placement.leader
    return sequence.placement.is_loading or (leader is not None and leader.placement.is_loading)


def last_delta(reason: FinishReason, token_ids: tuple[int, ...] = ()) -> TokenDelta:
    """Return a last delta without text and without a `stop_reason`."""
    return TokenDelta("", token_ids, reason)


def recall(sequence: Sequence, vocabulary: OutputVocabulary) -> None:
    """Restore text and sampler from tokens that were sampled before.

    Raises
    ------
    InvalidArgumentError
        The output could not have continued with one of these tokens.
    """
    request, sampler = sequence.request, sequence.sampler
    for token in request.generated_token_ids:
        push(sequence, token, vocabulary)
        if sampler is not None and not request.resamples:
            sampler.recall(token)


def push(sequence: Sequence, token: int, vocabulary: OutputVocabulary) -> str:
    """Add a token to the output; return the text that can no longer change."""
    return sequence.detokenizer.push(spelled_piece(sequence.request.spelled, vocabulary, token))
