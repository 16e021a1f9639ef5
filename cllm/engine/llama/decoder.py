"""llama.cpp behind the `Decoder` protocol.  Inference thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Batch, Context, Model, Run
from cllm.bindings.embedding_batch import EmbeddingBatch
from cllm.engine.config import EngineConfig
from cllm.engine.core.decoder import MediaRows
from cllm.engine.core.speculation import N_DRAFT_ROWS
from cllm.engine.file_content import MappedFiles
from cllm.engine.llama.architecture_faults import can_copy
from cllm.engine.llama.loras import LlamaLoras
from cllm.engine.lora import LoraSet

# Rows, and output rows, that a `PaddedDecoder` may add for each sequence.
N_PADDING_ROWS = 2
N_CELLS = 256  # the fewest that a context has
# Limit of a tick, in seconds, on backends that cannot abort a decode: a cancel takes up to two ticks.
MAX_TICK_S = 0.5


class Follower(Protocol):
    """Memory beside the decoder's, whose sequences follow those of the decoder.  Its calls raise no errors."""

    def decoded(
        self, runs: Sequence[Run], tokens: NDArray[np.int32], hidden: NDArray[np.float32]
    ) -> None:
        """Learn that the decoder has computed rows: their tokens, and their hidden states `(n_rows, n_embd_out)`."""

    def seq_rm(self, seq_id: int, p0: int | None, p1: int | None) -> None:
        """Learn that positions `[p0, p1)` of a sequence were removed."""

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p1: int | None) -> None:
        """Learn that an empty sequence shares the positions before `p1` of another."""

    def clear(self) -> None:
        """Learn that all sequences are empty."""


