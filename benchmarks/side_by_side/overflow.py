"""e: requests that together need several times the KV cache, though each of them fits."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.side_by_side.http_load import (
    Outcome,
    ask_together,
    body_for,
    failures_of,
    n_tokens_of,
    total_s,
    warm_up,
)
from benchmarks.side_by_side.workload import prompt_of


@dataclass(frozen=True)
class OverflowSizes:
    """Number and shape of the requests, and how many times the KV cache they need together."""

    n_requests: int = 24
    n_prompt: int = 128
    n_output: int = 128
    n_times: int = 3

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"{self.n_requests} requests, {self.n_times} × the KV cache"

    @property
    def n_seq_max(self) -> int:
        """Number of sequences: one for each request, so that only cells are scarce."""
        return self.n_requests

    @property
    def n_ctx(self) -> int:
        """Context that the requests need, divided by the overload."""
        return self.n_requests * (self.n_prompt + self.n_output) // self.n_times


FULL = (OverflowSizes(),)
QUICK = (OverflowSizes(n_requests=12),)


async def measure(port: int, peer: str, sizes: OverflowSizes, seed: str = "") -> Outcome:
    """Measure how many of the requests get all their tokens.

    Parameters
    ----------
    seed : str
        Must differ for each call to the same server, so that its cache has no prompt.
    """
    seed = f"{seed} overflow"
    prompts = [prompt_of(f"{seed} {i}", sizes.n_prompt) for i in range(sizes.n_requests)]
    await warm_up(port, peer, seed)
    answers = await ask_together(port, [body_for(peer, p, sizes.n_output) for p in prompts])
    for answer in answers:
        if answer.is_complete and (n := n_tokens_of(answer, sizes.n_output)) < sizes.n_output:
            answer.failure = f"ended after {n} tokens, by {answer.finish_reason}"
    n_finished = sum(a.is_complete for a in answers)
    metrics = {
        "finished_share": n_finished / sizes.n_requests,
        "n_failed": sizes.n_requests - n_finished,
    }
    if n_finished == sizes.n_requests:  # with failed requests the time would be too short
        metrics["total_s"] = total_s(answers)
    return Outcome(metrics, failures_of(answers))
