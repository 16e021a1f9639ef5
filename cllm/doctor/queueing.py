"""Experiment with clients that arrive together and wait for one lock: their latency includes the wait."""

from __future__ import annotations

import time

import anyio
from anyio.lowlevel import checkpoint

from cllm.doctor.findings import Measurement
from cllm.doctor.workload import RequestRunner


def run_behind_a_lock(runner: RequestRunner, n_clients: int) -> list[Measurement]:
    """Run one request for each client, all submitted before the first is served.

    Return the measurements in the order of service.  Starts an event loop: do not call it from a coroutine.
    """
    # In debug mode asyncio would log that the loop is blocked, which is intended here.
    return anyio.run(_serve, runner, n_clients, backend_options={"debug": False})


async def _serve(runner: RequestRunner, n_clients: int) -> list[Measurement]:
    lock = anyio.Lock()
    served: list[Measurement] = []

    async def request() -> None:
        n_ahead = lock.statistics().tasks_waiting
        submitted_s = time.perf_counter()
        async with lock:
            served.append(runner.run(clears=0, submitted_s=submitted_s, n_ahead=n_ahead))

    async with anyio.create_task_group() as clients, lock:
        for _ in range(n_clients):
            clients.start_soon(request)
        while lock.statistics().tasks_waiting < n_clients:
            await checkpoint()
    return served
