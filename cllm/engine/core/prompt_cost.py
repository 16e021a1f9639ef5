"""PromptCost: how many rows of prompts are best computed together, learned from ticks of prompts only.

Prompts in one decode share its fixed cost, and wait for each other.  From 64 rows on, llama.cpp's
attention on a CPU works in tiles of 64 rows, and a tile visits the cells of all its rows.  For one
prompt that is cheaper than row by row.  For several prompts with mixed cells it may take twice as
long.  Pure: times come in as numbers.
"""

from __future__ import annotations

from cllm.engine.core.scheduler import ATTENTION_TILE
from cllm.engine.core.tick_cost import TickCost

# With `n_rows_together` rows, the fixed cost of a tick is at most the first share of their time.  The
# next tick of decoding sequences is at most the second.  Compared with 256 rows, 8 and 32 clients in a
# closed loop get their first token in 0.3 and 0.8 of the time.  They lose 0.02 and 0.01 of the tokens/s
# (0.6B, AVX-512).  With a DECODING_SHARE of 1/3, the last of a burst of 32 waits 1.1 times as long
# (`benchmarks.closed_loop`).
FIXED_SHARE, DECODING_SHARE = 1 / 16, 1 / 4
# Tiles are avoided if a row in a tile takes more than this times as long as a row outside of tiles.
DEAR = 1.15
# Tiles are tried again when the cells in use fall below this share of those at their last batch.  They
# are also tried after so many ticks without tiles.  Otherwise one slow batch on a busy machine would
# exclude them for ever: 64 clients in a closed loop would wait ten times as long for a first token.
FORGOTTEN_SHARE = 0.5
N_ROWS_LEAST = 16  # of fewer, the fixed cost of a tick is too large a part
N_TICKS_FORGOTTEN = 32


class PromptCost:
    """Learns from ticks without decoding sequences; one for each engine."""

    def __init__(self) -> None:
        self._cost = TickCost()
        self._row_s = 0.0  # in the last batch of less than a tile
        self._tile_row_s = 0.0  # in the last batch of several prompts with a tile or more
        self._n_cells = 0  # in use at that batch
        self._n_ticks = 0  # since that batch

    def observe(
        self, n_rows: int, n_attended: int, n_prompts: int, n_cells: int, seconds: float
    ) -> None:
        """Learn from the duration of a tick with these rows and prompts.

        Parameters
        ----------
        n_attended : int
            Cells that the rows attend to: see `cells_attended`.
        n_cells : int
            Cells in use, of all sequences.
        """
        self._cost.observe(n_rows, n_attended, seconds)
        self._n_ticks += 1
        if N_ROWS_LEAST <= n_rows < ATTENTION_TILE:
            self._row_s = seconds / n_rows
        elif n_prompts > 1:
            self._tile_row_s, self._n_cells, self._n_ticks = seconds / n_rows, n_cells, 0

    @property
    def fixed_s(self) -> float:
        """Seconds of a tick of prompts that do not depend on its rows; 0 while unknown."""
        return self._cost.coefficients[0]

    def n_rows_together(self, decode_s: float, n_cells: int) -> float:
        """Return the number of prompt rows in a tick beyond which more save little and delay each other.

        Less than a tile while the cost of a row is unknown.

        Parameters
        ----------
        decode_s : float
            Seconds of the tick of decoding sequences before the next tick of prompts.
        n_cells : int
            Cells in use.
        """
        fixed, per_row, _ = self._cost.coefficients
        if self.are_tiles_dear(n_cells) or per_row <= 0.0:
            return ATTENTION_TILE - 1
        seconds = max(fixed / FIXED_SHARE, decode_s / DECODING_SHARE)
        return max(ATTENTION_TILE, seconds / per_row)

    def are_tiles_dear(self, n_cells: int) -> bool:
        """Return True if prompts are computed faster in ticks of fewer rows than a tile."""
        is_forgotten = (
            n_cells < FORGOTTEN_SHARE * self._n_cells or self._n_ticks >= N_TICKS_FORGOTTEN
        )
        is_known = self._row_s and self._tile_row_s and not is_forgotten
        return bool(is_known) and self._tile_row_s > DEAR * self._row_s