class LlamaDecoder:
    """A `Decoder` over a context and one batch.

    Parameters
    ----------
    make_context : callable
        Makes the context, now and whenever it has to be recreated.
    n_batch : int
        Largest number of rows in one batch.
    loras : LlamaLoras, optional
        Loaded adapters of the model.

    Attributes
    ----------
    context : Context
        Present context; `rebuild` replaces it.
    n_ctx_seq : int
        Largest number of positions of one sequence.
    files : MappedFiles or None
        Mapped files of the weights.  `decode` raises `ModelChangedError` if one was written to.
    follower : Follower or None
        Its context needs hidden states: `keeps_hidden`.
    """

    files: MappedFiles | None = None
    follower: Follower | None = None

    def __init__(
        self, make_context: Callable[[], Context], n_batch: int, loras: LlamaLoras | None = None
    ) -> None:
        self._make_context = make_context
        self._loras = loras
        self._applied: LoraSet | None = ()
        self._n_batch = n_batch
        self._is_stopping = False
        self._n_threads: tuple[int, int] | None = None  # None: as the context was made
        self._open()

    def _open(self) -> None:
        context = self._make_context()
        self.context: Context = context
        self._applied = ()
        self.n_outputs_max: int = context.n_outputs_max
        self.n_vocab: int = context.n_vocab
        self.n_ctx_seq: int = context.n_ctx_seq
        self.separates_prompts: bool = context.has_tiled_attention
        self.max_tick_s: float | None = None if context.can_abort else MAX_TICK_S
        self.n_batch: int = min(self._n_batch, context.n_batch)  # llama.cpp: never more than n_ctx
        if self._n_threads is not None:
            context.set_n_threads(*self._n_threads)
        self.allow()
        self._batch = Batch(context.n_batch)
        self._embeddings: EmbeddingBatch | None = None

    # --- Calls of the present context: see `Decoder` -------------------------------------------
    def set_loras(self, loras: LoraSet) -> None:
        """Compute the next batches with these adapters and no others."""
        if loras != self._applied:
            assert self._loras is not None
            self._applied = None  # unknown if the next call fails: it may have had its effect
            self.context.set_loras(self._loras.of(loras))
            self._applied = loras

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of threads for the next batches, in later contexts too."""
        self._n_threads = n_threads, n_threads_batch
        self.context.set_n_threads(n_threads, n_threads_batch)

    def clear(self) -> None:
        """Forget the rows added so far."""
        self._batch.clear()
        self._embeddings = None

    def add(self, seq_id: int, tokens: list[int], p0: int, *, n_outputs: int) -> range:
        """Add rows; return the indices of their output rows among all output rows of the batch."""
        return self._batch.add(seq_id, tokens, p0, n_outputs=n_outputs)

    def add_media(self, media: MediaRows) -> None:
        """Make the batch consist of rows of one media chunk alone."""
        self._embeddings = EmbeddingBatch(**media._asdict())

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        """Remove positions `[p0, p1)` of a sequence; return False if the memory cannot remove this part."""
        is_removed = self.context.seq_rm(seq_id, p0, p1)
        if is_removed and self.follower is not None:
            self.follower.seq_rm(seq_id, p0, p1)
        return is_removed

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        """Let an empty sequence share positions `[p0, p1)` of another."""
        self.context.seq_cp(seq_id_src, seq_id_dst, p0, p1)
        if self.follower is not None:
            self.follower.seq_cp(seq_id_src, seq_id_dst, p1)

    def seq_pos_min(self, seq_id: int) -> int | None:
        """Return the first position of a sequence; None if it is empty."""
        return self.context.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int | None:
        """Return the last position of a sequence; None if it is empty."""
        return self.context.seq_pos_max(seq_id)

    def state_seq_get_data(self, seq_id: int) -> bytes:
        """Return a copy of a sequence's state."""
        return self.context.state_seq_get_data(seq_id)

    def state_seq_set_data(self, data: bytes, seq_id: int, *, n_positions: int) -> None:
        """Restore a copy of `state_seq_get_data` into an empty sequence."""
        self.context.state_seq_set_data(data, seq_id, n_positions=n_positions)

    def decode(self) -> NDArray[np.float32]:
        """Compute the batch; see `Decoder`."""
        rows = self.context.decode(self._embeddings or self._batch).rows
        if self.files is not None:
            self.files.check()
        if self.follower is not None and self._embeddings is None:
            batch = self._batch
            self.follower.decoded(batch.runs, batch.tokens, self.context.hidden_states())
        return rows

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Decode a batch of each of these sizes, and discard the results: GPUs compile kernels at first use."""
        for n_rows in sizes:
            self.clear()
            self.add(0, [0] * min(n_rows, self.n_batch, self.n_ctx_seq), 0, n_outputs=1)
            self.decode()
            self.seq_rm(0)
        self.clear()

    def rebuild(self) -> None:
        """Throw the context away and make an empty one; see `Decoder`."""
        self.context.close()  # first: there may not be memory for two
        self._open()
        if self.follower is not None:
            self.follower.clear()

    def close(self) -> None:
        """Free the context."""
        self.context.close()

    # --- Any thread: the abort flag is not llama.cpp's memory, and outlives its context --------
    def abort(self) -> None:
        """Make the running decode, and all decodes before `allow`, raise `DecodeFailedError`."""
        self.context.set_abort(True)

    def allow(self) -> None:
        """Let decodes run again after an `abort`; has no effect after `stop`."""
        self.context.set_abort(False)
        if self._is_stopping:  # checked last: `stop` may have been called meanwhile
            self.context.set_abort(True)

    def stop(self) -> None:
        """Make the running decode and every later one raise `DecodeFailedError`."""
        self._is_stopping = True
        self.context.set_abort(True)


class States(NamedTuple):
    """States of recurrent layers.

    Attributes
    ----------
    n_bytes : int
        Bytes of one state of one sequence; 0 if the model has none.
    can_roll_back : bool
        True if llama.cpp can keep more than one state of a sequence, to remove wrong drafts.
    """

    n_bytes: int = 0
    can_roll_back: bool = False


NO_STATES = States()


def measure_states(model: Model, config: EngineConfig) -> States:
    """Return what states a model has, measured with a small context that decodes a token."""
    if not model.has_state:
        return States()
    n_threads, n_threads_batch = config.compute_threads
    with Context(
        model,
        n_ctx=N_CELLS,
        n_batch=3,
        n_rs_seq=1,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
    ) as context:
        batch = Batch(1)
        batch.add(0, [0], 0, n_outputs=0)
        context.decode(batch)
        return States(len(context.state_seq_get_data(0)), context.n_rollback > 0)


def make_context(model: Model, config: EngineConfig, states: States = NO_STATES) -> Context:
    """Return an empty context for an engine, of a model with such states."""
    n_threads, n_threads_batch = config.compute_threads
    n_drafts = config.n_draft_states(states.n_bytes) if states.can_roll_back else 0
    # llama.cpp aborts unless a batch and the cache have room for a row of every seq_id.
    kv_unified, n_seq_ids = config.kv_layout(
        model.n_ctx_train,
        state_bytes=states.n_bytes,
        n_states=1 + n_drafts,
        is_windowed=bool(model.n_swa),
        can_copy=can_copy(model),
    )
    n_padding = N_PADDING_ROWS * n_seq_ids if config.deterministic else 0
    n_draft_rows = N_DRAFT_ROWS if config.reserves_drafts else 0
    n_batch = max(config.n_batch, n_seq_ids) + n_padding
    type_k, type_v = config.kv_types
    return Context(
        model,
        n_ctx=max(config.n_cells, n_seq_ids) if config.n_cells else 0,
        n_batch=n_batch,
        n_ubatch=config.n_ubatch,
        n_seq_max=n_seq_ids,
        n_rs_seq=n_drafts,
        n_outputs_max=min(n_seq_ids + n_padding + n_draft_rows, n_batch),
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        kv_unified=kv_unified,
        flash_attn=True if config.deterministic else config.flash_attn,
        type_k=type_k,
        type_v=type_v,
        # llama.cpp does not reuse a shared cell, even if the windows of all its sequences have
        # passed it.  A small cache, only as large as the window, would fill up.
        swa_full=config.prefix_cache if config.swa_full is None else config.swa_full,
        offload_kqv=config.kv_offload,
        op_offload=config.op_offload,
        poll=config.poll,
        # Memory that removes no rows of wrong drafts has none.
        keeps_hidden=config.uses_mtp and not (states.n_bytes and not n_drafts),
        **config.rope,
    )
