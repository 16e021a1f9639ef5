"""n: clients in a closed loop while other programs keep processors busy.

The prompts are of lower-case letters, whose token ids are the same in every vocabulary here.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
PAUSE_S = 1.0  # the neighbours have begun
WINDOW_S = 6.0  # a peer that makes a token a second would need minutes for whole answers


@dataclass(frozen=True)
class NeighbourSizes(ClosedLoopSizes):
    """Clients, and the busy processes beside the server.

    Attributes
    ----------
    n_neighbours : int
        Each is one endless loop.
    """

    n_each: int = 1
    n_neighbours: int = 0
    n_output: int = 64

    @property
    def case(self) -> str:
        """The same words for every peer."""
        plural = "s" * (self.n_neighbours != 1)
        return f"{super().case}, {self.n_neighbours} busy neighbour{plural}"

    @property
    def n_ctx(self) -> int:
        """Cells for all clients at once."""
        return cells_for(self.n_clients, N_PROMPT + self.n_output)


def sizes_of(n_clients: Sequence[int], n_neighbours: Sequence[int]) -> tuple[NeighbourSizes, ...]:
    """Every combination."""
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
    processes = [subprocess.Popen([sys.executable, "-c", SPIN], process_group=0) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def text_of(seed: str) -> str:
    """A prompt that no other seed has."""
    return "".join(random.Random(seed).choices(LETTERS, k=N_PROMPT))


def metrics_of(answers: Sequence[Answer], end: float) -> dict[str, float]:
    """Throughput, and the longest wait for a token of an answer that had begun.

    Parameters
    ----------
    end : float
        When the answers that are not complete were cut off.
    """
    n_tokens = sum(a.n_events if a.n_tokens is None else a.n_tokens for a in answers)
    begun = [a for a in answers if a.arrivals]
    gaps_s = [gap for a in begun for gap in a.gaps_s()]
    gaps_s += [end - a.arrivals[-1] for a in begun if not a.is_complete]
    longest_s = max(gaps_s, default=WINDOW_S)
    return {"tokens_per_s": n_tokens / WINDOW_S, "itl_max_ms": 1e3 * longest_s}


Ask = Callable[[int, str, Answer], Coroutine[Any, Any, None]]


async def _window(sizes: NeighbourSizes, ask: Ask) -> tuple[dict[str, float], list[Answer]]:
    """Let all clients ask, once to warm up and then until the time is over."""
    answers: list[Answer] = []

    async def client(number: int) -> None:
        for index in itertools.count():
            answers.append(Answer())
            await ask(number, f"{number} {index}", answers[-1])

    async with anyio.create_task_group() as clients:
        for number in range(sizes.n_clients):
            clients.start_soon(ask, number, f"warm-up {number}", Answer())
    with busy(sizes.n_neighbours):
        await anyio.sleep(PAUSE_S)
        with anyio.move_on_after(WINDOW_S):
            async with anyio.create_task_group() as clients:
                for number in range(sizes.n_clients):
                    clients.start_soon(client, number)
        return metrics_of(answers, time.perf_counter()), answers


async def measure(port: int, peer: str, sizes: NeighbourSizes) -> Outcome:
    """The figures as the clients see them; the neighbours begin after the first answers."""
    async with connected(port, sizes.n_clients) as connections:

        async def ask(number: int, seed: str, answer: Answer) -> None:
            body = greedy_body(peer, sizes.n_output, prompt=text_of(seed))
            await connections[number].stream(body | {"ignore_eos": True}, answer)

        metrics, answers = await _window(sizes, ask)
    failures = failures_of(answers)
    return Outcome({**metrics, "n_failed": len(failures)}, failures)


async def measure_embedded(setup: Setup, sizes: NeighbourSizes) -> dict[str, float]:
    """The same of an engine in this program."""
    async with Engine(**setup.engine_options) as engine:

        async def ask(_number: int, seed: str, answer: Answer) -> None:
            params = SamplingParams(max_tokens=sizes.n_output, temperature=0, ignore_eos=True)
            async with engine.stream(text_of(seed), params) as stream:
                async for delta in stream:
                    answer.arrivals.append(time.perf_counter())
                    answer.n_events += len(delta.token_ids)
            answer.finish_reason = "length"

        metrics, _ = await _window(sizes, ask)
    return metrics


def embedded(setup: Setup, sizes: NeighbourSizes) -> Mapping[str, float]:
    """`measure_embedded` in a process and a session of its own, as each server has."""
    given = json.dumps([dataclasses.asdict(setup), dataclasses.asdict(sizes)], default=str)
    command = [sys.executable, "-m", __name__, given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, process_group=0)
    metrics: dict[str, float] = json.loads(done.stdout)
    return metrics


def _main(given: str) -> None:
    setup, sizes = json.loads(given)
    options: dict[str, Any] = setup | {"model": Path(setup["model"])}
    metrics = anyio.run(measure_embedded, Setup(**options), NeighbourSizes(**sizes))
    print(json.dumps(metrics))


if __name__ == "__main__":
    _main(sys.argv[1])
