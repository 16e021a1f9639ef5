"""KVCacheManager: what sequences hold in the KV cache, in the bookkeeping and in llama.cpp at once.

Every call that gives cells to a sequence or takes them away is here: sharing prefixes, keeping what
finished sequences computed, evicting it, swapping out and back, and the completion callback
(`leave`), which removes a sequence whatever the bookkeeping says, and looks.

When llama.cpp does not do what it was told, `fault` says so: nothing may be decoded before the
context has been recreated (`reset`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from cllm.engine.core import scheduler
from cllm.engine.core.checkpoints import MIN_GAIN, NEVER, next_checkpoint
from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import KVCache, Slot
from cllm.engine.core.prefix_cache import CachedPrefix, Match, PrefixCache
from cllm.engine.core.prefix_tiers import BLOCK, PrefixTiers, SavedPrefix, Tokens
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.core.swap_store import SwapStore
from cllm.engine.lora import LoraUse
from cllm.engine.request import SequenceState
from cllm.errors import LlamaCallError

logger = logging.getLogger("cllm.engine")

# Copying a sequence between streams moves the whole stream: not worth it for less of it than this.
# A cell's copy takes 1/370 of a token's computation in a model of two layers, 1/1500 in one of 30.
MIN_STREAM_SHARE = 1 / 512
# Going on in a stream costs what was cached behind the common part: not more than was common.
MIN_TAKEN_SHARE = 1 / 2
# Shorter prefixes are computed again sooner than they are found.
MIN_SAVED = 2 * BLOCK
# The copy of a sequence that shares cells needs them once more: not worth it for more than a few.
MIN_OWN_SHARE = 0.9


class KVCacheManager:
    """The KV cache of one context.

    Parameters
    ----------
    memory : CacheMemory
    kv_cache : KVCache
    n_seq_max : int
        Sequences that may run at once.
    prefix_cache_tokens : int
        Cells that finished prefixes may hold; 0 shares nothing, not even between running sequences.
    swap_tokens : int
        Tokens of preempted sequences that may be kept in host memory.
    tiers : PrefixTiers, optional
        Where prefixes go that leave the cache, and come back from.
    recompute_s : callable
        What computing so many first tokens of a sequence takes; 0 while that is unknown.
    may_pause_s : callable
        How long copying a prefix to host memory may keep everybody waiting: longer ones are let go.

    Attributes
    ----------
    fault : Exception or None
        Why the bookkeeping and llama.cpp cannot be trusted to agree any more.
    """

    def __init__(
        self,
        memory: CacheMemory,
        kv_cache: KVCache,
        recorder: Recorder,
        *,
        n_seq_max: int,
        prefix_cache_tokens: int,
        swap_tokens: int,
        clock: Callable[[], float],
        tiers: PrefixTiers | None = None,
        recompute_s: Callable[[int], float] = lambda n_tokens: 0.0,
        may_pause_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._memory = memory
        self.kv_cache = kv_cache
        self._recorder = recorder
        self._n_seq_max = n_seq_max
        # Memory that forgets positions cannot give up a part, nor lend one.
        self._can_truncate = kv_cache.has_pos_min
        self._n_tokens_max = prefix_cache_tokens
        self._swap = SwapStore(memory, recorder, n_tokens_max=swap_tokens, clock=clock)
        self.prefixes = PrefixCache()
        self.tiers = tiers
        self._recompute_s = recompute_s
        self._may_pause_s = may_pause_s
        self.fault: Exception | None = None

    # --- In ----------------------------------------------------------------------------------
    def allocate(self, sequence: Sequence, running: list[Sequence], now: float) -> bool:
        """Let a waiting sequence run, with what it can share; False if there is no room for it."""
        if len(running) >= self._n_seq_max:
            return False
        match = self._shared(sequence, running)
        n_parted = match.n_parted
        self._choose_state(sequence, match)
        if sequence.swapped is not None:
            match = Match()
        if not self._has_room(sequence, match, running):
            return False
        sequence.start(self._open(match), now)
        if sequence.swapped:
            self._restore(sequence)
            if sequence.is_placed and not self._can_truncate:
                self._part(sequence, n_parted)
        if not sequence.is_placed:
            self._place(sequence, match)
        return True

    def could_allocate(
        self, sequence: Sequence, active: list[Sequence], paused: list[Sequence]
    ) -> bool:
        """Whether there would be room for a sequence if the paused ones were preempted."""
        if len(active) >= self._n_seq_max:
            return False
        n_freed = self.kv_cache.n_freed_by([s.slot for s in paused if s.slot is not None])
        return self._has_room(sequence, self._match(sequence, active), active, n_freed)

    def _has_room(
        self, sequence: Sequence, match: Match, running: list[Sequence], n_freed: int = 0
    ) -> bool:
        """In the per-sequence layout a sequence has all the cells that it can need."""
        return not self.kv_cache.kv_unified or scheduler.has_room(
            sequence,
            self._n_new_cells(sequence, match),
            self.kv_cache.n_available + n_freed,
            running,
        )

    def place_followers(self, running: list[Sequence], now: float) -> None:
        """Give those that wait for a leader what it has computed by now."""
        waiting = [s for s in running if not s.is_placed]
        for sequence in sorted(waiting, key=lambda s: s.urgency(now)):
            leader = sequence.leader
            if leader is None or not leader.is_ready or leader.n_computed >= sequence.n_expected:
                self._place(sequence, self._match(sequence, running))

    def shareable(
        self, sequence: Sequence, running: Iterable[Sequence]
    ) -> tuple[int, SavedPrefix | None]:
        """Return how many first tokens a sequence would not have to compute now, and their saved prefix."""
        if sequence.swapped is not None:
            return sequence.n_restorable, None
        match = self._match(sequence, running)
        n_tokens = max(match.n_tokens, match.n_expected)
        prefix, n_saved = self._in_tiers(sequence, n_tokens)
        return max(n_tokens, n_saved), prefix

    def prefetch(self, sequence: Sequence, prefix: SavedPrefix | None) -> None:
        """Start reading the saved prefix of a sequence, if it is in a file; the sequence waits for it."""
        if prefix is not None and prefix.state is None and self.tiers is not None:
            sequence.awaits = prefix
            self.tiers.load(prefix)

    def _choose_state(self, sequence: Sequence, match: Match) -> None:
        """Let a sequence go on from a copy: its own, or a saved prefix if that is faster than computing it.

        What others have in cells is shared rather than restored beside them.
        """
        if sequence.swapped is not None:
            n_most = min(sequence.n_restorable, sequence.n_settled)
            if match.n_tokens >= n_most:
                self._swap.forget(sequence)
        sequence.awaits = None
        if self.tiers is None or sequence.swapped is not None:
            return
        n_shared = max(match.n_tokens, match.n_expected)
        prefix, n_tokens = self._in_tiers(sequence, n_shared)
        if prefix is None or prefix.state is None:
            return
        self.tiers.touch(prefix)
        self._swap.adopt(sequence, prefix.state, n_tokens)
        sequence.restores = prefix

    def _in_tiers(self, sequence: Sequence, n_shared: int) -> tuple[SavedPrefix | None, int]:
        """A prefix that is worth to be restored, of whom others share so much in cells."""
        if self.tiers is None or not self._n_tokens_max:
            return None, 0
        wanted = sequence.token_array()[: sequence.n_settled]
        prefix, n_tokens = self.tiers.match(wanted, sequence.request.lora)
        if prefix is None or n_tokens < n_shared + MIN_GAIN:
            return None, 0
        kv_cache = self.kv_cache
        n_most = kv_cache.n_available if kv_cache.kv_unified else kv_cache.n_ctx_seq
        if len(prefix.tokens) > min(n_most, kv_cache.n_ctx_seq):  # all of it is put back, then cut
            return None, 0
        computed_s = self._recompute_s(n_tokens) - self._recompute_s(n_shared)
        # What is unknown is tried; what is in a file is read meanwhile.
        if 0 < computed_s < self._swap.restore_s(len(prefix.tokens)):
            return None, 0
        return prefix, n_tokens

    def _match(self, sequence: Sequence, running: Iterable[Sequence]) -> Match:
        return Match() if sequence.swapped else self._shared(sequence, running)

    def _shared(self, sequence: Sequence, running: Iterable[Sequence]) -> Match:
        """What a sequence would share, had it no copy of its own."""
        if not self._n_tokens_max:
            return Match()
        n_min = 1 if self.kv_cache.kv_unified else int(self.kv_cache.n_ctx_seq * MIN_STREAM_SHARE)
        return self.prefixes.match(
            sequence, running, n_min=n_min, whole_only=not self._can_truncate
        )

    def _n_new_cells(self, sequence: Sequence, match: Match) -> int:
        """Cells that a sequence needs and no live request holds yet."""
        n_tokens = len(sequence.tokens)
        if match.leader is not None:
            return n_tokens - match.n_expected
        if match.source is not None:
            return n_tokens - self.kv_cache.n_shared_live(match.source, match.n_tokens)
        return n_tokens

    def _place(self, sequence: Sequence, match: Match) -> None:
        """Let a sequence that holds a seq_id share what it can, or wait for its leader."""
        if match.leader is not None:
            sequence.leader, sequence.n_expected = match.leader, match.n_expected
            if not self._can_truncate:
                self._part(match.leader, match.n_expected)
            return
        slot = sequence.slot
        assert slot is not None
        if match.source is not None and slot.n_computed == 0:
            if match.entry is not None:
                self.prefixes.touch(match.entry)
            self._copy(match.source, slot, match.n_tokens)
        self.truncate(slot, match.n_tokens)
        self._recorder.n_cached_tokens += sequence.place(slot.n_computed)
        if slot.n_computed:
            logger.debug("request %s: shares %d tokens", sequence.request_id, slot.n_computed)
        if not self._can_truncate and self._n_tokens_max:
            self._part(sequence, match.n_parted)

    def _part(self, sequence: Sequence, n_tokens: int) -> None:
        """Others have so many tokens in common with it, and want its memory as it is after them."""
        if n_tokens >= sequence.n_computed + MIN_GAIN:
            sequence.parted.add(n_tokens)
        self._set_checkpoint(sequence)

    def _set_checkpoint(self, sequence: Sequence) -> None:
        n_least = 0
        if not self.kv_cache.kv_unified:  # it is copied, if it can be and is not too short for that
            n_least = NEVER if self.tiers is None else MIN_SAVED
        sequence.n_checkpoint = next_checkpoint(
            sequence.n_computed, sequence.n_prompt, sequence.parted, n_least=n_least
        )

    def _open(self, match: Match) -> Slot:
        """A seq_id for a running sequence: a free one, or in the per-sequence layout a cached one.

        There a cached prefix that is mostly shared becomes the running sequence, uncopied.
        """
        kv_cache = self.kv_cache
        if kv_cache.kv_unified:
            return kv_cache.open()
        shared = match.entry if match.leader is None else None
        if shared is not None and match.n_tokens >= MIN_TAKEN_SHARE * len(shared.tokens):
            return self._take_over(shared)
        # llama.cpp computes each unbroken row of seq_ids in a batch of its own: leave no gaps,
        # though it cost a cached prefix.
        live = kv_cache.live_ids
        entries = {entry.slot.seq_id: entry for entry in self.prefixes.entries}
        ages = {entry.slot.seq_id: age for age, entry in enumerate(self.prefixes.entries, 1)}

        def cost(seq_id: int) -> tuple[int, int, int]:
            ends = [*live, seq_id]
            return max(ends) - min(ends) + 1 - len(ends), ages.get(seq_id, 0), seq_id

        best = min((*kv_cache.free_ids, *entries), key=cost)
        if shared is not None and best == shared.slot.seq_id:
            return self._take_over(shared)
        if best in entries:
            self.evict(entries[best])
        return kv_cache.open(best)

    def _take_over(self, entry: CachedPrefix) -> Slot:
        """A cached prefix becomes a running sequence; nothing is copied."""
        self.prefixes.entries.remove(entry)
        self.kv_cache.set_cached(entry.slot, False)
        return entry.slot

    def _copy(self, source: Slot, slot: Slot, n_tokens: int) -> None:
        """Let `slot` hold the first positions of `source`."""
        end = n_tokens if n_tokens < source.n_computed else None
        try:
            if self.kv_cache.kv_unified or end is None:
                self._memory.seq_cp(source.seq_id, slot.seq_id, None, end)
                self.kv_cache.share(source, slot, n_tokens)
            else:
                self._memory.seq_cp(source.seq_id, slot.seq_id)
                self.kv_cache.share(source, slot, source.n_computed)
                self.truncate(slot, n_tokens)
        except Exception as error:
            self.fault = error

    def truncate(self, slot: Slot, n_tokens: int) -> None:
        """Leave the first `n_tokens` positions of a slot."""
        if n_tokens < slot.n_computed:
            self._remove(slot.seq_id, n_tokens)
            self.kv_cache.truncate(slot, n_tokens)

    def keep_checkpoints(self, chunks: Iterable[Chunk]) -> None:
        """Keep the memory of those that have come where it is to be kept."""
        for sequence in (chunk.sequence for chunk in chunks):
            slot = sequence.slot
            if slot is None or slot.n_computed != sequence.n_checkpoint:
                continue
            if self.fault is None:
                tokens = sequence.token_array()[: slot.n_computed].copy()
                # In the per-sequence layout a copy in cells would need a stream of its own.
                if self.kv_cache.kv_unified:
                    is_new = self._keep_copy(slot, tokens, sequence.request.lora)
                else:
                    prefix = self._save_copy(slot, tokens, sequence.request.lora)
                    if is_new := prefix is not None:
                        sequence.saved.append(prefix)
                self._recorder.n_checkpoints += is_new
            self._set_checkpoint(sequence)

    # --- Out ---------------------------------------------------------------------------------
    def distrust(self, sequence: Sequence) -> None:
        """What it had saved for others, and what it went on from, are not to be used: it has failed."""
        for prefix in sequence.saved:
            if self.tiers is not None:
                self.tiers.forget(prefix)
        sequence.saved.clear()

    def leave(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Remove a sequence from the KV cache, whatever the bookkeeping says about it, and look.

        With `keep`, the prefix cache remembers what it had computed.
        """
        slot = sequence.slot
        if slot is None:
            return
        sequence.leave()
        is_kept = keep and slot.n_computed and self._n_tokens_max and self.fault is None
        if is_kept and self._keep(sequence, slot):
            return
        self._remove(slot.seq_id, 0)
        n_tokens = slot.n_computed
        n_cells = self.kv_cache.release(slot)
        logger.debug(
            "request %s: cleared KV cache, seq_id %d, %d positions, %d cells freed, %d shared",
            sequence.request_id, slot.seq_id, n_tokens, n_cells, n_tokens - n_cells,
        )  # fmt: skip

    def _remove(self, seq_id: int, n_tokens: int) -> None:
        """Remove the positions of a seq_id from `n_tokens` on."""
        try:
            removed = self._memory.seq_rm(seq_id, n_tokens or None)
            left = self._memory.seq_pos_max(seq_id)
        except Exception as error:
            self.fault = error
            return
        if not removed or left != (n_tokens - 1 if n_tokens else None):
            self.fault = LlamaCallError(
                "llama_memory_seq_rm", int(removed), f"seq_id {seq_id} still ends at {left}"
            )

    def _keep(self, sequence: Sequence, slot: Slot) -> bool:
        """Remember what a finished sequence computed; True if its slot was handed over."""
        n_tokens = min(slot.n_computed, self._n_tokens_max)
        if n_tokens < slot.n_computed and not self._can_truncate:
            return False
        tokens, lora = sequence.token_array()[:n_tokens].copy(), sequence.request.lora
        if self.kv_cache.kv_unified:
            self._keep_copy(slot, tokens, lora)
            return False
        if not self._make_way(tokens, lora):
            return False
        self.truncate(slot, n_tokens)
        self.kv_cache.set_cached(slot, True)
        logger.debug(
            "request %s: seq_id %d handed to the prefix cache, %d positions",
            sequence.request_id, slot.seq_id, n_tokens,
        )  # fmt: skip
        self._remember(CachedPrefix(tokens, slot, lora))
        return True

    def _keep_copy(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> bool:
        """Remember the first tokens of a slot under a seq_id of their own, which shares its cells; whether it was new."""
        if not self._make_way(tokens, lora):
            return False
        kv_cache, entries = self.kv_cache, self.prefixes.entries
        while entries and kv_cache.n_cached_ids >= kv_cache.n_seq_ids - self._n_seq_max:
            self.evict(entries[0])
        if not kv_cache.free_ids:
            return False
        kept = kv_cache.open(is_cached=True)
        self._copy(slot, kept, len(tokens))
        self._remember(CachedPrefix(tokens, kept, lora))
        return True

    def _make_way(self, tokens: Tokens, lora: LoraUse) -> bool:
        """Evict what a new entry makes needless; False if a cached prefix has its tokens, which is touched."""
        n_most = None if self._can_truncate else len(tokens)
        if (covering := self.prefixes.covering(tokens, lora, n_most=n_most)) is not None:
            self.prefixes.touch(covering)
            return False
        if self._can_truncate:  # a part of the longer one does for the shorter
            for entry in self.prefixes.covered_by(tokens, lora):
                self.evict(entry, saves=False)
        return True

    def _remember(self, entry: CachedPrefix) -> None:
        self.prefixes.entries.append(entry)
        while self.kv_cache.n_cached > self._n_tokens_max:
            self.evict(self.prefixes.entries[0])

    def evict(self, entry: CachedPrefix, *, saves: bool = True) -> None:
        """Let a cached prefix leave the cells, for the tiers below if that is worth it."""
        self.prefixes.entries.remove(entry)
        if saves:
            self._save_copy(entry.slot, entry.tokens, entry.lora)
        self._remove(entry.slot.seq_id, 0)
        n_cells = self.kv_cache.release(entry.slot)
        self._recorder.n_evictions += 1
        logger.debug("cached prefix of %d tokens: evicted, %d cells", len(entry.tokens), n_cells)

    def _save_copy(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> SavedPrefix | None:
        """Let the tiers below have a copy of what a slot holds, these tokens; None if that is not worth it."""
        tiers = self.tiers
        if tiers is None or self.fault is not None or len(tokens) < MIN_SAVED:
            return None
        if (covering := tiers.covering(tokens, lora)) is not None:
            tiers.touch(covering)
            return None
        if self._swap.copy_s(len(tokens)) > self._may_pause_s():
            return None
        state = self._swap.copy_of(slot, f"prefix of {len(tokens)} tokens")
        return None if state is None else tiers.add(tokens, lora, state)

    def write_all(self) -> None:
        """Write the cached prefixes to files, as many as are taken, the most recently used first."""
        for entry in reversed(self.prefixes.entries):
            if self.tiers is None or not self.tiers.writes:
                return
            self._save_copy(entry.slot, entry.tokens, entry.lora)

    def evict_until(self, n_free: int) -> None:
        """Evict cached prefixes, least recently used first, until so many cells are free."""
        while self.kv_cache.n_free < n_free and self.prefixes.entries:
            self.evict(self.prefixes.entries[0])

    def evict_lora(self, name: str) -> None:
        """Evict what this adapter has computed: another may have its name."""
        for entry in [e for e in self.prefixes.entries if e.lora.uses(name)]:
            self.evict(entry, saves=False)
        if self.tiers is not None:
            self.tiers.forget_lora(name)

    def evict_all(self) -> int:
        """Evict every cached prefix, and save none; return how many there were."""
        n_entries = len(self.prefixes.entries)
        while self.prefixes.entries:
            self.evict(self.prefixes.entries[0], saves=False)
        return n_entries

    def forget_prefixes(self) -> None:
        """Forget what finished requests have left, wherever it is."""
        self.evict_all()
        if self.tiers is not None:
            self.tiers.clear()

    # --- Preemption --------------------------------------------------------------------------
    def preempt(self, sequence: Sequence, recompute_s: float, *, keep: bool = False) -> None:
        """Take the seq_id and the cells of a sequence that goes back to the queue.

        They are saved in host memory where that has been measured to be cheaper than computing
        them again, and where few of them are shared: what comes back shares nothing.  Otherwise,
        with `keep`, the prefix cache remembers them as long as there is room.
        """
        slot = sequence.slot
        assert slot is not None
        is_own = self.kv_cache.n_own(slot) >= MIN_OWN_SHARE * slot.n_computed
        if self._can_truncate and is_own and self._swap.is_worth(slot.n_computed, recompute_s):
            self._swap.save(sequence, slot)
        self.leave(sequence, keep=keep and sequence.swapped is None)

    def _restore(self, sequence: Sequence) -> None:
        """Put back a swapped sequence's cells; if that fails it computes them again."""
        swapped, slot = sequence.swapped, sequence.slot
        assert swapped is not None
        assert slot is not None
        self.evict_until(swapped.n_tokens)
        if self.kv_cache.kv_unified and self.kv_cache.n_free < swapped.n_tokens:
            self._swap.forget(sequence)
            return
        n_tokens, prefix = sequence.n_restorable, sequence.restores
        if self._swap.restore(sequence, slot):
            self.kv_cache.advance(slot, swapped.n_tokens)
            self.truncate(slot, min(n_tokens, sequence.n_settled))
            n_cached = sequence.place(slot.n_computed)
            if prefix is not None:
                sequence.saved.append(prefix)
                self._recorder.n_cached_tokens += n_cached
                self._recorder.n_restored_prefixes += 1
        else:
            self._remove(slot.seq_id, 0)
            if prefix is not None and self.tiers is not None:
                self.tiers.forget(prefix)

    def adopt(self, sequence: Sequence, state: SequenceState) -> None:
        """A new sequence brings what the KV cache held of it, as far as it can be used."""
        n_most = sequence.n_settled
        if state.n_tokens <= n_most or (self._can_truncate and n_most > 0):
            self._swap.adopt(sequence, state)

    def save(self, sequence: Sequence) -> SequenceState | None:
        """What the KV cache holds of a sequence that is to go on elsewhere; None if nothing."""
        slot = sequence.slot
        if sequence.restores is not None:  # of which only the beginning is its own
            return None
        if sequence.swapped is not None or slot is None:
            return sequence.swapped
        if not slot.n_computed or self.fault is not None:
            return None
        return self._swap.copy_of(slot, f"request {sequence.request_id}")

    def forget(self, sequence: Sequence) -> None:
        """Its request has ended: drop what was saved of it."""
        self._swap.forget(sequence)

    # --- After a failure ---------------------------------------------------------------------
    def read_back(self, chunks: Iterable[Chunk]) -> None:
        """After a failed decode: what llama.cpp kept is what we have."""
        for chunk in chunks:
            sequence, slot = chunk.sequence, chunk.sequence.slot
            assert slot is not None
            n_before = min(slot.n_computed, sequence.n_prompt)
            self.kv_cache.read_back(slot, self._memory)
            n_kept = min(slot.n_computed, sequence.n_prompt)
            self._recorder.n_prefill_tokens += max(0, n_kept - n_before)
            if not self._can_truncate:
                # The failing part may be in there, and cannot be taken out.
                self._remove(slot.seq_id, 0)
                self.kv_cache.truncate(slot, 0)
                self._set_checkpoint(sequence)
            else:
                # Rows that were stored though their logits are lost: compute them again.
                self.truncate(slot, sequence.n_settled)

    def remove_all(self) -> None:
        """After a failed decode, where llama.cpp moves states about in the decode that computes others.

        Whose they were before it failed, nobody knows.
        """
        for seq_id in self.kv_cache.held_ids:
            self._remove(seq_id, 0)
        fault = self.fault
        self.reset()
        self.fault = fault

    def reset(self) -> None:
        """The context is new and empty."""
        self.kv_cache.clear()
        self.prefixes.entries.clear()
        self.fault = None
