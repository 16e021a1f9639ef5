"""Decoder: what the engine needs of a context and its batch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.engine.core.kv_cache import CacheReader
from cllm.engine.lora import LoraSet


class MediaRows(NamedTuple):
    """Rows of one media chunk, or of a part of it: a batch of its own; see `EmbeddingBatch`."""

    seq_id: int
    rows: NDArray[np.float32]
    positions: NDArray[np.int32]
    is_causal: bool
    n_outputs: int


class CacheMemory(CacheReader, Protocol):
    """The KV cache calls of a context; `cllm.bindings.Memory` documents them."""

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool: ...
    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None: ...
    def state_seq_get_data(self, seq_id: int) -> bytes: ...
    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None: ...


class Decoder(CacheMemory, Protocol):
    """A context and its batch.  Raises the errors of `Context`; `decode` may raise `ModelChangedError`.

    `tests.simulation.conformance.check_decoder` checks how a decoder must behave.

    Attributes
    ----------
    n_batch, n_outputs_max : int
        Largest number of rows, and of output rows, in one decode.
    n_vocab : int
        Number of logits of a row.
    separates_prompts : bool
        True if prompts are better computed in decodes of their own.  From 64 rows on, llama.cpp's
        attention on a CPU works in tiles, in which a row that only decodes costs as much as 64.
    max_tick_s : float or None
        Longest time, in seconds, that a decode with rows of prompts should take.  Set if `abort` cannot end a
        decode; otherwise None.
    """

    n_batch: int
    n_outputs_max: int
    n_vocab: int
    separates_prompts: bool
    max_tick_s: float | None

    def set_loras(self, loras: LoraSet) -> None:
        """Compute the next batches with these adapters, which are loaded, and no others."""

    def clear(self) -> None:
        """Forget the rows added so far."""

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """Add rows; return the indices of their output rows among all output rows of the batch."""

    def add_media(self, media: MediaRows) -> None:
        """Make the batch consist of rows of one media chunk alone."""

    def decode(self) -> NDArray[np.float32]:
        """Compute the rows; return the logits, float32 `(n_outputs, n_vocab)`, valid until the next call."""

    def rebuild(self) -> None:
        """Throw the context away and make an empty one with the same parameters."""
