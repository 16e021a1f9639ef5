"""Parts: the objects of an engine for one loaded model, on the event loop and the inference thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio

from cllm.engine.config import EngineConfig
from cllm.engine.core.commands import Event
from cllm.engine.health import Restart
from cllm.engine.llama.backend import LlamaBackend
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.loop.embedding_calls import EmbeddingCalls
from cllm.engine.loop.input_processor import InputProcessor
from cllm.engine.loop.loop_guard import LoopGuard
from cllm.engine.loop.loras import LoraRegistry
from cllm.engine.loop.media_reader import MediaReader
from cllm.engine.loop.prompt_tokenizer import PromptTokenizer
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.thread.backend import Backend
from cllm.engine.thread.host import EngineHost
from cllm.engine.thread.inference_thread import InferenceThread
from cllm.engine.thread.interrupter import Interrupter
from cllm.engine.thread.mailbox import Inbox, Outbox
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary
from cllm.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Parts:
    """One model, from its load to its end.  Event loop only, except where a host allows any thread."""

    gate: QueueGate
    inbox: Inbox
    dispatcher: Dispatcher
    interrupter: Interrupter
    thread: EngineHost
    input_processor: InputProcessor
    embeddings: EmbeddingCalls
    loras: LoraRegistry

    def end_when_idle(self) -> None:
        """Stop the host as soon as no request is open, and return at once.  Submit no more requests."""
        self.gate.when_empty(self.thread.request_stop)

    async def aclose(self) -> None:
        """Cancel all requests, free everything, join the threads."""
        self.thread.request_stop()
        with anyio.CancelScope(shield=True):
            await self.input_processor.aclose()
            await self.dispatcher.ended.wait()
        self.thread.join()


def start_parts(
    config: EngineConfig,
    backend: Backend,
    child_backend: str | None,
    loop_guard: LoopGuard,
    check_host: Callable[..., EngineVocabulary],
    on_restart: Callable[[Restart], None] | None,
) -> Parts:
    """Make the parts, and begin to load the model.

    Parameters
    ----------
    child_backend : str or None
        Backend of the child process with `process=True`, as "module:class"; a `LlamaBackend`.
    check_host : callable
        Called with a host; returns its vocabulary, or raises an error if it serves no requests.
    """
    workers = WorkerThreads()
    try:
        interrupter = Interrupter()
        # With a child process, the inbox of that process interrupts decodes.
        inbox = Inbox() if config.process else Inbox(interrupter.cancel)
        gate = QueueGate(n_seq_max=config.n_seq_max, max_queue=config.max_queue)
        dispatcher = Dispatcher(inbox, gate, loop_guard, on_restart)
        outbox: Outbox[list[Event]] = Outbox(dispatcher.deliver)
        host: EngineHost
        if config.process:
            assert child_backend is not None
            host = _make_process(config, backend, child_backend, inbox, outbox, workers)
        else:
            host = InferenceThread(config, backend, inbox, outbox, workers, interrupter)
        check = partial(check_host, host)
        tokenizer = workers.start("cllm-tokenizer")
        loras = LoraRegistry(dispatcher, workers, backend.check_lora, is_fixed=config.deterministic)
        last_vocabulary = partial(check, draining=True)
        input_processor = InputProcessor(
            check,
            gate,
            dispatcher,
            loras,
            PromptTokenizer(
                last_vocabulary,
                dispatcher.loaded,
                workers,
                tokenizer,
                MediaReader(dispatcher.ask, dispatcher.loaded, gate),
            ),
            stream_buffer=config.stream_buffer,
            constraints=backend.constraints(last_vocabulary, workers),
            can_speculate=config.speculation is not None,
        )
        embeddings = EmbeddingCalls(
            check, lambda: host.text_vocabulary, gate, dispatcher, tokenizer
        )
        host.start()
    except BaseException:  # for example, the system allows no more threads
        workers.end()
        raise
    return Parts(gate, inbox, dispatcher, interrupter, host, input_processor, embeddings, loras)


def _make_process(
    config: EngineConfig,
    backend: Backend,
    child_backend: str,
    inbox: Inbox,
    outbox: Outbox[list[Event]],
    workers: WorkerThreads,
) -> EngineHost:
    try:
        from cllm.engine.process.engine_process import EngineProcess
    except ModuleNotFoundError as error:
        hint = f"{error.name} is missing (pip install 'cllm[process]')"
        limit = f"False: it needs the extra 'process'; {hint}"
        raise InvalidArgumentError("process", True, limit) from error
    assert isinstance(backend, LlamaBackend)
    open_all = backend.open_vocabularies
    process = EngineProcess(config, inbox, outbox, workers, open_all, backend=child_backend)
    inbox.on_put = process.on_put
    return process
