"""b: a closed loop of clients, each of which asks again as soon as it is answered."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.side_by_side.http_client import Answer, Connection
from benchmarks.side_by_side.http_load import (
    Outcome,
    body_for,
    failures_of,
    in_ms,
    n_tokens_of,
    run_clients,
    total_s,
    ttfts_s,
    warm_up,
)
from benchmarks.side_by_side.workload import ClosedLoopSizes, cells_for, prompt_of


@dataclass(frozen=True)
class LoopSizes(ClosedLoopSizes):
    """Number of clients, and the requests that each sends."""

    n_prompt: int = 64
    n_output: int = 32

    @property
    def n_ctx(self) -> int:
        """Context in which all requests fit at once."""
        return cells_for(self.n_clients, self.n_prompt + self.n_output)


# All clients send their first requests at once: with few requests each, the burst would dominate.
FULL = (LoopSizes(1, 16), LoopSizes(8, 16), LoopSizes(32, 16))
QUICK = (LoopSizes(1, 4), LoopSizes(8, 2), LoopSizes(32, 1))


async def measure(port: int, peer: str, sizes: LoopSizes, seed: str = "") -> Outcome:
    """Measure throughput and latencies as the clients see them.

    Throughput is the number of tokens divided by the seconds from the first send to the last end.  The
    warm-up is excluded.  The burst at the beginning and the last, lone answers are included.

    Parameters
    ----------
    seed : str
        Must differ for each call to the same server, so that its cache has no prompt.
    """
    seed = f"{seed} loop {sizes.n_clients}"
    answers: list[Answer] = []

    async def client(number: int, connection: Connection) -> None:
        for index in range(sizes.n_each):
            prompt = prompt_of(f"{seed} {number} {index}", sizes.n_prompt)
            answers.append(await connection.stream(body_for(peer, prompt, sizes.n_output)))

    await warm_up(port, peer, seed)
    await run_clients(port, sizes.n_clients, client)
    done = [a for a in answers if a.is_complete]
    n_tokens = sum(n_tokens_of(a, sizes.n_output) for a in done)
    metrics = {
        "tokens_per_s": n_tokens / total_s(answers),
        **in_ms("ttft", ttfts_s(done)),
        **in_ms("itl", [gap for a in done for gap in a.gaps_s()]),
        "n_failed": len(answers) - len(done),
    }
    if n_events := sum(a.n_events for a in done):
        metrics["tokens_per_event"] = n_tokens / n_events
    return Outcome(metrics, failures_of(answers))
