"""Find computed tokens that a new sequence can share.  Pure: the bookkeeping and llama.cpp are elsewhere.

Finished sequences leave their tokens here, each under a seq_id of its own, least recently used
first.  Running ones are asked directly.  A scan over at most 256 arrays with numpy is enough.
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
    """Prefix of a finished sequence: the tokens, the adapters that computed them, and the slot that holds them."""

    tokens: Tokens
    slot: Slot
    lora: LoraUse = NO_LORA


@dataclass(frozen=True, slots=True)
class Match:
    """Tokens that a sequence can have without computing them.

    Attributes
    ----------
    source : Slot or None
        Holds the first `n_tokens` of the sequence's tokens now.
    leader : Sequence or None
        Is computing the first `n_expected` of them, which are worth waiting for.
    n_parted : int
        As many it has in common with another who holds more, and cannot lend a part.
    entry : CachedPrefix or None
        The source, if it is a cached one.
    """

    source: Slot | None = None
    n_tokens: int = 0
    entry: CachedPrefix | None = None
    leader: Sequence | None = None
    n_expected: int = 0
    n_parted: int = 0


class PrefixCache:
    """The cached prefixes, least recently used first."""

    def __init__(self) -> None:
        self.entries: list[CachedPrefix] = []

    def touch(self, entry: CachedPrefix) -> None:
        """Mark an entry as used now."""
        self.entries.remove(entry)
        self.entries.append(entry)

    def covering(
        self, tokens: Tokens, lora: LoraUse = NO_LORA, *, n_most: int | None = None
    ) -> CachedPrefix | None:
        """An entry of at most `n_most` tokens that begins with all of `tokens`, computed alike."""
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
        """Entries that `tokens`, computed like that, begins with."""
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
        """The longest prefix that a sequence shares with others, to the token.

        At least `n_min` tokens of it.  With `whole_only`, all that the other has computed or
        nothing.  What logits are needed of is left to be computed: at least its last token.

        It waits for a leader when that gives more than a lone first token (most prompts begin with
        the same one), or all there is to share; with `whole_only`, that will stop there.
        """
        wanted, lora = sequence.token_array()[: sequence.n_settled], sequence.request.lora
        n_wanted = len(wanted)
        source, entry, n_tokens, n_parted = None, None, 0, 0
        # The most recent of equals, so that the others may grow old.  Who has another token where
        # the longest match so far ends cannot be longer: most need no comparison.
        for cached in reversed(self.entries):
            tokens = cached.tokens
            if n_tokens >= min(n_wanted, len(tokens)) or tokens[n_tokens] != wanted[n_tokens]:
                continue
            n_common = common_length(tokens, wanted, cached.lora, lora)
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
            n_common = common_length(other.token_array(), wanted, other.request.lora, lora)
            if n_common < n_min:
                continue
            if whole_only and n_common < other.n_computed:
                n_parted = max(n_parted, n_common)
                continue
            n_now = min(n_common, other.n_computed)
            if n_now >= n_min and n_now > n_tokens:
                source, entry, n_tokens = slot, None, n_now
            n_coming = n_common
            if not other.is_scored:  # such rows come few at a time: not worth waiting for
                n_coming = min(n_common, max(other.n_settled, other.n_computed))
            if n_coming > max(n_expected, other.n_computed) and not other.is_paused:
                leader, n_expected = other, n_coming
        n_gained = n_expected - n_tokens
        # Where it has to end a chunk for it, it takes more.
        n_least = MIN_GAIN if whole_only else 2
        if n_gained < 1 or (n_gained < n_least and n_expected < n_wanted):
            leader, n_expected = None, 0
        return Match(source, n_tokens, entry, leader, n_expected, n_parted)


def _begins_with(tokens: Tokens, head: Tokens) -> bool:
    n_head = len(head)
    if n_head > len(tokens) or (n_head and tokens[n_head - 1] != head[-1]):
        return False
    return common_length(tokens, head) == n_head
