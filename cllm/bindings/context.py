"""Context: parameters, decode and logits of one `llama_context`.  One thread only."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings._abort import AbortFlag
from cllm.bindings._library import forward_log, library
from cllm.bindings._llama_ext_h import ARCHITECTURES, hidden_states
from cllm.bindings._threadpool import ThreadPool
from cllm.bindings.batch import Batch
from cllm.bindings.embedding_batch import EmbeddingBatch
from cllm.bindings.lora import LoraContext
from cllm.bindings.memory import Memory
from cllm.bindings.model import Model
from cllm.checks import INT32_MAX, MAX_THREADS, check_bool, check_enum, check_float, check_int
from cllm.errors import (
    ContextError,
    DecodeFailedError,
    InvalidArgumentError,
    InvalidBatchError,
    LlamaCallError,
    NoKVSlotError,
    NotGenerativeError,
    PositionError,
    StaleLogitsError,
)

KV_TYPES = {
    name: h.GgmlType[name.upper()]
    for name in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
}
MAX_CELLS = 1 << 26


class Logits:
    """The logits of one decode, valid until the next.

    Attributes
    ----------
    n_rows : int
        One for each output row of the batch, in batch order.
    """

    def __init__(self, context: Context, n_rows: int) -> None:
        self._context = context
        self._generation = context.n_decodes
        self.n_rows = n_rows

    @property
    def rows(self) -> NDArray[np.float32]:
        """A view of llama.cpp's buffer, float32, shape `(n_rows, n_vocab)`.

        Copy what must outlive the next decode.

        Raises
        ------
        StaleLogitsError
            Another decode was begun since.
        """
        return self._context._logit_rows(self._generation, self.n_rows)


class Context(Memory, LoraContext):
    """The KV cache and the compute buffers for one model.  One thread only, except `set_abort`.

    Parameters
    ----------
    model : Model
        Kept alive, and refuses to close while the context is open.
    n_ctx : int
        Number of KV cells; 0 takes the model's training length.  llama.cpp rounds it up to a multiple
        of 256, in the per-sequence layout for each sequence: read `n_ctx` back.
    n_batch, n_ubatch : int
        Rows of a logical and of a physical batch; `n_batch` at least `n_seq_max`.
    n_seq_max : int
        Sequences, 1 to 256.
    n_rs_seq : int
        Former states that recurrent layers keep of each sequence, so that `seq_rm` can remove the last
        rows of a decode.  Each takes as much memory as the current one.  At most 2 less than the smaller
        of `n_batch` and `n_ubatch`.  Some architectures keep none: read `n_rollback` back.
    n_outputs_max : int, optional
        Largest number of output rows of a batch, `n_seq_max` to `n_batch`.  None takes `n_seq_max`, which
        keeps the compute buffer small: 512 rows take 297 MiB on a model with 152k tokens.
    n_threads, n_threads_batch : int
        Compute threads for one row and for many.
    kv_unified : bool
        True: one KV buffer for all sequences.  False: an equal share of `n_ctx` for each of them.
    flash_attn : bool, optional
        None lets llama.cpp decide.
    type_k, type_v : str
        Data type of the cache: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.
    op_offload : bool, optional
        Let a GPU compute products of many rows whose weights are in host memory.  None does so if the
        model has layers on a GPU.
    poll : int, optional
        Polling level of idle compute threads, 0 (sleep) to 100 (busy-wait); None: as the library decides.  Only
        for libraries without OpenMP.
    offload_kqv, swa_full, no_perf : bool
        As in llama.h.
    keeps_hidden : bool
        Keep the hidden state of every row of the last decode; see `hidden_states`.  Only for architectures
        with multi-token prediction.
    rope_scaling : str, optional
        none, linear, yarn or longrope; None takes the model's.
    rope_freq_base, rope_freq_scale : float
        0 takes the model's.
    yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow : float, optional
        None takes the model's.
    yarn_orig_ctx : int
        0 takes the model's.

    Attributes
    ----------
    n_ctx, n_ctx_seq, n_batch, n_ubatch, n_seq_max, n_outputs_max : int
        What llama.cpp really uses.
    can_abort : bool
        True if `set_abort` can end a decode.  llama.cpp's backends for GPUs always finish the batch.
    has_tiled_attention : bool
        True if attention is computed in tiles of 64 rows, of any sequences, in batches of 64 rows or
        more: on a CPU, with flash attention, F16 or F32 cells and `kv_unified` (`ops.cpp`).
    n_decodes : int
        Calls of `decode` so far; ties logits to their decode.

    Raises
    ------
    InvalidArgumentError
        A value is out of range: llama.cpp would abort, crash or compute NaN.
    ContextError
        The model cannot generate text (`NotGenerativeError`), or llama.cpp rejects the combination.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_rs_seq: int = 0,
        n_outputs_max: int | None = None,
        n_threads: int = 2,
        n_threads_batch: int = 2,
        kv_unified: bool = True,
        flash_attn: bool | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        offload_kqv: bool = True,
        op_offload: bool | None = None,
        poll: int | None = None,
        swa_full: bool = True,
        no_perf: bool = True,
        rope_scaling: str | None = None,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float | None = None,
        yarn_attn_factor: float | None = None,
        yarn_beta_fast: float | None = None,
        yarn_beta_slow: float | None = None,
        yarn_orig_ctx: int = 0,
        keeps_hidden: bool = False,
    ) -> None:
        lib = library()
        states = hidden_states() if keeps_hidden else None
        if keeps_hidden:
            architecture = model.metadata_value("general.architecture")
            if architecture not in ARCHITECTURES:
                raise ContextError(f"llama.cpp keeps no hidden states for {architecture}")
        if model.vocab_only:
            raise ContextError("the model was loaded with vocab_only: it has no weights")
        if not model.has_decoder or model.has_encoder or model.is_diffusion:
            raise NotGenerativeError("the model is not a causal decoder: it cannot generate text")
        params = lib.llama_context_default_params()
        n_seq_max = check_int("n_seq_max", n_seq_max, 1, lib.llama_max_parallel_sequences())
        n_ctx = check_int("n_ctx", n_ctx, 0, MAX_CELLS)
        if 0 < n_ctx < n_seq_max:
            raise InvalidArgumentError("n_ctx", n_ctx, f"at least n_seq_max ({n_seq_max})")
        n_batch = check_int("n_batch", n_batch, n_seq_max, 1 << 20)
        params.n_ctx, params.n_batch = n_ctx, n_batch
        params.n_ubatch = check_int("n_ubatch", n_ubatch, 1, 1 << 20)
        params.n_seq_max = n_seq_max
        # One more aborts the first decode of unequal sequences (`split_equal` in llama-batch.cpp).
        params.n_rs_seq = check_int("n_rs_seq", n_rs_seq, 0, max(0, min(n_batch, n_ubatch) - 2))
        if n_outputs_max is None:
            n_outputs_max = n_seq_max
        params.n_outputs_max = check_int("n_outputs_max", n_outputs_max, n_seq_max, n_batch)
        set_compute(
            params, model, n_threads=n_threads, n_threads_batch=n_threads_batch, flash_attn=flash_attn,
            type_k=type_k, type_v=type_v, offload_kqv=offload_kqv, op_offload=op_offload,
        )  # fmt: skip
        params.kv_unified = bool(kv_unified)
        params.swa_full = bool(swa_full)
        params.no_perf = bool(no_perf)
        set_rope(
            params,
            rope_scaling=rope_scaling,
            rope_freq_base=rope_freq_base,
            rope_freq_scale=rope_freq_scale,
            yarn_ext_factor=yarn_ext_factor,
            yarn_attn_factor=yarn_attn_factor,
            yarn_beta_fast=yarn_beta_fast,
            yarn_beta_slow=yarn_beta_slow,
            yarn_orig_ctx=yarn_orig_ctx,
        )
        if states is not None:
            set_no_pooling(params, model)
        self._abort_flag = AbortFlag(params)
        # One buffer for many sequences may well have more cells than one of them has positions.
        no_warning = "> n_ctx_train" if n_seq_max > 1 else ""
        if poll is None:
            pointer, free = init_context(model, params, no_warning=no_warning), lib.llama_free
        else:
            pool = ThreadPool(max(n_threads, n_threads_batch), check_int("poll", poll, 0, 100))
            pointer, free = pool.of(lambda: init_context(model, params, no_warning=no_warning))
        super().__init__(pointer, model, free, kv_unified=bool(kv_unified))
        with self._closed_on_error():
            self.n_vocab: int = model.vocab.n_tokens
            self.n_embd_inp: int = model.n_embd_inp
            self.has_mrope: bool = model.has_mrope
            self.can_abort: bool = lib.can_abort and not model.has_gpu
            self.has_tiled_attention: bool = (
                not model.is_on_gpu
                and kv_unified
                and flash_attn is not False
                and type_k == type_v
                and type_k in ("f16", "f32")
            )
            self.n_batch: int = int(lib.llama_n_batch(pointer))
            self.n_ubatch: int = int(lib.llama_n_ubatch(pointer))
            if states is not None:
                states.keep(pointer, outputs_only=False)
        self._states, self._n_embd_out = states, model.n_embd_out
        self.n_outputs_max = n_outputs_max
        self.n_decodes: int = 0
        # Position of the image that a sequence ends with, as far as it was decoded.
        self._images: dict[int, int] = {}
        self._n_output_rows: int = 0
        self._decoded = False
        # The last view of the logits, with their address and number of rows.
        self._view: NDArray[np.float32] = np.empty((0, self.n_vocab), np.float32)
        self._view_of = (0, 0)

    # --- Decoding ----------------------------------------------------------------------------
    def decode(self, batch: Batch | EmbeddingBatch) -> Logits:
        """Compute the rows of `batch`, store their keys and values, and return the logits of its output rows.

        Releases the GIL while computing.  Positions of a model with M-RoPE may jump forward, because an
        image has fewer positions than rows.

        Raises
        ------
        PositionError
            Rows of a sequence do not continue what the KV cache holds; nothing was computed.
        InvalidArgumentError
            A row the context cannot take; nothing was computed.
        NoKVSlotError
            The KV cache has no room; nothing was stored.
        InvalidBatchError
            llama.cpp refused the batch; nothing was stored.
        DecodeFailedError
            Aborted (code 2) or failed (code < -1): part of the batch may have been stored, read
            `seq_pos_max` before going on.  Of an image with M-RoPE that is decoded in parts, the earlier
            parts may be gone, too: decode all of them again.

        Notes
        -----
        See `llama_decode` and `llama_synchronize` in llama.h.
        """
        pointer = self._pointer
        self._check_batch(batch)
        self.n_decodes += 1
        self._decoded = False
        self._rollback.begin()
        self._lib.n_computed += 1
        code = self._compute(pointer, batch)
        if code == 0:
            # On a GPU decode is asynchronous: wait here, with the GIL released, not in a getter.
            self._lib.llama_synchronize(pointer)
        forward_log()
        if self._images or isinstance(batch, EmbeddingBatch):
            self._note_images(batch, code)
        check_decode(code)
        self._decoded = True
        self._n_output_rows = batch.n_outputs
        # A copy: the batch may be filled again before a row is sampled.
        self._is_output = batch.output_flags.copy()
        self._pending_copies.clear()
        if self.n_rollback and isinstance(batch, Batch):
            self._rollback.decoded(batch.runs)
        return Logits(self, batch.n_outputs)

    def _note_images(self, batch: Batch | EmbeddingBatch, code: int) -> None:
        """Keep the position of the image that a sequence ends with; forget it if anything else follows."""
        if code in (1, -1):  # nothing was stored
            return
        for run in batch.runs:
            self._images.pop(run.seq_id, None)
        if code == 0 and isinstance(batch, EmbeddingBatch):
            self._images[batch.runs[0].seq_id] = batch.runs[0].p0

    def _compute(self, pointer: Any, batch: Batch | EmbeddingBatch) -> int:
        is_causal = isinstance(batch, Batch) or batch.is_causal
        if not is_causal:
            self._lib.llama_set_causal_attn(pointer, False)
        try:
            return int(self._lib.llama_decode(pointer, batch.struct))
        finally:
            if not is_causal:
                self._lib.llama_set_causal_attn(pointer, True)

    def _check_batch(self, batch: Batch | EmbeddingBatch) -> None:
        check_int("rows", batch.n_rows, 1, self.n_batch)
        if isinstance(batch, EmbeddingBatch):
            self._check_embeddings(batch)
        # One too many aborts the process, and only after the buffers were set up.
        check_int("output rows", batch.n_outputs, 0, self.n_outputs_max)
        if batch.highest_token >= self.n_vocab:
            raise InvalidArgumentError("token", batch.highest_token, f"0 to {self.n_vocab - 1}")
        pos_max, memory = self._lib.llama_memory_seq_pos_max, self._memory
        highest_id, highest_position = self.n_seq_max - 1, self.n_ctx_seq - 1
        # The rest of an image that is decoded in parts has the time of its first part.
        parts = self._images if isinstance(batch, EmbeddingBatch) else {}
        ends: dict[int, int] = {}
        for seq_id, p0, n_tokens in batch.runs:
            check_int("seq_id", seq_id, 0, highest_id)
            check_int("position", p0 + n_tokens - 1, 0, highest_position)
            last = ends.get(seq_id)
            if last is None:
                last = pos_max(memory, seq_id)
            goes_on = self.has_mrope and (p0 > last or p0 == last == parts.get(seq_id))
            if p0 != last + 1 and not goes_on:
                raise PositionError(seq_id, last, p0)
            ends[seq_id] = p0 + n_tokens - 1

    def _check_embeddings(self, batch: EmbeddingBatch) -> None:
        check_int("position", batch.last_position, 0, self.n_ctx_seq - 1)
        check_int("n_embd of rows", batch.n_embd, self.n_embd_inp, self.n_embd_inp)
        if batch.has_mrope != self.has_mrope:
            shape = f"({'4, ' * self.has_mrope}{batch.n_rows}{',' * (not self.has_mrope)})"
            raise InvalidArgumentError("shape of positions", batch._positions.shape, shape)
        if not batch.is_causal:
            # llama.cpp aborts.
            check_int("rows that attend to each other (n_ubatch)", batch.n_rows, 1, self.n_ubatch)

    def _logit_rows(self, generation: int, n_rows: int) -> NDArray[np.float32]:
        pointer = self._pointer
        if generation != self.n_decodes or not self._decoded:
            raise StaleLogitsError(
                f"logits of decode {generation}, but decode {self.n_decodes} was begun since"
            )
        if n_rows == 0:
            return np.empty((0, self.n_vocab), np.float32)
        data = self._lib.llama_get_logits(pointer)
        if not data:
            raise LlamaCallError(
                "llama_get_logits", 0, "returned NULL for an output row after a successful decode"
            )
        place = ctypes.addressof(data.contents), n_rows
        if self._view_of != place:  # `as_array` takes 0.05 ms
            self._view_of = place
            self._view = np.ctypeslib.as_array(data, shape=(n_rows, self.n_vocab))
        return self._view[:]

    def check_output_row(self, row: int) -> int:
        """Return `row`; raise `StaleLogitsError` or `InvalidArgumentError` if this batch row has no logits."""
        if not self._decoded:
            raise StaleLogitsError("there is no successful decode to take logits from")
        row = check_int("row", row, 0, len(self._is_output) - 1)
        if not self._is_output[row]:
            raise InvalidArgumentError(
                "row", row, "a row of the last batch that was added with logits (n_outputs)"
            )
        return row

    def output_logits(self, row: int) -> NDArray[np.float32]:
        """Return the logits of this batch row: a float32 view, `(n_vocab,)`, valid until the next decode."""
        row = self.check_output_row(row)
        index = int(np.count_nonzero(self._is_output[:row]))
        rows = self._logit_rows(self.n_decodes, self._n_output_rows)
        return np.atleast_1d(rows[index])

    def hidden_states(self) -> NDArray[np.float32]:
        """Return the hidden states of all rows of the last decode, in the order of the batch.

        Returns
        -------
        ndarray
            View, float32, shape `(n_rows, n_embd_out)`, valid until the next decode.

        Raises
        ------
        StaleLogitsError
            There is no successful decode.
        LlamaCallError
            The context was made without `keeps_hidden`.
        """
        pointer = self._pointer
        if not self._decoded:
            raise StaleLogitsError("there is no successful decode to take hidden states from")
        rows = None if self._states is None else self._states.rows(pointer)
        if not rows:
            raise LlamaCallError("llama_get_embeddings_nextn", 0, "there are no hidden states")
        return np.ctypeslib.as_array(rows, shape=(len(self._is_output), self._n_embd_out))

    def set_abort(self, abort: bool) -> None:
        """Make the running and every later `decode` raise `DecodeFailedError` (code 2); False ends this.

        The only method that any thread may call.  Ends the whole batch.  CPU only.
        """
        self._abort_flag.set(abort)

    def __repr__(self) -> str:
        if self.closed:
            return "<Context closed>"
        return f"<Context n_ctx={self.n_ctx} n_seq_max={self.n_seq_max} decodes={self.n_decodes}>"


