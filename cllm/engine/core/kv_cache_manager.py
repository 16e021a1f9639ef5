"""KVCacheManager: gives sequences their place in the KV cache, and takes it away.  Inference thread only.

It decides from what a sequence starts: cells that other sequences hold, a leader that computes them,
a saved state of its own, or a saved prefix.  `Cells` manages the cells, `SavedStates` the states
outside of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from cllm.engine.core import scheduler
from cllm.engine.core.cells import MIN_OWN_SHARE, Cells
from cllm.engine.core.checkpoints import (
    MIN_GAIN,
    N_OUTPUT_CHECKPOINTS,
    NEVER,
    OUTPUT_INTERVAL,
    next_checkpoint,
)
from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import KVCache, Slot
from cllm.engine.core.prefix_cache import Match
from cllm.engine.core.prefix_tiers import PrefixStore, PrefixTiers, SavedPrefix
from cllm.engine.core.saved_states import MIN_SAVED, SavedStates
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.request import SequenceState

logger: logging.Logger = logging.getLogger("cllm.engine")


class KVCacheManager:
    """Places of sequences in the KV cache of one context.

    Parameters
    ----------
    memory : CacheMemory
    kv_cache : KVCache
    n_seq_max : int
        Number of sequences that may run at once.
    prefix_cache_tokens : int
        Number of cells that finished prefixes may hold; 0 shares nothing, not even between running
        sequences.
    n_bytes_max : int
        Bytes of host memory for states that have left the cells.
    store : PrefixStore, optional
        Files of prefixes.
    recompute_s, may_pause_s : callable
        As for `SavedStates`.
    """

    def __init__(
        self,
        memory: CacheMemory,
        kv_cache: KVCache,
        recorder: Recorder,
        *,
        n_seq_max: int,
        prefix_cache_tokens: int,
        n_bytes_max: int,
        clock: Callable[[], float],
        store: PrefixStore | None = None,
        recompute_s: Callable[[int], float] = lambda n_tokens: 0.0,
        may_pause_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._kv_cache = kv_cache
        self._recorder = recorder
        self._n_seq_max = n_seq_max
        tiers = None
        if prefix_cache_tokens and (n_bytes_max or store):
            tiers = PrefixTiers(
                n_bytes_max=n_bytes_max, whole_only=not kv_cache.has_pos_min, store=store
            )
        self.saved: SavedStates = SavedStates(
            memory,
            recorder,
            n_bytes_max=n_bytes_max,
            clock=clock,
            tiers=tiers,
            recompute_s=recompute_s,
            may_pause_s=may_pause_s,
        )
        self.cells: Cells = Cells(
            memory,
            kv_cache,
            self.saved,
            recorder,
            n_seq_max=n_seq_max,
            prefix_cache_tokens=prefix_cache_tokens,
        )

    # --- Before a sequence runs --------------------------------------------------------------
    def shareable(
        self, sequence: Sequence, running: Iterable[Sequence]
    ) -> tuple[int, SavedPrefix | None]:
        """Return how many first tokens a sequence need not compute, and the saved prefix that has them.

        The prefix is None if cells, or a saved state of the sequence, are used instead.
        """
        if sequence.placement.swapped is not None:
            return sequence.placement.n_restorable, None
        match = self._match(sequence, running)
        n_tokens = max(match.n_tokens, match.n_expected)
        prefix, n_saved = self._saved_prefix(sequence, n_tokens)
        return max(n_tokens, n_saved), prefix

    def prefetch(self, sequence: Sequence, prefix: SavedPrefix | None) -> None:
        """Start reading the saved prefix of a sequence, if it is in a file; the sequence waits for it."""
        if prefix is not None and prefix.state is None:
            self.saved.load(sequence, prefix)

    def adopt(self, sequence: Sequence, state: SequenceState) -> None:
        """Keep the KV state that a new request brings, if it can be used, to start from it later."""
        n_most = sequence.n_settled
        if state.n_tokens <= n_most or (self.cells.can_truncate and n_most > 0):
            self.saved.adopt(sequence, state)

    def _match(self, sequence: Sequence, running: Iterable[Sequence]) -> Match:
        return Match() if sequence.placement.swapped else self.cells.match(sequence, running)

    def _saved_prefix(self, sequence: Sequence, n_shared: int) -> tuple[SavedPrefix | None, int]:
        """Return a saved prefix worth restoring, with more tokens than can be shared, and its usable length.

        None and 0 if there is none.
        """
        if not self.cells.shares:
            return None, 0
        kv_cache = self._kv_cache
        n_most = kv_cache.n_available if kv_cache.kv_unified else kv_cache.n_ctx_seq
        return self.saved.find(sequence, n_shared, min(n_most, kv_cache.n_ctx_seq))

    # --- In ----------------------------------------------------------------------------------
    @property
    def n_seats(self) -> int:
        """Number of seq_ids that requests have at most."""
        return self._n_seq_max

    def has_seat(self, running: list[Sequence]) -> bool:
        """Return True if fewer than `n_seq_max` sequences run."""
        return len(running) < self._n_seq_max

    def allocate(self, sequence: Sequence, running: list[Sequence], now: float) -> bool:
        """Start a waiting sequence with all tokens that it can share; return False without room."""
        if not self.has_seat(running):
            return False
        match = self.cells.match(sequence, running)
        n_parted = match.n_parted
        self._choose_state(sequence, match)
        placement = sequence.placement
        if placement.swapped is not None:
            match = Match()
        if not self._has_room(sequence, match, running):
            if placement.restores is not None:  # else its bytes would outlive a dropped prefix
                self.saved.forget(sequence)
            return False
        sequence.start(self.cells.open(match), now)
        if placement.swapped:
            self._restore(sequence)
            if placement.is_placed and not self.cells.can_truncate:
                self._part(sequence, n_parted)
        if not placement.is_placed:
            self._place(sequence, match)
        return True

    def could_allocate(
        self, sequence: Sequence, active: list[Sequence], paused: list[Sequence]
    ) -> bool:
        """Return True if a sequence could start once the sequences in `paused` were preempted.

        The sequences in `active` would go on running.
        """
        if not self.has_seat(active):
            return False
        slots = [s.placement.slot for s in paused]
        n_freed = self._kv_cache.n_freed_by([slot for slot in slots if slot is not None])
        return self._has_room(sequence, self._match(sequence, active), active, n_freed)

    def _has_room(
        self, sequence: Sequence, match: Match, running: list[Sequence], n_freed: int = 0
    ) -> bool:
        """Return True if there are cells for a sequence: always in the per-sequence layout."""
        return not self._kv_cache.kv_unified or scheduler.has_room(
            sequence,
            self._n_new_cells(sequence, match),
            self._kv_cache.n_available + n_freed,
            running,
        )

    def _n_new_cells(self, sequence: Sequence, match: Match) -> int:
        """Return how many cells a sequence needs that no live request holds yet."""
        n_tokens = len(sequence.tokens)
        if match.leader is not None:
            return n_tokens - match.n_expected
        if match.source is not None:
            return n_tokens - self._kv_cache.n_shared_live(match.source, match.n_tokens)
        return n_tokens

    def _choose_state(self, sequence: Sequence, match: Match) -> None:
        """Choose the saved state that a sequence starts from: its own, or a saved prefix if that is faster.

        Tokens that other sequences hold in cells are shared instead of restored.
        """
        placement = sequence.placement
        if placement.swapped is not None:
            n_most = min(placement.n_restorable, sequence.n_settled)
            if match.n_tokens >= n_most:
                self.saved.forget(sequence)
        if placement.swapped is None:
            n_shared = max(match.n_tokens, match.n_expected)
            prefix, n_tokens = self._saved_prefix(sequence, n_shared)
            if prefix is not None and prefix.state is not None:
                self.saved.adopt_prefix(sequence, prefix, n_tokens)
        self.saved.stop_awaiting(sequence)  # last: the prefix may then leave host memory

    def place_followers(self, running: list[Sequence], now: float) -> None:
        """Share the tokens that leaders have computed with their followers."""
        waiting = [s for s in running if not s.placement.is_placed]
        for sequence in sorted(waiting, key=lambda s: s.urgency(now)):
            leader, n_expected = sequence.placement.leader, sequence.placement.n_expected
            if leader is None or not leader.is_ready or leader.n_computed >= n_expected:
                self._place(sequence, self._match(sequence, running))

    def _place(self, sequence: Sequence, match: Match) -> None:
        """Place a sequence with a seq_id: it shares all it can, or waits for its leader."""
        if match.leader is not None:
            sequence.placement.follow(match.leader, match.n_expected)
            if not self.cells.can_truncate:
                self._part(match.leader, match.n_expected)
            return
        slot = sequence.placement.slot
        assert slot is not None
        self.cells.share(match, slot)
        self._recorder.n_cached_tokens += sequence.place(slot.n_computed)
        if slot.n_computed:
            logger.debug("request %s: shares %d tokens", sequence.request_id, slot.n_computed)
        if not self.cells.can_truncate and self.cells.shares:
            self._part(sequence, match.n_parted)

    def _restore(self, sequence: Sequence) -> None:
        """Put back the state of a sequence; if that fails it computes its tokens again."""
        placement = sequence.placement
        swapped, slot = placement.swapped, placement.slot
        assert swapped is not None
        assert slot is not None
        self.cells.evict_until(swapped.n_tokens)
        if self._kv_cache.kv_unified and self._kv_cache.n_free < swapped.n_tokens:
            self.saved.forget(sequence)
            return
        n_tokens, prefix = placement.n_restorable, placement.restores
        if self.saved.restore(sequence, slot):
            self._kv_cache.advance(slot, swapped.n_tokens)
            self.cells.truncate(slot, min(n_tokens, sequence.n_settled))
            n_cached = sequence.place(slot.n_computed)
            if prefix is not None:
                placement.saved.append(prefix)
                self._recorder.n_cached_tokens += n_cached
                self._recorder.n_restored_prefixes += 1
        else:
            self.cells.empty(slot)
            if prefix is not None and self.saved.tiers is not None:
                self.saved.tiers.forget(prefix)

    # --- Checkpoints of memory that forgets positions ----------------------------------------
    def _part(self, sequence: Sequence, n_tokens: int) -> None:
        """Plan a checkpoint where another sequence diverges from this one, and set the next checkpoint."""
        if n_tokens >= sequence.n_computed + MIN_GAIN:
            sequence.placement.branch_points.add(n_tokens)
        self._set_checkpoint(sequence)

    def _set_checkpoint(self, sequence: Sequence) -> None:
        n_least, n_output_from, request = 0, NEVER, sequence.request
        if not self._kv_cache.shares_cells:  # a checkpoint is a saved prefix, if those are kept
            n_least = NEVER if self.saved.tiers is None else MIN_SAVED
        elif request.generated_token_ids or request.params.banned_strings:  # it may be rewound
            n_kept = N_OUTPUT_CHECKPOINTS * OUTPUT_INTERVAL
            n_output_from = max(sequence.n_prompt, len(sequence.tokens) - n_kept)
        placement = sequence.placement
        # The question about media differs more often than what stands before it.
        ends = {span.end for span in sequence.spans if span.end < sequence.n_prompt}
        n_checkpoint = next_checkpoint(
            sequence.n_computed,
            sequence.n_prompt,
            placement.branch_points | ends,
            n_least=n_least,
            n_output_from=n_output_from,
        )
        placement.n_checkpoint = sequence.spans.ceil(n_checkpoint)

    def keep_checkpoints(self, chunks: Iterable[Chunk]) -> None:
        """Save the memory of each sequence that has reached its next checkpoint."""
        for sequence in (chunk.sequence for chunk in chunks):
            placement = sequence.placement
            slot = placement.slot
            # With drafts, a tick may have computed tokens beyond the checkpoint.
            if slot is None or slot.n_computed < placement.n_checkpoint:
                continue
            if self.cells.fault is None:
                tokens = sequence.token_array()[: slot.n_computed].copy()
                # In the per-sequence layout a copy in cells would need a stream of its own.
                if self._kv_cache.shares_cells:
                    in_output = slot.n_computed > sequence.n_prompt
                    if in_output and len(placement.output_checkpoints) == N_OUTPUT_CHECKPOINTS:
                        self.cells.drop(placement.output_checkpoints.pop(0))
                    kept = self.cells.keep_copy(slot, tokens, sequence.request.lora)
                    is_new = kept is not None
                    if kept is not None and in_output:
                        placement.output_checkpoints.append(kept)
                else:
                    prefix = self.cells.save(slot, tokens, sequence.request.lora)
                    if is_new := prefix is not None:
                        placement.saved.append(prefix)
                self._recorder.n_checkpoints += is_new
            self._set_checkpoint(sequence)

    # --- Out ---------------------------------------------------------------------------------
    def leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Remove a sequence from the KV cache, and check that llama.cpp has removed it.

        With `keep`, the prefix cache keeps the tokens that the sequence had computed.
        """
        slot = sequence.placement.slot
        if slot is None:
            return
        sequence.placement.leave()
        for checkpoint in sequence.placement.output_checkpoints:
            self.cells.age(checkpoint)
        n_tokens = slot.n_computed
        if keep and self.cells.keep(slot, sequence.token_array(), sequence.request.lora):
            logger.debug(
                "request %s: seq_id %d handed to the prefix cache, %d positions",
                sequence.request_id, slot.seq_id, slot.n_computed,
            )  # fmt: skip
            return
        n_cells = self.cells.release(slot)
        logger.debug(
            "request %s: cleared KV cache, seq_id %d, %d positions, %d cells freed, %d shared",
            sequence.request_id, slot.seq_id, n_tokens, n_cells, n_tokens - n_cells,
        )  # fmt: skip

    def preempt(self, sequence: Sequence, recompute_s: float, *, keep: bool = False) -> None:
        """Take the seq_id and the cells of a sequence that goes back to the queue.

        The cells are saved in host memory if that is measured to be cheaper than computing them
        again.  Few of them may be shared, because a restored copy shares none.  Otherwise, with
        `keep`, the prefix cache keeps them as long as there is room.
        """
        slot = sequence.placement.slot
        assert slot is not None
        self._ends_between_chunks(slot)
        is_own = self._kv_cache.n_own(slot) >= MIN_OWN_SHARE * slot.n_computed
        can_return = self.cells.can_truncate and is_own
        if can_return and self.saved.is_worth(slot.n_computed, recompute_s):
            self.saved.save(sequence, slot)
        self.leave(sequence, keep=keep and sequence.placement.swapped is None)

    def _ends_between_chunks(self, slot: Slot) -> bool:
        """Remove part of a media chunk at the end of a slot if possible; return False if it is left.

        Also False if the slot is empty: there is nothing to save.
        """
        n_whole = slot.spans.floor(slot.n_computed)
        if n_whole < slot.n_computed and self.cells.can_truncate:
            self.cells.truncate(slot, n_whole)
        return 0 < slot.n_computed == n_whole

    def save(self, sequence: Sequence) -> SequenceState | None:
        """Return the state of a sequence that will continue elsewhere; None if it has none."""
        placement = sequence.placement
        slot = placement.slot
        if placement.swapped is not None or slot is None:
            return placement.swapped
        if not self._ends_between_chunks(slot) or self.cells.fault is not None:
            return None
        return self.saved.copy_of(slot, f"request {sequence.request_id}")

    # --- After a failure ---------------------------------------------------------------------
    def read_back(self, chunks: Iterable[Chunk]) -> None:
        """Adopt llama.cpp's positions of the sequences of a failed decode."""
        for chunk in chunks:
            sequence, slot = chunk.sequence, chunk.sequence.placement.slot
            assert slot is not None
            n_before = min(slot.n_computed, sequence.n_prompt)
            self.cells.read_back(slot)
            n_kept = min(slot.n_computed, sequence.n_prompt)
            self._recorder.n_prefill_tokens += max(0, n_kept - n_before)
            if not self.cells.can_truncate:
                # The slot may hold rows of the failed batch, which cannot be removed alone.
                self.cells.empty(slot)
                self._set_checkpoint(sequence)
            else:
                # Some rows may be stored though their logits are lost: compute them again.
                self.cells.truncate(slot, sequence.n_settled)
