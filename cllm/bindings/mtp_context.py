"""MtpContext: the layers of a model that guess one token more (multi-token prediction).  One thread only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings._abort import AbortFlag
from cllm.bindings._library import forward_log, library
from cllm.bindings._llama_ext_h import hidden_states
from cllm.bindings.context import check_decode, check_flash_attn, check_kv_type, init_context
from cllm.bindings.lora import LoraContext
from cllm.bindings.memory import Memory
from cllm.bindings.model import Model
from cllm.checks import MAX_THREADS, check_int
from cllm.errors import ContextError, InvalidArgumentError, LlamaCallError, PositionError

# Architectures that llama.cpp has a graph of these layers for (`DECODER_MTP` in src/models).  For any
# other it would compute its usual graph, without the weights.
ARCHITECTURES = frozenset({
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next",
    "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "step35",
})  # fmt: skip


class MtpRows(NamedTuple):
    """Consecutive rows of one sequence.

    Attributes
    ----------
    tokens : list of int
        Tokens of the positions from `p0` on.
    hidden : ndarray
        float32, shape `(len(tokens), n_embd_out)`: the hidden state of the position before each token.
    is_output : bool
        True if the logits of the last row are wanted.
    """

    seq_id: int
    p0: int
    tokens: list[int]
    hidden: NDArray[np.float32]
    is_output: bool


class MtpContext(Memory, LoraContext):
    """KV cache and compute buffers for the MTP layer of a model, in the unified layout.  One thread only.

    Parameters
    ----------
    model : Model
        Loaded with `load_mtp`, from a file that has the weights of the layer.  llama.cpp aborts without them.
    n_ctx, n_batch, n_ubatch, n_seq_max : int
        As for `Context`.
    n_threads, n_threads_batch : int
        Compute threads for one row and for many.
    flash_attn, type_k, type_v, offload_kqv, op_offload
        As for `Context`.

    Raises
    ------
    InvalidArgumentError
        A value is out of range.
    ContextError
        llama.cpp has no graph for the layer, or the model does not have exactly one.
    LibraryError
        The library has no functions for hidden states.

    Notes
    -----
    See `LLAMA_CONTEXT_TYPE_MTP`, `llama_batch_ext_set_embd_state` and `llama_process` in llama.h.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int = 2,
        n_threads_batch: int = 2,
        flash_attn: bool | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        offload_kqv: bool = True,
        op_offload: bool | None = None,
    ) -> None:
        check_mtp(model)
        lib, states = library(), hidden_states()
        params = lib.llama_context_default_params()
        params.ctx_type = h.ContextType.MTP
        params.n_seq_max = check_int("n_seq_max", n_seq_max, 1, lib.llama_max_parallel_sequences())
        params.n_ctx = check_int("n_ctx", n_ctx, n_seq_max, 1 << 26)
        params.n_batch = check_int("n_batch", n_batch, n_seq_max, 1 << 20)
        params.n_ubatch = check_int("n_ubatch", n_ubatch, 1, 1 << 20)
        params.n_outputs_max = n_seq_max
        params.n_threads = check_int("n_threads", n_threads, 1, MAX_THREADS)
        params.n_threads_batch = check_int("n_threads_batch", n_threads_batch, 1, MAX_THREADS)
        params.kv_unified, params.swa_full, params.no_perf = True, True, True
        params.flash_attn_type = check_flash_attn(flash_attn)
        params.type_k = check_kv_type("type_k", type_k)
        params.type_v = check_kv_type("type_v", type_v)
        params.offload_kqv = bool(offload_kqv)
        params.op_offload = model.is_on_gpu if op_offload is None else bool(op_offload)
        self._abort_flag = AbortFlag(params)
        pointer = init_context(model, params, no_warning="> n_ctx_train")
        batch = lib.llama_batch_ext_init(pointer)

        def free(pointer: Any) -> None:
            lib.llama_batch_ext_free(batch)
            lib.llama_free(pointer)

        super().__init__(pointer, model, free, kv_unified=True)
        self._batch = batch
        self._states = states
        self.n_vocab: int = model.vocab.n_tokens
        self.n_embd: int = model.n_embd_out
        with self._closed_on_error():
            self.n_batch: int = int(lib.llama_n_batch(pointer))
            states.keep(pointer)

    def decode(
        self, runs: Sequence[MtpRows]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Compute rows; return logits and hidden states of the output rows.

        Releases the GIL while computing.  A sequence that is empty may begin at any position.

        Returns
        -------
        logits : ndarray
            View, float32, shape `(n_outputs, n_vocab)`, valid until the next decode.
        hidden : list of ndarray
            One view for each output row: float32, shape `(n_embd_out,)`, valid until the next decode.

        Raises
        ------
        PositionError, InvalidArgumentError
            Rows do not continue what the KV cache holds, or have wrong values; nothing was computed.
        NoKVSlotError, InvalidBatchError
            The KV cache has no room, or llama.cpp rejects the batch; nothing was stored.
        DecodeFailedError
            Failed: part of the batch may have been stored.
        """
        pointer, lib = self._pointer, self._lib
        n_rows = self._check(runs)
        lib.llama_batch_ext_clear(self._batch)
        for run in runs:
            self._add(run)
        lib.n_computed += 1
        code = lib.llama_process(pointer, h.ProcessType.DECODE, self._batch)
        if code == 0:
            lib.llama_synchronize(pointer)
        forward_log()
        check_decode(code)
        n_outputs = sum(run.is_output for run in runs)
        if not n_outputs:
            return np.empty((0, self.n_vocab), np.float32), []
        logits, states = lib.llama_get_logits(pointer), self._states.rows(pointer)
        if not logits or not states:
            raise LlamaCallError("llama_process", 0, "returned no logits or no hidden states")
        hidden = np.ctypeslib.as_array(states, shape=(n_rows, self.n_embd))
        ends = np.cumsum([len(run.tokens) for run in runs]).tolist()
        return (
            np.ctypeslib.as_array(logits, shape=(n_outputs, self.n_vocab)),
            [hidden[end - 1] for end, run in zip(ends, runs, strict=True) if run.is_output],
        )

    def _add(self, run: MtpRows) -> None:
        lib, batch = self._lib, self._batch
        hidden = np.ascontiguousarray(run.hidden)
        address = hidden.ctypes.data
        float_p = ctypes.POINTER(ctypes.c_float)
        state = h.DECLARATIONS.structs["llama_embd"](n_rows=1, n_embd=self.n_embd)
        position, row = ctypes.c_int32(), 0
        for i, token in enumerate(run.tokens):
            row = lib.llama_batch_ext_add_token(batch, run.seq_id, token)
            position.value = run.p0 + i
            state.data = ctypes.cast(address + 4 * self.n_embd * i, float_p)
            if not (
                row >= 0
                and lib.llama_batch_ext_set_pos(batch, row, ctypes.byref(position))
                and lib.llama_batch_ext_set_embd_state(batch, row, state)
            ):
                raise LlamaCallError("llama_batch_ext_add_token", row, f"rejects token {token}")
        lib.llama_batch_ext_set_output_logits(batch, row, run.is_output)

    def _check(self, runs: Sequence[MtpRows]) -> int:
        """Return the number of rows; raise an error for rows that the context cannot take."""
        n_rows = check_int("rows", sum(len(run.tokens) for run in runs), 1, self.n_batch)
        seen: set[int] = set()
        for run in runs:
            last = self.seq_pos_max(run.seq_id)
            if run.seq_id in seen or (last is not None and run.p0 != last + 1):
                raise PositionError(run.seq_id, -1 if last is None else last, run.p0)
            seen.add(run.seq_id)
            check_int("tokens of a sequence", len(run.tokens), 1, self.n_batch)
            check_int("position", run.p0, 0, self.n_ctx_seq - len(run.tokens))
            check_int("token", min(run.tokens), 0, self.n_vocab - 1)
            check_int("token", max(run.tokens), 0, self.n_vocab - 1)
            shape = len(run.tokens), self.n_embd
            if run.hidden.shape != shape or run.hidden.dtype != np.float32:
                kind = f"{run.hidden.dtype} {run.hidden.shape}"
                raise InvalidArgumentError("hidden", kind, f"float32 {shape}")
        return n_rows


def check_mtp(model: Model) -> None:
    """Check that llama.cpp can compute the MTP layer of a model.

    Raises
    ------
    ContextError
        It has no such layer, or more than one, or its architecture has no graph for it.
    """
    architecture = model.metadata_value("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ContextError(f"llama.cpp has no multi-token prediction for {architecture}")
    if model.n_layer_nextn != 1:
        raise ContextError(
            f"multi-token prediction needs one layer for it, and the model has {model.n_layer_nextn}"
        )
    if not model.has_mtp:
        raise ContextError("the model was loaded without load_mtp")
