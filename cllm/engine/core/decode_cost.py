"""DecodeCost: what decodes take on this machine, learned from every tick.

| question | answered by | asked for |
|---|---|---|
| How long does a tick take? | `next_tick_s`, `ticks` | waiting for requests, swapping, saving prefixes |
| How many rows of prompts are worth it? | `ticks.n_prompt_rows`, `n_rows_within`, `n_rows_together`, `goes_on` | `Turns` |
| What does one more row cost? | `rows` | drafts |

Pure: times come in as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cllm.engine.core.prompt_cost import PromptCost
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.scheduler import Chunk, is_decoding
from cllm.engine.core.tick_cost import TickCost, cells_attended
from cllm.engine.core.tick_shares import TickShares

# With a larger share, prompts in parts of half the time of a decode would take more than twice as long.
MAX_FIXED_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class TickShape:
    """Size of a tick, for estimates of its duration.

    Attributes
    ----------
    n_rows : int
        Rows of the batch.
    n_attended : int
        Cells that they attend to: see `cells_attended`.
    n_chunks, n_decoding : int
        Sequences in the batch, and those of them that only decode.
    is_even : bool
        True if each sequence has as many rows as the others.
    """

    n_rows: int
    n_attended: int
    n_chunks: int
    n_decoding: int
    is_even: bool

    @classmethod
    def of(cls, chunks: list[Chunk]) -> Self:
        """Return the shape of a batch that is not decoded yet."""
        rows = [chunk.n_rows for chunk in chunks]
        return cls(
            n_rows=sum(rows),
            n_attended=cells_attended(chunks),
            n_chunks=len(chunks),
            n_decoding=sum(map(is_decoding, chunks)),
            is_even=len(set(rows)) == 1,
        )

    @property
    def is_decoding_only(self) -> bool:
        """True if no sequence computes its prompt."""
        return self.n_decoding == self.n_chunks


class DecodeCost:
    """Learns from the ticks of one engine.

    Parameters
    ----------
    rows : RowCost
        What is known of decodes without prompts.
    shares : TickShares
        Counts the seconds of ticks by shape.
    is_unified : bool
        True if one decode computes sequences with unequal numbers of rows together: not the
        per-sequence layout.

    Attributes
    ----------
    ticks : TickCost
    rows : RowCost
    prompts : PromptCost
    """

    def __init__(self, rows: RowCost, shares: TickShares, *, is_unified: bool) -> None:
        self.ticks: TickCost = TickCost()
        self._shares = shares
        self.rows = rows
        self.prompts: PromptCost = PromptCost()
        self._is_unified = is_unified
        self._decoding_tick_s = 0.0  # the last tick that only decoded
        self._prompts_tick_s = 0.0  # the last tick with prompts
        self._prompts_turn_s = 0.0  # all ticks with prompts since the last one that only decoded

    def observe(self, tick: TickShape, n_held: int, *, total_s: float, planned_s: float) -> None:
        """Learn from a tick.

        Parameters
        ----------
        n_held : int
            Cells in use, of all sequences.
        total_s, planned_s : float
            Seconds of the whole tick, and of its plan.
        """
        n_rows, n_attended = tick.n_rows, tick.n_attended
        self._shares.observe(n_rows, total_s, has_prompts=not tick.is_decoding_only)
        if tick.is_decoding_only:
            # Planning does not count: it may include drafting, whose cost the drafter knows.
            self.ticks.observe(n_rows, n_attended, total_s - planned_s)
            self._decoding_tick_s, self._prompts_turn_s = total_s, 0.0
            if tick.is_even or self._is_unified:
                self.rows.observe(n_rows, total_s - planned_s)
            return
        self.ticks.observe(n_rows, n_attended, total_s, has_prompts=True)
        self._prompts_tick_s = total_s
        self._prompts_turn_s += total_s
        if not tick.n_decoding:
            self.prompts.observe(n_rows, n_attended, tick.n_chunks, n_held, total_s)

    # --- How long ----------------------------------------------------------------------------
    def next_tick_s(self, n_decoding: int, n_prompts: int, n_sets: int) -> float:
        """Return the expected seconds until all these sequences have had a turn; 0 while unknown.

        That is a tick with prompts, if there are any, and a decoding tick for each set of adapters.

        Parameters
        ----------
        n_sets : int
            Number of sets of adapters of the decoding sequences.
        """
        seconds = self._prompts_tick_s if n_prompts else 0.0
        if n_decoding and self.rows.table:
            seconds += n_sets * self.rows.measured(-(-n_decoding // n_sets))
        return seconds

    # --- How many rows of prompts ------------------------------------------------------------
    def goes_on(self, n_held: int) -> bool:
        """True if another tick of prompts may follow before the next one that decodes.

        With many clients, one short prompt between two tokens of the streams is too few.
        """
        turn_s = self._prompts_turn_s + self._prompts_tick_s
        return turn_s <= self._decoding_tick_s and self.prompts.are_tiles_dear(n_held)

    @property
    def are_rows_dear(self) -> bool:
        """True if a tick that decodes takes most of its time for its rows: prompts may be computed in small parts."""
        return self.prompts.fixed_s <= MAX_FIXED_SHARE * self._decoding_tick_s

    def n_rows_within(self, share: float, n_computed: int) -> int:
        """Return the number of rows of a prompt within a share of the last tick that only decoded; at least 1.

        Parameters
        ----------
        share : float
        n_computed : int
            Number of computed tokens of the prompt.
        """
        seconds = share * self._decoding_tick_s
        return self.ticks.n_prompt_rows((), n_computed, seconds, is_gradual=False)

    def n_rows_together(self, n_held: int) -> float:
        """Return the number of prompt rows in a tick beyond which more rows save little."""
        return self.prompts.n_rows_together(self._decoding_tick_s, n_held)
