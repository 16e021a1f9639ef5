"""f: one short request after another on one server, to see whether later ones take longer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.side_by_side.http_load import (
    Outcome,
    body_for,
    connected,
    failures_of,
    in_ms,
)
from benchmarks.side_by_side.workload import prompt_of


@dataclass(frozen=True)
class SequentialSizes:
    """Number and shape of the requests.

    Attributes
    ----------
    n_warm_up : int
        Requests before the first that counts.
    n_ctx, n_seq_max : int
        Much less than all prompts need together, so that old prefixes must be evicted.
    """

    n_output: int
    n_requests: int = 1000
    n_prompt: int = 16
    n_warm_up: int = 20
    n_ctx: int = 2048
    n_seq_max: int = 4

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"{self.n_requests} requests, max_tokens {self.n_output}"


FULL = (SequentialSizes(1), SequentialSizes(16))
QUICK = (SequentialSizes(1, n_requests=200), SequentialSizes(16, n_requests=100))


async def measure(port: int, peer: str, sizes: SequentialSizes, seed: str = "") -> Outcome:
    """Measure the median duration of the last tenth of the requests, divided by that of the first tenth.

    Parameters
    ----------
    seed : str
        Must differ for each call to the same server, so that its cache has no prompt.
    """
    seed = f"{seed} sequential {sizes.n_output}"
    answers = []
    async with connected(port, 1) as (connection,):
        for index in range(-sizes.n_warm_up, sizes.n_requests):
            prompt = prompt_of(f"{seed} {index}", sizes.n_prompt)
            answer = await connection.stream(body_for(peer, prompt, sizes.n_output))
            if index >= 0:
                answers.append(answer)
    done = [a.took_s for a in answers if a.is_complete]
    metrics = {
        "total_s": answers[-1].ended_at - answers[0].sent_at,
        **in_ms("request", done),
        "n_failed": len(answers) - len(done),
    }
    if n_tenth := len(done) // 10:
        metrics["last_over_first"] = median(done[-n_tenth:]) / median(done[:n_tenth])
    return Outcome(metrics, failures_of(answers))
