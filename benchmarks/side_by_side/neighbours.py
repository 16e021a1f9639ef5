"""n: clients in a closed loop while other programs keep processors busy.

The prompts are random lower-case letters, sent as text, because the models have different vocabularies.
`python -m benchmarks.side_by_side.neighbours JSON` measures the embedded API and prints JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from benchmarks.side_by_side.http_client import Answer
from benchmarks.side_by_side.http_load import (
    Outcome,
    connected,
    failures_of,
    greedy_body,
)
from benchmarks.side_by_side.workload import ClosedLoopSizes, Setup, cells_for
from cllm import Engine, SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"
N_PROMPT = 32  # letters
SPIN = "while True: pass"
PAUSE_S = 3.0  # time that clients and neighbours run before the measured window
WINDOW_S = 4.0  # a peer that makes a token a second would need minutes for whole answers
N_OUTPUT = range(32, 97)  # answers of equal length would keep all clients in step


@dataclass(frozen=True)
class NeighbourSizes(ClosedLoopSizes):
    """Number of clients, and of the busy processes beside the server.

    Attributes
    ----------
    n_neighbours : int
        Number of processes that each run an endless loop.
    """

    n_each: int = 1
    n_neighbours: int = 0

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        plural = "s" * (self.n_neighbours != 1)
        return f"{super().case}, {self.n_neighbours} busy neighbour{plural}"

    @property
    def n_ctx(self) -> int:
        """Cells for all clients at once."""
        return cells_for(self.n_clients, N_PROMPT + max(N_OUTPUT))


def sizes_of(n_clients: Sequence[int], n_neighbours: Sequence[int]) -> tuple[NeighbourSizes, ...]:
    """Return all combinations."""
    return tuple(
        NeighbourSizes(clients, n_neighbours=neighbours)
        for neighbours in n_neighbours
        for clients in n_clients
    )


FULL = sizes_of((1, 4, 16), (0, 1, 2))
QUICK = sizes_of((1, 4), (0, 1))


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Keep `n` other processes computing."""
    with ExitStack() as ending:
        for _ in range(n):
            process = subprocess.Popen([sys.executable, "-c", SPIN], process_group=0)
            ending.callback(process.wait)
            ending.callback(process.kill)  # runs before `wait`: callbacks run in reverse order
        yield


def text_of(seed: str) -> str:
    """Return a random prompt of `N_PROMPT` letters, which depends only on the seed."""
    return "".join(random.Random(seed).choices(LETTERS, k=N_PROMPT))


def metrics_of(answers: Sequence[Answer], since: float, until: float) -> dict[str, float]:
    """Return the throughput and the longest wait for a token of a begun answer, within a window."""
    n_tokens = 0.0
    gaps_s = []
    for answer in answers:
        n_arrivals: float = sum(since < at <= until for at in answer.arrivals)
        if answer.n_tokens is not None and answer.arrivals:  # an event may have several tokens
            n_arrivals *= answer.n_tokens / len(answer.arrivals)
        n_tokens += n_arrivals
        gaps_s += answer.gaps_s(since, until)
        if answer.arrivals and not (
            answer.is_complete or answer.failure
        ):  # cut off at the end of the window
            gaps_s.append(until - answer.arrivals[-1])
    longest_s = max(gaps_s, default=WINDOW_S)
    return {"tokens_per_s": n_tokens / (until - since), "itl_max_ms": 1e3 * longest_s}


Ask = Callable[[int, str, int, Answer], Coroutine[Any, Any, None]]


async def _window(sizes: NeighbourSizes, ask: Ask) -> tuple[dict[str, float], list[Answer]]:
    """Let all clients send requests endlessly beside the neighbours, and measure `WINDOW_S` seconds of it."""
    answers: list[Answer] = []

    async def client(number: int) -> None:
        for index in itertools.count():
            seed = f"{number} {index}"
            answers.append(Answer())
            await ask(number, seed, random.Random(seed).choice(N_OUTPUT), answers[-1])
            if answers[-1].failure:
                return

    with busy(sizes.n_neighbours):
        async with anyio.create_task_group() as clients:
            for number in range(sizes.n_clients):
                clients.start_soon(client, number)
            await anyio.sleep(PAUSE_S)
            since = time.perf_counter()
            await anyio.sleep(WINDOW_S)
            clients.cancel_scope.cancel()
            metrics = metrics_of(answers, since, time.perf_counter())
    return metrics, answers


async def measure(port: int, peer: str, sizes: NeighbourSizes) -> Outcome:
    """Measure throughput and gaps over HTTP."""
    async with connected(port, sizes.n_clients) as connections:

        async def ask(number: int, seed: str, n_output: int, answer: Answer) -> None:
            body = greedy_body(peer, n_output, prompt=text_of(seed)) | {"ignore_eos": True}
            await connections[number].stream(body, answer)

        metrics, answers = await _window(sizes, ask)
    failures = failures_of(answers)
    return Outcome({**metrics, "n_failed": len(failures)}, failures)


async def measure_embedded(setup: Setup, sizes: NeighbourSizes) -> dict[str, float]:
    """Measure an engine in this process."""
    async with Engine(**setup.engine_options) as engine:

        async def ask(_number: int, seed: str, n_output: int, answer: Answer) -> None:
            params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
            async with engine.stream(text_of(seed), params) as stream:
                async for _ in stream:
                    answer.arrivals.append(time.perf_counter())
            answer.finish_reason, answer.n_tokens = "length", n_output

        metrics, _ = await _window(sizes, ask)
    return metrics


def embedded(setup: Setup, sizes: NeighbourSizes) -> Mapping[str, float]:
    """Run `measure_embedded` in a process and a process group of its own, as each server has."""
    given = json.dumps([dataclasses.asdict(setup), dataclasses.asdict(sizes)], default=str)
    command = [sys.executable, "-m", __name__, given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, process_group=0)
    metrics: dict[str, float] = json.loads(done.stdout)
    return metrics


def _main(given: str) -> None:
    setup, sizes = json.loads(given)
    metrics = anyio.run(measure_embedded, Setup.of_plain(setup), NeighbourSizes(**sizes))
    print(json.dumps(metrics))


if __name__ == "__main__":
    _main(sys.argv[1])
