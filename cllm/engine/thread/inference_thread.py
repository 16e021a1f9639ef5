"""InferenceThread: owns what its backend loads, runs ticks, and frees what it owns.

The thread waits for the worker threads before it frees the vocabulary that they use.  An exit handler
stops and joins it.  Freeing a context during a decode would crash, so a stuck thread leaks its objects.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from cllm.engine.config import EngineConfig
from cllm.engine.core.commands import (
    AddEmbedding,
    Ask,
    CancelRequest,
    Command,
    Event,
    Finished,
    MediaMeasured,
    PrefixesRemoved,
    Progressed,
    Ready,
    Shutdown,
    Withdraw,
)
from cllm.engine.core.embedding_core import EmbeddingCore
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.core.gap_budget import GapBudget
from cllm.engine.core.linger import Linger
from cllm.engine.core.media_store import MediaStore
from cllm.engine.core.scheduler import Chunk, is_decoding
from cllm.engine.core.speculation import BudgetedSpeculation
from cllm.engine.core.statistics import EngineStatistics, Recorder
from cllm.engine.core.thread_tuner import ThreadTuner
from cllm.engine.output import FinishReason
from cllm.engine.request import ModelInfo
from cllm.engine.thread.backend import Backend, Loaded, MediaEncoderThread, Work
from cllm.engine.thread.chrome_trace import ChromeTrace
from cllm.engine.thread.host import EngineHost
from cllm.engine.thread.interrupter import Abortable, Interrupter
from cllm.engine.thread.mailbox import EventOutbox, Inbox
from cllm.engine.thread.prefix_files import PrefixFiles
from cllm.engine.thread.processor_load import ProcessorReader
from cllm.engine.thread.questions import Questions
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.errors import CllmError
from cllm.memory import available_bytes

logger: logging.Logger = logging.getLogger("cllm.engine")

IDLE_AUDIT_S = 1.0
# Host memory for evicted prefixes by default: this fraction (1 / 4) of the available memory, at most 8 GiB.
PREFIX_SHARE = 4
MAX_PREFIX_BYTES = 8 << 30
AUDIT_EVERY_TICK = os.environ.get("CLLM_AUDIT") == "tick"


class InferenceThread(EngineHost):
    """An `EngineHost` that computes in this process."""

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        inbox: Inbox,
        outbox: EventOutbox,
        workers: WorkerThreads,
        interrupter: Interrupter,
    ) -> None:
        super().__init__("cllm-inference", inbox, outbox, workers)
        self._config = config
        self._backend = backend
        self._recorder: Recorder | None = None  # a snapshot, replaced after every tick
        self._interrupter = interrupter
        self._audited_at = float("-inf")
        self._held: list[Event] = []  # not yet posted
        self._is_listened_to = True
        self._trace: ChromeTrace | None = None
        self._busy_since: float | None = None
        self._linger = Linger()
        target_ms = config.target_itl_ms
        self._text_budget = GapBudget(None if target_ms is None else target_ms / 1000.0)
        self._embeddings: EmbeddingCore | None = None
        self._questions: Questions | None = None
        self._media: MediaEncoderThread | None = None
        self._tuner: ThreadTuner | None = None
        self._set_n_threads: Callable[[int], None] | None = None

    @property
    def statistics(self) -> EngineStatistics:
        """See `EngineHost`."""
        recorder = self._recorder
        return EngineStatistics() if recorder is None else EngineStatistics.of(recorder)

    @property
    def n_requests(self) -> tuple[int, int, int] | None:
        """Numbers of waiting, running and paused requests after the last tick; None before the model is loaded.

        Any thread.
        """
        counts = self._recorder
        if counts is None:
            return None
        return counts.n_waiting, counts.n_running, counts.n_paused

    @property
    def heartbeat_age_s(self) -> float:
        """See `EngineHost`."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.perf_counter() - busy_since

    def request_stop(self) -> None:
        """See `EngineHost`."""
        self._stopping = True
        self._backend.stop()
        super().request_stop()

    # --- The thread itself -------------------------------------------------------------------
    def _serve(self, owned: ExitStack) -> None:
        core, model_info = self._load(owned)
        self._publish(core)
        self._outbox.post([Ready(model_info, self.statistics)])
        try:
            self._loop(core)
        except BaseException as error:
            self.failure: BaseException | None = error  # before it is reported
            core.fail_all(error)  # frees no KV cells: the whole context is freed
            events = core.take_events()
            if self._trace is not None:
                self._trace.on_tick(core, events, self._busy_since or time.perf_counter())
            if self._embeddings is not None:
                self._embeddings.fail_all(error)
                events += self._embeddings.take_events()
            self._publish(core)
            self._held += events
            self._post_held()
            del events  # the errors hold frames of callers by their tracebacks: see `_loop`
            raise
        finally:
            self._busy_since = None

    def _load(self, owned: ExitStack) -> tuple[EngineCore, ModelInfo]:
        loaded = self._backend.load(owned)
        self.text_vocabulary = loaded.text_vocabulary or loaded.vocabulary
        self.vocabulary = loaded.vocabulary
        self._interrupter.attach(loaded.decoder, can_truncate=loaded.kv_cache.has_pos_min)
        core = self._make_core(loaded, owned)
        audit = partial(self._audit, core)
        self._questions = Questions(core, loaded.loras, audit, loaded.media)
        if loaded.encoder is not None:
            self._embeddings = EmbeddingCore(
                loaded.encoder,
                core.recorder,
                on_batch=partial(self._on_texts, loaded.encoder),
            )
        self._set_n_threads = loaded.set_n_threads
        core.recorder.n_threads = loaded.n_threads_max
        if loaded.set_n_threads is not None and loaded.n_threads_max > 1:
            costs = [core.cost.ticks]
            if self._embeddings is not None:
                costs.append(self._embeddings.cost)
            relatives = (os.getppid(),) if self._config.process else ()
            reader = ProcessorReader(relatives)
            self._tuner = ThreadTuner(
                loaded.n_threads_max, costs, reader.read, reader.count_runnable
            )
        return core, loaded.model

    def _make_core(self, loaded: Loaded, owned: ExitStack) -> EngineCore:
        config = self._config
        if config.n_prefill_chunk is None:
            config = replace(config, n_prefill_chunk=loaded.n_prefill_chunk)
        if config.prefix_cache_bytes is None:
            config = replace(config, prefix_cache_bytes=_default_bytes())
        store = self._make_store(loaded, owned)
        speculation = None
        if loaded.drafter is not None:
            speculation = BudgetedSpeculation(
                loaded.drafter,
                loaded.row_cost,
                loaded.kv_cache,
                stream_buffer=config.stream_buffer,
            )
        if config.trace is not None:
            self._trace = owned.enter_context(closing(ChromeTrace(Path(config.trace))))
        return EngineCore(
            loaded.decoder,
            loaded.vocabulary,
            loaded.kv_cache,
            loaded.make_sampler,
            loaded.read_logprob,
            config,
            on_batch=self._on_batch,
            speculation=speculation,
            row_cost=loaded.row_cost,
            tick_shares=loaded.tick_shares,
            store=store,
            media=self._make_media(loaded),
        )

    def _make_media(self, loaded: Loaded) -> MediaStore | None:
        """Return the store of embeddings of media; None if the model takes none."""
        self._media = loaded.media
        if loaded.media is None:
            return None
        loaded.media.start(self._inbox.put, self._interrupter.note_media)
        return MediaStore(loaded.media, self._config.media_cache_bytes)

    def _make_store(self, loaded: Loaded, owned: ExitStack) -> PrefixFiles | None:
        """Return the files of the prefix cache; None without a directory for them, or without `prefix_cache`."""
        config = self._config
        if config.prefix_cache_dir is None or not config.prefix_cache:
            return None
        store = PrefixFiles(
            Path(config.prefix_cache_dir),
            loaded.model.state_key,
            config.prefix_cache_dir_bytes,
            self._inbox.put,
        )
        owned.callback(store.close)
        n_mib, where = store.n_bytes >> 20, config.prefix_cache_dir
        logger.info("prefix cache: %d MiB of files in %s", n_mib, where)
        return store

    def _loop(self, core: EngineCore) -> None:
        n_ended = 0
        while True:
            if core.rest() and not core.has_work:
                self._publish(core)
                self._outbox.post([])
            self._busy_since = None
            if is_idle := not core.has_work:
                self._audit_when_idle(core)
            commands = self._drain(core, n_ended, is_idle=is_idle)
            self._busy_since = time.perf_counter()
            if is_idle and self._tuner is not None:
                self._use_threads(core, self._tuner.resume(self._busy_since))
            is_last = any(isinstance(command, Shutdown) for command in commands)
            tick_s = 0.0
            for command in commands:
                self._handle(core, command)
            if is_last:
                core.queue.cancel_all()
                core.save_prefixes()
            else:
                core.tick()
                tick_s = time.perf_counter() - self._busy_since
                self._linger.on_tick(tick_s)
                if AUDIT_EVERY_TICK and (found := core.discrepancies()):
                    raise CllmError(
                        f"the KV cache bookkeeping and llama.cpp disagree: {'; '.join(found)}"
                    )
            events = core.take_events()
            events += self._questions.take_events() if self._questions is not None else []
            self._publish(core)
            n_ended, started = sum(map(_has_ended_well, events)), time.perf_counter()
            self._linger.on_ends(n_ended, started)
            is_late = bool(self._held)  # a decode would have posted them: this tick had none
            self._held += events
            if is_late or not self._can_wait(core, events):
                self._post_held()
            if self._trace is not None:
                self._trace.on_tick(core, events, self._busy_since)
            # Events can refer to the engine.  A waiting thread must not keep the engine alive.
            del events
            core.recorder.deliver_s += time.perf_counter() - started
            if self._embeddings is not None:
                self._embed(core, self._embeddings, tick_s, is_last=is_last)
            if self._tuner is not None:
                self._use_threads(core, self._tuner.update(time.perf_counter()))
            if not self._is_listened_to:
                core.queue.cancel_all()
                return
            if is_last:
                return

    def _can_wait(self, core: EngineCore, events: list[Event]) -> bool:
        """Return True if events are posted when the next decode begins: see `_post_held`."""
        decodes_next = not self._config.process and core.decodes_next and not self._has_texts
        return decodes_next and all(map(_is_progress, events))

    @property
    def _has_texts(self) -> bool:
        """True if texts wait to become vectors."""
        return self._embeddings is not None and self._embeddings.has_work

    def _embed(
        self, core: EngineCore, embeddings: EmbeddingCore, tick_s: float, *, is_last: bool
    ) -> None:
        """Compute a batch of texts in the time between two ticks; with `is_last`, cancel all texts."""
        if is_last:
            embeddings.cancel_all()
        elif embeddings.has_work and core.has_work:
            now, next_tick_s = time.perf_counter(), core.next_tick_s()
            embeddings.tick(self._text_budget.seconds(now, tick_s, next_tick_s))
        else:
            self._text_budget.pause()
            embeddings.tick()
        if events := embeddings.take_events():
            self._publish(core)
            self._held += events
            self._post_held()

    def _use_threads(self, core: EngineCore, n_threads: int) -> None:
        """Set the number of threads for the next ticks."""
        recorder = core.recorder
        if n_threads != recorder.n_threads and self._set_n_threads is not None:
            logger.debug("%d compute threads instead of %d", n_threads, recorder.n_threads)
            self._set_n_threads(n_threads)
            recorder.n_threads = n_threads
            # Costs measured with fewer threads are not valid for the full number.
            core.cost.rows.is_paused = n_threads < max(self._config.compute_threads)

    def _post_held(self) -> None:
        """Post the held events to the event loop.

        Tokens of running requests are posted when the next decode begins.  The event loop then works while
        llama.cpp computes, and does not compete with this thread for the GIL.  An event loop in another process
        gets them at once.  It works while this thread plans the next tick, when compute threads are idle.
        """
        if self._held:
            held, self._held = self._held, []
            self._is_listened_to = self._outbox.post(held)

    def _drain(self, core: EngineCore, n_ended: int, *, is_idle: bool) -> list[Command]:
        """Return the new commands.

        Without work it waits for a command or the next deadline.  After `n_ended` requests have ended it may
        wait a little for the next requests of their clients (`Linger`).
        """
        linger, now = self._linger, time.perf_counter()
        for at in self._inbox.take_arrivals():
            linger.on_arrival(at)
        linger.settle(now)
        if self._has_texts:
            return self._inbox.drain(wait=False)
        if is_idle and not core.has_work:  # an audit may have found work
            return self._inbox.drain(wait=True, until=core.next_deadline)
        wait_s = 0.0
        if n_ended and core.may_wait:
            wait_s = linger.seconds(n_ended, len(core.queue.running), core.next_tick_s())
        if not wait_s:
            return self._inbox.drain(wait=False)
        deadline = core.next_deadline
        until = now + wait_s if deadline is None else min(deadline, now + wait_s)
        commands = self._inbox.drain_requests(n_ended, until)
        linger.on_wait(time.perf_counter() - now)
        return commands

    def _handle(self, core: EngineCore, command: Command) -> None:
        match command:
            case Ask():
                assert self._questions is not None
                self._questions.ask(command)
            case AddEmbedding():
                assert self._embeddings is not None
                self._embeddings.handle(command)
            case CancelRequest(request_id):
                core.handle(command)
                if self._embeddings is not None:
                    self._embeddings.handle(command)
                self._interrupter.forget(request_id)
            case Withdraw(call_id):
                assert self._questions is not None
                self._questions.withdraw(call_id)
            case MediaMeasured() | PrefixesRemoved():
                pass  # `Questions` asks again in every tick
            case _:
                core.handle(command)

    def _audit_when_idle(self, core: EngineCore) -> None:
        """Audit, at most once a second."""
        now = time.perf_counter()
        if now - self._audited_at >= IDLE_AUDIT_S:
            self._audited_at = now
            self._audit(core)

    def _audit(self, core: EngineCore) -> list[str]:
        """Return the differences between the bookkeeping and llama.cpp; the next tick repairs them."""
        try:
            found = core.discrepancies()
        except Exception as error:
            found = [f"llama.cpp's cannot be read ({error!r})"]
        if found:
            core.recorder.n_discrepancies += len(found)
            logger.error("the KV cache bookkeeping and llama.cpp disagree: %s", "; ".join(found))
            cause = CllmError(f"the KV cache bookkeeping and llama.cpp disagree: {found[0]}")
            core.mark_corrupt(cause)
        return found

    def _on_batch(self, chunks: list[Chunk]) -> None:
        """Handle the start of a decode of these chunks; without chunks, its end."""
        if self._trace is not None:
            self._trace.on_batch(chunks)
        if chunks:
            self._post_held()
            if self._media is not None:
                self._media.pause(_work_of(chunks))
            self._interrupter.begin({c.sequence.request_id: c.n_rows for c in chunks})
        else:
            self._interrupter.end()
            if self._media is not None:
                self._media.resume()

    def _on_texts(self, encoder: Abortable, n_tokens: Mapping[str, int]) -> None:
        """Handle the start of a batch of texts, which can then be aborted; without texts, its end."""
        if n_tokens:
            if self._media is not None:
                self._media.pause("texts")
            self._interrupter.begin(n_tokens, encoder)
        else:
            self._interrupter.end()
            if self._media is not None:
                self._media.resume()

    def _publish(self, core: EngineCore) -> None:
        self._recorder = core.snapshot()


def _work_of(chunks: list[Chunk]) -> Work:
    if chunks[0].sequence.media_index is not None:
        return "media"
    return "tokens" if all(map(is_decoding, chunks)) else "prompts"


def _default_bytes() -> int:
    """Return the default of `prefix_cache_bytes`."""
    n_bytes = min(MAX_PREFIX_BYTES, (available_bytes() or 0) // PREFIX_SHARE)
    logger.info("prefix cache and preempted requests: up to %d MiB of host memory", n_bytes >> 20)
    return n_bytes


def _is_progress(event: Event) -> bool:
    """Return True for a delta that is not the last one of its request: it may be posted later."""
    return isinstance(event, Progressed)


def _has_ended_well(event: Event) -> bool:
    """Return True for the end of an answer whose client may send the next request."""
    return (
        isinstance(event, Finished)
        and event.error is None
        and event.completion.finish_reason is not FinishReason.CANCELLED
    )
