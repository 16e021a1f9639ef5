"""d: a long prompt joins decoding streams, which pause while it is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.side_by_side.http_client import Answer
from benchmarks.side_by_side.http_load import Outcome, body_for, connected, failures_of, in_ms
from benchmarks.side_by_side.workload import cells_for, prompt_of

POLL_S = 0.005


@dataclass(frozen=True)
class JoiningSizes:
    """The streams, and the prompt that joins them.

    Attributes
    ----------
    n_output : int
        Tokens of a stream: enough to outlast the prompt.
    n_before : int
        Events of each stream before the prompt is sent.
    n_joining : int
        Tokens of the prompt.
    """

    n_streams: int = 4
    n_prompt: int = 64
    n_output: int = 512
    n_before: int = 32
    n_joining: int = 2000

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return f"{self.n_streams} streams, a prompt of {self.n_joining} tokens"

    @property
    def n_seq_max(self) -> int:
        """Number of sequences with which the prompt need not wait."""
        return self.n_streams + 1

    @property
    def n_ctx(self) -> int:
        """Context in which all requests fit at once."""
        n_streaming = self.n_streams * (self.n_prompt + self.n_output)
        return cells_for(1, n_streaming + self.n_joining + 1)


FULL = (JoiningSizes(),)
QUICK = FULL


async def measure(port: int, peer: str, sizes: JoiningSizes, seed: str = "") -> Outcome:
    """Measure the gaps of the streams that overlap the time from the prompt's send to its first token.

    `itl_alone_…` has the gaps before the send.  A stream that ends before the prompt's first token is a
    failure.  All streams are canceled after the measurement.

    Parameters
    ----------
    seed : str
        Must differ for each call to the same server, so that its cache has no prompt.
    """
    seed = f"{seed} joining"
    streams = [Answer() for _ in range(sizes.n_streams)]

    async def wait_for_all(is_there: Callable[[Answer], bool]) -> None:
        while not all(a.ended_at or is_there(a) for a in streams):
            await asyncio.sleep(POLL_S)

    async with connected(port, sizes.n_streams + 1) as connections, asyncio.TaskGroup() as tasks:
        running = []
        for number, answer in enumerate(streams):
            prompt = prompt_of(f"{seed} {number}", sizes.n_prompt)
            body = body_for(peer, prompt, sizes.n_output)
            running.append(tasks.create_task(connections[number].stream(body, answer)))
        await wait_for_all(lambda a: a.n_events >= sizes.n_before)
        prompt = prompt_of(f"{seed} prompt", sizes.n_joining)
        joined = await connections[-1].stream(body_for(peer, prompt, 1))
        since = joined.sent_at
        until = joined.arrivals[0] if joined.arrivals else joined.ended_at
        await wait_for_all(lambda a: a.arrivals[-1] >= until)
        for task in running:
            task.cancel()
    lasting = []
    for answer in streams:
        if answer.arrivals and answer.arrivals[-1] >= until:
            lasting.append(answer)
        else:
            answer.failure = answer.failure or "ended before the prompt was computed"
    all_begun_at = max((a.arrivals[0] for a in lasting), default=since)
    metrics: dict[str, float] = {
        **in_ms("itl", [gap for a in lasting for gap in a.gaps_s(since, until)]),
        **in_ms("itl_alone", [gap for a in lasting for gap in a.gaps_s(all_begun_at, since)]),
        "n_failed": len(streams) - len(lasting) + (not joined.is_complete),
    }
    if joined.is_complete:
        metrics["prefill_s"] = joined.ttft_s
    return Outcome(metrics, failures_of([*streams, joined]))
