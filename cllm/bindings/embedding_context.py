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
    """The compute buffers that turn texts into vectors; of a text nothing stays but for its next piece.

    Several contexts may share one model: one that generates is not disturbed.

    Parameters
    ----------
    model : Model
        An encoder (BERT, T5's) or a decoder.  Kept alive, and refuses to close while this is open.
    n_batch : int
        Tokens of all texts of a batch, which is computed in one piece: no text can be longer.  Buffers
        grow with it: a float for each of its tokens and each token of the vocabulary, and more.
    n_seq_max : int
        Texts of a batch, 1 to 256.
    pooling : str, optional
        What becomes of the vectors of a text's tokens: their mean, that of the first (cls), of the
        last, or the scores of the model's classifier (rank).  None takes the model's.
    n_threads : int
        Compute threads.
    flash_attn : bool, optional
        None lets llama.cpp decide.

    Attributes
    ----------
    n_batch, n_seq_max : int
    n_tokens_max : int
        Tokens of one text: `n_batch`, or as many as the model was trained for.
    pooling : str
        The one in use.
    n_values : int
        Of a vector: the model's width, or its classifier's labels.
    computes_in_pieces : bool
        A text may come in several batches: no token looks at those after it.

    Raises
    ------
    InvalidArgumentError
        A value that would abort llama.cpp, a pooling that the model cannot do, or none given for one
        that has none.
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
    ) -> None:
        lib = library()
        if model.vocab_only:
            raise ContextError("the model was loaded with vocab_only: it has no weights")
        if model.is_diffusion or (model.has_encoder and model.has_decoder):
            raise ContextError("the model is neither an encoder nor a decoder: it embeds no text")
        own = own_pooling(model)
        params = lib.llama_context_default_params()
        params.n_batch = params.n_ubatch = check_int("n_batch", n_batch, 1, 1 << 20)
        # All rows of a batch are outputs, and a cell each is all they need.
        params.n_ctx = params.n_outputs_max = n_batch
        limit = min(n_batch, lib.llama_max_parallel_sequences())
        params.n_seq_max = check_int("n_seq_max", n_seq_max, 1, limit)
        params.kv_unified, params.embeddings, params.no_perf = True, True, True
        params.op_offload = model.is_on_gpu
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
        self.computes_in_pieces: bool = bool(self._memory) and is_causal
        self._held: tuple[int, int] | None = None  # seq_id and tokens of a text that may go on
        self._n_vocab = model.vocab.n_tokens
        self.n_batch: int = n_batch
        self.n_seq_max: int = n_seq_max
        self.n_tokens_max: int = min(n_batch, model.n_ctx_train)
        self.n_values: int = model.n_cls_out if self.pooling == "rank" else model.n_embd_out

    def compute(self, batch: Batch) -> NDArray[np.float32]:
        """The vectors of the texts of `batch`, each one run from position 0.

        A run that is alone in its batch may also go on where the batch before ended, if that was alone
        too and this `computes_in_pieces`.  Releases the GIL while computing.

        Returns
        -------
        ndarray
            float32, `(n_texts, n_values)`, in the order of the runs, not normalised; the caller's own.
            Of a run that goes on: the mean of its own tokens, its own first (cls), the text's last.

        Raises
        ------
        InvalidArgumentError, PositionError
            A batch that this cannot take; nothing was computed.
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
        """Make the running and every later `compute` return "aborted", or stop doing so.

        The only method that any thread may call.  CPU only.
        """
        self._abort_flag.set(abort)


def own_pooling(model: Model) -> str | None:
    """The pooling that the model's file names; None if it names none.

    Raises
    ------
    ContextError
        A number that none has: llama.cpp would abort.
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
    """The pooling to use, which the model can do."""
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
