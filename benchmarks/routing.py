"""Simulate how many conversations a number of replicas can serve, for each way of routing.

    python -m benchmarks.routing [--replicas 1 2 4 8 16] [--plot docs/images/routing.png]

Each replica is cllm's own scheduler and KV cache bookkeeping (`tests.simulation.simulator`) with a virtual clock.  A
tick takes what it has been measured to take with Qwen3-0.6B (Q4_K_M) on two cores: `ROW_MS`, `PROMPT_ROW_MS`.
Conversations begin at random (Poisson), at a constant rate per replica.  Each has one of a few system
prompts, some of which are far more frequent than others.  Its turns differ in number and length, with time
to think between them.

The program prints the 50th and 95th percentile of the time to the first token for each way and number of
replicas.  It also prints the share of found tokens: see `Result.found`.  `--dies` removes a replica half-way,
and the others continue its requests.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from cllm.routing.prefix_table import Key, PrefixTable, keys_of
from cllm.testing.fake_decoder import FakeRun
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

# Milliseconds of a tick by the number of decoding rows (interpolated linearly), and of each row of a prompt.
ROW_MS = {1: 26.0, 2: 40.0, 4: 57.0, 8: 95.0, 16: 150.0, 32: 290.0}
PROMPT_ROW_MS = 3.4
N_SEQ_MAX, N_CTX, N_BATCH = 16, 16384, 512
N_SYSTEM_PROMPTS, SYSTEM_TOKENS = 24, 600
MEAN_TURNS, TURN_TOKENS, OUTPUT_TOKENS, THINK_S = 5.0, 60, 16, 20.0
DURATION_S = 300.0
WAYS = ("random", "power of two", "session hash", "prefix table")

Choose = Callable[[Sequence[Key], int, Mapping[str, int]], str]


def tick_s(n_decoding: int, n_prompt: int) -> float:
    """Return the seconds of a tick with these numbers of rows."""
    widths = [0, *ROW_MS]
    decoding = np.interp(n_decoding, widths, [0.0, *ROW_MS.values()])
    floor = ROW_MS[1] if n_prompt else 0.0
    return float(max(floor, decoding + PROMPT_ROW_MS * n_prompt)) / 1000.0


def _latency(runs: Sequence[FakeRun]) -> float:
    n_decoding = sum(len(run.tokens) == 1 for run in runs)
    return tick_s(n_decoding, sum(len(run.tokens) for run in runs if len(run.tokens) > 1))


@dataclass
class Conversation:
    """Conversation of one caller: its tokens so far, and the number of turns that are left."""

    session: int
    tokens: list[int]
    n_left: int
    n_said: int = 0  # tokens of the turns before


@dataclass
class Asked:
    """Request that has not ended; `at` is the time of its arrival in seconds."""

    conversation: Conversation
    at: float
    n_shared: int  # tokens that some earlier request has had
    has_begun: bool = False


@dataclass
class Replica:
    """A server."""

    name: str
    sim: Simulator
    asked: dict[str, Asked] = field(default_factory=dict)


@dataclass
class Result:
    """Result of one run."""

    way: str
    n_replicas: int
    ttfts: list[float]
    n_found: int = 0
    n_shared: int = 0
    n_moved: int = 0

    @property
    def found(self) -> float:
        """Share of the prompt tokens shared with earlier requests that the chosen replica had in its cache."""
        return self.n_found / max(1, self.n_shared)

    def ttft(self, share: float) -> float:
        """Return a quantile of the time to the first token, in seconds; `share` is 0 to 1."""
        return float(np.quantile(self.ttfts, share))


def chooser(way: str, seed: int) -> Choose:
    """Return the function that chooses a replica in this way."""
    drawn, table = random.Random(seed), PrefixTable()

    def at_random(_: Sequence[Key], __: int, load: Mapping[str, int]) -> str:
        return drawn.choice(sorted(load))

    def of_two(_: Sequence[Key], __: int, load: Mapping[str, int]) -> str:
        two = drawn.sample(sorted(load), min(2, len(load)))
        return min(two, key=load.__getitem__)

    def by_session(_: Sequence[Key], session: int, load: Mapping[str, int]) -> str:
        # Rendezvous hashing: if a replica is removed, only its own sessions move.
        return max(load, key=lambda name: blake2b(f"{session} {name}".encode()).digest())

    def by_prefix(keys: Sequence[Key], _: int, load: Mapping[str, int]) -> str:
        return table.choose(keys, load)

    return dict(zip(WAYS, (at_random, of_two, by_session, by_prefix), strict=True))[way]


class Cluster:
    """Replicas with a clock each, and callers; the event with the earliest time is simulated next."""

    def __init__(self, way: str, n_replicas: int, rate: float, seed: int, *, dies: bool) -> None:
        self._drawn = random.Random(seed)
        self._choose = chooser(way, seed)
        self._replicas = {f"r{i}": Replica(f"r{i}", _simulator()) for i in range(n_replicas)}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Conversation]] = []
        self._dies_at = DURATION_S / 2 if dies and n_replicas > 1 else float("inf")
        self._had: set[tuple[int, ...]] = set()
        self.result = Result(way, n_replicas, [])
        self._system = [self._text(SYSTEM_TOKENS) for _ in range(N_SYSTEM_PROMPTS)]
        weights = [1.0 / (i + 1) for i in range(N_SYSTEM_PROMPTS)]
        at = 0.0
        while (at := at + self._drawn.expovariate(rate * n_replicas)) < DURATION_S:
            (system,) = self._drawn.choices(self._system, weights)
            n_turns = 1 + int(self._drawn.expovariate(1.0 / (MEAN_TURNS - 0.5)))
            session = next(self._numbers)
            heapq.heappush(self._due, (at, session, Conversation(session, list(system), n_turns)))

    def _text(self, mean: float) -> list[int]:
        n_tokens = max(4, int(self._drawn.lognormvariate(0.0, 0.6) * mean))
        return [self._drawn.randrange(3, 200) for _ in range(n_tokens)]

    def run(self) -> Result:
        """Run until every conversation has ended."""
        while True:
            busy = [r for r in self._replicas.values() if r.sim.core.has_work]
            next_at = self._due[0][0] if self._due else float("inf")
            if busy:
                replica = min(busy, key=lambda r: r.sim.now)
                if replica.sim.now <= next_at:
                    self._tick(replica)
                    continue
            if not self._due:
                return self.result
            if next_at >= self._dies_at and busy:
                self._take_away(self._dies_at)
            at, _, conversation = heapq.heappop(self._due)
            n_shared = self._n_shared(conversation)
            conversation.tokens += self._text(TURN_TOKENS)
            self._send(Asked(conversation, at, n_shared), at)

    def _n_shared(self, conversation: Conversation) -> int:
        """Number of tokens of a conversation that some replica has computed: a whole chat, or a known system prompt."""
        if conversation.n_said:
            return conversation.n_said
        system = tuple(conversation.tokens)
        is_new = system not in self._had
        self._had.add(system)
        return 0 if is_new else len(system)

    def _send(self, asked: Asked, at: float, generated: Sequence[int] = ()) -> None:
        conversation = asked.conversation
        keys = keys_of(np.array(conversation.tokens, np.int32).tobytes())
        load = {name: len(replica.asked) for name, replica in self._replicas.items()}
        replica = self._replicas[self._choose(keys, conversation.session, load)]
        if not replica.sim.core.has_work:
            replica.sim.now = max(replica.sim.now, at)
        request_id = replica.sim.submit(
            conversation.tokens,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            generated=generated,
        )
        replica.asked[request_id] = asked

    def _tick(self, replica: Replica) -> None:
        sim = replica.sim
        for request_id in sim.tick():
            asked = replica.asked.get(request_id)
            if asked is None:
                continue
            if not asked.has_begun and sim.tokens[request_id]:
                asked.has_begun = True
                self.result.ttfts.append(sim.now - asked.at)
            if request_id in sim.finished:
                self._on_end(replica, request_id, asked)

    def _on_end(self, replica: Replica, request_id: str, asked: Asked) -> None:
        sim, conversation = replica.sim, asked.conversation
        del replica.asked[request_id]
        completion = sim.finished[request_id].completion
        self.result.n_shared += asked.n_shared
        self.result.n_found += min(completion.usage.n_cached, asked.n_shared)
        generated = sim.requests[request_id].generated_token_ids
        conversation.tokens += [*generated, *completion.token_ids]
        conversation.n_said = len(conversation.tokens)
        conversation.n_left -= 1
        if conversation.n_left > 0:
            at = sim.now + self._drawn.expovariate(1.0 / THINK_S)
            heapq.heappush(self._due, (at, next(self._numbers), conversation))

    def _take_away(self, at: float) -> None:
        """Remove the replica with the most requests; others continue them after the tokens generated so far."""
        self._dies_at = float("inf")
        name = max(self._replicas, key=lambda name: len(self._replicas[name].asked))
        replica = self._replicas.pop(name)
        for request_id, asked in replica.asked.items():
            self.result.n_moved += 1
            self._send(asked, at, tuple(replica.sim.tokens[request_id]))


def _simulator() -> Simulator:
    return Simulator(
        n_ctx=N_CTX, n_seq_max=N_SEQ_MAX, n_batch=N_BATCH, latency_s=_latency, is_checked=False,
        answer=endless, prefix_cache_bytes=0,
    )  # fmt: skip


def run(way: str, n_replicas: int, rate: float, seed: int, *, dies: bool) -> Result:
    """Run one simulation."""
    return Cluster(way, n_replicas, rate, seed, dies=dies).run()


def _runs(
    pool: ProcessPoolExecutor, numbers: Sequence[int], rate: float, seeds: int, *, dies: bool
) -> list[Result]:
    """Run all ways with all numbers of replicas; a result combines the runs of all seeds."""
    asked = [(way, n) for n in numbers for way in WAYS]
    futures = {
        (way, n): [pool.submit(run, way, n, rate, seed, dies=dies) for seed in range(seeds)]
        for way, n in asked
    }
    results = []
    for (way, n), each in futures.items():
        whole = Result(way, n, [])
        for result in (future.result() for future in each):
            whole.ttfts += result.ttfts
            whole.n_found += result.n_found
            whole.n_shared += result.n_shared
            whole.n_moved += result.n_moved
        results.append(whole)
        print(
            f"{n:3} replicas, {way:13}: first token p50 {whole.ttft(0.5):6.2f} s, p95 "
            f"{whole.ttft(0.95):6.2f} s; {whole.found:4.0%} of the shared tokens were found; "
            f"{len(whole.ttfts)} requests, {whole.n_moved} moved",
            flush=True,
        )
    return results


def plot(results: Sequence[Result], rate: float, path: Path) -> None:
    """Plot the share of tokens found and the time to the first token, by the number of replicas."""
    from matplotlib import pyplot

    figure, (found, ttft) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for way in WAYS:
        mine = sorted((r for r in results if r.way == way), key=lambda r: r.n_replicas)
        numbers = [r.n_replicas for r in mine]
        found.plot(numbers, [r.found for r in mine], marker="o", label=way)
        ttft.plot(numbers, [r.ttft(0.95) for r in mine], marker="o", label=way)
    found.set(ylabel="of shared tokens found", ylim=(0, 1))
    ttft.set(ylabel="time to first token, p95 (s)", yscale="log")
    for axis in (found, ttft):
        axis.set(xlabel=f"replicas, {rate:g} conversations/s each", xscale="log")
        axis.grid(alpha=0.3)
    found.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rate", type=float, default=0.06, help="conversations/s of each replica")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dies", action="store_true", help="remove a replica half-way")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        results = _runs(pool, given.replicas, given.rate, given.seeds, dies=given.dies)
    if given.plot is not None:
        plot(results, given.rate, given.plot)


if __name__ == "__main__":
    main()
