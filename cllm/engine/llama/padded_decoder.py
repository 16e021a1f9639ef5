"""A decoder that computes at least two rows together, for models whose weights are F16 or F32.

llama.cpp multiplies such weights with one row by another method than with several rows (`llamafile_sgemm`
refuses n < 2).  The logits of a row would depend on whether it is alone.  If a row might be alone, a
padding row is added behind each sequence, and removed after the decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Context
from cllm.engine.core.decoder import MediaRows
from cllm.engine.llama.decoder import N_PADDING_ROWS, LlamaDecoder
from cllm.engine.llama.loras import LlamaLoras
from cllm.errors import LlamaCallError

PADDING = 0  # a token; every vocabulary has it


class Rows(NamedTuple):
    """Consecutive rows of one sequence; the last `n_outputs` are output rows."""

    seq_id: int
    tokens: list[int]
    p0: int
    n_outputs: int


class PaddedDecoder(LlamaDecoder):
    """A `LlamaDecoder` in the per-sequence layout.

    llama.cpp cuts a batch into physical batches: neighbouring seq_ids with the same number of rows each
    (`llama_batch_allocr::split_equal`).  It computes the last layers for output rows only.  A padding
    row, which is an output row, is added behind each sequence.  The row before its own output rows becomes
    an output row too.  However the batch is cut, no row and no output row is then computed alone.
    """

    def __init__(
        self, make_context: Callable[[], Context], n_batch: int, loras: LlamaLoras | None = None
    ) -> None:
        self._added: list[Rows] = []
        self._n_outputs = 0
        super().__init__(make_context, n_batch, loras)

    def _open(self) -> None:
        super()._open()
        n_padding = N_PADDING_ROWS * self.context.n_seq_max
        self.n_outputs_max: int = self.n_outputs_max - n_padding
        self.n_batch: int = max(1, min(self._n_batch, self.context.n_batch - n_padding))
        self.n_ctx_seq: int = self.n_ctx_seq - 1  # the last one is for padding

    def clear(self) -> None:
        """Forget the rows added so far."""
        super().clear()
        self._added.clear()
        self._n_outputs = 0

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """Add rows; return the indices of their output rows among all output rows."""
        self._added.append(Rows(seq_id, tokens, p0, n_outputs))
        first, self._n_outputs = self._n_outputs, self._n_outputs + n_outputs
        return range(first, self._n_outputs)

    def add_media(self, media: MediaRows) -> None:
        """Make the batch consist of rows of one media chunk alone; no output row is alone."""
        self._n_outputs = media.n_outputs
        super().add_media(media._replace(n_outputs=_n_asked(media.n_outputs, len(media.rows))))

    def decode(self) -> NDArray[np.float32]:
        """Compute the batch, and more rows if some would be alone; see `Decoder`."""
        if self._embeddings is not None:
            logits = super().decode()
            return logits[len(logits) - self._n_outputs :]
        super().clear()
        if not has_lone_rows(self._added):
            for rows in self._added:
                super().add(rows.seq_id, rows.tokens, rows.p0, n_outputs=rows.n_outputs)
            return super().decode()
        wanted: list[int] = []
        for seq_id, tokens, p0, n_outputs in self._added:
            n_asked = _n_asked(n_outputs, len(tokens))
            outputs = super().add(seq_id, tokens, p0, n_outputs=n_asked)
            wanted += outputs[n_asked - n_outputs :]
            super().add(seq_id, [PADDING], p0 + len(tokens), n_outputs=1)
        try:
            logits = super().decode()
        finally:
            for seq_id, tokens, p0, _ in self._added:
                self._remove_padding(seq_id, p0 + len(tokens))
        return logits[wanted]

    def _remove_padding(self, seq_id: int, p0: int) -> None:
        if not self.seq_rm(seq_id, p0):
            raise LlamaCallError("llama_memory_seq_rm", 0, f"seq_id {seq_id} keeps its padding")


def _n_asked(n_outputs: int, n_rows: int) -> int:
    """Return the number of output rows with which none of the wanted ones is alone."""
    return min(n_outputs + 1, n_rows) if n_outputs else 0


def has_lone_rows(added: Sequence[Rows]) -> bool:
    """Return True if a row, or an output row, may be computed alone."""
    if any(len(rows.tokens) != 1 or rows.n_outputs != 1 for rows in added):
        return True
    seq_ids = {rows.seq_id for rows in added}
    return any(i - 1 not in seq_ids and i + 1 not in seq_ids for i in seq_ids)
