"""Cost of a tick, fitted while the engine runs: fixed + per row + per KV cell that a row attends to.

The fit turns `target_itl_ms` into a number of prompt rows: as many as keep the tick, and so the gap
between two tokens of a decoding stream, at the target.  Pure: times come in as numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from cllm.engine.core.gap_budget import MAX_AIM, MIN_SHARE
from cllm.engine.core.scheduler import Chunk

# Older ticks count for less: the fit describes the shapes that are decoded now.  Ticks with prompts and
# ticks without age apart: many ticks of the same few rows say nothing about the cost of a row, and their
# scatter would decide it.
FORGETTING, FORGETTING_OTHERS = 0.97, 0.999
N_REMEMBERED = 512  # the weight of older ones is below a millionth
N_LATEST = 15
# In these units the three coefficients are of similar size.
ROWS, CELLS = 100.0, 100_000.0
# Kernels change with the number of rows, so a fit says little about batches much larger than any
# it has seen lately: grow towards them.
FIRST_PROMPT_ROWS = 32
MAX_GROWTH = 2.0


class _Moments:
    """Sums of the features of ticks, and of their products; older ticks count for less."""

    def __init__(self) -> None:
        self.products = [[0.0] * 3 for _ in range(3)]
        self.sums = [0.0] * 3

    def age(self, factor: float, features: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        """Count the ticks so far for less, and add one with these features."""
        for i, feature in enumerate(features):
            row = self.products[i]
            self.sums[i] = factor * self.sums[i] + feature
            for j in range(3):
                row[j] = factor * row[j] + feature * features[j]


def _solution(
    matrix: Sequence[Sequence[float]], vector: Sequence[float], kept: Sequence[int]
) -> list[float]:
    """Return the unknowns of the `kept` equations of a positive definite system, the others being 0.

    Gaussian elimination: with numpy, all of the fit takes 115 µs instead of 45.
    """
    rows = [[*(matrix[i][j] for j in kept), vector[i]] for i in kept]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, len(row)):
                row[j] -= factor * pivot[j]
    found = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, len(rows)))
        found[i] = (rows[i][-1] - known) / rows[i][i]
    return found


class TickCost:
    """Least-squares fit over the ticks so far; the error of a tick is relative to its time.

    Attributes
    ----------
    latest : deque
        Rows, cells and seconds of the latest ticks; `ThreadTuner` reads and clears it.
    """

    def __init__(self) -> None:
        self._of_decoding, self._of_prompts = _Moments(), _Moments()
        self._fit = [0.0] * 3
        self._n_rows_max = 0.0
        self._n_rows_ever = 0
        # Evaluated on demand: most ticks need no value.
        self._unseen: deque[tuple[int, int, float, bool]] = deque(maxlen=N_REMEMBERED)
        self.latest: deque[tuple[int, int, float]] = deque(maxlen=N_LATEST)

    def observe(
        self, n_rows: int, n_cells: int, seconds: float, *, has_prompts: bool = False
    ) -> None:
        """Learn from the duration of a tick with these rows and attended cells."""
        if seconds > 0.0:
            self._unseen.append((n_rows, n_cells, seconds, has_prompts))
            self.latest.append((n_rows, n_cells, seconds))

    def _add(self, n_rows: int, n_cells: int, seconds: float, has_prompts: bool) -> None:
        own, others = self._of_decoding, self._of_prompts
        if has_prompts:
            own, others = others, own
        # Divided by the time itself: a short tick says as much about the fit as a long one.
        own.age(FORGETTING, (1.0 / seconds, n_rows / ROWS / seconds, n_cells / CELLS / seconds))
        others.age(FORGETTING_OTHERS)
        self._n_rows_max = max(FORGETTING * self._n_rows_max, n_rows)
        self._n_rows_ever = max(self._n_rows_ever, n_rows)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Fixed seconds of a tick, and those of each row and of each cell attended to; never negative."""
        if self._unseen:
            while self._unseen:
                self._add(*self._unseen.popleft())
            of_decoding, of_prompts = self._of_decoding, self._of_prompts
            moments = [
                [a + b for a, b in zip(*rows, strict=True)]
                for rows in zip(of_decoding.products, of_prompts.products, strict=True)
            ]
            # A coefficient that the latest ticks do not determine keeps its value.
            ridge = 1e-6 * sum(moments[i][i] for i in range(3))
            sums = [0.0] * 3
            for i in range(3):
                moments[i][i] += ridge
                sums[i] = of_decoding.sums[i] + of_prompts.sums[i] + ridge * self._fit[i]
            kept = [0, 1, 2]
            while True:
                solution = _solution(moments, sums, kept)
                if min(solution) >= 0.0:
                    break
                del kept[solution.index(min(solution))]
            self._fit = [0.0] * 3
            for i, value in zip(kept, solution, strict=True):
                self._fit[i] = value
        fixed, per_row, per_cell = self._fit
        return fixed, per_row / ROWS, per_cell / CELLS

    def seconds(self, n_rows: float, n_cells: float) -> float:
        """Return the expected seconds of a tick with these rows and attended cells."""
        fixed, per_row, per_cell = self.coefficients
        return fixed + per_row * n_rows + per_cell * n_cells

    def recompute_s(self, n_tokens: int) -> float:
        """Return the seconds that computing the first `n_tokens` of a sequence is expected to add to some ticks."""
        _, per_row, per_cell = self.coefficients
        return per_row * n_tokens + per_cell * n_tokens * n_tokens / 2

    def known_recompute_s(self, n_tokens: int) -> float:
        """Return the same as `recompute_s`; 0 unless ticks of about 32 rows or more were measured lately."""
        seconds = self.recompute_s(n_tokens)
        return seconds if self._n_rows_max >= FIRST_PROMPT_ROWS else 0.0

    def n_prompt_rows(
        self,
        decoding: Iterable[int],
        n_computed: int,
        target_s: float,
        *,
        aim: float = MAX_AIM,
        is_apart: bool = False,
        is_gradual: bool = True,
    ) -> int:
        """Return the number of prompt rows that keep a tick at `aim * target_s`; at least 1.

        Parameters
        ----------
        decoding : iterable of int
            The cells that each decoding sequence attends to.
        n_computed : int
            Number of computed tokens of the prompt: its rows attend to these and to each other.
        target_s : float
        aim : float
            Gaps scatter by some percent: with their median a little above the target, nearly all stay below 1.2
            times the target, and the prompt gets what would be left unused.
        is_apart : bool
            True: the prompt rows need a decode of their own, as rows of a media chunk do.
        is_gradual : bool
            True: at most some times as many rows as lately.  False: as ever.
        """
        cells = list(decoding)
        fixed, per_row, per_cell = self.coefficients
        left = aim * target_s - self.seconds(len(cells), sum(cells)) - (fixed if is_apart else 0.0)
        left = max(left, MIN_SHARE * target_s)
        # left = per_row·m + per_cell·(n_computed·m + m²/2), solved for m.
        linear, quadratic = per_row + per_cell * n_computed, per_cell / 2
        # In the form without a difference: per_cell may be next to nothing.
        divisor = linear + math.sqrt(linear**2 + 4 * quadratic * left)
        n_rows = 2 * left / divisor if divisor > 0.0 else math.inf
        n_seen = self._n_rows_max if is_gradual else self._n_rows_ever
        limit = max(FIRST_PROMPT_ROWS, MAX_GROWTH * n_seen)
        return max(1, int(min(n_rows, limit)))


def cells_attended(chunks: Iterable[Chunk]) -> int:
    """Return the sum, over all rows, of the cells that a row attends to: those before it and its own."""
    return sum(c.n_rows * c.sequence.n_computed + c.n_rows * (c.n_rows + 1) // 2 for c in chunks)
