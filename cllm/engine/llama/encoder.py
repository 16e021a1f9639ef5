"""llama.cpp behind the `TextEncoder` protocol, and a placeholder for the decoder of an engine without one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Batch, EmbeddingContext, Model
from cllm.bindings.embedding_context import check_pooling, own_pooling
from cllm.engine.config import N_TEXTS_MAX, EngineConfig
from cllm.engine.core.decoder import MediaRows
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.file_content import MappedFiles
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.lora import LoraSet
from cllm.errors import ContextError, InvalidBatchError

# ggml computes the attention of each token to all tokens of its batch, and masks the tokens of other
# texts.  On a CPU 256 tokens keep all cores busy.  Time per token in batches of 8, 128, 256, 512 and
# 1,024 tokens: 544, 260, 282, 312 and 383 µs (all-MiniLM-L6-v2).
N_BATCH_CPU = 256
# Architectures of classifiers whose scores llama.cpp returns as probabilities (softmax).
SOFTMAXED = ("qwen3", "qwen3vl")


def make_embedding_context(
    model: Model, config: EngineConfig, pooling: str, n_threads: int
) -> EmbeddingContext:
    """Return the context that computes the vectors of texts, in batches of up to `n_ubatch` tokens."""
    return EmbeddingContext(
        model,
        n_batch=config.n_ubatch,
        n_seq_max=min(N_TEXTS_MAX, config.n_ubatch),
        pooling=pooling,
        n_threads=n_threads,
        flash_attn=config.flash_attn,
        op_offload=config.op_offload,
    )


class LlamaTextEncoder:
    """A `TextEncoder` over a context of its own, on the model that may generate too.

    The context is made by `open`, in the thread that computes; engines without embeddings do
    not pay for its buffers.

    Parameters
    ----------
    info : EmbeddingInfo
    loras : LlamaLoras
        Loaded adapters.  Those with a scale other than 0 when the context is made compute texts.

    Attributes
    ----------
    files : MappedFiles or None
        Mapped files of the weights.  `compute` raises `ModelChangedError` if one was written to.
    """

    files: MappedFiles | None = None

    def __init__(
        self, model: Model, config: EngineConfig, info: EmbeddingInfo, loras: LlamaLoras
    ) -> None:
        self._model = model
        self._loras = loras
        self._config = config
        self._pooling = info.pooling
        self.n_batch: int = config.n_ubatch
        self.n_batch_target: int = min(
            self.n_batch, self.n_batch if model.is_on_gpu else N_BATCH_CPU
        )
        self.n_texts_max: int = min(N_TEXTS_MAX, config.n_ubatch)
        self._context: EmbeddingContext | None = None
        self._batch: Batch | None = None
        self._applied: LoraSet = ()
        self._so_far = np.empty((0, 0), np.float32)  # the vectors that were computed last
        self._is_aborted = self._is_stopping = False
        self._n_threads = config.compute_threads[1]

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of threads for the next batches."""
        self._n_threads = n_threads_batch
        if self._context is not None:
            self._context.set_n_threads(n_threads, n_threads_batch)

    def open(self) -> None:
        """See `TextEncoder`."""
        if self._context is None:
            self._context = make_embedding_context(
                self._model, self._config, self._pooling, self._n_threads
            )
            self._applied = ()
            self._batch = Batch(self.n_batch)
            self._tell()

    @property
    def computes_in_pieces(self) -> bool:
        """See `TextEncoder`."""
        self.open()
        assert self._context is not None
        return self._context.computes_in_pieces

    def compute(self, texts: Sequence[Sequence[int]], n_computed: int = 0) -> NDArray[np.float32]:
        """See `TextEncoder`."""
        self.open()
        assert self._context is not None
        assert self._batch is not None
        if not n_computed and self._applied != (wanted := self._loras.defaults):
            self._context.set_loras(self._loras.of(wanted))  # one may have been loaded since
            self._applied = wanted
        self._batch.clear()
        for seq_id, tokens in enumerate(texts):
            self._batch.add(seq_id, list(tokens), n_computed)
        vectors = self._context.compute(self._batch)
        if self.files is not None:
            self.files.check()
        if n_computed:
            vectors = self._of_pieces(vectors, n_computed, self._batch.n_rows)
        self._so_far = vectors
        return vectors

    def _of_pieces(
        self, vectors: NDArray[np.float32], n_before: int, n_rows: int
    ) -> NDArray[np.float32]:
        """Combine the vectors of the last `n_rows` tokens with those of the `n_before` tokens before."""
        if self._pooling == "mean":
            share = np.float32(n_rows / (n_before + n_rows))
            mean: NDArray[np.float32] = self._so_far + share * (vectors - self._so_far)
            return mean
        return self._so_far if self._pooling == "cls" else vectors

    def close(self) -> None:
        """See `TextEncoder`."""
        context, self._context = self._context, None
        if context is not None:
            context.close()

    # --- Any thread --------------------------------------------------------------------------
    def abort(self) -> None:
        """Make the running batch, and all batches before `allow`, raise `DecodeFailedError`."""
        self._is_aborted = True
        self._tell()

    def allow(self) -> None:
        """Let batches run again after an `abort`; has no effect after `stop`."""
        self._is_aborted = False
        self._tell()

    def stop(self) -> None:
        """Make the running batch and every later one raise `DecodeFailedError`."""
        self._is_stopping = True
        self._tell()

    def _tell(self) -> None:
        if (context := self._context) is not None:
            context.set_abort(self._is_aborted or self._is_stopping)
            if self._is_stopping:  # checked last: `stop` may have been called meanwhile
                context.set_abort(True)


