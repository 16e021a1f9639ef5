"""One turn of the inference thread: plan → decode → sample → detokenize → events.

`EngineCore` holds every request from its submission to its last event.  It knows neither threads
nor event loops nor libllama: what it needs of a context is the `Decoder` protocol below.

Whatever way a request ends, `_leave_cache` removes its sequence from the KV cache, unconditionally,
and looks whether it is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine import sampling, scheduler
from cllm.engine.handoff import Event, Finished, Progressed
from cllm.engine.kv_cache import CacheReader, KVCache
from cllm.engine.request import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from cllm.engine.sampling import TokenSampler
from cllm.engine.scheduler import Chunk
from cllm.engine.sequence import Sequence, Vocabulary
from cllm.engine.statistics import EngineStatistics, Recorder
from cllm.errors import DecodeFailedError, EngineFailedError, GenerationError, LlamaCallError

logger = logging.getLogger("cllm.engine")

ABORTED = 2  # llama_decode: the abort flag was set


class Decoder(CacheReader, Protocol):
    """A context and its batch.  Raises the errors of `Context.decode`.

    `testing.conformance.check_decoder` says how one behaves.
    """

    n_batch: int

    def clear(self) -> None:
        """Forget the rows added so far."""

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """Add rows; the indices of its output rows among all output rows."""

    def decode(self) -> NDArray[np.float32]:
        """Compute the rows; logits `(n_outputs, n_vocab)`, valid until the next call."""

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)`; all of the sequence by default."""


SamplerFactory = Callable[[SamplingParams], TokenSampler | None]