def init_context(model: Model, params: Any, *, no_warning: str) -> Any:
    """Return the pointer to a new context; llama.cpp's messages are logged (`no_warning`: see `forward_log`).

    Raises
    ------
    ContextError
        llama.cpp refuses these parameters.
    """
    forward_log()
    pointer = library().llama_init_from_model(model._pointer, params)
    reason = forward_log(no_warning=no_warning)
    if not pointer:
        raise ContextError(reason or "llama.cpp could not create the context")
    return pointer


def set_compute(
    params: Any,
    model: Model,
    *,
    n_threads: int,
    n_threads_batch: int,
    flash_attn: bool | None,
    type_k: str,
    type_v: str,
    offload_kqv: bool,
    op_offload: bool | None,
) -> None:
    """Set the parameters of threads, attention, cell types and devices; see `Context`."""
    params.n_threads = check_int("n_threads", n_threads, 1, MAX_THREADS)
    params.n_threads_batch = check_int("n_threads_batch", n_threads_batch, 1, MAX_THREADS)
    params.flash_attn_type = check_flash_attn(flash_attn)
    params.type_k = check_kv_type("type_k", type_k)
    params.type_v = check_kv_type("type_v", type_v)
    params.offload_kqv = bool(offload_kqv)
    params.op_offload = model.is_on_gpu if op_offload is None else bool(op_offload)


