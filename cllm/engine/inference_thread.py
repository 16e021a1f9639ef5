"""InferenceThread: owns Model and Context, runs ticks, and frees what it owns.

The only module of the engine that touches libllama.  The thread is a daemon so that it cannot keep
an interpreter alive, and an exit handler stops and joins it first: freeing a context while a decode
runs crashes, so what a stuck thread holds is leaked instead.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from contextlib import ExitStack, closing
from dataclasses import replace

from cllm.bindings import Context, LoraAdapter, Model
from cllm.engine.config import EngineConfig
from cllm.engine.decoder import Decoder
from cllm.engine.handoff import (
    Audit,
    Audited,
    Cancel,
    Command,
    Event,
    Inbox,
    Inspect,
    Inspected,
    Outbox,
    Read,
    Ready,
    ResetPrefixCache,
    Shutdown,
    Stopped,
    Submit,
)
from cllm.engine.interrupter import Interrupter
from cllm.engine.kv_cache import KVCache
from cllm.engine.llama_decoder import LlamaDecoder, make_context
from cllm.engine.llama_sampler import SamplerFactory
from cllm.engine.logprobs import LogprobReader
from cllm.engine.output_processor import ReadLogprob
from cllm.engine.preflight import Preflight
from cllm.engine.request import ModelInfo
from cllm.engine.run_queue import MakeSampler
from cllm.engine.scheduler import Chunk
from cllm.engine.sequence import Vocabulary
from cllm.engine.statistics import EngineStatistics, Readings
from cllm.engine.tick import EngineCore
from cllm.engine.tick_log import LoggedDecoder, LoggedVocabulary, TickLog
from cllm.errors import CllmError, ModelLoadError

logger = logging.getLogger("cllm.engine")

EXIT_TIMEOUT_S = 5.0
IDLE_AUDIT_S = 1.0
# On a CPU.  2,000 tokens beside 4 streams, in batches of 128, 192, 256 and 512: 13.2, 11.9, 11.7 and
# 11.2 s, while the streams stood still for 1.0, 1.4, 1.9 and 3.3 s (qwen3-0.6b, 2 cores).
N_PREFILL_CHUNK = 128
AUDIT_EVERY_TICK = os.environ.get("CLLM_AUDIT") == "tick"


class InferenceThread:
    """The thread and what other threads may know of it.

    Attributes
    ----------
    model : Model or None
        Once loaded; other threads may use its vocabulary until `Shutdown` is sent.
    failure : BaseException or None
        Why it has ended, or is about to, if nobody asked it to; any thread.
    interrupter : Interrupter or None
        Once loaded: ends a decode that is mostly for cancelled requests; any thread.
    """

    def __init__(self, config: EngineConfig, inbox: Inbox, outbox: Outbox[list[Event]]) -> None:
        self._config = config
        self._inbox = inbox
        self._outbox = outbox
        self.model: Model | None = None
        self._readings: Readings | None = None  # replaced after every tick
        self._decoder: LlamaDecoder | None = None
        self._stopping = False
        self.failure: BaseException | None = None
        self.interrupter: Interrupter | None = None
        self._preflight = Preflight(config)
        self._audited_at = float("-inf")
        self._log: TickLog | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="cllm-inference", daemon=True)

    def start(self) -> None:
        """Load the model and begin to serve."""
        # A bound method would keep the engine alive for ever.
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        self._thread.start()
        # Registered after `weakref`'s own exit handler, and so run before it.
        atexit.register(self._at_exit)
        self._inbox.on_cancel = functools.partial(_interrupt, weakref.ref(self))

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def statistics(self) -> EngineStatistics:
        """What was so after the last tick; any thread."""
        readings = self._readings
        return EngineStatistics() if readings is None else EngineStatistics.of(readings)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last showed that it is not stuck; 0 while it is idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.perf_counter() - busy_since

    def request_stop(self) -> None:
        """Cancel everything, also a load or a decode that is running.  Any thread; returns at once."""
        self._stopping = True
        self._preflight.stop()
        if (decoder := self._decoder) is not None:
            decoder.stop()
        self._inbox.put(Shutdown())

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to have freed everything and ended."""
        self._thread.join(timeout)
        atexit.unregister(self._at_exit)

    # --- The thread itself -------------------------------------------------------------------
    def _run(self) -> None:
        try:
            with ExitStack() as owned:  # freed in reverse order: context, adapters, model
                try:
                    self._serve(owned)
                except BaseException as error:
                    self.failure = error
                    logger.debug("the inference thread ends", exc_info=True)
                    # Another thread may be inside a call of the vocabulary: free nothing before
                    # everybody has been told and asks for it, if there is anybody left.
                    if self._outbox.post([Stopped(error)]):
                        self._await_shutdown()
        finally:
            self.model = self._decoder = self._busy_since = None
            if self.failure is None:
                self._outbox.post([Stopped(None)])

    def _await_shutdown(self) -> None:
        self._busy_since = None
        while not self._stopping:
            self._inbox.drain(wait=True)

    def _serve(self, owned: ExitStack) -> None:
        self._preflight.run()
        core, model_info = self._load(owned)
        self._preflight.passed()
        self._publish(core)
        self._outbox.post([Ready(model_info, self.statistics)])
        try:
            self._loop(core)
        except BaseException as error:
            self.failure = error  # before anybody hears of it
            core.fail_all(error)  # what the requests hold in the cache goes with the context
            self._publish(core)
            events = core.take_events()
            if self._log is not None:
                self._log.tick(events)
            self._outbox.post(events)
            raise

    def _load(self, owned: ExitStack) -> tuple[EngineCore, ModelInfo]:
        config = self._config
        path = config.model_path
        if config.model is None and not path.is_file():
            raise ModelLoadError(str(path), "the embedded model is not installed")
        model = owned.enter_context(
            Model(
                path,
                n_gpu_layers=config.n_gpu_layers,
                use_mmap=config.use_mmap,
                use_mlock=config.use_mlock,
                check_tensors=config.check_tensors,
                on_progress=lambda _: not self._stopping,
            )
        )
        loras = [(owned.enter_context(LoraAdapter(model, p)), scale) for p, scale in config.lora]
        decoder = LlamaDecoder(lambda: make_context(model, config, loras), n_batch=config.n_batch)
        owned.callback(decoder.close)
        self.model, self._decoder = model, decoder
        if self._stopping:
            decoder.stop()
        context = decoder.context
        kv_cache = KVCache(
            n_cells=context.n_ctx,
            n_seq_ids=context.n_seq_max,
            n_ctx_seq=context.n_ctx_seq,
            kv_unified=config.kv_unified,
            has_pos_min=not (model.has_state or model.n_swa),
            is_windowed=bool(model.n_swa) and not model.has_state,
        )
        self.interrupter = Interrupter(decoder, can_truncate=kv_cache.has_pos_min)
        core = self._make_core(decoder, model, kv_cache, owned)
        return core, _model_info(model, context)

    def _make_core(
        self, decoder: Decoder, model: Model, kv_cache: KVCache, owned: ExitStack
    ) -> EngineCore:
        vocabulary: Vocabulary = model.vocab
        reader = decoder  # audits are no part of what a replay repeats
        make_sampler: MakeSampler = SamplerFactory(model, kv_cache.n_ctx_seq)
        read_logprob: ReadLogprob = LogprobReader(model.vocab, decoder.n_vocab).read
        clock, config = time.perf_counter, self._config
        if config.n_prefill_chunk is None:
            n_rows = config.n_batch if model.is_on_gpu else N_PREFILL_CHUNK
            config = replace(config, n_prefill_chunk=n_rows)
        if config.tick_log is not None:
            self._log = log = owned.enter_context(closing(TickLog(config.tick_log)))
            log.header(config, kv_cache)
            decoder, vocabulary = LoggedDecoder(decoder, log), LoggedVocabulary(vocabulary, log)
            make_sampler, clock = log.calls("make_sampler", make_sampler), log.clock
            read_logprob = log.calls("read_logprob", read_logprob)
        return EngineCore(
            decoder,
            vocabulary,
            kv_cache,
            make_sampler,
            read_logprob,
            config,
            reader=reader,
            clock=clock,
            on_batch=self._on_batch,
        )

    def _loop(self, core: EngineCore) -> None:
        while True:
            self._busy_since = None
            if not core.has_work:
                self._audit_when_idle(core)
            commands = self._inbox.drain(wait=not core.has_work, until=core.next_deadline)
            self._busy_since = time.perf_counter()
            is_last = any(isinstance(command, Shutdown) for command in commands)
            for command in commands:
                self._obey(core, command)
            if is_last:
                core.cancel_all()
            else:
                core.tick()
                if AUDIT_EVERY_TICK and (found := core.discrepancies()):
                    raise CllmError(f"the books and llama.cpp disagree: {'; '.join(found)}")
            self._publish(core)
            events = core.take_events()
            if self._log is not None:
                self._log.cancel_all() if is_last else self._log.tick(events)
            started = time.perf_counter()
            listened = self._outbox.post(events) if events else True
            core.recorder.deliver_s += time.perf_counter() - started
            if not listened:
                core.cancel_all()
                return
            if is_last:
                return

    def _obey(self, core: EngineCore, command: Command) -> None:
        match command:
            case Submit(request):
                core.submit(request)
            case Cancel(request_id):
                core.cancel(request_id)
                if self.interrupter is not None:
                    self.interrupter.obeyed(request_id)
            case Read(request_id, n_deltas):
                core.read(request_id, n_deltas)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case Audit(call_id):
                core.post(Audited(call_id, tuple(core.discrepancies())))
            case Inspect(call_id):
                core.post(Inspected(call_id, core.slots()))
        if self._log is not None:
            self._log.command(command)

    def _audit_when_idle(self, core: EngineCore) -> None:
        """Compare the books with llama.cpp's, at most once a second; mend what differs."""
        now = time.perf_counter()
        if now - self._audited_at < IDLE_AUDIT_S:
            return
        self._audited_at = now
        if found := core.discrepancies():
            logger.error("the books and llama.cpp disagree: %s", "; ".join(found))
            error = CllmError(f"the books and llama.cpp disagree: {found[0]}")
            core.distrust(error)
            if self._log is not None:
                self._log.distrust(error)

    def _on_batch(self, chunks: list[Chunk]) -> None:
        """A decode is about to begin, or has ended if there are no chunks."""
        assert self.interrupter is not None
        if chunks:
            self.interrupter.begin({c.sequence.request_id: c.n_tokens for c in chunks})
        else:
            self.interrupter.end()

    def _publish(self, core: EngineCore) -> None:
        self._readings = core.readings()


def _model_info(model: Model, context: Context) -> ModelInfo:
    return ModelInfo(
        path=model.path,
        name=model.metadata_value("general.name") or "",
        description=model.description,
        architecture=model.metadata_value("general.architecture") or "",
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_vocab=model.vocab.n_tokens,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        chat_template=model.chat_template(),
        tool_chat_template=model.chat_template("tool_use"),
        n_ctx=context.n_ctx_seq,
    )


def _stop_at_exit(reference: weakref.ref[InferenceThread]) -> None:
    """Exit with a live engine: stop flag, abort flag, join; never free what the thread may use."""
    thread = reference()
    if thread is not None and thread.is_alive:
        thread.request_stop()
        thread.join(EXIT_TIMEOUT_S)


def _interrupt(reference: weakref.ref[InferenceThread], request_id: str) -> None:
    """A request has been cancelled; does not keep the thread's object alive."""
    thread = reference()
    if thread is not None and (interrupter := thread.interrupter) is not None:
        interrupter.cancel(request_id)
