"""MtpContext: the layers of a model that guess one token more (multi-token prediction).  One thread only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings._library import forward_log, library
from cllm.bindings._llama_ext_h import ARCHITECTURES, hidden_states
from cllm.bindings.context import (
    MAX_CELLS,
    check_decode,
    init_context,
    set_compute,
    set_no_pooling,
    set_rope,
)
from cllm.bindings.lora import LoraContext
from cllm.bindings.memory import Memory
from cllm.bindings.model import Model
from cllm.checks import check_int
from cllm.errors import ContextError, InvalidArgumentError, LlamaCallError, PositionError


class MtpRows(NamedTuple):
    """Consecutive rows of one sequence.

    Attributes
    ----------
    tokens : list of int
        Tokens of the positions from `p0` on.
    hidden : ndarray
        float32, shape `(len(tokens), n_embd_out)`: the hidden state of the position before each token.
    """

    seq_id: int
    p0: int
    tokens: list[int]
    hidden: NDArray[np.float32]


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
    **rope
        `rope_scaling` and the other settings of rotary embeddings of `Context`.

    Raises
    ------
    InvalidArgumentError
        A value is out of range.
    ContextError
        llama.cpp has no graph for the layer, the model does not have exactly one, or was loaded without
        `load_mtp`.
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
        **rope: Any,
    ) -> None:
        check_mtp(model)
        lib, states = library(), hidden_states()
        params = lib.llama_context_default_params()
        params.ctx_type = h.ContextType.MTP
        params.n_seq_max = check_int("n_seq_max", n_seq_max, 1, lib.llama_max_parallel_sequences())
        params.n_ctx = check_int("n_ctx", n_ctx, n_seq_max, MAX_CELLS)
        params.n_batch = check_int("n_batch", n_batch, n_seq_max, 1 << 20)
        params.n_ubatch = check_int("n_ubatch", n_ubatch, 1, 1 << 20)
        params.n_outputs_max = n_seq_max
        params.kv_unified, params.swa_full, params.no_perf = True, True, True
        set_compute(
            params, model, n_threads=n_threads, n_threads_batch=n_threads_batch, flash_attn=flash_attn,
            type_k=type_k, type_v=type_v, offload_kqv=offload_kqv, op_offload=op_offload,
        )  # fmt: skip
        set_rope(params, **rope)
        set_no_pooling(params, model)
        pointer = init_context(model, params, no_warning="> n_ctx_train")
        batches: list[Any] = []

        def free(pointer: Any) -> None:
            for batch in batches:
                lib.llama_batch_ext_free(batch)
            lib.llama_free(pointer)

        super().__init__(pointer, model, free, kv_unified=True)
        self._states = states
        self.n_vocab: int = model.vocab.n_tokens
        self.n_embd: int = model.n_embd_out
        with self._closed_on_error():
            batches.append(lib.llama_batch_ext_init(pointer))
            (self._batch,) = batches
            self.n_batch: int = int(lib.llama_n_batch(pointer))
            # Some graphs keep only those of output rows in any case.
            states.keep(pointer, outputs_only=True)

    def compute(self, runs: Sequence[MtpRows]) -> None:
        """Compute rows and store their keys and values.

        Releases the GIL while computing.  A sequence that is empty may begin at any position.

        Raises
        ------
        PositionError, InvalidArgumentError
            Rows do not continue what the KV cache holds, or have wrong values; nothing was computed.
        NoKVSlotError, InvalidBatchError
            The KV cache has no room, or llama.cpp rejects the batch; nothing was stored.
        DecodeFailedError
            Failed: part of the batch may have been stored.
        """
        self._decode(runs, has_outputs=False)

    def predict(self, rows: Sequence[MtpRows]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute one row of each sequence; return the logits of the next tokens, and the hidden states.

        Parameters
        ----------
        rows : sequence of MtpRows
            Each has one token.

        Returns
        -------
        logits, hidden : ndarray
            Views, float32, shapes `(len(rows), n_vocab)` and `(len(rows), n_embd_out)`, valid until the next
            decode.

        Raises
        ------
        PositionError, InvalidArgumentError, NoKVSlotError, InvalidBatchError, DecodeFailedError
            As `compute`.
        """
        for run in rows:
            check_int("tokens of a sequence", len(run.tokens), 1, 1)
        pointer = self._decode(rows, has_outputs=True)
        logits, states = self._lib.llama_get_logits(pointer), self._states.rows(pointer)
        if not logits or not states:
            raise LlamaCallError("llama_process", 0, "returned no logits or no hidden states")
        as_array, n_rows = np.ctypeslib.as_array, len(rows)
        return as_array(logits, (n_rows, self.n_vocab)), as_array(states, (n_rows, self.n_embd))

    def _decode(self, runs: Sequence[MtpRows], *, has_outputs: bool) -> Any:
        pointer, lib = self._pointer, self._lib
        self._check(runs)
        lib.llama_batch_ext_clear(self._batch)
        for run in runs:
            self._add(run, has_outputs)
        lib.n_computed += 1
        code = lib.llama_process(pointer, h.ProcessType.DECODE, self._batch)
        if code == 0:
            lib.llama_synchronize(pointer)
        forward_log()
        check_decode(code)
        return pointer

    def _add(self, run: MtpRows, is_output: bool) -> None:
        lib, batch = self._lib, self._batch
        hidden = np.ascontiguousarray(run.hidden)
        address = hidden.ctypes.data
        float_p = ctypes.POINTER(ctypes.c_float)
        state = h.DECLARATIONS.structs["llama_embd"](n_rows=1, n_embd=self.n_embd)
        position = ctypes.c_int32()
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
            if is_output:
                lib.llama_batch_ext_set_output_logits(batch, row, True)

    def _check(self, runs: Sequence[MtpRows]) -> None:
        """Raise an error for rows that the context cannot take."""
        check_int("rows", sum(len(run.tokens) for run in runs), 1, self.n_batch)
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