class EngineCore:
    """All requests, and what one tick does with them.

    Attributes
    ----------
    waiting, running : list of Sequence
        Without and with a seq_id.
    events : list of Event
        What happened since they were last taken.
    """

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: Vocabulary,
        kv_cache: KVCache,
        make_sampler: SamplerFactory,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder = decoder
        self._vocabulary = vocabulary
        self.kv_cache = kv_cache
        self._make_sampler = make_sampler
        self._clock = clock
        self._by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.events: list[Event] = []
        self.recorder = Recorder()

    # --- Commands ----------------------------------------------------------------------------
    def submit(self, request: GenerationRequest) -> None:
        """Take a request into the queue."""
        sequence = Sequence(request)
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)
        try:
            sequence.sampler = self._make_sampler(request.params)
        except Exception as error:
            self._finish(sequence, FinishReason.ERROR, None, cause=error)
            return
        logger.debug("request %s: new, %d prompt tokens", request.request_id, sequence.n_prompt)

    def cancel(self, request_id: str) -> None:
        """End a request on its caller's wish."""
        if sequence := self._by_id.get(request_id):
            self._finish(sequence, FinishReason.CANCELLED, None)

    def cancel_all(self) -> None:
        """End every request."""
        for sequence in list(self._by_id.values()):
            self._finish(sequence, FinishReason.CANCELLED, None)

    def set_paused(self, request_id: str, paused: bool) -> None:
        """Compute no more of a request, or go on with it."""
        if sequence := self._by_id.get(request_id):
            sequence.is_paused = paused

    def fail_all(self, cause: BaseException) -> None:
        """The engine has failed: end every request, leaving llama.cpp alone."""
        for sequence in list(self._by_id.values()):
            error = EngineFailedError(f"the engine has failed: {cause!r}")
            error.__cause__ = cause
            self._report(sequence, FinishReason.ERROR, None, error=error)

    # --- The tick ----------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything; a paused sequence waits for its reader."""
        return any(not s.is_paused for s in self._by_id.values())

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of any request, paused ones included."""
        deadlines = (s.request.deadline for s in self._by_id.values())
        return min((d for d in deadlines if d is not None), default=None)

    def tick(self) -> None:
        """Advance every running sequence by one chunk, in one decode."""
        recorder, started = self.recorder, self._clock()
        self._expire(started)
        self._admit(started)
        self._make_room()
        n_rows = min(self._decoder.n_batch, self.kv_cache.n_free)
        chunks = scheduler.plan(self.running, n_rows)
        if not chunks:
            return
        outputs = self._fill_batch(chunks)
        planned = self._clock()
        recorder.plan_s += planned - started
        try:
            logits = self._decoder.decode()
        except LlamaCallError as error:
            self._after_failed_decode(chunks, error)
            return
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            n_prompt_left = max(0, sequence.n_prompt - sequence.n_computed)
            recorder.n_prefill_tokens += min(chunk.n_tokens, n_prompt_left)
            self.kv_cache.advance(sequence.slot, chunk.n_tokens)
        decoded = self._clock()
        recorder.decode_s += decoded - planned
        tokens = sampling.sample(logits, [s.sampler for s in outputs]) if outputs else []
        sampled = self._clock()
        recorder.sample_s += sampled - decoded
        for sequence, token in zip(outputs, tokens, strict=True):
            self._advance(sequence, token, sampled)
        recorder.detokenize_s += self._clock() - sampled
        self._count(chunks, len(outputs))

    def _count(self, chunks: list[Chunk], n_outputs: int) -> None:
        recorder = self.recorder
        recorder.n_ticks += 1
        recorder.n_decode_rows += sum(chunk.n_tokens for chunk in chunks)
        recorder.n_decoding_ticks += n_outputs > 0
        recorder.n_decoding_rows += n_outputs
        # decode and synchronize; argmax, isfinite and the gather before it
        recorder.n_gil_handovers += 2 + 3 * (n_outputs > 0)

    def _expire(self, now: float) -> None:
        deadlines = ((s, s.request.deadline) for s in self._by_id.values())
        due = [s for s, deadline in deadlines if deadline is not None and deadline <= now]
        for sequence in due:
            self._finish(sequence, FinishReason.DEADLINE, None)

    def _admit(self, now: float) -> None:
        while any(not s.is_paused for s in self.waiting):
            n_free = self.kv_cache.n_free
            first = scheduler.next_admitted(self.waiting, self.running, n_free)
            if first is not None and self.kv_cache.n_free_ids:
                self.waiting.remove(first)
                self.running.append(first)
                first.admit(self.kv_cache.open(), now)
                logger.debug("request %s: prefill in %r", first.request_id, first.slot)
                continue
            # Readers that have stopped must not keep the queue waiting.
            paused = [s for s in self.running if s.is_paused]
            if not paused:
                return
            self._preempt(scheduler.choose_preempted(paused))

    def _make_room(self) -> None:
        """Preempt until every decoding sequence has a cell for its next token."""
        while any(not s.is_paused for s in self.running):
            n_needed = max(1, scheduler.n_rows_needed(self.running))
            holders = [s for s in self.running if s.n_computed]
            if self.kv_cache.n_free >= n_needed or len(self.running) == 1 or not holders:
                return
            self._preempt(scheduler.choose_preempted(holders))

    def _fill_batch(self, chunks: list[Chunk]) -> list[Sequence]:
        """Put the chunks into the batch; the sequences whose last row is sampled, in row order."""
        self._decoder.clear()
        outputs = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.n_computed
            assert sequence.slot is not None
            tokens = sequence.tokens[start : start + chunk.n_tokens]
            self._decoder.add(
                sequence.slot.seq_id, tokens, start, n_outputs=1 if chunk.completes else 0
            )
            if chunk.completes:
                outputs.append(sequence)
        return outputs

    def _advance(self, sequence: Sequence, token: int | Exception, now: float) -> None:
        """Add one sampled token to a sequence, and end it where it ends."""
        if isinstance(token, Exception):
            self._finish(sequence, FinishReason.ERROR, None, cause=token)
            return
        params = sequence.request.params
        sequence.append(token, now)
        self.recorder.n_output_tokens += 1
        if self._vocabulary.is_eog(token) or token in params.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, token, token_ids=(token,))
            return
        detokenizer = sequence.detokenizer
        text = sequence.say(detokenizer.push(self._vocabulary.piece(token)))
        if detokenizer.stop_match is not None:
            self._finish(
                sequence, FinishReason.STOP, detokenizer.stop_match, text=text, token_ids=(token,)
            )
        elif sequence.n_output == params.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, "max_tokens", text=text, token_ids=(token,))
        elif len(sequence.tokens) > self.kv_cache.n_ctx_seq:
            self._finish(sequence, FinishReason.LENGTH, "context", text=text, token_ids=(token,))
        else:
            self.events.append(Progressed(sequence.request_id, TokenDelta(text, (token,))))

    # --- Endings -----------------------------------------------------------------------------
    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: str | int | None,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        cause: Exception | None = None,
    ) -> None:
        """The completion callback: clear the cache and the books, then tell the caller."""
        self._leave_cache(sequence)
        error = None
        if cause is not None:
            error = GenerationError(f"request {sequence.request_id} failed: {cause}")
            error.__cause__ = cause
        self._report(sequence, reason, stop_reason, text=text, token_ids=token_ids, error=error)

    def _report(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: str | int | None,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        error: GenerationError | EngineFailedError | None = None,
    ) -> None:
        del self._by_id[sequence.request_id]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.sampler is not None:
            sequence.sampler.close()
        text += sequence.say(sequence.detokenizer.flush())
        completion = sequence.completion(reason, stop_reason, self._clock())
        if error is not None:
            error.completion = completion
        delta = TokenDelta(text, token_ids, reason, stop_reason)
        self.events.append(Finished(sequence.request_id, delta, completion, error))
        self.recorder.n_finished[reason] += 1
        logger.debug(
            "request %s: finished, %s (%s), %d output tokens",
            sequence.request_id, reason, stop_reason, sequence.n_output,
        )  # fmt: skip

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's cells; it waits with all its tokens and computes them again later."""
        self._leave_cache(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        sequence.n_preemptions += 1
        self.recorder.n_preemptions += 1
        logger.debug("request %s: preempted", sequence.request_id)

    def _leave_cache(self, sequence: Sequence) -> None:
        """Remove a sequence from the KV cache, whatever the books say about it, and look."""
        slot = sequence.slot
        if slot is None:
            return
        removed = self._decoder.seq_rm(slot.seq_id)
        left = self._decoder.seq_pos_max(slot.seq_id)
        if not removed or left is not None:
            raise LlamaCallError(
                "llama_memory_seq_rm", int(removed), f"seq_id {slot.seq_id} still ends at {left}"
            )
        n_cells = self.kv_cache.release(slot)
        sequence.slot = None
        logger.debug(
            "request %s: cleared KV cache, seq_id %d, %d cells",
            sequence.request_id, slot.seq_id, n_cells,
        )  # fmt: skip

    def _after_failed_decode(self, chunks: list[Chunk], error: LlamaCallError) -> None:
        """Read the books back; an abort is tried again, another failure ends what was in it."""
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.slot is not None
            self.kv_cache.read_back(sequence.slot, self._decoder)
            if sequence.n_pending == 0:
                # All of it was stored, but the logits of its last row are lost: compute it again.
                # Recurrent memory cannot give up a part.
                if not self._decoder.seq_rm(sequence.slot.seq_id, sequence.n_computed - 1):
                    self._decoder.seq_rm(sequence.slot.seq_id)
                self.kv_cache.read_back(sequence.slot, self._decoder)
        if isinstance(error, DecodeFailedError) and error.code == ABORTED:
            return
        logger.error("%s; %d requests were in the batch", error, len(chunks))
        for chunk in chunks:
            self._finish(chunk.sequence, FinishReason.ERROR, None, cause=error)

    # --- Inspection --------------------------------------------------------------------------
    def discrepancies(self) -> list[str]:
        """Where the books and llama.cpp disagree."""
        return self.kv_cache.discrepancies(self._decoder)

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        return self.recorder.snapshot(
            n_waiting=len(self.waiting),
            n_running=len(self.running),
            n_paused=sum(s.is_paused for s in self._by_id.values()),
            n_kv_cells_used=self.kv_cache.n_used,
            n_kv_cells=self.kv_cache.n_cells,
            n_seq_ids_used=self.kv_cache.n_used_ids,
        )
