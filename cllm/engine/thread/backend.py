"""Backend: what an inference thread serves requests with: a model, however it is computed.

`llama.backend` has llama.cpp; `cllm.testing` has one that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cllm.engine.config import EngineConfig
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.core.decoder import Decoder
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.output_processor import ReadLogprob
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.run_queue import MakeSampler
from cllm.engine.core.speculation import Drafter
from cllm.engine.core.text_encoder import TextEncoder
from cllm.engine.lora import LoraInfo
from cllm.engine.request import ModelInfo
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.interrupter import Abortable
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary

CheckServing = Callable[[], EngineVocabulary]


class Constraints(Protocol):
    """Compiler of constraints; event loop only."""

    async def compile(
        self, params: SamplingParams, tool_grammar: str | None = None
    ) -> CompiledConstraint | None: ...
    async def aclose(self) -> None: ...


class AbortableDecoder(Decoder, Abortable, Protocol):
    """Decoder whose running decode can be ended from any thread."""


class AbortableEncoder(TextEncoder, Abortable, Protocol):
    """Encoder whose running batch can be ended from any thread."""


class Loras(Protocol):
    """The adapters that are loaded.  Inference thread only, between ticks.

    Attributes
    ----------
    infos : tuple of LoraInfo
    """

    @property
    def infos(self) -> tuple[LoraInfo, ...]: ...

    def load(self, name: str, path: str, scale: float) -> None:
        """Load one.

        Raises
        ------
        ModelLoadError
            It is none of this model's.
        InvalidRequestError
            Another has its name.
        """

    def unload(self, name: str) -> None:
        """Free an adapter that no request uses.

        Raises
        ------
        InvalidRequestError
            There is none of this name.
        """


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready.

    Attributes
    ----------
    kv_cache : KVCache
        The bookkeeping, empty.
    n_prefill_chunk : int
        What `EngineConfig.n_prefill_chunk` is if it says nothing.
    drafter : Drafter or None
        Whom drafts come from.
    encoder : AbortableEncoder or None
        What computes the vectors of texts; open only if nothing is generated.
    text_vocabulary : EngineVocabulary or None
        That of the encoder; None: it is `vocabulary`.
    row_cost : RowCost
        What earlier engines have left of it; filled while this one runs.
    n_threads_max : int
        Compute threads, as configured.
    set_n_threads : callable or None
        Compute the next ticks with at most so many threads; None: their number is fixed.
    """

    model: ModelInfo
    vocabulary: EngineVocabulary
    decoder: AbortableDecoder
    kv_cache: KVCache
    make_sampler: MakeSampler
    read_logprob: ReadLogprob
    n_prefill_chunk: int
    loras: Loras
    drafter: Drafter | None = None
    encoder: AbortableEncoder | None = None
    row_cost: RowCost = field(default_factory=RowCost)
    text_vocabulary: EngineVocabulary | None = None
    n_threads_max: int = 1
    set_n_threads: Callable[[int], None] | None = None


class Backend(Protocol):
    """One model of one engine."""

    def load(self, owned: ExitStack) -> Loaded:
        """Make it ready; `owned` frees it.  Inference thread, once.

        Raises
        ------
        CllmError
            Says why it cannot be used.
        """

    def check_memory(self, loaded: EngineConfig | None) -> None:
        """Check memory before a `load` beside an engine of that configuration.  Any thread; may take a second.

        Raises
        ------
        ModelLoadError
            Both do not fit into memory.
        """

    def check_lora(self, path: Path) -> None:
        """Check that a file is an adapter of the model, before `Loras.load`.  Any thread; may take long.

        Raises
        ------
        ModelLoadError
            It is none, or a process that tried it ended.
        """

    def stop(self) -> None:
        """End a `load`, or every decode.  Any thread; returns at once."""

    def constraints(self, check_serving: CheckServing, workers: WorkerThreads) -> Constraints:
        """The compiler for one engine.

        Parameters
        ----------
        check_serving : callable
            The vocabulary, or why requests are not served.
        workers : WorkerThreads
            For calls that are not for the event loop.
        """
