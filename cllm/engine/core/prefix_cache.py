"""Find computed tokens that a new sequence can share.  Pure: the bookkeeping and llama.cpp are elsewhere.

Prefixes of finished sequences, and checkpoints of running ones, are entries here, each under a seq_id
of its own.  Running sequences are compared directly.  A scan over at most 256 arrays is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cllm.engine.core.checkpoints import MIN_GAIN
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.prefix_tiers import Tokens, common_length
from cllm.engine.core.sequence import Sequence
from cllm.engine.lora import NO_LORA, LoraUse


@dataclass(eq=False, slots=True)
class CachedPrefix:
    """Cached prefix of a sequence.

    Attributes
    ----------
    slot : Slot
        Slot that holds the tokens.
    lora : LoraUse
        Adapters that computed them.
    used_at : int
        `PrefixCache.n_rows` when it was last used.
    """

    tokens: Tokens
    slot: Slot
    lora: LoraUse = NO_LORA
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that a sequence can have without computing them.

    Attributes
    ----------
    source : Slot or None
        Slot that holds the first `n_tokens` of the sequence's tokens now.
    leader : Sequence or None
        Running sequence that computes the first `n_expected` tokens, which are worth waiting for.
    n_parted : int
        Largest number of tokens in common with a longer prefix or sequence that cannot share a part.
    entry : CachedPrefix or None
        Cached prefix of `source`; None if that is a running sequence.
    """

    source: Slot | None = None
    n_tokens: int = 0
    entry: CachedPrefix | None = None
    leader: Sequence | None = None
    n_expected: int = 0
    n_parted: int = 0


class PrefixCache:
    """The cached prefixes, least recently used first.

    Attributes
    ----------
    entries : list of CachedPrefix
    n_rows : int
        Number of rows, of prompts and of streams, computed beside the cached prefixes: their clock.
    """

    def __init__(self) -> None:
        self.entries: list[CachedPrefix] = []
        self.n_rows: int = 0

    def add(self, entry: CachedPrefix) -> None:
        """Add an entry as the most recently used one."""
        entry.used_at = self.n_rows
        self.entries.append(entry)

    def touch(self, entry: CachedPrefix) -> None:
        """Mark an entry as used now."""
        self.entries.remove(entry)
        self.add(entry)

    def n_rows_since(self, entry: CachedPrefix) -> int:
        """Return the number of rows that were computed since an entry was last used."""
        return self.n_rows - entry.used_at

    def covering(
        self, tokens: Tokens, lora: LoraUse = NO_LORA, *, n_most: int | None = None
    ) -> CachedPrefix | None:
        """Return an entry that begins with all of `tokens`, computed by the same adapters; else None.

        With `n_most`, only entries of at most so many tokens count.
        """
        n_tokens = len(tokens)
        return next(
            (
                e
                for e in self.entries
                if (n_most is None or len(e.tokens) <= n_most)
                and _begins_with(e.tokens, tokens)
                and e.lora.n_alike(lora) >= n_tokens
            ),
            None,
        )

    def covered_by(self, tokens: Tokens, lora: LoraUse = NO_LORA) -> list[CachedPrefix]:
        """Return the entries that `tokens` begins with, computed by the same adapters."""
        return [
            e
            for e in self.entries
            if _begins_with(tokens, e.tokens) and e.lora.n_alike(lora) >= len(e.tokens)
        ]

    def match(
        self,
        sequence: Sequence,
        running: Iterable[Sequence],
        *,
        n_min: int = 1,
        whole_only: bool = False,
    ) -> Match:
        """Return the longest prefix that a sequence has in common with an entry or a running sequence.

        Fewer than `n_min` tokens are not shared.  With `whole_only`, an entry, or the computed tokens of
        a sequence, are shared as a whole only.  Tokens whose logits are needed, at least the last one,
        and parts of media chunks are not shared.

        The match has a leader if waiting for it gives at least two tokens (`MIN_GAIN` with `whole_only`),
        or all that can be shared.  One token is too few, because most prompts begin with the same.
        """
        wanted, lora = sequence.token_array()[: sequence.n_settled], sequence.request.lora
        n_wanted, floor = len(wanted), sequence.spans.floor
        source, entry, n_tokens, n_parted = None, None, 0, 0
        # The most recent of equal entries, so that the others are evicted sooner.  An entry with
        # another token where the longest match ends cannot match longer: most need no comparison.
        for cached in reversed(self.entries):
            tokens = cached.tokens
            if n_tokens >= min(n_wanted, len(tokens)) or tokens[n_tokens] != wanted[n_tokens]:
                continue
            n_common = floor(common_length(tokens, wanted, cached.lora, lora))
            if whole_only and n_common < len(tokens):
                n_parted = max(n_parted, n_common)
                continue
            if n_common >= n_min and n_common > n_tokens:
                source, entry, n_tokens = cached.slot, cached, n_common
        leader, n_expected = None, n_tokens
        for other in running:
            slot = other.placement.slot
            if other is sequence or not other.placement.is_placed or slot is None:
                continue
            own = other.tokens
            if n_tokens >= min(n_wanted, len(own)) or own[n_tokens] != wanted[n_tokens]:
                continue
            n_common = floor(common_length(other.token_array(), wanted, other.request.lora, lora))
            if n_common < n_min:
                continue
            if whole_only and n_common < other.n_computed:
                n_parted = max(n_parted, n_common)
                continue
            n_now = floor(min(n_common, other.n_computed))
            if n_now >= n_min and n_now > n_tokens:
                source, entry, n_tokens = slot, None, n_now
            n_coming = n_common
            if not other.is_scored:  # few rows are scored in a tick: not worth waiting for
                n_coming = floor(min(n_common, max(other.n_settled, other.n_computed)))
            if n_coming > max(n_expected, other.n_computed) and not other.is_paused:
                leader, n_expected = other, n_coming
        n_gained = n_expected - n_tokens
        # With `whole_only` the leader ends a chunk there, which must gain more tokens.
        n_least = MIN_GAIN if whole_only else 2
        if n_gained < 1 or (n_gained < n_least and n_expected < n_wanted):
            leader, n_expected = None, 0
        return Match(source, n_tokens, entry, leader, n_expected, n_parted)


def _begins_with(tokens: Tokens, head: Tokens) -> bool:
    n_head = len(head)
    if n_head > len(tokens) or (n_head and tokens[n_head - 1] != head[-1]):
        return False
    return common_length(tokens, head) == n_head
