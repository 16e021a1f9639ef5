"""Simulate clients in a closed loop, with the real engine core, a virtual clock and a table of costs.

    python -m benchmarks.closed_loop [--costs chat] [--clients 8 32] [--each 16] [--turnaround-ms 8]

The simulation estimates the gain of a policy before it is measured.  The program prints the time to the first
token, the gaps and the tokens/s, with and without `Linger`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cllm.engine.core.linger import Linger
from cllm.engine.core.scheduler import ATTENTION_TILE
from cllm.testing.fake_decoder import FakeRun
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

FIRST_GAP_S = 0.0015  # between the first requests of two clients
SCATTER = 0.3  # a turnaround is at most this share longer, at random


@dataclass(frozen=True)
class Costs:
    """Durations of ticks, and the number of tokens of a request.

    Attributes
    ----------
    rows_ms : mapping
        Duration of a tick that only decodes, by its number of rows, as `cllm doctor --rows` measures it.
    prompt_row_ms, cell_ms, output_row_ms : float
        Duration of a prompt's row, of each cell that such a row attends to, and of a row that is sampled.
    n_history : int
        Tokens of each client that are in the cache from earlier requests.
    passed_cell_ms, tile_cell_ms : float
        Duration of each row for each cell in use.  `tile_cell_ms` is that of a tick with at least
        `ATTENTION_TILE` rows of several sequences, `passed_cell_ms` that of other ticks.
    """

    rows_ms: Mapping[int, float]
    prompt_row_ms: float
    cell_ms: float
    output_row_ms: float
    n_prompt: int
    n_output: int
    n_history: int = 0
    passed_cell_ms: float = 0.0
    tile_cell_ms: float = 0.0

    def tick_s(self, runs: Sequence[FakeRun], n_cells: int) -> float:
        """Return the expected duration of a tick."""
        n_rows = sum(len(run.tokens) for run in runs)
        is_tiled = n_rows >= ATTENTION_TILE and len(runs) > 1
        cell_ms = self.tile_cell_ms if is_tiled else self.passed_cell_ms
        return (
            self._without_others_ms(runs, n_rows, n_cells) + n_rows * n_cells * cell_ms
        ) / 1000.0

    def _without_others_ms(self, runs: Sequence[FakeRun], n_rows: int, n_cells: int) -> float:
        if n_rows == len(runs):
            known = self.rows_ms
            ms = float(np.interp(n_rows, list(known), list(known.values())))
            return ms * max(1.0, n_rows / max(known))
        n_outputs = sum(run.n_outputs for run in runs)
        n_attended = -(-max(n_cells, 256) // 256) * 256
        row_ms = self.prompt_row_ms + n_attended * self.cell_ms
        return max(self.rows_ms[1], n_rows * row_ms + n_outputs * self.output_row_ms)


# A 0.6B model, Q4_K_M, on two cores with AVX-512; 64 tokens in, 32 out.
LARGE = Costs(
    {1: 30, 2: 45, 3: 52, 4: 57, 5: 75, 6: 85, 7: 95, 8: 100, 16: 145, 32: 290},
    prompt_row_ms=3.4, cell_ms=0.45e-3, output_row_ms=4.5, n_prompt=64, n_output=32,
)  # fmt: skip
# SmolLM2-135M, Q4_1, on two cores with AVX2: a short question, and what a chat answers to it.
CHAT = Costs(
    {1: 11, 2: 20, 4: 33, 8: 50, 12: 63, 16: 95, 24: 145, 32: 190, 48: 260, 63: 310},
    prompt_row_ms=4.2, cell_ms=0.0, output_row_ms=2.0, n_prompt=25, n_output=48,
    n_history=200, passed_cell_ms=0.25e-3, tile_cell_ms=1e-3,
)  # fmt: skip
# Two layers of a 0.6B model, F16, on two cores with AVX2; 64 tokens in, 32 out.
SMALL = Costs(
    {1: 2, 2: 2.3, 4: 3, 8: 5.5, 16: 11, 32: 22, 48: 32, 63: 40},
    prompt_row_ms=0.07, cell_ms=0.0, output_row_ms=0.05, n_prompt=64, n_output=32,
)  # fmt: skip
COSTS = {"large": LARGE, "chat": CHAT, "small": SMALL}


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation: seconds, except for `tokens_per_s`."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:5.1f} tokens/s, TTFT p50 {self.ttft_p50:.2f} s, "
            f"p99 {self.ttft_p99:.2f} s, ITL p99 {self.itl_p99:.2f} s"
        )


class ClosedLoop:
    """Clients that each send their next request when the last one has ended.

    Parameters
    ----------
    turnaround_s : float
        Seconds from the end of a request to the client's next one, and up to `SCATTER` more at random.
    lingers : bool
        True if the engine waits for the next requests of clients.
    was_disturbed : bool
        True if the engine has once observed twice the real duration of a batch of several prompts.
    """

    def __init__(
        self,
        n_clients: int,
        n_each: int,
        *,
        turnaround_s: float,
        lingers: bool,
        costs: Costs = LARGE,
        was_disturbed: bool = False,
        seed: int = 0,
    ) -> None:
        self._random, self._costs = random.Random(seed), costs
        self._n_clients, self._n_each, self._turnaround_s = n_clients, n_each, turnaround_s
        self._linger = Linger() if lingers else None
        self._sim = Simulator(
            n_ctx=-(-n_clients * (costs.n_prompt + costs.n_output) // 256) * 256,
            n_seq_max=n_clients,
            n_batch=512,
            latency_s=lambda runs: costs.tick_s(runs, self._n_cells),
            is_checked=False,
            n_prefill_chunk=128,
            answer=endless,
            prefix_cache_bytes=0,
            separates_prompts=True,
        )
        if was_disturbed:
            row_s = costs.prompt_row_ms / 1000.0
            for n_rows, n_prompts, seconds in ((32, 1, row_s), (256, 4, 2 * row_s)):
                self._sim.core.cost.prompts.observe(n_rows, 0, n_prompts, 0, n_rows * seconds)
        # Time of the next request of a client, number of the client, and number of its earlier requests.
        self._arrivals = [(i * FIRST_GAP_S, i, 0) for i in range(n_clients)]
        self._owners: dict[str, tuple[int, int]] = {}
        self._heard_at: dict[str, float] = {}
        self._ttfts: list[float] = []
        self._gaps: list[float] = []

    @property
    def _n_cells(self) -> int:
        return self._sim.kv_cache.n_held + self._n_clients * self._costs.n_history

    def run(self) -> Outcome:
        """Run until every client has its answers."""
        sim = self._sim
        sim.now = 0.0
        while self._arrivals or sim.core.has_work:
            if not sim.core.has_work:
                sim.now = max(sim.now, self._arrivals[0][0])
            self._deliver()
            n_ended = self._tick()
            if n_ended and self._linger is not None and sim.core.may_wait:
                self._wait(self._linger, n_ended)
        n_tokens = sum(len(tokens) for tokens in sim.tokens.values())
        ttfts, gaps = sorted(self._ttfts), sorted(self._gaps)
        return Outcome(
            n_tokens / sim.now,
            statistics.median(ttfts),
            ttfts[int(0.99 * (len(ttfts) - 1))],
            gaps[int(0.99 * (len(gaps) - 1))],
        )

    def _deliver(self) -> None:
        sim = self._sim
        while self._arrivals and self._arrivals[0][0] <= sim.now + 1e-12:
            at, client, n_had = heapq.heappop(self._arrivals)
            prompt = [self._random.randrange(3, 200) for _ in range(self._costs.n_prompt)]
            request_id = sim.submit(prompt, max_tokens=self._costs.n_output, ignore_eos=True)
            self._owners[request_id] = client, n_had
            self._heard_at[request_id] = at
            if self._linger is not None:
                self._linger.on_arrival(at)
        if self._linger is not None:
            self._linger.settle(sim.now)

    def _tick(self) -> int:
        """Run a tick, and return the number of requests that ended."""
        sim, n_ended, began = self._sim, 0, self._sim.now
        heard = sim.tick()
        if self._linger is not None:
            self._linger.on_tick(sim.now - began)
        for request_id in heard:
            is_first = len(sim.tokens[request_id]) == 1
            gap_s = sim.now - self._heard_at[request_id]
            (self._ttfts if is_first else self._gaps).append(gap_s)
            self._heard_at[request_id] = sim.now
            if request_id not in sim.finished:
                continue
            n_ended += 1
            client, n_had = self._owners[request_id]
            if n_had + 1 < self._n_each:
                back_s = self._turnaround_s * (1 + SCATTER * self._random.random())
                heapq.heappush(self._arrivals, (sim.now + back_s, client, n_had + 1))
        return n_ended

    def _wait(self, linger: Linger, n_ended: int) -> None:
        sim = self._sim
        linger.on_ends(n_ended, sim.now)
        wait_s = linger.seconds(n_ended, len(sim.core.queue.running), sim.core.next_tick_s())
        if not wait_s:
            return
        back = [at for at, _, _ in sorted(self._arrivals) if at <= sim.now + wait_s][:n_ended]
        until = back[-1] if len(back) == n_ended else sim.now + wait_s
        linger.on_wait(until - sim.now)
        sim.now = until


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the results for each number of clients, with and without `Linger`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.closed_loop")
    parser.add_argument("--costs", choices=COSTS, default="large")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--turnaround-ms", type=float, default=8.0)
    options = parser.parse_args(arguments)
    for n_clients, lingers in itertools.product(options.clients, (False, True)):
        loop = ClosedLoop(
            n_clients,
            options.each,
            turnaround_s=options.turnaround_ms / 1000.0,
            lingers=lingers,
            costs=COSTS[options.costs],
        )
        print(f"{n_clients} clients, {'lingering' if lingers else 'at once'}: {loop.run()}")


if __name__ == "__main__":
    main()
