"""Backend: the interface between an inference thread and the library that computes the model.

`llama.backend` implements it with llama.cpp, and `cllm.testing` with a fake that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from cllm.engine.config import EngineConfig
from cllm.engine.constraint import CompiledConstraint
from cllm.engine.core.commands import MediaEncoded, MediaMeasured
from cllm.engine.core.decoder import Decoder
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.media_store import MediaEncoder
from cllm.engine.core.output_processor import ReadLogprob
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.run_queue import MakeSampler
from cllm.engine.core.speculation import Drafter
from cllm.engine.core.text_encoder import TextEncoder
from cllm.engine.core.tick_shares import TickShares
from cllm.engine.lora import LoraInfo
from cllm.engine.media import MediaPiece, Shape
from cllm.engine.request import ModelInfo
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.interrupter import Abortable
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.engine.vocabulary import EngineVocabulary

CheckServing = Callable[[], EngineVocabulary]


class Constraints(Protocol):
    """Compiler of constraints; event loop only.

    `compile` returns None if there is neither a constraint in `params` nor a `tool_grammar`.
    """

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
        """Load an adapter.

        Raises
        ------
        ModelLoadError
            The file is not an adapter of this model.
        InvalidRequestError
            Another loaded adapter has this name.
        """

    def unload(self, name: str) -> None:
        """Free an adapter that no request uses.

        Raises
        ------
        InvalidRequestError
            No loaded adapter has this name.
        """


# What a batch has: only the next tokens of streams; also rows of prompts; a media chunk; texts to embed.
Work = Literal["tokens", "prompts", "media", "texts"]


class MediaEncoderThread(MediaEncoder, Protocol):
    """Encoder of images and audio in a thread of its own, which takes turns with the decodes."""

    def start(
        self,
        post: Callable[[MediaEncoded | MediaMeasured], object],
        note: Callable[[bytes], object],
    ) -> None:
        """Set what the encoder's threads call.

        Parameters
        ----------
        post : callable
            Called with each chunk that is encoded, and when `layout` can be called again.
        note : callable
            Called with the digest of each image or audio before it is encoded, and with `b""` afterwards.
        """

    def layout(self, shape: Shape) -> tuple[MediaPiece, ...] | None:
        """Return the chunks and tokens of an image or audio of this shape; None if they are not known yet.

        Raises
        ------
        InvalidRequestError
            It has none.
        PromptTooLongError
            Audio has more rows than a sequence can have: the error has a lower bound of them.
        ClosedError
            The encoder has ended.
        """

    def forget(self, shape: Shape) -> None:
        """Compute no layout of this shape any more: no question waits for it."""

    def pause(self, work: Work) -> None:
        """Give the encoder its turn, and wait until a decode of this kind may begin."""

    def resume(self) -> None:
        """Note that the decode has ended."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready.

    Attributes
    ----------
    kv_cache : KVCache
        Bookkeeping of the KV cache, empty.
    n_prefill_chunk : int
        Default of `EngineConfig.n_prefill_chunk` for this model.
    drafter : Drafter or None
        Source of drafts for speculation.
    encoder : AbortableEncoder or None
        Encoder that computes the vectors of texts; already open only if the model generates no text.
    text_vocabulary : EngineVocabulary or None
        Vocabulary of the encoder; None: the same as `vocabulary`.
    media : MediaEncoderThread or None
        Encoder of images and audio; None if the model takes none.
    row_cost : RowCost
        Costs that earlier engines measured; the running engine updates them.
    tick_shares : TickShares
        Seconds of ticks by shape; the running engine counts them.
    n_threads_max : int
        Configured number of compute threads.
    set_n_threads : callable or None
        Called with the largest number of threads for the next ticks; None: the number is fixed.
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
    media: MediaEncoderThread | None = None
    row_cost: RowCost = field(default_factory=RowCost)
    tick_shares: TickShares = field(default_factory=TickShares)
    text_vocabulary: EngineVocabulary | None = None
    n_threads_max: int = 1
    set_n_threads: Callable[[int], None] | None = None


class Backend(Protocol):
    """One model of one engine."""

    def load(self, owned: ExitStack) -> Loaded:
        """Load the model; `owned` frees everything when it is closed.  Inference thread, once.

        Raises
        ------
        CllmError
            The model cannot be used.
        """

    def check_memory(self, loaded: EngineConfig | None) -> None:
        """Check that the model fits into memory, before `load`.  Any thread; may take a second.

        Parameters
        ----------
        loaded : EngineConfig or None
            Configuration of an engine that stays loaded meanwhile.

        Raises
        ------
        ModelLoadError
            The model does not fit into memory, beside the loaded one if there is one.
        """

    def check_lora(self, path: Path) -> None:
        """Check that a file is an adapter of the model, before `Loras.load`.  Any thread; may take long.

        Raises
        ------
        ModelLoadError
            The file is not an adapter of the model, or the process that tried it ended.
        """

    def stop(self) -> None:
        """Abort a running `load`, and every decode, also later ones.  Any thread; returns at once."""

    def constraints(self, check_serving: CheckServing, workers: WorkerThreads) -> Constraints:
        """Return the compiler of constraints for one engine.

        Parameters
        ----------
        check_serving : callable
            Returns the vocabulary, or raises an error if requests are not served.
        workers : WorkerThreads
            Threads for calls that would block the event loop.
        """
