"""InferenceThread: owns Model and Context, runs ticks, and frees what it owns.

The only module of the engine that touches libllama.  The thread is a daemon so that it cannot keep
an interpreter alive, and an exit handler stops and joins it first: freeing a context while a decode
runs crashes, so what a stuck thread holds is leaked instead.
"""

from __future__ import annotations

import atexit
import functools
import logging
import secrets
import threading
import time
import weakref
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Batch, Candidates, Context, LoraAdapter, Model, SamplerChain
from cllm.checks import MAX_SEED
from cllm.engine.config import EngineConfig
from cllm.engine.handoff import (
    Audit,
    Audited,
    Cancel,
    Command,
    Event,
    Inbox,
    Outbox,
    Pause,
    Ready,
    Resume,
    Shutdown,
    Stopped,
    Submit,
)
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import ModelInfo, SamplingParams
from cllm.engine.statistics import EngineStatistics
from cllm.engine.tick import EngineCore, SamplerFactory
from cllm.errors import ModelLoadError

logger = logging.getLogger("cllm.engine")

EXIT_TIMEOUT_S = 5.0


class LlamaDecoder:
    """A `Decoder` over a context and one batch."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = Batch(context.n_batch)
        self.n_batch = context.n_batch
        self.clear = self._batch.clear
        self.add = self._batch.add
        self.seq_rm = context.seq_rm
        self.seq_pos_min = context.seq_pos_min
        self.seq_pos_max = context.seq_pos_max

    def decode(self) -> NDArray[np.float32]:
        """Compute the batch; see `Decoder`."""
        return self._context.decode(self._batch).rows


class LlamaSampler:
    """A `TokenSampler`: llama.cpp's chain over a whole row."""

    def __init__(self, model: Model, ids: NDArray[np.int32], params: SamplingParams) -> None:
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        chain = SamplerChain(model.vocab)
        # llama-server's order of samplers.
        chain.add_top_k(params.top_k).add_top_p(params.top_p).add_min_p(params.min_p)
        self._chain = chain.add_temp(params.temperature).add_dist(seed)
        self._ids = ids
        self.close = chain.close

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose from one row and accept the choice."""
        token = self._chain.apply(Candidates(self._ids, logits))
        self._chain.accept(token)
        return token


def sampler_factory(model: Model) -> SamplerFactory:
    """What makes the sampler of each request: None for a greedy one."""
    ids = np.arange(model.vocab.n_tokens, dtype=np.int32)  # the same for all of them
    return lambda params: None if params.is_greedy else LlamaSampler(model, ids, params)


class InferenceThread:
    """The thread and what other threads may know of it.

    Attributes
    ----------
    model : Model or None
        Once loaded; other threads may use its vocabulary until `Shutdown` is sent.
    statistics : EngineStatistics
        Replaced after every tick; safe to read from any thread.
    """

    def __init__(self, config: EngineConfig, inbox: Inbox, outbox: Outbox[list[Event]]) -> None:
        self._config = config
        self._inbox = inbox
        self._outbox = outbox
        self.model: Model | None = None
        self.statistics = EngineStatistics()
        self._context: Context | None = None
        self._stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="cllm-inference", daemon=True)

    def start(self) -> None:
        """Load the model and begin to serve."""
        # A bound method would keep the engine alive for ever.
        self._at_exit = functools.partial(_stop_at_exit, weakref.ref(self))
        self._thread.start()
        # Registered after `weakref`'s own exit handler, and so run before it.
        atexit.register(self._at_exit)

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last showed that it is not stuck; 0 while it is idle."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.perf_counter() - busy_since

    def request_stop(self) -> None:
        """Cancel everything, also a load or a decode that is running.  Any thread; returns at once."""
        self._stopping = True
        if (context := self._context) is not None:
            context.set_abort(True)
        self._inbox.put(Shutdown())

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to have freed everything and ended."""
        self._thread.join(timeout)
        atexit.unregister(self._at_exit)

    # --- The thread itself -------------------------------------------------------------------
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with ExitStack() as owned:  # freed in reverse order: context, adapters, model
                self._serve(owned)
        except BaseException as caught:
            error = caught
            logger.debug("the inference thread ends", exc_info=True)
        finally:
            self.model = self._context = self._busy_since = None
            self._outbox.post([Stopped(error)])

    def _serve(self, owned: ExitStack) -> None:
        core, model_info = self._load(owned)
        self._publish(core)
        self._outbox.post([Ready(model_info, self.statistics)])
        try:
            self._loop(core)
        except BaseException as error:
            core.fail_all(error)  # what the requests hold in the cache goes with the context
            self._publish(core)
            self._outbox.post(core.events)
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
        n_threads, n_threads_batch = config.compute_threads
        context = owned.enter_context(
            Context(
                model,
                n_ctx=config.n_ctx,
                n_batch=config.n_batch,
                n_ubatch=config.n_ubatch,
                n_seq_max=config.n_seq_max,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                kv_unified=config.kv_unified,
                flash_attn=config.flash_attn,
                type_k=config.type_k,
                type_v=config.type_v,
                rope_scaling=config.rope_scaling,
                rope_freq_base=config.rope_freq_base,
                rope_freq_scale=config.rope_freq_scale,
                yarn_ext_factor=config.yarn_ext_factor,
                yarn_attn_factor=config.yarn_attn_factor,
                yarn_beta_fast=config.yarn_beta_fast,
                yarn_beta_slow=config.yarn_beta_slow,
                yarn_orig_ctx=config.yarn_orig_ctx,
            )
        )
        if loras:
            context.set_loras(loras)
        self.model, self._context = model, context
        if self._stopping:
            context.set_abort(True)
        kv_cache = KVCache(
            n_cells=context.n_ctx,
            n_seq_max=context.n_seq_max,
            n_ctx_seq=context.n_ctx_seq,
            has_pos_min=not (model.is_recurrent or model.is_hybrid),
        )
        core = EngineCore(LlamaDecoder(context), model.vocab, kv_cache, sampler_factory(model))
        return core, _model_info(model, context)

    def _loop(self, core: EngineCore) -> None:
        while True:
            self._busy_since = None
            commands = self._inbox.drain(wait=not core.has_work, until=core.next_deadline)
            self._busy_since = time.perf_counter()
            if any(isinstance(command, Shutdown) for command in commands):
                core.cancel_all()
            else:
                for command in commands:
                    self._obey(core, command)
                core.tick()
            self._publish(core)
            events, core.events = core.events, []
            started = time.perf_counter()
            listened = self._outbox.post(events) if events else True
            core.recorder.deliver_s += time.perf_counter() - started
            if not listened:
                core.cancel_all()
                return
            if any(isinstance(command, Shutdown) for command in commands):
                return

    def _obey(self, core: EngineCore, command: Command) -> None:
        match command:
            case Submit(request):
                core.submit(request)
            case Cancel(request_id):
                core.cancel(request_id)
            case Pause(request_id):
                core.set_paused(request_id, True)
            case Resume(request_id):
                core.set_paused(request_id, False)
            case Audit(call_id):
                core.events.append(Audited(call_id, tuple(core.discrepancies())))

    def _publish(self, core: EngineCore) -> None:
        self.statistics = core.statistics()


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
        n_ctx=context.n_ctx_seq,
    )


def _stop_at_exit(reference: weakref.ref[InferenceThread]) -> None:
    """Exit with a live engine: stop flag, abort flag, join; never free what the thread may use."""
    thread = reference()
    if thread is not None and thread.is_alive:
        thread.request_stop()
        thread.join(EXIT_TIMEOUT_S)
