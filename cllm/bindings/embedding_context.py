"""EmbeddingContext: vectors of whole texts, or a classifier's scores of them.  One thread only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings._abort import AbortFlag
from cllm.bindings._library import forward_log, library
from cllm.bindings.batch import Batch
from cllm.bindings.context import check_decode, check_flash_attn, init_context
from cllm.bindings.lora import LoraContext
from cllm.bindings.model import Model
from cllm.checks import MAX_THREADS, check_int
from cllm.errors import ContextError, InvalidArgumentError, LlamaCallError, PositionError

POOLINGS = {name: h.PoolingType[name.upper()] for name in ("mean", "cls", "last", "rank")}


class EmbeddingContext(LoraContext):
    """Compute buffers that turn texts into vectors.  A text is kept only for its next piece.

    Several contexts can share one model, also with a `Context` that generates.  One thread only.

    Parameters
    ----------
    model : Model
        An encoder (BERT, T5's) or a decoder.  Kept alive, and refuses to close while this is open.
    n_batch : int
        Largest number of tokens of a batch, all texts together, and of one text.  Buffers grow with
        it: at least one float for each token of a batch and each token of the vocabulary.
    n_seq_max : int
        Largest number of texts of a batch: 1 to 256, at most `n_batch`.
    pooling : str, optional
        Vector of a text: the mean of the vectors of its tokens (mean), the first (cls), the last (last),
        or the scores of the model's classifier (rank).  None takes the pooling of the model's file.
    n_threads : int
        Compute threads.
    flash_attn : bool, optional
        None lets llama.cpp decide.
    op_offload : bool, optional
        As for `Context`.

    Attributes
    ----------
    n_batch, n_seq_max : int
    n_tokens_max : int
        Largest number of tokens of one text: the smaller of `n_batch` and the training length.
    pooling : str
        Pooling in use.
    n_values : int
        Length of a vector: the embedding size of the model, or the number of labels with rank.
    computes_in_pieces : bool
        True if a text may be split over several batches, because no token depends on later ones.

    Raises
    ------
    InvalidArgumentError
        A value is out of range, the model does not support `pooling`, or `pooling` is None and the
        model's file names none.
    ContextError
        The model computes no vectors of texts, or llama.cpp refuses the combination.

    Notes
    -----
    See `llama_context_params.embeddings` and `llama_pooling_type` in llama.h.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_batch: int = 512,
        n_seq_max: int = 64,
        pooling: str | None = None,
        n_threads: int = 2,
        flash_attn: bool | None = None,
        op_offload: bool | None = None,
    ) -> None:
        lib = library()
        if model.vocab_only:
            raise ContextError("the model was loaded with vocab_only: it has no weights")
        if model.is_diffusion or (model.has_encoder and model.has_decoder):
            raise ContextError("the model is neither an encoder nor a decoder: it embeds no text")
        own = own_pooling(model)
        params = lib.llama_context_default_params()
        n_batch = check_int("n_batch", n_batch, 1, 1 << 20)
        limit = min(n_batch, lib.llama_max_parallel_sequences())
        params.n_seq_max = check_int("n_seq_max", n_seq_max, 1, limit)
        # `llama_context::graph_reserve` rounds the rows up to a multiple of the sequences, but not the outputs:
        # with pooling "mean" it would abort.
        n_rows = -(-n_batch // n_seq_max) * n_seq_max
        # All rows of a batch are outputs, and a cell each is all they need.
        params.n_batch = params.n_ubatch = params.n_ctx = params.n_outputs_max = n_rows
        params.kv_unified, params.embeddings, params.no_perf = True, True, True
        params.op_offload = model.is_on_gpu if op_offload is None else bool(op_offload)
        params.n_threads = params.n_threads_batch = check_int(
            "n_threads", n_threads, 1, MAX_THREADS
        )
        params.flash_attn_type = check_flash_attn(flash_attn)
        self.pooling: str | None = check_pooling(pooling, own)
        params.pooling_type = POOLINGS[self.pooling]
        self._abort_flag = AbortFlag(params)
        pointer = init_context(model, params, no_warning="model default pooling_type")
        super().__init__(pointer, lib.llama_free, parent=model)
        self._lib = lib
        with self._closed_on_error():
            self._memory = lib.llama_get_memory(pointer)
        self._compute = lib.llama_decode if model.has_decoder else lib.llama_encode
        architecture = model.metadata_value("general.architecture")
        is_causal = model.metadata_value(f"{architecture}.attention.causal") != "false"
        # llama.cpp gives an encoder such as T5's a memory too, and its file does not say that it is not causal.
        self.computes_in_pieces: bool = bool(self._memory) and model.has_decoder and is_causal
        self._held: tuple[int, int] | None = None  # seq_id and tokens of a text that may go on
        self._n_vocab = model.vocab.n_tokens
        self.n_batch: int = n_batch
        self.n_seq_max: int = n_seq_max
        self.n_tokens_max: int = min(n_batch, model.n_ctx_train)
        self.n_values: int = model.n_cls_out if self.pooling == "rank" else model.n_embd_out

    def compute(self, batch: Batch) -> NDArray[np.float32]:
        """Return the vectors of the texts of `batch`; each text is one run, from position 0.

        A batch of one run may also continue the run of the previous batch, if that was its only one and
        `computes_in_pieces` is True.  Releases the GIL while computing.

        Returns
        -------
        ndarray
            New float32 array, shape `(n_texts, n_values)`, in the order of the runs, not normalized.  For
            a continued run: the mean of its own tokens, its own first token (cls), or the text's last.

        Raises
        ------
        InvalidArgumentError, PositionError
            The batch has too many rows, or an invalid token, sequence or position; nothing was computed.
        DecodeFailedError
            Aborted (code 2) or failed.
        LlamaCallError
            llama.cpp has no vector for a text.

        Notes
        -----
        See `llama_encode`, `llama_decode` and `llama_get_embeddings_seq` in llama.h.
        """
        pointer = self._pointer
        self._check_batch(batch)
        batch.output_flags[:] = 1  # every token counts; llama.cpp would do so, and warn
        self._held = None
        seq_id, p0, n_tokens = batch.runs[0]
        if self._memory and not p0:
            self._lib.llama_memory_clear(self._memory, False)
        library().n_computed += 1
        code = self._compute(pointer, batch.struct)
        if code == 0:
            self._lib.llama_synchronize(pointer)
        forward_log()
        check_decode(code)
        vectors = np.empty((len(batch.runs), self.n_values), np.float32)
        for row, run in zip(vectors, batch.runs, strict=True):
            values = self._lib.llama_get_embeddings_seq(pointer, run.seq_id)
            if not values:
                raise LlamaCallError("llama_get_embeddings_seq", 0, "returned NULL")
            row[:] = np.ctypeslib.as_array(values, shape=(self.n_values,))
        if self.computes_in_pieces and len(batch.runs) == 1:
            self._held = seq_id, p0 + n_tokens
        return vectors

    def _check_batch(self, batch: Batch) -> None:
        check_int("rows", batch.n_rows, 1, self.n_batch)
        if batch.highest_token >= self._n_vocab:
            raise InvalidArgumentError("token", batch.highest_token, f"0 to {self._n_vocab - 1}")
        seen: set[int] = set()
        for seq_id, p0, n_tokens in batch.runs:
            check_int("seq_id", seq_id, 0, self.n_seq_max - 1)
            goes_on = len(batch.runs) == 1 and self._held == (seq_id, p0)
            if (p0 != 0 and not goes_on) or seq_id in seen:
                raise PositionError(seq_id, -1, p0)
            check_int("tokens", p0 + n_tokens, 1, self.n_tokens_max)
            seen.add(seq_id)

    def set_abort(self, abort: bool) -> None:
        """Make the running and every later `compute` raise `DecodeFailedError` (code 2); False ends this.

        The only method that any thread may call.  CPU only.
        """
        self._abort_flag.set(abort)


def own_pooling(model: Model) -> str | None:
    """Return the pooling that the model's file names (mean, cls, last or rank); None if it names none.

    Raises
    ------
    ContextError
        The file has a pooling number that does not exist; llama.cpp would abort.
    """
    architecture = model.metadata_value("general.architecture")
    value = model.metadata_value(f"{architecture}.pooling_type")
    if value is None:
        return None
    names = {str(int(number)): name for name, number in POOLINGS.items()} | {"0": None, "-1": None}
    if value not in names:
        raise ContextError(f"the model's file has pooling_type {value}, which does not exist")
    return names[value]


def check_pooling(wanted: str | None, own: str | None) -> str:
    """Return `wanted`, or `own` if None; raise `InvalidArgumentError` if the model does not support it."""
    if wanted is None:
        if own is None:
            limit = "mean, cls or last: the model's file names none"
            raise InvalidArgumentError("pooling", None, limit)
        return own
    if not isinstance(wanted, str) or wanted not in POOLINGS:
        raise InvalidArgumentError("pooling", wanted, "one of " + ", ".join(POOLINGS))
    if wanted == "rank" and own != "rank":
        raise InvalidArgumentError(
            "pooling", wanted, "mean, cls or last: the model has no classifier"
        )
    return wanted
