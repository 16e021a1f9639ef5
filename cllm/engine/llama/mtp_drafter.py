"""MtpDrafter: drafts of the model's own layer for multi-token prediction (MTP).

The layer computes a row from a token and from the hidden state of the position before it, which the model
computed.  It has KV cells of its own.  They follow the model's cells: a shared prefix is shared here
too, and removed rows are removed here.  Where the model has rows without hidden states (restored from
host memory, or of an image), the layer begins again behind them, and sees only what follows.

Rows wait for the next draft, or until they are many.  They are computed before the model's next rows are
added: by then wrong drafts have been removed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Model, MtpContext, MtpRows, Run
from cllm.bindings._llama_ext_h import ARCHITECTURES
from cllm.engine.config import EngineConfig
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import N_DRAFT_ROWS, Drafts
from cllm.engine.llama.gguf_header import read_header, read_shapes
from cllm.engine.llama.step_drafter import StepDrafter
from cllm.errors import ModelLoadError, NoKVSlotError, PositionError

logger: logging.Logger = logging.getLogger("cllm.engine")

# Rows of a sequence that wait for the next draft, at the most.
N_WAITING = 32
BLOCK = re.compile(r"blk\.(\d+)\.")
WEIGHT = ".nextn.eh_proj.weight"


def mtp_fault(path: Path) -> str | None:
    """Return the reason that a model cannot draft by itself; None if it can.

    llama.cpp ends the process if the file names a layer without its weights.

    Raises
    ------
    OSError
        The file cannot be opened.
    """
    architecture = read_header(path).get("general.architecture")
    if architecture not in ARCHITECTURES:
        return f"llama.cpp has no multi-token prediction for {architecture}"
    names = read_shapes(path)
    last = max((int(block[1]) for name in names if (block := BLOCK.match(name))), default=0)
    layers = [name for name in names if name.endswith(WEIGHT)]
    if layers != [f"blk.{last}{WEIGHT}"]:
        return (
            f"its file has {len(layers)} layers for multi-token prediction, must have one, its last"
        )
    return None


def check_mtp_file(path: Path) -> None:
    """Check that a model can draft by itself.

    Raises
    ------
    ModelLoadError
        It cannot, or its file cannot be read.
    """
    try:
        fault = mtp_fault(path)
    except OSError as error:
        raise ModelLoadError(str(path), error.strerror or str(error)) from error
    if fault is not None:
        raise ModelLoadError(str(path), f"speculation is 'mtp', but {fault}")


def make_mtp_context(
    model: Model, config: EngineConfig, n_cells: int, n_seq_ids: int
) -> MtpContext:
    """Return the context of the MTP layer for an engine with this many cells and seq_ids."""
    n_threads, n_threads_batch = config.compute_threads
    type_k, type_v = config.kv_types
    return MtpContext(
        model,
        n_ctx=(n_cells or model.n_ctx_train) + N_DRAFT_ROWS,
        n_batch=max(config.n_batch, n_seq_ids),
        n_ubatch=config.n_ubatch,
        n_seq_max=n_seq_ids,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        flash_attn=config.flash_attn,
        type_k=type_k,
        type_v=type_v,
        offload_kqv=config.kv_offload,
        op_offload=config.op_offload,
        **config.rope,
    )


class MtpMemory(Protocol):
    """Calls of `MtpContext` that `MtpDrafter` needs."""

    n_batch: int
    n_embd: int
    n_seq_max: int

    def compute(self, runs: SequenceOf[MtpRows]) -> None: ...
    def predict(
        self, rows: SequenceOf[MtpRows]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool: ...
    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None: ...
    def memory_clear(self, *, data: bool = True) -> None: ...


@dataclass(slots=True)
class _Held:
    """Rows of one sequence in the layer.

    Attributes
    ----------
    end : int
        Position after the last row in the layer's cells.
    tokens : list of int
        Tokens of the next positions, which the model has computed and the layer has not.
    hidden : ndarray
        float32, shape `(1 + len(tokens), n_embd)`: hidden states from position `end - 1` on.
    """

    end: int
    tokens: list[int]
    hidden: NDArray[np.float32]

    @property
    def n_computed(self) -> int:
        """Number of positions that the model has computed."""
        return self.end + len(self.tokens)


class MtpDrafter(StepDrafter):
    """A `Drafter`, and a `Follower` of the decoder's cells.

    Parameters
    ----------
    context : MtpContext
        It has a seq_id for each seq_id of the engine, and a cell for each cell.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self, context: MtpContext, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__("multi-token prediction", context, clock)
        self._context: MtpMemory = context
        self._unknown = np.zeros((1, context.n_embd), np.float32)
        self._held: dict[int, _Held] = {}

    def warm_up(self) -> None:
        """Compute a few rows and remove them: a fault of llama.cpp then ends the process at load, not later."""
        context = self._context
        context.compute([MtpRows(0, 0, [0, 0], self._unknown.repeat(2, 0))])
        context.predict([MtpRows(0, 2, [0], self._unknown)])
        context.seq_rm(0, 2)
        if context.n_seq_max > 1:
            context.seq_cp(0, 1)
        context.memory_clear()

    # --- The decoder's cells: see `Follower` ---------------------------------------------------
    def decoded(
        self, runs: SequenceOf[Run], tokens: NDArray[np.int32], hidden: NDArray[np.float32]
    ) -> None:
        """See `Follower`."""
        with self._guarded() as is_usable:
            if not is_usable:
                return
            if any(len(held.tokens) > N_WAITING for held in self._held.values()):
                self._compute_waiting(self._held)
            row = 0
            for seq_id, p0, n_rows in runs:
                held = self._held.get(seq_id)
                if held is None or held.n_computed != p0:
                    self._forget(seq_id)
                    held = self._held[seq_id] = _Held(p0, [], self._unknown)
                rows = slice(row, row + n_rows)
                held.tokens += tokens[rows].tolist()
                held.hidden = np.concatenate([held.hidden, hidden[rows]])
                row += n_rows

    def seq_rm(self, seq_id: int, p0: int | None, p1: int | None) -> None:
        """See `Follower`."""
        with self._guarded() as is_usable:
            held = self._held.get(seq_id)
            if held is None or not is_usable:
                return
            if not p0 or p1 is not None:
                self._forget(seq_id)
            elif p0 >= held.end:
                n_kept = p0 - held.end
                held.tokens = held.tokens[:n_kept]
                held.hidden = held.hidden[: n_kept + 1]
            elif self._context.seq_rm(seq_id, p0):
                self._held[seq_id] = _Held(p0, [], self._unknown)
            else:
                self._forget(seq_id)

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p1: int | None) -> None:
        """See `Follower`."""
        with self._guarded() as is_usable:
            source = self._held.get(seq_id_src)
            if source is None or not is_usable:
                return
            self._forget(seq_id_dst)
            self._compute_waiting([seq_id_src])  # once, and not once for each copy
            if p1 is None or p1 >= source.end:
                self._context.seq_cp(seq_id_src, seq_id_dst)
                self._held[seq_id_dst] = _Held(source.end, [], source.hidden)
            else:
                self._context.seq_cp(seq_id_src, seq_id_dst, None, p1)
                self._held[seq_id_dst] = _Held(p1, [], self._unknown)

    def clear(self) -> None:
        """See `Follower`."""
        with self._guarded() as is_usable:
            if is_usable:
                self._empty()

    @contextmanager
    def _guarded(self) -> Iterator[bool]:
        """Give True if the layer is usable; begin with empty cells if they are full, or differ from `_held`."""
        with self._ending_on_error():
            try:
                yield not self.is_broken
            except (NoKVSlotError, PositionError) as error:
                logger.info("multi-token prediction begins with empty cells: %s", error)
                self._empty()

    def _empty(self) -> None:
        self._held.clear()
        self._context.memory_clear()

    def _forget(self, seq_id: int) -> None:
        if self._held.pop(seq_id, None) is not None:
            self._context.seq_rm(seq_id)

    def _compute_waiting(self, seq_ids: Iterable[int]) -> None:
        """Compute the rows of these sequences that wait, in as few batches as they need."""
        n_batch, runs, n_rows = self._context.n_batch, list[MtpRows](), 0
        for seq_id in seq_ids:
            held = self._held[seq_id]
            while held.tokens:
                if n_rows == n_batch or (runs and runs[-1].seq_id == seq_id):
                    self._context.compute(runs)
                    runs, n_rows = [], 0
                n = min(len(held.tokens), n_batch - n_rows)
                runs.append(MtpRows(seq_id, held.end, held.tokens[:n], held.hidden[:n]))
                held.end, held.tokens, held.hidden = held.end + n, held.tokens[n:], held.hidden[n:]
                n_rows += n
            held.hidden = held.hidden.copy()  # a view would keep all rows of a prompt
        if runs:
            self._context.compute(runs)

    # --- Drafts --------------------------------------------------------------------------------
    def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        guesses: list[list[int]] = [[] for _ in wanted]
        with self._guarded() as is_usable:
            if is_usable:
                self._guess(wanted, guesses)
        return [tuple(guess) for guess in guesses]

    def _guess(
        self, wanted: SequenceOf[tuple[Sequence, int]], guesses: SequenceOf[list[int]]
    ) -> None:
        """Append the wanted number of drafts to each list of `guesses`."""
        active = [i for i, (sequence, n) in enumerate(wanted) if n and self._is_ready(sequence)]
        seq_ids = [seq_id_of(wanted[i][0]) for i in active]
        n_steps, started = 0, self._clock()
        self._compute_waiting(seq_ids)
        rows = []
        for i, seq_id in zip(active, seq_ids, strict=True):
            held = self._held[seq_id]
            rows.append(MtpRows(seq_id, held.end, wanted[i][0].tokens[-1:], held.hidden))
        while rows:
            logits, hidden = self._context.predict(rows)
            n_steps += 1
            following: dict[int, MtpRows] = {}
            for i, row, token, state in zip(active, rows, logits.argmax(1), hidden, strict=True):
                guesses[i].append(int(token))
                if len(guesses[i]) < wanted[i][1]:
                    next_row = MtpRows(row.seq_id, row.p0 + 1, guesses[i][-1:], state[np.newaxis])
                    following[i] = next_row
            active, rows = list(following), list(following.values())
        for seq_id in seq_ids:
            self._context.seq_rm(seq_id, self._held[seq_id].end)
        if n_steps:
            self._learn_step((self._clock() - started) / n_steps)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return True if all tokens of a sequence but the last are known, with their hidden states."""
        held = self._held.get(seq_id_of(sequence))
        return held is not None and held.n_computed == len(sequence.tokens) - 1