def embedding_info(model: Model, config: EngineConfig) -> EmbeddingInfo | None:
    """Return the model's abilities with texts; None without a pooling.

    None also for diffusion models, and for models with an encoder and a decoder.

    Raises
    ------
    InvalidArgumentError
        The settings ask for a pooling that the model does not have.
    """
    try:
        own = own_pooling(model)
    except ContextError:
        own = None
    if config.pooling is None and own is None:
        return None
    if model.is_diffusion or (model.has_encoder and model.has_decoder):
        return None
    pooling = check_pooling(config.pooling, own)
    vocabulary, is_classifier = model.vocab, pooling == "rank"
    with_specials, plain = (vocabulary.tokenize("a", add_special=s) for s in (True, False))
    n_before = next(
        i for i in range(len(with_specials) + 1) if with_specials[i : i + len(plain)] == plain
    )
    between = [vocabulary.eos] if vocabulary.adds_eos else []
    between += [vocabulary.sep] if vocabulary.adds_sep else []
    return EmbeddingInfo(
        pooling=pooling,
        n_values=model.n_cls_out if is_classifier else model.n_embd_out,
        n_tokens_max=min(config.n_ubatch, model.n_ctx_train),
        labels=model.labels if is_classifier else (),
        between=tuple(token for token in between if token is not None),
        after=tuple(with_specials[n_before + len(plain) :]),
        is_softmaxed=model.metadata_value("general.architecture") in SOFTMAXED,
    )


class NoDecoder:
    """`Decoder` of an engine that does not generate: it has no context and no sequences."""

    n_batch = n_outputs_max = n_ctx_seq = 1
    separates_prompts = False
    max_tick_s: float | None = None

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def set_loras(self, loras: LoraSet) -> None:
        """Do nothing: nothing is computed."""

    def clear(self) -> None:
        """Do nothing: there are no rows."""

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """Raise `InvalidBatchError`: this engine does not generate."""
        raise InvalidBatchError(
            "llama_decode", -1, "the model was loaded for vectors of texts alone"
        )

    def add_media(self, media: MediaRows) -> None:
        """Raise `InvalidBatchError`: this engine does not generate."""
        self.decode()

    def decode(self) -> NDArray[np.float32]:
        """Raise `InvalidBatchError`: this engine does not generate."""
        raise InvalidBatchError(
            "llama_decode", -1, "the model was loaded for vectors of texts alone"
        )

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Return True: there is nothing to remove."""
        return True

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """Do nothing: there is nothing to copy."""

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Return None: the sequence is empty."""
        return None

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Return None: the sequence is empty."""
        return None

    def state_seq_get_data(self, seq_id: int) -> bytes:
        """Return no bytes: the sequence is empty."""
        return b""

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """Do nothing: no state is kept."""

    def rebuild(self) -> None:
        """Do nothing: there is no context."""

    def close(self) -> None:
        """Do nothing: there is no context."""

    def abort(self) -> None:
        """Do nothing: no decode runs."""

    def allow(self) -> None:
        """Do nothing: no decode runs."""

    def stop(self) -> None:
        """Do nothing: no decode runs."""
