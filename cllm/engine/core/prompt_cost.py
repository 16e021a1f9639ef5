"""PromptCost: how many rows of prompts are best computed together, learned from ticks of prompts only.

Together they share what any decode costs, and wait for each other.  From 64 rows on, llama.cpp's
attention on a CPU goes by tiles of 64 rows, and a tile visits the cells of all its rows: of one
prompt that is cheaper than row by row, of several whose cells lie among each other's it may take
twice as long.  Pure: times come in as numbers.
"""

from __future__ import annotations

import math

from cllm.engine.core.scheduler import ATTENTION_TILE
from cllm.engine.core.tick_cost import TickCost

# Prompts that are computed together are as many rows as make what any tick costs this share of
# theirs, and the tick of those that decode, before the next one, this much of it: 8 and 32 clients
# in a closed loop get their first token in 0.3 and 0.8 of the time that 256 rows together take,
# for 0.02 and 0.01 of the tokens/s (0.6B, AVX-512); with a third for the latter, the last of a burst of 32 waits
# 1.1 times as long (`benchmarks.closed_loop`).
FIXED_SHARE, DECODING_SHARE = 1 / 16, 1 / 4
# A row in a tile that is dearer than this beside one that is in none makes tiles not worth it.
DEAR = 1.15
# They are tried again when the cells in use are fewer than this share of those of the last time, and
# after so many ticks without them: a batch that a busy machine has made dear would keep them out for
# ever, and 64 clients in a closed loop wait for their first token ten times as long.
FORGOTTEN_SHARE = 0.5
N_TICKS_FORGOTTEN = 32


class PromptCost:
    """Learns from ticks without decoding sequences; one for each engine."""

    def __init__(self) -> None:
        self._cost = TickCost()
        self._row_s = 0.0  # of a batch that is no whole tile, when last seen
        self._tile_row_s = 0.0  # of a batch of several prompts that is one or more
        self._n_cells = 0  # in use then
        self._n_ticks = 0  # since then

    def observe(
        self, n_rows: int, n_attended: int, n_prompts: int, n_cells: int, seconds: float
    ) -> None:
        """Learn from the duration of a tick with these rows and prompts.

        Parameters
        ----------
        n_attended : int
            Cells that the rows attend to: see `cells_attended`.
        n_cells : int
            In use, of all sequences.
        """
        self._cost.observe(n_rows, n_attended, seconds)
        self._n_ticks += 1
        if n_rows < ATTENTION_TILE:
            self._row_s = seconds / n_rows
        elif n_prompts > 1:
            self._tile_row_s, self._n_cells, self._n_ticks = seconds / n_rows, n_cells, 0

    def n_rows_together(self, decode_s: float, n_cells: int) -> float:
        """Rows of prompts from which more in one tick save little, and make each other wait.

        Parameters
        ----------
        decode_s : float
            What the tick of those that decode takes, which comes before the next one of prompts.
        n_cells : int
            In use.
        """
        if self.are_tiles_dear(n_cells):
            return ATTENTION_TILE - 1
        fixed, per_row, _ = self._cost.coefficients
        if per_row <= 0.0:
            return math.inf
        seconds = max(fixed / FIXED_SHARE, decode_s / DECODING_SHARE)
        return max(ATTENTION_TILE, seconds / per_row)

    def are_tiles_dear(self, n_cells: int) -> bool:
        """Return True if prompts are computed faster in ticks of fewer rows than a tile."""
        is_forgotten = (
            n_cells < FORGOTTEN_SHARE * self._n_cells or self._n_ticks >= N_TICKS_FORGOTTEN
        )
        is_known = self._row_s and self._tile_row_s and not is_forgotten
        return bool(is_known) and self._tile_row_s > DEAR * self._row_s
