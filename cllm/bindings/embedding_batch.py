"""EmbeddingBatch: rows of embeddings for one `llama_decode`, in place of tokens."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.bindings.batch import Run
from cllm.checks import INT32_MAX, check_bool, check_int
from cllm.errors import InvalidArgumentError


class EmbeddingBatch:
    """Rows of one image, or of a part of it, for `Context.decode`.

    A batch has tokens or embeddings and never both: llama.cpp does not reject such a batch, but reads it
    as something else (`llama_batch` in llama.h).

    Parameters
    ----------
    seq_id : int
    rows : ndarray
        float32, shape `(n_rows, n_embd)`: all or some rows that `Projector.encode` returned.
    positions : ndarray
        int32, shape `(n_rows,)` or `(4, n_rows)`: the columns of `MediaChunk.positions` for these rows.
    is_causal : bool
        `MediaChunk.is_causal`.  False: each row attends to all rows of the batch, which has to have all
        rows of the chunk.
    n_outputs : int
        How many of the last rows shall have logits.

    Attributes
    ----------
    runs : list of Run
        One run, from the position of the first row.  Its end is that position plus `n_rows`, which
        with M-RoPE is not the position after the last row.
    n_rows, n_outputs, n_embd : int
    last_position : int
        Position of the last row.
    has_mrope : bool
        True if the positions have four parts.

    Raises
    ------
    InvalidArgumentError
        Arrays of another type or shape, values that are not finite, or a number out of range.
    """

    highest_token = -1

    def __init__(
        self,
        seq_id: int,
        rows: NDArray[np.float32],
        positions: NDArray[np.int32],
        *,
        is_causal: bool,
        n_outputs: int = 0,
    ) -> None:
        seq_id = check_int("seq_id", seq_id, 0, h.LLAMA_MAX_SEQ - 1)
        self._rows = _check_array("rows", rows, np.float32, 2)
        self._positions = _check_array("positions", positions, np.int32, 1, 2)
        n_rows, self.n_embd = self._rows.shape
        if self._positions.shape not in ((n_rows,), (4, n_rows)):
            limit = f"({n_rows},) or (4, {n_rows})"
            raise InvalidArgumentError("shape of positions", self._positions.shape, limit)
        if not np.isfinite(self._rows).all():
            raise InvalidArgumentError("rows", "NaN or infinite", "finite")
        self.has_mrope: bool = self._positions.ndim == 2
        times = self._positions.reshape(-1, n_rows)[0]
        steps = np.diff(times)
        if (
            self._positions.min() < 0
            or (steps < 0).any()
            or not (self.has_mrope or (steps == 1).all())
        ):
            raise InvalidArgumentError(
                "positions", times.tolist(), "0 or more, each after the last"
            )
        p0 = check_int("position", int(times[0]), 0, INT32_MAX - n_rows)
        self.last_position = int(times[-1])
        self.is_causal: bool = check_bool("is_causal", is_causal)
        self.n_rows = n_rows
        self.n_outputs = check_int("n_outputs", n_outputs, 0, n_rows)
        self.runs = [Run(seq_id, p0, n_rows)]
        self.output_flags: NDArray[np.int8] = np.zeros(n_rows, np.int8)
        self.output_flags[n_rows - n_outputs :] = 1
        self._seq_id = np.array([seq_id], np.int32)
        self._n_seq_ids = np.ones(n_rows, np.int32)
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self._seq_ids = (int32_p * n_rows)(*[self._seq_id.ctypes.data_as(int32_p)] * n_rows)
        self.struct: Any = h.DECLARATIONS.structs["llama_batch"](
            n_tokens=n_rows,
            token=None,
            embd=self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self._positions.ctypes.data_as(int32_p),
            n_seq_id=self._n_seq_ids.ctypes.data_as(int32_p),
            seq_id=self._seq_ids,
            logits=self.output_flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def __repr__(self) -> str:
        return f"<EmbeddingBatch rows={self.n_rows} n_embd={self.n_embd}>"


def _check_array(field: str, array: object, dtype: type[np.generic], *n_dims: int) -> NDArray[Any]:
    """Return a copy of the array in C order: its owner may change the values after their check."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim not in n_dims:
        kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else array
        dimensions = " or ".join(map(str, n_dims))
        raise InvalidArgumentError(field, kind, f"{dtype.__name__} of {dimensions} dimensions")
    if array.size == 0:
        raise InvalidArgumentError(field, array.shape, "at least one row")
    return np.array(array, order="C", copy=True)
