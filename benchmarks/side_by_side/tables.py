"""The records as tables: one for each model and metric of a measurement, own peer first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.side_by_side.records import (
    BATCHED_BENCH,
    CLLM,
    CLLM_EMBEDDED,
    CLLM_PROCESS,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LIMITS,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    PYTHON_SERVER,
    XLLAMACPP,
    Record,
    Spread,
    ratios,
    spread,
    values_of,
)

# Peers that are measured in the same way.  The first of a family is compared with the others.
FAMILIES = (
    (CLLM, CLLM_PROCESS, BATCHED_BENCH, LLAMA_CPP_PYTHON, XLLAMACPP),
    (CLLM_SERVE, CLLM_SERVE_THREAD, CLLM_EMBEDDED, LLAMA_SERVER, PYTHON_SERVER, *LIMITS),
)
# Metrics that are shown without ratios of the peers.
COUNTS = {"n_failed", "tokens_per_event"}
METRICS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "TTFT p99, ms",
    "first_turn_ttft_p50_ms": "TTFT p50 of the first turn, ms",
    "first_turn_ttft_p99_ms": "TTFT p99 of the first turn, ms",
    "later_turns_ttft_p50_ms": "TTFT p50 of turns 2 to 4, ms",
    "later_turns_ttft_p99_ms": "TTFT p99 of turns 2 to 4, ms",
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "itl_max_ms": "longest ITL, ms",
    "itl_alone_p50_ms": "ITL p50 before the prompt, ms",
    "itl_alone_p99_ms": "ITL p99 before the prompt, ms",
    "request_p50_ms": "request p50, ms",
    "request_p99_ms": "request p99, ms",
    "total_s": "total time, s",
    "prefill_s": "the prompt's first token, s",
    "finished_share": "share finished",
    "last_over_first": "last tenth ÷ first tenth",
    "first_ttft_ms": "TTFT of the first, ms",
    "later_ttft_ms": "TTFT p50 of the others, ms",
    "first_over_later": "TTFT of the first ÷ of the others",
    "outside_us": "outside llama_decode, µs a token",
    "handovers_per_tick": "GIL hand-overs a tick",
    "kept": "share of tokens/s kept",
    "rss_mib": "RSS, MiB",
    "rss_above_mib": "RSS above model and cache, MiB",
    "import_s": "import, s",
    "cold_ttft_s": "first token from a cold start, s",
    "n_failed": "failed",
    "tokens_per_event": "tokens an event",
}


@dataclass(frozen=True)
class Table:
    """One metric of all peers of a family.

    Attributes
    ----------
    peers : tuple of str
        Peers that have records, in the order of the family.
    values : mapping
        The metric by turn, by (case, peer).
    """

    model: str
    metric: str
    cases: tuple[str, ...]
    peers: tuple[str, ...]
    values: Mapping[tuple[str, str], Mapping[int, float]]

    @property
    def title(self) -> str:
        """The metric in words, with its unit."""
        return METRICS.get(self.metric, self.metric.replace("_", " "))

    @property
    def rivals(self) -> tuple[str, ...]:
        """The peers that cllm is compared with."""
        has_ours = any(self.peers[0] == family[0] for family in FAMILIES)
        return self.peers[1:] if has_ours and self.metric not in COUNTS else ()

    def spread(self, case: str, peer: str) -> Spread | None:
        """Return the spread of one cell of the table; None if it was not measured."""
        return spread(self.values[case, peer].values())

    def ratio(self, case: str, rival: str) -> Spread | None:
        """Return the spread of the first peer's metric divided by a rival's in the same turn."""
        return spread(ratios(self.values[case, self.peers[0]], self.values[case, rival]))


def tables(records: Sequence[Record], measurement: str) -> list[Table]:
    """Return the tables of one measurement; the column of failures is left out if there are none."""
    mine = [r for r in records if r.measurement == measurement]
    found = []
    for model in dict.fromkeys(r.model for r in mine):
        for family in FAMILIES:
            rows = [r for r in mine if r.model == model and r.peer in family]
            for metric in dict.fromkeys(name for r in rows for name in r.metrics):
                having = [r for r in rows if metric in r.metrics]
                if metric == "n_failed" and not any(r.metrics[metric] for r in having):
                    continue
                peers = tuple(p for p in family if any(r.peer == p for r in having))
                cases = tuple(dict.fromkeys(r.case for r in having))
                values = {
                    (c, p): values_of(having, measurement, model, c, p, metric)
                    for c in cases
                    for p in peers
                }
                found.append(Table(model, metric, cases, peers, values))
    return found
