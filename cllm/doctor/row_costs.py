"""Measure the time of a decode by its number of rows, one row for each sequence.

Kernels compute rows in groups whose size depends on the machine and the weight type.  Three rows may take
longer than four, and 64 twice as long as 63.  Use it from one thread only, and not from a coroutine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cllm.bindings import Batch, Context, Model
from cllm.doctor.workload import TEXT

N_ROWS_MAX = 64
N_POSITIONS = 16  # positions of every sequence when a turn begins
N_TURNS, QUICK_N_TURNS = 5, 3  # turns; their median is the result
STEP = 1.25  # ratio to the time of one row less from which `steps` has a number of rows
SAVING = 0.95  # ratio of times below which more rows count as cheaper


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Time of one decode by its number of rows.

    Attributes
    ----------
    seconds : mapping
        Median seconds of a decode by its number of rows, ascending from 1.
    """

    seconds: Mapping[int, float]

    def tokens_per_s(self, n_rows: int) -> float:
        """Return the tokens per second of all sequences together, in decodes of `n_rows` rows."""
        return n_rows / self.seconds[n_rows]

    @property
    def best(self) -> int:
        """The number of rows with the most tokens a second."""
        return max(self.seconds, key=self.tokens_per_s)

    @property
    def cheaper_with_more(self) -> dict[int, int]:
        """Numbers of rows for which more rows take below 0.95 of the time, each with the most such rows."""
        return {
            rows: max(cheaper)
            for rows, seconds in self.seconds.items()
            if (
                cheaper := [
                    m for m in self.seconds if m > rows and self.seconds[m] < SAVING * seconds
                ]
            )
        }

    @property
    def steps(self) -> dict[int, float]:
        """Numbers of rows from 3 on that take at least 1.25 times as long as one row less, and the ratio."""
        return {
            rows: factor
            for rows, seconds in self.seconds.items()
            # Two rows are twice the work of one.
            if rows > 2 and (factor := seconds / self.seconds[rows - 1]) >= STEP
        }

    def as_dict(self) -> dict[str, object]:
        """Return the milliseconds by number of rows and the derived properties for JSON; keys are text."""
        return {
            "decode_ms": {str(rows): 1000 * seconds for rows, seconds in self.seconds.items()},
            "best": self.best,
            "cheaper_with_more": {str(a): b for a, b in self.cheaper_with_more.items()},
            "steps": {str(rows): factor for rows, factor in self.steps.items()},
        }


def measure_rows(
    path: Path,
    *,
    n_threads: int,
    n_turns: int = N_TURNS,
    n_rows_max: int = N_ROWS_MAX,
    clock: Callable[[], float] = time.perf_counter,
    on_turn: Callable[[int], None] = lambda turn: None,
) -> RowCosts:
    """Measure decodes of 1 to `n_rows_max` rows, in turns that count up and down alternately.

    Raises the errors of `Model`, `Context` and `Context.decode`.

    Parameters
    ----------
    path : Path
        A GGUF file that can be loaded: see `preflight_check`.
    n_turns : int
        Measurements of each number of rows, at least 1; the median is the result.
    on_turn : callable
        Called with the number of each turn, from 0, before it begins.
    """
    # Each sequence grows by a token with every decode that it is in.
    n_ctx = n_rows_max * N_POSITIONS + n_rows_max * (n_rows_max + 1) // 2
    taken: dict[int, list[float]] = {rows: [] for rows in range(1, n_rows_max + 1)}
    with (
        Model(path) as model,
        Context(
            model,
            n_ctx=n_ctx,
            n_batch=max(n_rows_max, N_POSITIONS),
            n_seq_max=n_rows_max,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        ) as context,
    ):
        tokens = (model.vocab.tokenize(TEXT) * N_POSITIONS)[:N_POSITIONS]
        for turn in range(n_turns):
            on_turn(turn)
            numbers = list(taken)[:: -1 if turn % 2 else 1]
            for rows, seconds in _decodes(context, tokens, numbers, clock):
                taken[rows].append(seconds)
    return RowCosts({rows: median(seconds) for rows, seconds in taken.items()})


def _decodes(
    context: Context, tokens: Sequence[int], numbers: Sequence[int], clock: Callable[[], float]
) -> Iterator[tuple[int, float]]:
    """Yield each of these numbers of rows with the seconds of its decode; the context is emptied first."""
    batch, ends = Batch(context.n_batch), [len(tokens)] * context.n_seq_max
    for seq_id in range(context.n_seq_max):
        context.seq_rm(seq_id)
        batch.clear()
        batch.add(seq_id, list(tokens), 0, n_outputs=0)
        context.decode(batch)
    for rows in numbers:
        batch.clear()
        for seq_id in range(rows):
            batch.add(seq_id, [tokens[-1]], ends[seq_id], n_outputs=1)
            ends[seq_id] += 1
        started = clock()
        context.decode(batch)
        yield rows, clock() - started
