"""Measure how long a client waits for its first token beside another tenant's flood of requests.

    python -m benchmarks.tenants [--clients 1 4] [--turns 3]

The clients send one request after another, alone and then beside the flood, by turns on one server.  The
program prints the median and the 95th percentile of the times to the first token, and the ratios of a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import machine, percentile
from benchmarks.side_by_side import servers
from benchmarks.side_by_side.http_client import Answer, Connection
from benchmarks.side_by_side.http_load import body_for
from benchmarks.side_by_side.records import CLLM_SERVE
from benchmarks.side_by_side.workload import REAL_MODEL, Setup, model_path, prompt_of
from cllm.processors import usable_processors

N_SEQUENCES = 8
N_PROMPT = 40
N_OUTPUT = (16, 48)  # least and most


def body_of(seed: str) -> dict[str, Any]:
    """Return a request, which depends only on the seed."""
    n_output = random.Random(seed).randint(*N_OUTPUT)
    return body_for(CLLM_SERVE, prompt_of(seed, N_PROMPT), n_output)


def connection(port: int, tenant: str) -> Connection:
    """Return a connection of a tenant."""
    return Connection(port, headers=f"X-Tenant: {tenant}\r\n")


async def times_of(port: int, seed: str, n_clients: int, n_each: int) -> list[float]:
    """Return the seconds to the first token of each request of the clients."""
    times: list[float] = []

    async def client(number: int) -> None:
        light = connection(port, "light")
        for index in range(n_each):
            answer = await light.stream(body_of(f"{seed} {number} {index}"))
            if not answer.is_complete:
                raise RuntimeError(answer.failure)
            times.append(answer.ttft_s)
        light.close()

    async with asyncio.TaskGroup() as tasks:
        for number in range(n_clients):
            tasks.create_task(client(number))
    return times


async def beside_flood(
    port: int, seed: str, n_clients: int, n_each: int, n_flood: int
) -> list[float]:
    """Return the same beside `n_flood` requests of another tenant; one that ends is replaced."""
    first = Answer()

    async def flood(number: int) -> None:
        heavy = connection(port, "heavy")
        index = 0
        while True:
            body = body_of(f"{seed} flood {number} {index}")
            await heavy.stream(body, first if number == index == 0 else None)
            index += 1

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(flood(number)) for number in range(n_flood)]
        while not first.arrivals:
            await asyncio.sleep(0.01)
        times = await times_of(port, seed, n_clients, n_each)
        for task in running:
            task.cancel()
    return times


async def measure(port: int, options: argparse.Namespace) -> None:
    """Run the turns and print them."""
    for n_clients in options.clients:
        n_each, ratios = -(-options.requests // n_clients), []
        for turn in range(options.turns):
            alone = await times_of(port, f"{n_clients} {turn} alone", n_clients, n_each)
            beside = await beside_flood(
                port, f"{n_clients} {turn} beside", n_clients, n_each, options.flood
            )
            figures = [percentile(times, p) for times in (alone, beside) for p in (50, 95)]
            ratios.append(figures[3] / figures[1])
            shown = "alone {:4.0f} / {:4.0f}, beside {:4.0f} / {:4.0f}".format(
                *(1e3 * figure for figure in figures)
            )
            print(
                f"{n_clients} clients: {shown} ms (p50 / p95), p95 × {ratios[-1]:.2f}", flush=True
            )
        print(
            f"{n_clients} clients: p95 beside the flood ÷ alone: {median(ratios):.2f}", flush=True
        )


def main() -> None:
    """Start the server and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=48, help="of all clients, in a turn")
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    model = options.model or model_path(REAL_MODEL)
    print(
        f"{model.name}, {N_SEQUENCES} sequences, {options.flood} requests of a flood, {machine()}"
    )
    port = servers.free_port()
    setup = Setup(model, usable_processors().n_threads, 8192, N_SEQUENCES)
    with servers.running(servers.cllm_serve(setup, port), port):
        asyncio.run(measure(port, options))


if __name__ == "__main__":
    main()
