"""LoadSummary: the summary of many requests, and functions that format tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cllm import FinishReason


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Summary of many requests; `str` of it is a table.

    Percentiles are by nearest rank, and None without a value.

    Attributes
    ----------
    n_finished : mapping
        Number of requests by their `FinishReason`, for every reason.
    n_refused, n_errors : int
        Requests without a finish reason, and those that have one and raised an error.
    seconds : float
        Time from the first call to the last end.
    ttft_p50_s, ttft_p99_s : float or None
        Seconds from the call to the first token.
    itl_p50_s, itl_max_p99_s : float or None
        Seconds between tokens, as the engine measured them: the median of the requests' medians, and the
        99th percentile of their longest gaps.
    total_p50_s, total_p99_s : float or None
        Seconds from the call to the end, for requests that ended with `stop` or `length`.
    cached_share : float
        Share of prompt tokens that were taken from a shared prefix and not computed, 0 to 1.
    """

    n_requests: int
    n_finished: Mapping[FinishReason, int]
    n_refused: int
    n_errors: int
    n_output_tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_max_p99_s: float | None
    total_p50_s: float | None
    total_p99_s: float | None
    cached_share: float

    def __str__(self) -> str:
        rows = [
            ("requests", str(self.n_requests)),
            *((reason.value, str(n)) for reason, n in self.n_finished.items() if n),
            ("refused", str(self.n_refused)),
            ("output tokens", str(self.n_output_tokens)),
            ("seconds", f"{self.seconds:.2f}"),
            ("tokens/s", f"{self.tokens_per_s:.0f}"),
            ("first token, p50 ms", ms(self.ttft_p50_s)),
            ("first token, p99 ms", ms(self.ttft_p99_s)),
            ("between tokens, p50 ms", ms(self.itl_p50_s)),
            ("longest gap, p99 ms", ms(self.itl_max_p99_s)),
            ("whole answer, p50 ms", ms(self.total_p50_s)),
            ("whole answer, p99 ms", ms(self.total_p99_s)),
            ("prompt tokens shared", f"{self.cached_share:.0%}"),
        ]
        return aligned(rows, left=1)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the percentile of values, by nearest rank; None without values."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if values else None


def ms(seconds: float | None) -> str:
    """Return seconds as text in milliseconds; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def aligned(rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """Return rows as text: `left` columns to the left, the others to the right but for the last of several."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = (
        "  ".join(
            cell.ljust(width) if i < left or i == last > left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)
