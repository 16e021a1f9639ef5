"""TickShares: how the time of an engine divides between the shapes of its ticks.  Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping

# Shapes that `tuning` measures: decodes of so many sequences, and prompts of so many tokens.
DECODES = {"1": 1, "2": 2, "4": 4, "8": 8, "16": 16}
PROMPTS = {"p64": 64, "p256": 256}
SHAPES = (*DECODES, *PROMPTS)
_BETWEEN = (1.5, 3, 6, 12)  # rows between two decodes
_BETWEEN_PROMPTS = 128


class TickShares:
    """Seconds of ticks by the nearest of `SHAPES`.

    Attributes
    ----------
    seconds : dict
        Seconds by shape, of ticks since the engine began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(SHAPES, 0.0)

    def observe(self, n_rows: int, seconds: float, *, has_prompts: bool) -> None:
        """Count a tick."""
        if has_prompts:
            shape = "p64" if n_rows < _BETWEEN_PROMPTS else "p256"
        else:
            shape = SHAPES[bisect(_BETWEEN, n_rows)]
        self.seconds[shape] += seconds


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each shape; equal shares if no time is known."""
    known = {shape: max(0.0, seconds.get(shape, 0.0)) for shape in SHAPES}
    total = sum(known.values())
    if not total:
        return dict.fromkeys(SHAPES, 1 / len(SHAPES))
    return {shape: part / total for shape, part in known.items()}
