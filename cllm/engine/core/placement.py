"""Placement: the place of a sequence in the KV cache.  Inference thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cllm.engine.core.checkpoints import NEVER
from cllm.engine.core.kv_cache import Slot
from cllm.engine.core.prefix_tiers import SavedPrefix
from cllm.engine.request import SequenceState

LeaderT = TypeVar("LeaderT")


@dataclass(eq=False, slots=True)
class Placement(Generic[LeaderT]):
    """Place of a sequence in the KV cache, and the saved states that it can start from.

    Attributes
    ----------
    slot : Slot or None
        Its place in the KV cache while it runs; None while it waits.
    is_placed : bool
        True if it computes its own tokens.  Before that it may hold a seq_id, but no cell.
    leader : Sequence or None
        Computes the first `n_expected` tokens.  This sequence waits for them.
    n_shareable : int
        Number of first tokens that it could share, await or restore when it was submitted.
    swapped : SequenceState or None
        State to restore: its own, saved at a preemption or a suspension, or that of a saved prefix.
    n_restorable : int
        Number of first tokens of `swapped` that are also the first tokens of the sequence.
    restores : SavedPrefix or None
        The prefix that `swapped` is from.
    awaits : SavedPrefix or None
        A prefix that is being read from a file.  The sequence waits for it.
    awaits_media : bool
        True while media that it needs are being encoded.
    saved : list of SavedPrefix
        Prefixes that it has computed or gone on from.  They are forgotten if it fails.
    branch_points : set of int
        Positions at which other sequences part from it and could not share.
    n_checkpoint : int
        Number of computed tokens at which its memory is kept next.
    output_checkpoints : list of Slot
        Cached prefixes that end in its output.
    """

    slot: Slot | None = None
    is_placed: bool = False
    leader: LeaderT | None = None
    n_expected: int = 0
    n_shareable: int = 0
    swapped: SequenceState | None = None
    n_restorable: int = 0
    restores: SavedPrefix | None = None
    awaits: SavedPrefix | None = None
    awaits_media: bool = False
    saved: list[SavedPrefix] = field(default_factory=list)
    branch_points: set[int] = field(default_factory=set)
    n_checkpoint: int = NEVER
    output_checkpoints: list[Slot] = field(default_factory=list)

    @property
    def is_loading(self) -> bool:
        """True while the prefix for the sequence is read from a file, or its media are encoded."""
        return self.awaits_media or (self.awaits is not None and self.awaits.is_loading)

    def follow(self, leader: LeaderT, n_expected: int) -> None:
        """Wait until a leader has computed the first `n_expected` tokens."""
        self.leader, self.n_expected = leader, n_expected

    def compute(self) -> None:
        """Let the sequence compute its own tokens from now on."""
        self.is_placed, self.leader, self.n_expected = True, None, 0

    def leave(self) -> None:
        """Reset the place to that of a waiting sequence: no slot, no leader."""
        self.slot, self.leader, self.is_placed, self.n_expected = None, None, False, 0
