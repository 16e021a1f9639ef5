"""Measure the cost of Ray's front: one replica behind it beside `cllm serve`, by turns.

    .venv-ray/bin/python -m benchmarks.ray_front [--turns 4]

Both run the embedded model with one compute thread.  A token takes a millisecond, so that added time shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.side_by_side.servers import ServerPeer, free_port, running
from cllm.client import AsyncClient

N_TOKENS, N_PROMPT = 150, 64
ENGINE = {"n_ctx": 8192, "n_seq_max": 16, "n_threads": 1, "process": True}


@contextmanager
def through_ray() -> Iterator[str]:
    """Start a front with one replica, and yield its address."""
    port = free_port()
    settings = map(json.dumps, (ENGINE, {"model_name": "m"}, {"replicas": 1, "num_cpus": 1}))
    command = [sys.executable, "-m", "tests.ray.cluster", *settings, "--port", str(port)]
    environment = os.environ | {"CLLM_RAY_DIRECTORY": f"/tmp/cllm-ray-{os.getpid()}"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith('{"done"'))
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            process.stdout.read()


@contextmanager
def direct() -> Iterator[str]:
    """Start `cllm serve` with the same settings, and yield its address."""
    port = free_port()
    options = ("--n-ctx", "8192", "--n-seq-max", "16", "--n-threads", "1", "--port", str(port))
    command = (sys.executable, "-m", "cllm", "serve", *options)
    with running(ServerPeer("cllm serve", "/health", "", command), port):
        yield f"http://127.0.0.1:{port}"


async def measured(url: str, n_streams: int) -> tuple[float, float]:
    """Return the tokens per second, and the median time to the first token in milliseconds."""
    ttfts: list[float] = []

    async def one(client: AsyncClient, i: int) -> None:
        prompt = [3 + (i * 31 + j * 7) % 200 for j in range(N_PROMPT)]
        asked: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True, "temperature": 0.0}
        completion = await client.generate(prompt, **asked)
        assert completion.timings.ttft_s is not None
        ttfts.append(1000 * completion.timings.ttft_s)

    async with AsyncClient(url) as client:
        await one(client, 99)
        ttfts.clear()
        begun = time.perf_counter()
        for round_number in range(4):
            await asyncio.gather(*(one(client, round_number * 16 + i) for i in range(n_streams)))
        seconds = time.perf_counter() - begun
    return 4 * n_streams * N_TOKENS / seconds, median(ttfts)


def main() -> None:
    """Measure in turns and print the ratios."""
    parser = argparse.ArgumentParser(prog="benchmarks.ray_front", description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    turns = parser.parse_args().turns
    with through_ray() as ray_url, direct() as url:
        for n_streams in (1, 16):
            rates, firsts = [], []
            for turn in range(turns):
                told = {}
                for each in (url, ray_url) if turn % 2 else (ray_url, url):
                    told[each] = asyncio.run(measured(each, n_streams))
                rates.append(told[ray_url][0] / told[url][0])
                firsts.append(told[ray_url][1] / told[url][1])
                shown = ", ".join(
                    f"{rate:.0f} tokens/s {ttft:.1f} ms" for rate, ttft in told.values()
                )
                print(f"{n_streams} streams, turn {turn + 1}: {shown}", flush=True)
            print(
                f"{n_streams} streams: tokens/s {median(rates):.2f} [{min(rates):.2f}-{max(rates):.2f}], "
                f"time to first token {median(firsts):.2f} [{min(firsts):.2f}-{max(firsts):.2f}] of cllm serve's"
            )


if __name__ == "__main__":
    main()
