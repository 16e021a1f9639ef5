"""SavedStates: all that has left the KV cells and may come back.  Inference thread only.

Two kinds of states are kept in host memory: those of sequences that were preempted or suspended, and
those of prefixes (`PrefixTiers`, which also has their files).  One budget of bytes holds for both.
Sequences come first: prefixes are evicted to make room for them.  The times of copying and restoring
are measured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.engine.core.checkpoints import MIN_GAIN
from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.prefix_tiers import BLOCK, PrefixTiers, SavedPrefix, Tokens
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.lora import LoraUse
from cllm.engine.media_rows import Spans
from cllm.engine.request import SequenceState

logger: logging.Logger = logging.getLogger("cllm.engine")

# Shorter prefixes are not saved: computing them again is faster than finding them.
MIN_SAVED = 2 * BLOCK


class SavedStates:
    """States outside the cells, and the measured times of copies.

    Parameters
    ----------
    n_bytes_max : int
        Bytes of host memory for all states.
    tiers : PrefixTiers, optional
        Saved prefixes; None: no prefix is saved.
    recompute_s : callable
        Seconds that computing so many first tokens takes; 0 while that is unknown.
    may_pause_s : callable
        Seconds for which copying a prefix may delay all streams.  A prefix that takes longer is not saved.
    """

    def __init__(
        self,
        memory: CacheMemory,
        recorder: Recorder,
        *,
        n_bytes_max: int,
        clock: Callable[[], float],
        tiers: PrefixTiers | None,
        recompute_s: Callable[[int], float],
        may_pause_s: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._recorder = recorder
        self._n_bytes_max = n_bytes_max
        self._clock = clock
        self.tiers = tiers
        self._recompute_s = recompute_s
        self._may_pause_s = may_pause_s
        self._n_bytes = 0  # of states of sequences
        self._bytes_per_token = 0.0
        self._s_per_token = 0.0  # unknown: the first copy is the measurement
        # The same of restoring, and the largest number of tokens measured: few say little about many.
        self._restored_s_per_token, self._n_restored = 0.0, 0

    @property
    def n_bytes(self) -> int:
        """Bytes of host memory in use."""
        return self._n_bytes + (0 if self.tiers is None else self.tiers.n_bytes)

    # --- States of sequences -----------------------------------------------------------------
    def is_worth(self, n_tokens: int, recompute_s: float) -> bool:
        """Return True if the budget has room for so many tokens, and saving is cheaper than computing.

        Saving counts as a copy and its restoring, each of the time measured for a copy.
        """
        n_left = self._n_bytes_max - self._n_bytes
        has_room = n_tokens > 0 and n_left > 0 and n_tokens * self._bytes_per_token <= n_left
        return has_room and 2 * self._s_per_token * n_tokens < recompute_s

    def save(self, sequence: Sequence, slot: Slot) -> None:
        """Copy the state of a sequence, if the budget has room for it."""
        state = self.copy_of(slot, f"request {sequence.request_id}")
        if state is None or len(state.data) > self._n_bytes_max - self._n_bytes:
            return
        self.adopt(sequence, state)
        self._recorder.n_swaps += 1
        logger.debug("request %s: swapped out, %d bytes", sequence.request_id, len(state.data))

    def adopt(self, sequence: Sequence, state: SequenceState) -> None:
        """Keep the state of a sequence, from which it starts when it runs."""
        placement = sequence.placement
        placement.swapped, placement.n_restorable = state, state.n_tokens
        self._hold(len(state.data))

    def restore(self, sequence: Sequence, slot: Slot) -> bool:
        """Put a saved state into an empty slot; return False if that fails."""
        swapped, started = sequence.placement.swapped, self._clock()
        assert swapped is not None
        prefix, n_tokens = sequence.placement.restores, swapped.n_tokens
        spans = sequence.spans if prefix is None else Spans.of(prefix.tokens)
        n_positions = (spans.last_position(n_tokens) or 0) + 1
        self.forget(sequence)
        try:
            self._memory.state_seq_set_data(swapped.data, slot.seq_id, n_positions=n_positions)
        except Exception as error:
            logger.warning("request %s is computed again: %s", sequence.request_id, error)
            return False
        self._learn_restoring(swapped.n_tokens, self._clock() - started)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Drop the state that a sequence would start from."""
        placement = sequence.placement
        if placement.swapped is not None and placement.restores is None:
            self._hold(-len(placement.swapped.data))
        placement.swapped = placement.restores = None
        self.stop_awaiting(sequence)

    def _hold(self, n_bytes: int) -> None:
        """Count the bytes of a sequence's state; saved prefixes get the rest of the budget."""
        self._n_bytes += n_bytes
        if self.tiers is not None:
            self.tiers.limit(max(0, self._n_bytes_max - self._n_bytes))

    # --- Prefixes ----------------------------------------------------------------------------
    def find(
        self, sequence: Sequence, n_shared: int, n_most: int
    ) -> tuple[SavedPrefix | None, int]:
        """Return a prefix that is worth restoring, and how many tokens the sequence has in common with it.

        None and 0 without one.

        Parameters
        ----------
        n_shared : int
            Number of tokens that the sequence can share in cells.
        n_most : int
            Number of tokens for which there are cells.
        """
        if self.tiers is None:
            return None, 0
        wanted = sequence.token_array()[: sequence.n_settled]
        prefix, n_tokens = self.tiers.match(wanted, sequence.request.lora)
        n_tokens = sequence.spans.floor(n_tokens)
        # All of a prefix is put back, then cut.
        if prefix is None or n_tokens < n_shared + MIN_GAIN or len(prefix.tokens) > n_most:
            return None, 0
        computed_s = self._recompute_s(n_tokens) - self._recompute_s(n_shared)
        # A restoring of unknown time is tried; a file is read while the sequence waits.
        if 0 < computed_s < self.restore_s(len(prefix.tokens)):
            return None, 0
        return prefix, n_tokens

    def adopt_prefix(self, sequence: Sequence, prefix: SavedPrefix, n_tokens: int) -> None:
        """Make a sequence start from the first tokens of a prefix in host memory."""
        assert self.tiers is not None
        self.tiers.touch(prefix)
        placement = sequence.placement
        placement.swapped, placement.n_restorable = prefix.state, n_tokens
        placement.restores = prefix

    def takes(self, n_tokens: int) -> bool:
        """Return True if a prefix of so many tokens would be saved now."""
        if self.tiers is None or n_tokens < MIN_SAVED:
            return False
        return self.copy_s(n_tokens) <= self._may_pause_s()

    def keeps(self, n_tokens: int) -> bool:
        """Return True if so many tokens would stay in host memory and be restored from there.

        They may take the place of older ones.
        """
        n_bytes, n_left = n_tokens * self._bytes_per_token, self._n_bytes_max - self._n_bytes
        if not self.takes(n_tokens) or n_left <= 0 or n_left < n_bytes:
            return False
        computed_s = self._recompute_s(n_tokens)
        return not 0 < computed_s < self.copy_s(n_tokens) + self.restore_s(n_tokens)

    def add(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> SavedPrefix | None:
        """Save the prefix that a slot holds; return None if that is not worth it."""
        tiers = self.tiers
        if tiers is None or not self.takes(len(tokens)):
            return None
        if (covering := tiers.covering(tokens, lora)) is not None:
            tiers.touch(covering)
            return None
        state = self.copy_of(slot, f"prefix of {len(tokens)} tokens")
        return None if state is None else tiers.add(tokens, lora, state)

    def load(self, sequence: Sequence, prefix: SavedPrefix) -> None:
        """Start reading a prefix from its file; the sequence waits for it."""
        assert self.tiers is not None
        self.stop_awaiting(sequence)
        sequence.placement.awaits = prefix
        self.tiers.load(prefix)

    def stop_awaiting(self, sequence: Sequence) -> None:
        """Release the prefix that a sequence waits for, if there is one."""
        placement = sequence.placement
        if placement.awaits is not None:
            assert self.tiers is not None
            prefix, placement.awaits = placement.awaits, None
            self.tiers.stop_awaiting(prefix)

    def distrust(self, sequence: Sequence) -> None:
        """Forget the prefixes that a failed sequence has saved or started from, and their files."""
        for prefix in sequence.placement.saved:
            if self.tiers is not None:
                self.tiers.forget(prefix)
        sequence.placement.saved.clear()

    # --- Copies ------------------------------------------------------------------------------
    def copy_of(self, slot: Slot, what: str) -> SequenceState | None:
        """Return the state that a slot holds; None if llama.cpp does not give it.

        Parameters
        ----------
        what : str
            Owner of the state, for the log.
        """
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
        self._bytes_per_token = len(data) / slot.n_computed
        return SequenceState(data, slot.n_computed)

    def copy_s(self, n_tokens: int) -> float:
        """Return the seconds that copying so many tokens takes; 0 while that is unknown."""
        return self._s_per_token * n_tokens

    def restore_s(self, n_tokens: int) -> float:
        """Return the seconds that restoring so many tokens takes; 0 while that is unknown."""
        return self._restored_s_per_token * n_tokens if n_tokens <= 2 * self._n_restored else 0.0

    def _learn_restoring(self, n_tokens: int, seconds: float) -> None:
        measured, known = seconds / n_tokens, self._restored_s_per_token
        if n_tokens > 2 * self._n_restored:
            self._restored_s_per_token = measured
        elif 2 * n_tokens > self._n_restored:
            self._restored_s_per_token = (known + measured) / 2
        self._n_restored = max(n_tokens, self._n_restored)
