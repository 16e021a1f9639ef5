"""One tick of the inference thread: plan → batch → decode → sample → detokenize → events.

`EngineCore` uses no threads, event loops or libllama: it calls a context through the `Decoder`
protocol.  `run_queue` has the waiting and the running requests.  `recovery` decides how to react to
a failed decode, and `EngineCore` does it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from cllm.engine.config import EngineConfig
from cllm.engine.core import scheduler
from cllm.engine.core.commands import (
    AddRequest,
    CancelRequest,
    Command,
    Event,
    LiveView,
    MediaEncoded,
    PrefixLoaded,
    Read,
)
from cllm.engine.core.decode_cost import DecodeCost, TickShape
from cllm.engine.core.decoder import Decoder, MediaRows
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.kv_cache_manager import KVCacheManager
from cllm.engine.core.live_view import TickTrace, view_of
from cllm.engine.core.media_store import MediaStore
from cllm.engine.core.output_processor import OutputProcessor, ReadLogprob
from cllm.engine.core.prefix_tiers import PrefixStore
from cllm.engine.core.recovery import Recovery, Verdict
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.run_queue import MakeSampler, RunQueue, last_delta
from cllm.engine.core.scheduler import Chunk, is_decoding
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Speculation
from cllm.engine.core.statistics import EngineStatistics, Recorder
from cllm.engine.core.tick_shares import TickShares
from cllm.engine.core.turns import Turns
from cllm.engine.output import FinishReason, TokenDelta
from cllm.engine.vocabulary import OutputVocabulary
from cllm.errors import (
    DecodeFailedError,
    EngineFailedError,
    InvalidBatchError,
    InvalidRequestError,
    ModelChangedError,
    NoKVSlotError,
)

logger: logging.Logger = logging.getLogger("cllm.engine")

ABORTED = 2  # llama_decode: the abort flag was set
MAX_REBUILDS_IN_VAIN = 8  # new contexts without a token from any of them
N_PLAIN_TICKS = 16  # ticks without drafts after a decode with drafts has failed
PROBE_TOKEN = 0  # belongs to no request; every vocabulary has it


class EngineCore:
    """Core of generation: all requests, and the ticks that compute them.

    Its parts are public: `queue`, `manager`, `kv_cache`, `recovery`, `cost`, `turns`, `recorder`.

    Parameters
    ----------
    decoder : Decoder
        Its context must be empty.
    vocabulary : OutputVocabulary
    kv_cache : KVCache
        The bookkeeping of the decoder's context.
    make_sampler : callable
        Returns the sampler of a request; None for greedy sampling.
    read_logprob : callable
        Returns the log probability of a token, from its row of logits, the token, and the number of
        alternatives to include.
    config : EngineConfig
        Settings of scheduling and of the prefix cache; the size of a batch is that of the decoder.
    clock : callable
        Returns the time in seconds.  All times but `uptime_s` of the statistics come from it.
    on_batch : callable
        Called with the chunks of a batch just before it is decoded, and with an empty list just after.
    speculation : Speculation, optional
        Source of drafts; None: no drafts.
    row_cost : RowCost, optional
        Costs of decodes from earlier runs; None: unknown.  It learns from ticks that only decode.
    tick_shares : TickShares, optional
        Counts the seconds of ticks by shape.
    store : PrefixStore, optional
        The files of the prefix cache.
    media : MediaStore, optional
        Embeddings of media; None: the model takes none.
    """

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: OutputVocabulary,
        kv_cache: KVCache,
        make_sampler: MakeSampler,
        read_logprob: ReadLogprob,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_batch: Callable[[list[Chunk]], None] = lambda chunks: None,
        speculation: Speculation | None = None,
        row_cost: RowCost | None = None,
        tick_shares: TickShares | None = None,
        store: PrefixStore | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self._decoder = decoder
        self._media = media
        self.kv_cache = kv_cache
        self._config = config
        self._clock = clock
        self._on_batch = on_batch
        self.recovery: Recovery = Recovery()
        self.recorder: Recorder = Recorder()
        self._trace = TickTrace()
        rows = RowCost() if row_cost is None else row_cost
        self.cost: DecodeCost = DecodeCost(
            rows, tick_shares or TickShares(), is_unified=kv_cache.kv_unified
        )
        self.turns: Turns = Turns(kv_cache, decoder, config, self.cost)
        # Without rollback, memory that forgets positions cannot remove the row of a wrong draft.
        can_speculate = kv_cache.has_pos_min or kv_cache.n_rollback > 0
        self._speculation = speculation if can_speculate else None
        self.manager: KVCacheManager = KVCacheManager(
            decoder,
            kv_cache,
            self.recorder,
            n_seq_max=config.n_seq_max,
            prefix_cache_tokens=config.n_prefix_cache_tokens(kv_cache.n_cells),
            n_bytes_max=config.prefix_cache_bytes or 0,
            store=store,
            clock=clock,
            recompute_s=self.cost.ticks.known_recompute_s,
            may_pause_s=self._may_pause_s,
        )
        self.queue: RunQueue = RunQueue(
            self.manager,
            self.recovery,
            self.cost.ticks,
            self.recorder,
            make_sampler,
            vocabulary,
            stream_buffer=config.stream_buffer,
            clock=clock,
            tenants=self.turns.tenants,
            media=media,
        )
        self._processor = OutputProcessor(
            vocabulary,
            kv_cache,
            self.manager,
            self.queue,
            self.recorder,
            read_logprob,
            n_vocab=decoder.n_vocab,
            # With flash attention, NaN has not been seen to reach the rows of other sequences.
            nan_spreads=config.flash_attn is not True,
            clock=clock,
            on_drafts=self._observe_drafts,
        )
        self._n_rebuilds_in_vain = 0
        self._n_plain_ticks = 0
        # Rows of the next batch at most: fewer after llama.cpp found no room where the
        # bookkeeping saw some.
        self._n_rows_max = decoder.n_batch

    # --- Commands ----------------------------------------------------------------------------
    def handle(self, command: Command) -> None:
        """Handle a command; `InferenceThread` handles `Ask`, `AddEmbedding` and `Shutdown`."""
        match command:
            case AddRequest(request):
                self.queue.submit(request)
            case CancelRequest(request_id, saves_state):
                self.queue.cancel(request_id, saves_state=saves_state)
            case Read(request_id, n_deltas):
                self.queue.read(request_id, n_deltas)
            case PrefixLoaded(file, state) if (tiers := self.manager.saved.tiers) is not None:
                tiers.on_loaded(file, state)
            case MediaEncoded() if self._media is not None:
                self._on_encoded(self._media, command)

    def fail_all(self, cause: BaseException) -> None:
        """End every request with an `EngineFailedError` of this cause; the KV cache is not changed."""
        self.queue.fail_all(cause)

    def forget_lora(self, name: str) -> None:
        """Forget the prefixes that an unloaded adapter computed: another may get its name."""
        self.manager.cells.forget_lora(name)

    def erase_slot(self, seq_id: int) -> int:
        """Free the cells of a cached prefix; return the number of its tokens, 0 without one.

        Raises
        ------
        InvalidRequestError
            A request uses this seq_id.
        """
        if any(scheduler.seq_id_of(s) == seq_id for s in self.queue.running):
            limit = "the seq_id of a slot without a running request"
            raise InvalidRequestError("seq_id", seq_id, limit)
        return self.manager.cells.erase(seq_id)

    def save_prefixes(self) -> None:
        """Write the prefixes in the KV cache to files, as far as there is room, at the end of the engine."""
        self.manager.cells.write_all()

    def mark_corrupt(self, cause: Exception) -> None:
        """Note that the bookkeeping and llama.cpp disagree: the next tick first recreates the context."""
        self.manager.cells.fault = cause

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.queue.events = self.queue.events, []
        return events

    def _on_encoded(self, media: MediaStore, encoded: MediaEncoded) -> None:
        """Keep a media chunk; end the requests with it if it could not be encoded."""
        key = encoded.digest, encoded.ordinal
        if encoded.chunk is not None:
            media.take(key, encoded.chunk)
            return
        for sequence in media.users_of(key):
            self.queue.finish(sequence, last_delta(FinishReason.ERROR), cause=encoded.error)

    # --- The tick ----------------------------------------------------------------------------
    @property
    def has_work(self) -> bool:
        """True if a tick would do anything."""
        return self.queue.has_work or self.manager.cells.fault is not None

    @property
    def decodes_next(self) -> bool:
        """True if the next tick decodes at once, without a recovery, an eviction or a draft model first."""
        drafts_first = self._speculation is not None and self._speculation.has_model
        cells = self.manager.cells
        is_tidy = cells.fault is None and not cells.has_surplus
        return self.has_work and is_tidy and not drafts_first

    @property
    def next_deadline(self) -> float | None:
        """Earliest deadline of a request: a tick is due then, even without work; None without one."""
        return self.queue.next_deadline

    @property
    def may_wait(self) -> bool:
        """True if the next tick may wait for new requests: it repairs nothing and admits no request."""
        return (
            bool(self.queue.running) and not self.queue.waiting and self.manager.cells.fault is None
        )

    def next_tick_s(self) -> float:
        """Return the expected seconds until all running requests have had a turn; 0 while unknown."""
        return self.turns.next_tick_s(self.queue.running, has_loras=self.queue.has_loras)

    def tick(self) -> None:
        """Run one tick: admit requests, decode a chunk of each sequence that has a turn, and sample.

        Then decode rows of one media chunk, if any is ready: llama.cpp takes no tokens in the same batch.
        """
        queue, started = self.queue, self._clock()
        queue.expire(started)
        self._rebuild_if_corrupt()
        queue.admit(started)
        queue.make_room(self._n_rows_max, started)
        self._rebuild_if_corrupt()
        chunks = self._plan(started)
        if chunks and not self._step(chunks, started):
            return
        media = self._media
        is_encoding = media is not None and media.is_encoding
        self.turns.begin_gap(chunks, self.queue.running, self._clock(), is_encoding=is_encoding)
        if media is not None and media.has_users and self.manager.cells.fault is None:
            self._tick_media(media, chunks)

    def rest(self) -> bool:
        """Tidy the cells between two ticks, after the events have been posted; return True if a prefix has left."""
        cells, n_before = self.manager.cells, self.recorder.n_evictions
        cells.trim()
        if not self.queue.running and not self.queue.waiting:
            cells.compact()
        return self.recorder.n_evictions > n_before

    def _tick_media(self, media: MediaStore, chunks: list[Chunk]) -> None:
        """Decode rows of one media chunk after the chunks of this tick."""
        started, at_media = self._clock(), list[Sequence]()
        for sequence in self.recovery.restrict(self.queue.running):
            if sequence.is_ready and sequence.media_index is not None:
                if media.next_chunk(sequence) is not None:
                    at_media.append(sequence)
                else:  # others may have its seq_id while its media are encoded
                    self.queue.preempt(sequence, keep=True)
        chunk = self.turns.plan_media(at_media, chunks, self._n_rows_max, started)
        if chunk is not None:
            self._step([chunk], started)

    def _step(self, chunks: list[Chunk], started: float) -> bool:
        """Decode chunks and sample; return False if that failed."""
        recorder = self.recorder
        shape = TickShape.of(chunks)
        planned = self._clock()
        recorder.plan_s += planned - started
        try:
            self._fill_batch(chunks)
            filled = self._clock()
            self._on_batch(chunks)
            began = self._clock()  # media may have had a turn: not a cost of these rows
            logits = self._decoder.decode()
        except ModelChangedError:
            raise
        except Exception as error:
            self._on_batch([])
            self._after_failed_decode(chunks, error)
            return False
        self._on_batch([])
        decoded = self._clock()
        waited_s = began - filled
        recorder.decode_s += decoded - planned - waited_s
        self.manager.cells.prefixes.n_rows += shape.n_rows
        outputs = self._processor.commit(chunks, logits)
        recorder.count_tick(shape.n_rows, len(outputs))
        self.recovery.on_success()
        self._n_rows_max = self._decoder.n_batch
        if outputs:
            self._n_rebuilds_in_vain = 0
            self._processor.sample(outputs, logits)
        ended = self._clock()
        n_drafts = sum(len(chunk.drafts) for chunk in chunks)
        self._trace.note(shape, n_drafts, started, planned, decoded, ended)
        self.cost.observe(
            shape,
            self.kv_cache.n_held,
            total_s=ended - started - waited_s,
            planned_s=planned - started,
        )
        # After `observe`: copies are not part of the cost of rows.
        if not self.kv_cache.has_pos_min:
            self.manager.keep_checkpoints(chunks)
        return True

    def _plan(self, now: float) -> list[Chunk]:
        """Return the chunks of this tick, with drafts."""
        running = self.recovery.restrict(self.queue.running)
        n_rows = min(self._n_rows_max, self.kv_cache.n_free)
        chunks = self.turns.plan(running, n_rows, has_loras=self.queue.has_loras, now=now)
        return self._with_drafts(chunks, n_rows)

    def _with_drafts(self, chunks: list[Chunk], n_rows: int) -> list[Chunk]:
        """Return the chunks with drafts, if this tick may have drafts."""
        can_draft = self.recovery.is_over and not self._n_plain_ticks
        self._n_plain_ticks = max(0, self._n_plain_ticks - 1)
        if self._speculation is None or not can_draft or not all(map(is_decoding, chunks)):
            return chunks
        target_ms = self._config.target_itl_ms
        if not self.kv_cache.has_pos_min:  # drafts can be removed only from one physical batch
            n_rows = min(n_rows, self._config.n_ubatch)
        try:
            # Each chunk has one row, which is an output row.
            return self._speculation.extend(
                chunks,
                n_rows - len(chunks),
                self._decoder.n_outputs_max - len(chunks),
                None if target_ms is None else target_ms / 1000.0,
            )
        except Exception:
            self._give_up_drafts()
            return chunks

    def _observe_drafts(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """Report to the speculation how many drafts of a sequence were right."""
        if self._speculation is not None:
            try:
                self._speculation.observe(sequence, n_drafted, n_accepted)
            except Exception:
                self._give_up_drafts()

    def _give_up_drafts(self) -> None:
        logger.exception("nothing is guessed any more")
        self._speculation = None

    def _fill_batch(self, chunks: list[Chunk]) -> None:
        """Put the chunks into the batch."""
        self._decoder.clear()
        self._decoder.set_loras(chunks[0].sequence.loras)
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.n_computed
            sequence.n_turn = self.turns.n
            assert sequence.placement.slot is not None
            if sequence.media_index is not None:
                self._add_media(sequence, sequence.placement.slot.seq_id, chunk)
                return
            tokens = sequence.tokens[start : start + chunk.n_tokens]
            tokens.extend(chunk.drafts)
            p0 = sequence.spans.position(start)
            self._decoder.add(sequence.placement.slot.seq_id, tokens, p0, n_outputs=chunk.n_outputs)

    def _add_media(self, sequence: Sequence, seq_id: int, chunk: Chunk) -> None:
        """Put rows of a media chunk into the batch."""
        index, start = sequence.media_index, sequence.n_computed
        assert self._media is not None
        assert index is not None
        encoded, span = self._media.next_chunk(sequence), sequence.spans[index]
        assert encoded is not None
        rows = slice(start - span.start, start - span.start + chunk.n_tokens)
        positions = encoded.positions(sequence.spans.position(span.start))[..., rows]
        is_causal = not sequence.n_whole
        self._decoder.add_media(
            MediaRows(seq_id, encoded.rows[rows], positions, is_causal, chunk.n_outputs)
        )

    # --- Failures ----------------------------------------------------------------------------
    def _after_failed_decode(self, chunks: list[Chunk], error: Exception) -> None:
        """Adapt the bookkeeping to a failed decode, and let as few requests fail as possible."""
        has_drafts = any(chunk.drafts for chunk in chunks)
        if has_drafts:
            self._n_plain_ticks = N_PLAIN_TICKS
        if isinstance(error, NoKVSlotError):  # nothing was stored
            if not has_drafts:  # no other sequence is preempted for drafts
                self._shrink(chunks, error)
            return
        verdict = None
        if not (isinstance(error, DecodeFailedError) and error.code == ABORTED):
            logger.warning("%s; %d requests were in the batch", error, len(chunks))
            is_fatal = not isinstance(error, InvalidBatchError)
            # Before positions are read back: `on_failure` uses how far each chunk would have come.
            verdict = self.recovery.on_failure(chunks, is_fatal=is_fatal)
        try:
            if self.kv_cache.is_recurrent:
                self.manager.cells.remove_all()
                self.queue.restart_all()
            else:
                self.manager.read_back(chunks)
        except Exception as unreadable:
            self.mark_corrupt(unreadable)
        if verdict is Verdict.REBUILD:
            self.mark_corrupt(error)
        elif verdict is Verdict.END:
            self._fail_culprit(chunks[0].sequence, error)

    def _shrink(self, chunks: list[Chunk], error: NoKVSlotError) -> None:
        """Make room, or halve the batch, after llama.cpp found no room where the bookkeeping saw some."""
        queue, n_rows = self.queue, sum(chunk.n_rows for chunk in chunks)
        first = scheduler.most_urgent((s for s in queue.running if s.is_ready), self._clock())
        holders = [s for s in queue.running if s.n_computed and s is not first]
        if self.manager.cells.evict_all():
            return
        if holders:
            queue.preempt(scheduler.choose_preempted(holders))
        elif n_rows > 1 and not chunks[0].sequence.n_whole:
            self._n_rows_max = n_rows // 2
        else:
            # One row of the only sequence, which ends if a new context has no room for it either.
            verdict = self.recovery.on_failure(chunks, is_fatal=True)
            if verdict is Verdict.REBUILD:
                self.mark_corrupt(error)
            elif verdict is Verdict.END:
                end = TokenDelta("", (), FinishReason.LENGTH, "context")
                queue.finish(chunks[0].sequence, end)

    def _fail_culprit(self, sequence: Sequence, error: Exception) -> None:
        """Fail the request of a sequence that failed alone, or the engine if a probe fails too.

        The probe is repeated in a new context before the engine fails.
        """
        self.manager.leave(sequence)
        try:
            self._probe()
        except Exception as failure:
            self._rebuild(failure)
            try:
                self._probe()
            except Exception as again:
                raise EngineFailedError(f"every decode fails: {error}") from again
        self._n_rebuilds_in_vain = 0
        self.queue.finish(sequence, last_delta(FinishReason.ERROR), cause=error)

    def _probe(self) -> None:
        """Decode one token under a free seq_id; raise if that fails, unless it was aborted."""
        self.manager.cells.evict_all()
        slot = self.kv_cache.open()
        self._decoder.clear()
        self._decoder.add(slot.seq_id, [PROBE_TOKEN], 0, n_outputs=0)
        try:
            self._decoder.decode()
        except DecodeFailedError as error:
            if error.code != ABORTED:
                raise
        finally:
            self.kv_cache.release(slot)
            self._decoder.seq_rm(slot.seq_id)

    def _rebuild_if_corrupt(self) -> None:
        """Recreate the context if the bookkeeping and llama.cpp cannot be trusted to agree."""
        if self.manager.cells.fault is not None:
            self._rebuild(self.manager.cells.fault)

    def _rebuild(self, cause: Exception) -> None:
        self._n_rebuilds_in_vain += 1
        if self._n_rebuilds_in_vain > MAX_REBUILDS_IN_VAIN:
            raise EngineFailedError(f"a new context does not help: {cause}") from cause
        logger.warning("recreating the context: %s", cause)
        try:
            self._decoder.rebuild()
        except Exception as error:
            raise EngineFailedError(f"the context cannot be recreated: {error}") from cause
        self.manager.cells.reset()
        self.queue.restart_all()
        self.recorder.n_rebuilds += 1

    def _may_pause_s(self) -> float:
        """Return the seconds for which copying a prefix may delay streams; infinite if none decodes.

        Infinite without `target_itl_ms`, too.
        """
        target_ms = self._config.target_itl_ms
        if target_ms is None or not any(s.is_decoding for s in self.queue.running):
            return math.inf
        return target_ms / 1000.0

    # --- Inspection --------------------------------------------------------------------------
    def discrepancies(self) -> list[str]:
        """Return the differences between the KV cache bookkeeping and llama.cpp."""
        return self.kv_cache.discrepancies(self._decoder)

    def live_view(self) -> LiveView:
        """Return the present state of the engine."""
        return view_of(self.queue, self.manager, self._trace, self._clock())

    def snapshot(self) -> Recorder:
        """Return a copy of the counters as they are now, for `EngineStatistics.of`."""
        queue, tiers = self.queue, self.manager.saved.tiers
        if tiers is not None:
            self.recorder.n_prefix_bytes_host = tiers.n_bytes
            self.recorder.n_prefix_bytes_disk = tiers.n_file_bytes
        return self.recorder.snapshot(
            self.kv_cache,
            n_waiting=len(queue.waiting),
            n_running=len(queue.running),
            n_paused=queue.n_paused,
        )

    def statistics(self) -> EngineStatistics:
        """Return the statistics as they are now."""
        return EngineStatistics.of(self.snapshot())
