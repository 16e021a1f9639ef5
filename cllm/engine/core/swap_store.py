"""SwapStore: the cells of preempted sequences, in host memory.  Inference thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.request import SequenceState

logger = logging.getLogger("cllm.engine")


class SwapStore:
    """Saves and restores; remembers what that costs.

    Parameters
    ----------
    n_tokens_max : int
        Tokens whose cells may be kept at once.
    """

    def __init__(
        self,
        memory: CacheMemory,
        recorder: Recorder,
        *,
        n_tokens_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._recorder = recorder
        self._n_tokens_max = n_tokens_max
        self._clock = clock
        self._n_tokens = 0
        self._s_per_token = 0.0  # unknown: the first one is the measurement
        # The same of putting back; of how many tokens, since few say little about many.
        self._restored_s_per_token, self._n_restored = 0.0, 0

    def is_worth(self, n_tokens: int, recompute_s: float) -> bool:
        """Whether there is room for so many tokens, and saving them is the cheaper way."""
        has_room = 0 < n_tokens <= self._n_tokens_max - self._n_tokens
        return has_room and 2 * self._s_per_token * n_tokens < recompute_s

    def save(self, sequence: Sequence, slot: Slot) -> None:
        """Copy what a sequence holds; if that fails it computes it again."""
        if (state := self.copy_of(slot, f"request {sequence.request_id}")) is None:
            return
        self.adopt(sequence, state)
        self._recorder.n_swaps += 1
        logger.debug("request %s: swapped out, %d bytes", sequence.request_id, len(state.data))

    def copy_of(self, slot: Slot, what: str) -> SequenceState | None:
        """What a slot holds; None if it cannot be had."""
        started = self._clock()
        try:
            data = self._memory.state_seq_get_data(slot.seq_id)
        except Exception as error:
            logger.warning("%s: its cells are not saved: %s", what, error)
            return None
        if not data:
            return None
        measured = (self._clock() - started) / slot.n_computed
        known = self._s_per_token
        self._s_per_token = (known + measured) / 2 if known else measured
        return SequenceState(data, slot.n_computed)

    def copy_s(self, n_tokens: int) -> float:
        """What copying so many tokens takes; 0 while that is unknown."""
        return self._s_per_token * n_tokens

    def adopt(
        self, sequence: Sequence, state: SequenceState, n_restorable: int | None = None
    ) -> None:
        """A sequence goes on from this when it runs, or from so many tokens of it."""
        sequence.swapped = state
        sequence.n_restorable = state.n_tokens if n_restorable is None else n_restorable
        self._n_tokens += state.n_tokens

    def restore(self, sequence: Sequence, slot: Slot) -> bool:
        """Put back what was saved into an empty slot; False if it cannot be."""
        swapped, started = sequence.swapped, self._clock()
        assert swapped is not None
        self.forget(sequence)
        try:
            self._memory.state_seq_set_data(swapped.data, slot.seq_id, n_positions=swapped.n_tokens)
        except Exception as error:
            logger.warning("request %s is computed again: %s", sequence.request_id, error)
            return False
        self._learn_restoring(swapped.n_tokens, self._clock() - started)
        return True

    def _learn_restoring(self, n_tokens: int, seconds: float) -> None:
        measured, known = seconds / n_tokens, self._restored_s_per_token
        if n_tokens > 2 * self._n_restored:
            self._restored_s_per_token = measured
        elif 2 * n_tokens > self._n_restored:
            self._restored_s_per_token = (known + measured) / 2
        self._n_restored = max(n_tokens, self._n_restored)

    def restore_s(self, n_tokens: int) -> float:
        """What putting back so many tokens takes; 0 while that is unknown."""
        return self._restored_s_per_token * n_tokens if n_tokens <= 2 * self._n_restored else 0.0

    def forget(self, sequence: Sequence) -> None:
        """Drop what was saved of a sequence."""
        if sequence.swapped is not None:
            self._n_tokens -= sequence.swapped.n_tokens
            sequence.swapped = sequence.restores = None
