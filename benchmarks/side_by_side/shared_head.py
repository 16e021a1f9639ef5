"""c: requests at once that share a long head, as the users of one system prompt do."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.side_by_side.http_load import (
    Outcome,
    ask_together,
    body_for,
    failures_of,
    in_ms,
    total_s,
    ttfts_s,
    warm_up,
)
from benchmarks.side_by_side.workload import cells_for, prompt_of


@dataclass(frozen=True)
class HeadSizes:
    """Number of requests, and how much of each is shared."""

    n_requests: int
    n_head: int = 400
    n_own: int = 8
    n_output: int = 32

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"{self.n_requests} requests, a head of {self.n_head} tokens"

    @property
    def n_seq_max(self) -> int:
        """Number of sequences with which no request waits."""
        return self.n_requests

    @property
    def n_ctx(self) -> int:
        """Context in which all requests fit at once, even if the head is stored for each."""
        return cells_for(self.n_requests, self.n_head + self.n_own + self.n_output)


FULL = (HeadSizes(8), HeadSizes(32))
QUICK = (HeadSizes(8),)


async def measure(port: int, peer: str, sizes: HeadSizes, seed: str = "") -> Outcome:
    """Measure the time from the first request to the last end, with a head that is new to the server.

    Parameters
    ----------
    seed : str
        Must differ for each call to the same server, so that the head differs too.
    """
    seed = f"{seed} head {sizes.n_requests}"
    head = prompt_of(seed, sizes.n_head)
    tails = [prompt_of(f"{seed} {i}", sizes.n_own) for i in range(sizes.n_requests)]
    await warm_up(port, peer, seed)
    answers = await ask_together(
        port, [body_for(peer, head + tail, sizes.n_output) for tail in tails]
    )
    metrics = {
        "total_s": total_s(answers),
        **in_ms("ttft", ttfts_s(answers)),
        "n_failed": sum(not a.is_complete for a in answers),
    }
    return Outcome(metrics, failures_of(answers))
