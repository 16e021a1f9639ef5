"""Cells: the KV cells of one context, in the bookkeeping and in llama.cpp at once.  Inference thread only.

`Cells` shares prefixes, keeps what finished sequences computed, evicts it, truncates and removes.
Only the core's probe and `SavedStates` change cells elsewhere, apart from decodes.  After a removal
`Cells` checks that llama.cpp did it.  If not, it sets `fault`: the context must be recreated, and
`reset` called, before the next decode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cllm.engine.core.decoder import CacheMemory
from cllm.engine.core.kv_cache import KVCache, Slot
from cllm.engine.core.prefix_cache import CachedPrefix, Match, PrefixCache
from cllm.engine.core.prefix_tiers import SavedPrefix, Tokens
from cllm.engine.core.saved_states import MIN_SAVED, SavedStates
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.statistics import Recorder
from cllm.engine.lora import LoraUse
from cllm.errors import LlamaCallError

logger: logging.Logger = logging.getLogger("cllm.engine")

# Sharing in the per-sequence layout copies a whole stream: no prefix shorter than this share of
# `n_ctx_seq` is shared there.
# A cell's copy takes 1/370 of a token's computation in a model of two layers, 1/1500 in one of 30.
MIN_STREAM_SHARE = 1 / 512
# Continuing in the stream of a cached prefix loses its tokens after the common part: at least this
# share of it must be common.
MIN_TAKEN_SHARE = 1 / 2
# A copy shares no cells, so shared cells would be held twice: a sequence or a prefix is copied to
# host memory for its cells only if this share of them is its own.
MIN_OWN_SHARE = 0.9
# In the unified layout each row visits the cells of all sequences, also those that its mask excludes.  After
# so many rows, a prefix in cells has cost as much as computing it again, or some times as much as a copy to
# host memory and back, for which all streams have to wait.  Measured on two cores: 17,000 to 22,000 and 47 to
# 60 (SmolLM2-135M), 19,000 to 33,000 and 100 to 177 (layers of Qwen3-0.6B's size).  Idle cells cost a row of a
# prompt of 64 to 200 tokens 1.5 to 2 times as many seconds as a row that decodes.
N_ROWS_COPY, N_ROWS_COMPUTE = 512, 16_384
N_VISITED_STEP = 256  # attention visits a multiple of this
# Prefixes that would be computed again leave the cells only if they hold a small part of those visited.
MIN_LEFT_OVER = 16


class Cells:
    """Cells of the seq_ids of one context.

    Parameters
    ----------
    memory : CacheMemory
    kv_cache : KVCache
    saved : SavedStates
        Takes the prefixes that leave the cells.
    n_seq_max : int
        Number of sequences that may run at once.
    prefix_cache_tokens : int
        Number of cells that finished prefixes may hold; 0 shares nothing, not even between running
        sequences.

    Attributes
    ----------
    fault : Exception or None
        Error after which the bookkeeping and llama.cpp may disagree; None while they agree.
    prefixes : PrefixCache
    can_truncate : bool
        False for memory that forgets positions: except for drafts, a sequence is shared or removed whole.
    """

    def __init__(
        self,
        memory: CacheMemory,
        kv_cache: KVCache,
        saved: SavedStates,
        recorder: Recorder,
        *,
        n_seq_max: int,
        prefix_cache_tokens: int,
    ) -> None:
        self._memory = memory
        self.kv_cache = kv_cache
        self._saved = saved
        self._recorder = recorder
        # In the per-sequence layout prefixes have the seq_ids that no running sequence needs.
        self._n_ids_max = kv_cache.n_seq_ids - (n_seq_max if kv_cache.shares_cells else 0)
        self._n_tokens_max = prefix_cache_tokens
        self.can_truncate: bool = kv_cache.has_pos_min
        self.prefixes: PrefixCache = PrefixCache()
        self.fault: Exception | None = None

    @property
    def shares(self) -> bool:
        """True if sequences share prefixes."""
        return self._n_tokens_max > 0

    @property
    def _is_visited(self) -> bool:
        """True if rows visit the cells of other sequences, and the bookkeeping is right."""
        kv_cache = self.kv_cache
        return self.fault is None and kv_cache.shares_cells and not kv_cache.is_recurrent

    # --- Sharing -----------------------------------------------------------------------------
    def match(self, sequence: Sequence, running: Iterable[Sequence]) -> Match:
        """Return what a sequence could share, whether or not it has a state of its own."""
        if not self.shares:
            return Match()
        n_min = 1 if self.kv_cache.kv_unified else int(self.kv_cache.n_ctx_seq * MIN_STREAM_SHARE)
        if not self.kv_cache.can_copy:
            running = ()
        return self.prefixes.match(sequence, running, n_min=n_min, whole_only=not self.can_truncate)

    def open(self, match: Match) -> Slot:
        """Return a slot for a running sequence: a free seq_id, or that of a cached prefix.

        If cells cannot be shared, the cached prefix of the match may become the running sequence, without a
        copy.  Any other cached prefix whose seq_id is taken is evicted.
        """
        kv_cache = self.kv_cache
        if kv_cache.shares_cells:
            self._free_id(spared=match.source)
            return kv_cache.open()
        shared = match.entry if match.leader is None else None
        if shared is not None and match.n_tokens >= MIN_TAKEN_SHARE * len(shared.tokens):
            return self._take_over(shared)
        # llama.cpp computes each run of consecutive seq_ids in a batch of its own: leave no gaps,
        # even if that evicts a cached prefix.
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
        """Make a cached prefix a running sequence; nothing is copied."""
        self.prefixes.entries.remove(entry)
        self.kv_cache.set_cached(entry.slot, False)
        return entry.slot

    def share(self, match: Match, slot: Slot) -> None:
        """Make a slot hold the tokens of a match, and nothing else."""
        if match.source is not None and slot.n_computed == 0:
            if match.entry is not None:
                self.prefixes.touch(match.entry)
            self._copy(match.source, slot, match.n_tokens)
        self.truncate(slot, match.n_tokens)

    def _copy(self, source: Slot, slot: Slot, n_tokens: int) -> None:
        """Let `slot` hold the first positions of `source`."""
        end = n_tokens if n_tokens < source.n_computed else None
        try:
            if self.kv_cache.kv_unified or end is None:
                end = None if end is None else source.spans.position(end)
                self._memory.seq_cp(source.seq_id, slot.seq_id, None, end)
                self.kv_cache.share(source, slot, n_tokens)
            else:
                self._memory.seq_cp(source.seq_id, slot.seq_id)
                self.kv_cache.share(source, slot, source.n_computed)
                self.truncate(slot, n_tokens)
        except Exception as error:
            self.fault = error

    # --- Removing ----------------------------------------------------------------------------
    def truncate(self, slot: Slot, n_tokens: int) -> None:
        """Keep only the first `n_tokens` positions of a slot."""
        if n_tokens < slot.n_computed:
            self._remove(slot, n_tokens)
            self.kv_cache.truncate(slot, n_tokens)

    def empty(self, slot: Slot) -> None:
        """Remove all positions of a seq_id, whatever the bookkeeping says."""
        self._remove(slot, 0)
        self.kv_cache.truncate(slot, 0)

    def release(self, slot: Slot) -> int:
        """Remove all positions of a seq_id, and free the seq_id; return the number of cells freed."""
        self._remove(slot, 0)
        return self.kv_cache.release(slot)

    def _remove(self, slot: Slot, n_tokens: int) -> None:
        """Remove the rows of a slot from `n_tokens` on; set `fault` if llama.cpp did not."""
        seq_id, spans = slot.seq_id, slot.spans
        try:
            removed = self._memory.seq_rm(seq_id, spans.position(n_tokens) if n_tokens else None)
            left = self._memory.seq_pos_max(seq_id)
        except Exception as error:
            self.fault = error
            return
        if not removed or left != spans.last_position(n_tokens):
            self.fault = LlamaCallError(
                "llama_memory_seq_rm", int(removed), f"seq_id {seq_id} still ends at {left}"
            )

    # --- Keeping -----------------------------------------------------------------------------
    def keep(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> bool:
        """Cache the tokens of a sequence; return True if the prefix cache took over its slot.

        Otherwise the tokens may be cached under another seq_id, and the caller releases the slot.  Limits of the
        prefix cache hold after the next `trim`: no request waits for a copy of another prefix.
        """
        n_tokens = slot.spans.floor(min(slot.n_computed, self._n_tokens_max))
        if not n_tokens or self.fault is not None:
            return False
        if n_tokens < slot.n_computed and not self.can_truncate:
            return False
        tokens = tokens[:n_tokens].copy()
        if self.kv_cache.shares_cells and self.kv_cache.free_ids:
            self.keep_copy(slot, tokens, lora)
            return False
        if not self._make_way(tokens, lora):
            return False
        self.truncate(slot, n_tokens)
        self.kv_cache.set_cached(slot, True)
        self.prefixes.add(CachedPrefix(tokens, slot, lora))
        return True

    def keep_copy(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> Slot | None:
        """Cache the first tokens of a slot under a new seq_id that shares its cells; return the new slot.

        Return None if a cached prefix has these tokens already, or no seq_id is free.
        """
        if not self._make_way(tokens, lora):
            return None
        self._free_id()
        if not self.kv_cache.free_ids:
            return None
        kept = self.kv_cache.open(is_cached=True)
        kept.spans = slot.spans
        self._copy(slot, kept, len(tokens))
        self.prefixes.add(CachedPrefix(tokens, kept, lora))
        return kept

    def drop(self, slot: Slot) -> None:
        """Forget the cached prefix in a slot, if it is still there."""
        for entry in [entry for entry in self.prefixes.entries if entry.slot is slot]:
            self.evict(entry, saves=False)

    def age(self, slot: Slot) -> None:
        """Make the cached prefix in a slot the least recently used one, if it is still there."""
        self.prefixes.entries.sort(key=lambda entry: entry.slot is not slot)

    def _make_way(self, tokens: Tokens, lora: LoraUse) -> bool:
        """Evict the prefixes that a new entry contains; return False if a cached prefix contains the entry.

        Without `can_truncate` nothing is evicted, and only an entry with the same tokens counts.
        """
        n_most = None if self.can_truncate else len(tokens)
        if (covering := self.prefixes.covering(tokens, lora, n_most=n_most)) is not None:
            self.prefixes.touch(covering)
            return False
        if self.can_truncate:  # part of the new entry can stand in for a shorter prefix
            for entry in self.prefixes.covered_by(tokens, lora):
                self.evict(entry, saves=False)
        return True

    def _free_id(self, spared: Slot | None = None) -> None:
        """Evict the least recently used prefix that is not in the slot `spared`, if no seq_id is free."""
        if not self.kv_cache.free_ids:
            others = (entry for entry in self.prefixes.entries if entry.slot is not spared)
            if (entry := next(others, None)) is not None:
                self.evict(entry)

    def save(self, slot: Slot, tokens: Tokens, lora: LoraUse) -> SavedPrefix | None:
        """Save the content of a slot in host memory or a file; return None if it is not saved."""
        return None if self.fault is not None else self._saved.add(slot, tokens, lora)

    def write_all(self) -> None:
        """Write the cached prefixes to files, the most recently used first, until the store is full."""
        for entry in reversed(self.prefixes.entries):
            if self._saved.tiers is None or not self._saved.tiers.writes:
                return
            self.save(entry.slot, entry.tokens, entry.lora)

    # --- Evicting ----------------------------------------------------------------------------
    def evict(self, entry: CachedPrefix, *, saves: bool = True) -> None:
        """Remove a cached prefix from the cells; save it if that is worth it."""
        self.prefixes.entries.remove(entry)
        if saves:
            self.save(entry.slot, entry.tokens, entry.lora)
        n_cells = self.release(entry.slot)
        self._recorder.n_evictions += 1
        logger.debug("cached prefix of %d tokens: evicted, %d cells", len(entry.tokens), n_cells)

    @property
    def has_surplus(self) -> bool:
        """True if `trim` would evict a prefix."""
        return self._is_over or self._outdated() is not None

    @property
    def _is_over(self) -> bool:
        """True if the cached prefixes hold more seq_ids or cells than they may, and the bookkeeping is right."""
        n_entries = len(self.prefixes.entries)
        is_over = n_entries > self._n_ids_max or self.kv_cache.n_cached > self._n_tokens_max
        # After a fault the context is recreated, without prefixes.
        return n_entries > 0 and is_over and self.fault is None

    def _outdated(self) -> CachedPrefix | None:
        """Return a prefix whose cells have cost more than its eviction; None without one."""
        if not self._is_visited:
            return None
        for entry in self.prefixes.entries:
            n_since = self.prefixes.n_rows_since(entry)
            if n_since <= N_ROWS_COPY:
                continue
            n_own, n_tokens = self.kv_cache.n_own(entry.slot), entry.slot.n_computed
            is_copied = n_own >= MIN_OWN_SHARE * n_tokens and self._saved.keeps(n_tokens)
            if n_own and (is_copied or n_since > N_ROWS_COMPUTE):
                return entry
        return None

    def trim(self) -> None:
        """Evict prefixes until the limits hold; if they hold, evict at most one that is outdated.

        A copy to host memory delays all streams.  Call it between two ticks, after the events have been posted.
        """
        if not self._is_over and (outdated := self._outdated()) is not None:
            self.evict(outdated)
        while self._is_over:
            self.evict(self.prefixes.entries[0])

    def compact(self) -> None:
        """Evict all prefixes if few of the cells that rows visit are in use; no sequence runs.

        Attention visits all cells up to the last one in use, and llama.cpp moves no cell.  A prefix that was
        computed beside much else would make its requests visit as many cells as at that time.
        """
        kv_cache, entries = self.kv_cache, self.prefixes.entries
        if not self._is_visited:
            return
        n_left_over = kv_cache.n_visited - kv_cache.n_held
        if n_left_over < N_VISITED_STEP:
            return
        lengths = [entry.slot.n_computed for entry in entries]
        n_saved = sum(n for n in lengths if n >= MIN_SAVED)
        is_kept = not n_saved or self._saved.keeps(n_saved)
        if n_left_over >= sum(lengths) * (1 if is_kept else MIN_LEFT_OVER):
            while entries:
                self.evict(entries[0])

    def erase(self, seq_id: int) -> int:
        """Evict the cached prefix of a seq_id without saving it; return its number of tokens.

        Return 0 if the seq_id has no cached prefix.
        """
        for entry in self.prefixes.entries:
            if entry.slot.seq_id == seq_id:
                self.evict(entry, saves=False)
                return len(entry.tokens)
        return 0

    def evict_until(self, n_free: int) -> None:
        """Evict cached prefixes, least recently used first, until `n_free` cells are free or none is left."""
        while self.kv_cache.n_free < n_free and self.prefixes.entries:
            self.evict(self.prefixes.entries[0])

    def forget_lora(self, name: str) -> None:
        """Forget all tokens that an adapter computed, in cells and saved states: another may get its name."""
        for entry in [e for e in self.prefixes.entries if e.lora.uses(name)]:
            self.evict(entry, saves=False)
        if self._saved.tiers is not None:
            self._saved.tiers.forget_lora(name)

    def evict_all(self) -> int:
        """Evict every cached prefix without saving it; return their number."""
        n_entries = len(self.prefixes.entries)
        while self.prefixes.entries:
            self.evict(self.prefixes.entries[0], saves=False)
        return n_entries

    def forget_prefixes(self) -> None:
        """Forget all prefixes of finished requests, in cells, host memory and files."""
        self.evict_all()
        if self._saved.tiers is not None:
            self._saved.tiers.clear()

    # --- After a failure ---------------------------------------------------------------------
    def read_back(self, slot: Slot) -> None:
        """Adopt llama.cpp's positions of a slot after a failed decode; part of a media chunk is removed."""
        self.kv_cache.read_back(slot, self._memory)
        if len(slot.spans):
            self._remove(slot, slot.n_computed)

    def remove_all(self) -> None:
        """Remove every sequence after a failed decode of a recurrent model.

        llama.cpp may have moved states between cells, so none can be trusted.
        """
        for slot in self.kv_cache.slots:
            self._remove(slot, 0)
        fault = self.fault
        self.reset()
        self.fault = fault

    def reset(self) -> None:
        """Clear the bookkeeping and the fault, because the context is empty."""
        self.kv_cache.clear()
        self.prefixes.entries.clear()
        self.fault = None
