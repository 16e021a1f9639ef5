"""DraftModel: drafts of a smaller model with the same vocabulary, in a context of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Protocol

from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EngineConfig
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Drafts
from cllm.engine.llama.step_drafter import StepDrafter
from cllm.errors import ModelLoadError

# Tokens that it reads in a tick to catch up with all requests, and tokens left for the first step of each.
N_CATCH_UP, N_LAST = 128, 4


def make_draft_context(model: Model, config: EngineConfig, n_cells: int, n_seq_ids: int) -> Context:
    """Return the context of a model that drafts for an engine with this many cells and seq_ids."""
    n_threads, n_threads_batch = config.compute_threads
    return Context(
        model,
        n_ctx=max(n_cells, 2 * n_seq_ids) if n_cells else 0,
        n_batch=max(config.n_batch, 2 * n_seq_ids),
        n_ubatch=config.n_ubatch,
        n_seq_max=n_seq_ids,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        swa_full=True,
        offload_kqv=config.kv_offload,
        op_offload=config.op_offload,
        poll=config.poll,
    )


class DraftModel(StepDrafter):
    """A `Drafter`: the most likely tokens of a smaller model.

    Parameters
    ----------
    model : Model
    vocabulary : Tokens
        Vocabulary of the model that it drafts for.
    make_context : callable
        Makes its context, in the unified layout, with a seq_id for each seq_id of the engine.
    clock : callable
        Returns the time in seconds.

    Raises
    ------
    ModelLoadError
        The draft model has another vocabulary, or is recurrent and so cannot remove wrong drafts.
    """

    def __init__(
        self,
        model: Model,
        vocabulary: Tokens,
        make_context: Callable[[], Context],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_vocabulary(model.path, model.vocab, vocabulary)
        if model.has_state:
            raise ModelLoadError(model.path, "a recurrent model cannot draft")
        self._context: Context = make_context()
        super().__init__("the draft model", self._context, clock)
        self._batch = Batch(self._context.n_batch)
        self._held: dict[int, list[int]] = {}  # by seq_id, the tokens in its cache

    def _fitting(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Return the wanted drafts, 0 for a sequence without room; drop the others if cells are short."""
        n_left, fitting = self._context.n_ctx, []
        for sequence, n in wanted:
            n_cells = len(sequence.tokens) + n
            fits = n_cells <= n_left
            n_left -= n_cells if fits else 0
            fitting.append((sequence, n if fits else 0))
        served = {seq_id_of(sequence) for sequence, n in fitting if n}
        n_others = sum(len(held) for seq_id, held in self._held.items() if seq_id not in served)
        if n_others > n_left:
            for seq_id in self._held.keys() - served:
                self._context.seq_rm(seq_id)
                del self._held[seq_id]
        return fitting

    def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        wanted = self._fitting(wanted)
        n_left = N_CATCH_UP
        guesses: list[list[int]] = [[] for _ in wanted]
        pending: list[list[int]] = []
        for sequence, n in wanted:
            last, n_read = self._catch_up(sequence, n_left) if n else ([], 0)
            pending.append(last)
            n_left -= n_read
        n_steps, started = 0, self._clock()
        while active := [
            i for i, (_, n) in enumerate(wanted) if pending[i] and len(guesses[i]) < n
        ]:
            self._batch.clear()
            for i in active:
                seq_id = seq_id_of(wanted[i][0])
                held = self._held[seq_id]
                self._batch.add(seq_id, pending[i], len(held), n_outputs=1)
                held += pending[i]
            logits = self._context.decode(self._batch).rows
            for i, token in zip(active, logits.argmax(axis=1).tolist(), strict=True):
                guesses[i].append(token)
                pending[i] = [token]
            n_steps += 1
        if n_steps:
            self._learn_step((self._clock() - started) / n_steps)
        return [tuple(guess) for guess in guesses]

    def _catch_up(self, sequence: Sequence, n_left: int) -> tuple[list[int], int]:
        """Read up to `n_left` tokens of a sequence that the draft model has not computed yet.

        Return the tokens that are left for the first step, and the number of tokens read.  The tokens are
        empty if too many are left: they are read in later ticks.
        """
        seq_id, tokens = seq_id_of(sequence), sequence.tokens
        held = self._held.setdefault(seq_id, [])
        n_same = _n_same(held, tokens[:-1])
        if n_same < len(held):
            self._context.seq_rm(seq_id, n_same or None)
            del held[n_same:]
        n_missing = len(tokens) - n_same
        # The first step has at least one row of each sequence; a few more rows cost little.
        n_last = max(1, min(N_LAST, self._context.n_batch // self._context.n_seq_max))
        n_read = min(n_missing - n_last, n_left, self._context.n_batch)
        if n_read > 0:
            piece = tokens[n_same : n_same + n_read]
            self._batch.clear()
            self._batch.add(seq_id, piece, n_same, n_outputs=0)
            self._context.decode(self._batch)
            held += piece
        n_read = max(0, n_read)
        is_ready = n_missing - n_read <= n_last
        return (tokens[n_same + n_read :] if is_ready else []), n_read


def _n_same(held: list[int], tokens: list[int]) -> int:
    """Return the number of equal tokens at the beginning of both."""
    low, high = 0, min(len(held), len(tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if held[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Tokens(Protocol):
    """Tokens by which two vocabularies are compared."""

    n_tokens: int

    def pieces(self, *, special: bool = False) -> list[bytes]: ...


def check_vocabulary(path: str | Path, drafts: Tokens, vocabulary: Tokens) -> None:
    """Check that a draft model has the same tokens as the model.

    Raises
    ------
    ModelLoadError
        The number of tokens differs, or a token does; names the numbers or the first such token.
    """
    if drafts.n_tokens != vocabulary.n_tokens:
        n_other, n_own = drafts.n_tokens, vocabulary.n_tokens
        raise ModelLoadError(str(path), f"cannot draft: it has {n_other} tokens, not {n_own}")
    both = zip(drafts.pieces(special=True), vocabulary.pieces(special=True), strict=True)
    for token, (other, own) in enumerate(both):
        if other != own:
            raise ModelLoadError(
                str(path), f"cannot draft: its token {token} is {other!r}, not {own!r}"
            )