def set_rope(
    params: Any,
    *,
    rope_scaling: str | None = None,
    rope_freq_base: float = 0.0,
    rope_freq_scale: float = 0.0,
    yarn_orig_ctx: int = 0,
    **yarn: float | None,
) -> None:
    """Set the parameters of rotary embeddings; see `Context`."""
    if rope_scaling is not None:
        params.rope_scaling_type = check_rope_scaling(rope_scaling)
    # 0 takes the model's; next to 0 every logit becomes NaN.
    if rope_freq_base != 0:
        params.rope_freq_base = check_float("rope_freq_base", rope_freq_base, 1e-3, 1e12)
    if rope_freq_scale != 0:
        params.rope_freq_scale = check_float("rope_freq_scale", rope_freq_scale, 1e-6, 1e6)
    for field, value in yarn.items():
        if value is not None:
            setattr(params, field, check_float(field, value, -1.0, 1e6))
    params.yarn_orig_ctx = check_int("yarn_orig_ctx", yarn_orig_ctx, 0, INT32_MAX)


def set_no_pooling(params: Any, model: Model) -> None:
    """Set no pooling of a model that has one: llama.cpp would keep no hidden states."""
    architecture = model.metadata_value("general.architecture")
    if model.metadata_value(f"{architecture}.pooling_type") is not None:
        params.pooling_type = h.PoolingType.NONE


