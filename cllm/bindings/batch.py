"""Batch: the rows of one `llama_decode`, in arrays that are allocated once and filled by slices.

Every row has an explicit position and belongs to exactly one sequence; the other possibilities of
`llama_batch` (positions by llama.cpp, rows shared by sequences) corrupt memory or the cache when
misused, and are not needed here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import _llama_h as h
from cllm.checks import INT32_MAX, check_int
from cllm.errors import InvalidArgumentError, PositionError


class Run(NamedTuple):
    """Consecutive rows of one sequence: positions `[p0, p0 + n_tokens)`."""

    seq_id: int
    p0: int
    n_tokens: int

    @property
    def p1(self) -> int:
        """Position after the last row."""
        return self.p0 + self.n_tokens


class Batch:
    """Rows for `Context.decode`: at most `n_rows_max`, which is 1 to 1,048,576.

    Attributes
    ----------
    runs : list of Run
        What was added since `clear`, in order.
    n_rows, n_outputs : int
        Rows, and rows whose logits are wanted.
    highest_token : int
        The largest token id of all rows; -1 without any.
    """

    def __init__(self, n_rows_max: int) -> None:
        self.n_rows_max: int = check_int("n_rows_max", n_rows_max, 1, 1 << 20)
        self.tokens: NDArray[np.int32] = np.zeros(n_rows_max, np.int32)
        self._positions: NDArray[np.int32] = np.zeros(n_rows_max, np.int32)
        self._seq_ids: NDArray[np.int32] = np.zeros(n_rows_max, np.int32)
        self._is_output: NDArray[np.int8] = np.zeros(n_rows_max, np.int8)
        # One sequence per row, always: the counts and the pointers to `_seq_ids` never change.
        self._n_seq_ids: NDArray[np.int32] = np.ones(n_rows_max, np.int32)
        int32_p = ctypes.POINTER(ctypes.c_int32)
        base = self._seq_ids.ctypes.data
        self._seq_id_pointers = (int32_p * n_rows_max)(
            *(ctypes.cast(base + 4 * row, int32_p) for row in range(n_rows_max))
        )
        self._positions_template: NDArray[np.int32] = np.arange(n_rows_max, dtype=np.int32)
        self.struct: Any = h.DECLARATIONS.structs["llama_batch"](
            n_tokens=0,
            token=self.tokens.ctypes.data_as(int32_p),
            embd=None,
            pos=self._positions.ctypes.data_as(int32_p),
            n_seq_id=self._n_seq_ids.ctypes.data_as(int32_p),
            seq_id=self._seq_id_pointers,
            logits=self._is_output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self.runs: list[Run] = []
        self.n_rows: int = 0
        self.n_outputs: int = 0
        self.highest_token: int = -1
        self._ends: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all rows."""
        self.runs.clear()
        self._ends.clear()
        self.n_rows = self.n_outputs = 0
        self.highest_token = -1
        self.struct.n_tokens = 0

    def add(self, seq_id: int, tokens: Sequence[int], p0: int, *, n_outputs: int = 0) -> range:
        """Add consecutive tokens of one sequence.

        Parameters
        ----------
        seq_id : int
        tokens : sequence of int
            At least one.
        p0 : int
            Position of the first; the others follow.
        n_outputs : int
            How many of the last rows shall have logits.

        Returns
        -------
        range
            Indices of the new output rows in `Logits.rows`.

        Raises
        ------
        PositionError
            The sequence is in the batch already and `p0` does not continue it.
        InvalidArgumentError
            Too many rows, or a value out of range; the batch is unchanged.
        """
        n_tokens = len(tokens)
        start, end = self.n_rows, self.n_rows + n_tokens
        if not 1 <= n_tokens <= self.n_rows_max - start:
            raise InvalidArgumentError("rows", n_tokens, f"1 to {self.n_rows_max - start}")
        seq_id = check_int("seq_id", seq_id, 0, h.LLAMA_MAX_SEQ - 1)
        p0 = check_int("p0", p0, 0, INT32_MAX - n_tokens)
        n_outputs = check_int("n_outputs", n_outputs, 0, n_tokens)
        last = self._ends.get(seq_id)
        if last is not None and p0 != last:
            raise PositionError(seq_id, last - 1, p0)
        if n_tokens == 1 and type(tokens) is list and type(tokens[0]) is int:
            # The usual case, one token of a decoding sequence: slices would take four times as long.
            highest = check_int("token", tokens[0], 0, INT32_MAX)
            self.tokens[start] = highest
            self._positions[start] = p0
            self._seq_ids[start] = seq_id
            self._is_output[start] = n_outputs
        else:
            values = _check_tokens(tokens)
            highest = int(values.max())
            self.tokens[start:end] = values
            np.add(self._positions_template[:n_tokens], p0, out=self._positions[start:end])
            self._seq_ids[start:end] = seq_id
            self._is_output[start : end - n_outputs] = 0
            self._is_output[end - n_outputs : end] = 1
        self.highest_token = max(self.highest_token, highest)
        self.runs.append(Run(seq_id, p0, n_tokens))
        self._ends[seq_id] = p0 + n_tokens
        self.n_rows = self.struct.n_tokens = end
        self.n_outputs += n_outputs
        return range(self.n_outputs - n_outputs, self.n_outputs)

    @property
    def output_flags(self) -> NDArray[np.int8]:
        """Flags of the rows whose logits are wanted: int8, `(n_rows,)`."""
        return self._is_output[: self.n_rows]

    def __repr__(self) -> str:
        return f"<Batch rows={self.n_rows}/{self.n_rows_max} outputs={self.n_outputs}>"


def _check_tokens(tokens: Sequence[int]) -> NDArray[np.integer]:
    """Return the tokens as an integer array; reject values that numpy would wrap or round to int32."""
    try:
        values = np.asarray(tokens)
    except ValueError:  # ragged
        raise InvalidArgumentError("tokens", tokens, "integers") from None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InvalidArgumentError("tokens", tokens, "a sequence of integers")
    for value in (int(values.min()), int(values.max())):
        check_int("token", value, 0, INT32_MAX)
    return values
