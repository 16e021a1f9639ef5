"""DraftModel: drafts of a smaller model with the same vocabulary, in a context of its own.

It is only asked for guesses: whatever goes wrong here costs speed, and never an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from cllm.bindings import Batch, Context, Model
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.speculation import Drafts
from cllm.errors import CllmError, ModelLoadError, NoKVSlotError

logger = logging.getLogger("cllm.engine")

N_DRAFTS_MAX = 8
# How often it is right: before that is known of a sequence, and how fast it is learned.
AT_FIRST, WEIGHT = 0.6, 0.1
# A sequence that it was wrong about gets another try in time.
RECOVERY = 0.003
STEP_WEIGHT = 0.1
STEP_AT_FIRST_S = 1e-6  # nobody has measured it yet: tried once


class DraftModel:
    """A `Drafter`: the most likely tokens of a smaller model.

    Parameters
    ----------
    model : Model
    vocabulary : Tokens
        Of the model that it drafts for.
    make_context : callable
        Its context: the unified layout, a seq_id for each of the engine's.
    clock : callable
        Seconds.

    Raises
    ------
    ModelLoadError
        It has another vocabulary, or a memory that cannot give up a wrong guess.
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
        self._context = make_context()
        self._batch = Batch(self._context.n_batch)
        self._clock = clock
        self._held: dict[int, list[int]] = {}  # by seq_id, the tokens in its cache
        self._shares: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._share = AT_FIRST
        self._is_broken = False
        self.step_s = STEP_AT_FIRST_S

    def close(self) -> None:
        """Free the context."""
        self._context.close()

    def expect(self, sequence: Sequence, n_max: int) -> list[float]:
        """See `Drafter`."""
        if self._is_broken:
            return []
        share = self._shares.get(sequence, self._share)
        self._shares[sequence] = share + RECOVERY * (AT_FIRST - share)
        return [share ** (n + 1) for n in range(min(n_max, N_DRAFTS_MAX))]

    def observe(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> None:
        """See `Drafter`."""
        share = self._shares.get(sequence, self._share)
        for is_right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
            share += WEIGHT * (is_right - share)
        self._shares[sequence] = share
        self._share += WEIGHT * (share - self._share)

    def draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        """See `Drafter`."""
        if not wanted:
            return []
        try:
            return self._draft(wanted)
        except NoKVSlotError:
            self._forget_all()  # others' tokens are in the way
        except CllmError as error:
            logger.warning("the model that drafts is not used any more: %s", error)
            self._is_broken = True
        return [()] * len(wanted)

    def _draft(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Drafts]:
        started = self._clock()
        guesses: list[list[int]] = [[] for _ in wanted]
        pending = [self._catch_up(sequence) for sequence, _ in wanted]
        n_steps = 0
        while active := [
            i for i, (_, n) in enumerate(wanted) if pending[i] and len(guesses[i]) < n
        ]:
            self._batch.clear()
            for i in active:
                seq_id = _seq_id(wanted[i][0])
                held = self._held[seq_id]
                self._batch.add(seq_id, pending[i], len(held), n_outputs=1)
                held += pending[i]
            logits = self._context.decode(self._batch).rows
            for i, token in zip(active, logits.argmax(axis=1).tolist(), strict=True):
                guesses[i].append(token)
                pending[i] = [token]
            n_steps += 1
        if n_steps:
            measured = (self._clock() - started) / n_steps
            is_first = self.step_s == STEP_AT_FIRST_S
            self.step_s += (1.0 if is_first else STEP_WEIGHT) * (measured - self.step_s)
        return [tuple(guess) for guess in guesses]

    def _catch_up(self, sequence: Sequence) -> list[int]:
        """Compute what the sequence has more of, but its last tokens, which are returned.

        Nothing if there is too much to be computed in one tick: the rest is another tick's.
        """
        seq_id, tokens = _seq_id(sequence), sequence.tokens
        held = self._held.setdefault(seq_id, [])
        n_same = _n_same(held, tokens[:-1])
        if n_same < len(held):
            self._context.seq_rm(seq_id, n_same or None)
            del held[n_same:]
        n_room = self._context.n_batch - self._context.n_seq_max
        missing = tokens[n_same:]
        if len(missing) <= n_room // self._context.n_seq_max:
            return missing
        piece = missing[: min(n_room, len(missing) - 1)]
        self._batch.clear()
        self._batch.add(seq_id, piece, n_same, n_outputs=0)
        self._context.decode(self._batch)
        held += piece
        return []

    def _forget_all(self) -> None:
        for seq_id in self._held:
            self._context.seq_rm(seq_id)
        self._held.clear()


def _seq_id(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot.seq_id


def _n_same(held: list[int], tokens: list[int]) -> int:
    """With how many same tokens both begin."""
    low, high = 0, min(len(held), len(tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if held[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Tokens(Protocol):
    """What two vocabularies are compared by."""

    n_tokens: int

    def spelling(self, token: int) -> bytes: ...


def check_vocabulary(path: str | Path, drafts: Tokens, vocabulary: Tokens) -> None:
    """Demand that the tokens of a model that drafts are those of the one it drafts for.

    Raises
    ------
    ModelLoadError
        Names the first that is not.
    """
    if drafts.n_tokens != vocabulary.n_tokens:
        n_other, n_own = drafts.n_tokens, vocabulary.n_tokens
        raise ModelLoadError(str(path), f"cannot draft: it has {n_other} tokens, not {n_own}")
    for token in range(vocabulary.n_tokens):
        other, own = drafts.spelling(token), vocabulary.spelling(token)
        if other != own:
            raise ModelLoadError(
                str(path), f"cannot draft: its token {token} is {other!r}, not {own!r}"
            )
