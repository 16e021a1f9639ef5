"""MtpDrafter: drafts of the model's own layer for multi-token prediction (MTP).

The layer computes a row from a token and from the hidden state of the position before it, which the model
computed.  It has KV cells of its own.  They follow the model's cells: a shared prefix is shared here
too, and removed rows are removed here.  Where the model has rows without hidden states (restored from
host memory, or of an image), the layer begins again behind them, and sees only what follows.

Rows of prompts are computed in the tick that computes the prompt, those of single tokens together with the next draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Model, MtpContext, MtpRows, Run
from cllm.engine.config import EngineConfig
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import N_DRAFT_ROWS, Drafts
from cllm.engine.llama.gguf_header import read_shapes
from cllm.engine.llama.step_drafter import StepDrafter
from cllm.errors import ModelLoadError

# Rows of a sequence that wait for the next draft, at the most.
N_WAITING = 16


def check_mtp_file(path: Path, parts: Iterable[Path]) -> None:
    """Check that a model's files have the weights of an MTP layer: llama.cpp ends the process without them.

    Raises
    ------
    ModelLoadError
        They have none, or a file cannot be read.
    """
    try:
        names = [name for part in parts for name in read_shapes(part)]
    except OSError as error:
        raise ModelLoadError(str(path), error.strerror or str(error)) from error
    if not any(name.endswith(".nextn.eh_proj.weight") for name in names):
        hint = "speculation needs another value than 'mtp'"
        raise ModelLoadError(str(path), f"it has no layer for multi-token prediction: {hint}")


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
    )


class MtpMemory(Protocol):
    """Calls of `MtpContext` that `MtpDrafter` needs."""

    n_batch: int
    n_embd: int

    def decode(
        self, runs: SequenceOf[MtpRows]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]: ...
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

    # --- The decoder's cells: see `Follower` ---------------------------------------------------
    def decoded(
        self, runs: SequenceOf[Run], tokens: NDArray[np.int32], hidden: NDArray[np.float32]
    ) -> None:
        """See `Follower`."""
        if self.is_broken:
            return
        with self._ending_on_error():
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
            if any(len(held.tokens) > N_WAITING for held in self._held.values()):
                self._compute_waiting()

    def seq_rm(self, seq_id: int, p0: int | None, p1: int | None) -> None:
        """See `Follower`."""
        held = self._held.get(seq_id)
        if held is None or self.is_broken:
            return
        with self._ending_on_error():
            if not p0 or p1 is not None:
                self._forget(seq_id)
            elif p0 < held.n_computed:
                n_kept = max(0, p0 - held.end)
                held.tokens = held.tokens[:n_kept]
                held.hidden = held.hidden[: n_kept + 1]
                if p0 < held.end:
                    self._context.seq_rm(seq_id, p0)
                    held.end, held.hidden = p0, self._unknown

    def seq_cp(self, seq_id_src: int, seq_id_dst: int, p1: int | None) -> None:
        """See `Follower`."""
        source = self._held.get(seq_id_src)
        if source is None or self.is_broken:
            return
        with self._ending_on_error():
            self._forget(seq_id_dst)
            n = source.n_computed if p1 is None else min(p1, source.n_computed)
            end = min(source.end, n)
            if end:
                self._context.seq_cp(seq_id_src, seq_id_dst, None, end)
            is_known = end == source.end
            hidden = source.hidden[: n - end + 1] if is_known else self._unknown
            self._held[seq_id_dst] = _Held(end, source.tokens[: n - end], hidden)

    def clear(self) -> None:
        """See `Follower`."""
        with self._ending_on_error():
            self._held.clear()
            self._context.memory_clear()

    def _forget(self, seq_id: int) -> None:
        if self._held.pop(seq_id, None) is not None:
            self._context.seq_rm(seq_id)

    def _compute_waiting(self) -> None:
        """Compute all rows that wait, in as few batches as they need."""
        n_batch, runs, n_rows = self._context.n_batch, list[MtpRows](), 0
        for seq_id, held in self._held.items():
            while held.tokens:
                if n_rows == n_batch or (runs and runs[-1].seq_id == seq_id):
                    self._context.decode(runs)
                    runs, n_rows = [], 0
                n = min(len(held.tokens), n_batch - n_rows)
                runs.append(MtpRows(seq_id, held.end, held.tokens[:n], held.hidden[:n], False))
                held.end, held.tokens, held.hidden = held.end + n, held.tokens[n:], held.hidden[n:]
                n_rows += n
        if runs:
            self._context.decode(runs)

    # --- Drafts --------------------------------------------------------------------------------
    def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        guesses: list[list[int]] = [[] for _ in wanted]
        active = [i for i, (sequence, n) in enumerate(wanted) if n and self._is_ready(sequence)]
        firsts = [wanted[i][0] for i in active]
        if sum(1 + len(self._of(sequence).tokens) for sequence in firsts) > self._context.n_batch:
            self._compute_waiting()
        runs = [self._first_rows(sequence) for sequence in firsts]
        n_steps, started = 0, self._clock()
        while runs:
            logits, hidden = self._context.decode(runs)
            n_steps += 1
            following: dict[int, MtpRows] = {}
            for run, i, row, state in zip(runs, active, logits, hidden, strict=True):
                guesses[i].append(int(row.argmax()))
                if len(guesses[i]) < wanted[i][1]:
                    p0 = run.p0 + len(run.tokens)
                    following[i] = MtpRows(run.seq_id, p0, guesses[i][-1:], state[np.newaxis], True)
            active, runs = list(following), list(following.values())
        for sequence in firsts:
            self._end_drafts(sequence)
        if n_steps:
            self._learn_step((self._clock() - started) / n_steps)
        return [tuple(guess) for guess in guesses]

    def _of(self, sequence: Sequence) -> _Held:
        return self._held[seq_id_of(sequence)]

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return True if the model has computed all tokens of a sequence but the last, and the layer has seen the last of them."""
        held = self._held.get(seq_id_of(sequence))
        return held is not None and held.n_computed == len(sequence.tokens) - 1

    def _first_rows(self, sequence: Sequence) -> MtpRows:
        """Return the rows that wait, and that of the last token."""
        held = self._of(sequence)
        tokens = [*held.tokens, sequence.tokens[-1]]
        return MtpRows(seq_id_of(sequence), held.end, tokens, held.hidden, True)

    def _end_drafts(self, sequence: Sequence) -> None:
        """Keep the rows that have waited, and remove those of the last token and of the drafts."""
        held = self._of(sequence)
        held.end, held.tokens, held.hidden = held.n_computed, [], held.hidden[-1:]
        self._context.seq_rm(seq_id_of(sequence), held.end)