def check_flash_attn(wanted: bool | None) -> h.FlashAttnType:
    """Return llama.cpp's value for a choice of flash attention; None lets llama.cpp decide."""
    if wanted is None:
        return h.FlashAttnType.AUTO
    is_wanted = check_bool("flash_attn", wanted)
    return h.FlashAttnType.ENABLED if is_wanted else h.FlashAttnType.DISABLED


def check_kv_type(field: str, name: object) -> h.GgmlType:
    """Return the KV cache type called `name`; raise `InvalidArgumentError` for others, which crash ggml."""
    if not isinstance(name, str) or name not in KV_TYPES:
        raise InvalidArgumentError(field, name, "one of " + ", ".join(KV_TYPES))
    return KV_TYPES[name]


def check_rope_scaling(name: object) -> h.RopeScalingType:
    """Return the RoPE scaling with this name (in any case) or number; else raise `InvalidArgumentError`."""
    if isinstance(name, str) and name.upper() in h.RopeScalingType.__members__:
        return h.RopeScalingType[name.upper()]
    return check_enum("rope_scaling", name, h.RopeScalingType)


def check_decode(code: int) -> None:
    """Raise the exception for a code of `llama_decode`."""
    if code == 0:
        return
    if code == 1:
        raise NoKVSlotError("llama_decode", code, "no room in the KV cache")
    if code == 2:
        raise DecodeFailedError("llama_decode", code, "aborted")
    if code == -1:
        raise InvalidBatchError("llama_decode", code, "invalid batch")
    raise DecodeFailedError("llama_decode", code, "fatal error")


def system_info() -> str:
    """CPU features and backends of the loaded library.  See `llama_print_system_info`."""
    raw: Any = library().llama_print_system_info()
    return str(raw.decode("utf-8", "replace"))
