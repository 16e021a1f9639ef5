"""A handle of the process of `cluster.py` for tests, and clients of its front."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx

from cllm.client import AsyncClient
from tests.server.conftest import LONG, samples_of, wait_for, wait_until

ENGINE: dict[str, Any] = {"n_ctx": 16384, "n_seq_max": 16, "n_threads": 1, "deterministic": True}
SERVER: dict[str, Any] = {"model_name": "embedded", "drain_timeout_s": 20.0}
CLUSTER: dict[str, Any] = {"replicas": 2, "num_cpus": 1}
START_S = 180.0
REPLICA_PORTS = 30000, 30016  # the first that Ray gives its replicas
STATISTICS_PORT, STATUS = 8404, 17  # of HAProxy; the column of its table
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUNTING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}


class Cluster:
    """The process that holds the cluster."""

    def __init__(self, directory: Path, *, cpus: tuple[int, ...] = (8,), **changes: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._is_routed = changes.get("affinity") == "prefix"
        settings = map(json.dumps, (ENGINE, SERVER, CLUSTER | changes))
        command = [sys.executable, "-m", "tests.ray.cluster", *settings, "--port", str(port)]
        command += ["--cpus", *map(str, cpus)]
        # A short path: the length of the socket paths of HAProxy and Ray is limited.
        environment = os.environ | {"CLLM_RAY_DIRECTORY": f"/tmp/cllm-ray-{os.getpid()}"}
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip

    def ask(self, what: str) -> dict[str, Any]:
        """Send a command, and wait for its line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self) -> dict[str, Any]:
        """Return the next line of JSON from the process; lines that Ray prints are skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"done"'):
                told: dict[str, Any] = json.loads(line)
                return told
        raise AssertionError(Path(self._log.name).read_text()[-3000:])

    def start(self) -> None:
        """Wait until the front sends requests to both replicas.

        Ray reports the replicas as running before that.  Until HAProxy has them in its table, Ray's own proxy
        forwards requests without the router, and some of those never end.
        """
        assert self.wait()["done"] == "start"
        wait_until(self._front_knows_both, "the front knows both replicas", timeout_s=START_S)

    def _front_knows_both(self) -> bool:
        try:
            table = httpx.get(f"http://127.0.0.1:{STATISTICS_PORT}/stats;csv", timeout=5).text
        except httpx.TransportError:
            return False
        servers = [row for row in csv.reader(table.splitlines()) if "SERVE_REPLICA_" in row[1]]
        backends = {row[0] for row in servers}
        is_routed = any("ingress-request-router" in name for name in backends)
        are_up = all(row[STATUS] == "UP" for row in servers)
        return is_routed == self._is_routed and are_up and len(servers) == 2 * len(backends) > 0

    def end(self) -> None:
        """End the process; kill it if it does not end within `START_S`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def replica_pids(self) -> list[int]:
        """Return the process ids of the replicas."""
        return pids_of("ray::ServeReplica:cllm:cllm")

    def replica_metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each replica, read at its own port and not through the front."""
        found = []
        for port in range(*REPLICA_PORTS):
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5)
                found += [samples_of(answer.text)] if "cllm_" in answer.text else []
        return found

    def has_two(self) -> bool:
        """Return True if both replicas run."""
        return bool(self.ask("status")["replicas"] == {"RUNNING": 2})


def pids_of(title: str) -> list[int]:
    """Return the ids of the processes whose title begins with `title`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(int(entry.name))
    return found


class PlainStreams:
    """Plain HTTP streams, which cannot move to another replica, each read in a thread.

    Attributes
    ----------
    ends : dict
        Text of each stream by number, and True if the stream ended with `[DONE]`.
    """

    def __init__(self, url: str, n: int) -> None:
        self.ends: dict[int, tuple[str, bool]] = {}
        self._url = url
        self._begun: set[int] = set()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(n)]

    @staticmethod
    def prompt(i: int) -> str:
        """Return the prompt of the i-th stream."""
        return f"{LONG} plain {i}"

    async def begin(self) -> None:
        """Start all streams, and wait until each has received text."""
        for thread in self._threads:
            thread.start()
        await wait_for(lambda: len(self._begun) == len(self._threads), "all run")

    async def join(self) -> None:
        """Wait until all streams have ended."""
        for thread in self._threads:
            await anyio.to_thread.run_sync(thread.join)

    def _read(self, i: int) -> None:
        text, has_end = "", False
        body = {"prompt": self.prompt(i), "stream": True, **COUNTING}
        try:
            with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        has_end = True
                    elif line.startswith("data: "):
                        self._begun.add(i)
                        text += json.loads(line[6:])["text"]
        except httpx.TransportError:
            pass
        self.ends[i] = text, has_end


async def probe(url: str, statuses: list[int]) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        while True:
            try:
                body = {"prompt": "1+1=", **GREEDY}
                statuses.append((await client.post(f"{url}/generate", json=body)).status_code)
            except httpx.TransportError:
                statuses.append(0)


async def lose_a_replica(cluster: Cluster, lose: Callable[[], object]) -> None:
    """Lose a replica: `AsyncClient` streams stay complete, some plain ones are cut, few new requests fail."""
    n_streams, probes = 6, list[int]()
    plain = PlainStreams(cluster.url, n_streams)
    async with AsyncClient(cluster.url, session_id=None) as client:
        asked = [f"{i} moved {LONG}" for i in range(n_streams)]
        alone = [await client.generate(prompt, **COUNTING) for prompt in asked]
        wholes = [
            (await client.generate(plain.prompt(i), **COUNTING)).text for i in range(n_streams)
        ]
        streams = [client.stream(prompt, **COUNTING) for prompt in asked]
        for stream in streams:
            await anext(stream)
        await plain.begin()
        async with anyio.create_task_group() as group:
            group.start_soon(probe, cluster.url, probes)
            await anyio.to_thread.run_sync(lose)
            ended = [await stream.completion() for stream in streams]
            await plain.join()
            group.cancel_scope.cancel()
    assert [one.token_ids for one in ended] == [one.token_ids for one in alone]
    assert any(stream.n_moves for stream in streams)
    # Plain streams: some are cut and have no `[DONE]`; the others are complete.
    assert {has_end for _, has_end in plain.ends.values()} == {True, False}
    for i, (text, has_end) in plain.ends.items():
        assert text == wholes[i] if has_end else wholes[i].startswith(text)
    bad = [status for status in probes if status != 200]
    assert len(bad) <= max(1, len(probes) // 100), (bad, len(probes))


async def wait_for_two(cluster: Cluster) -> None:
    """Wait until both replicas run again."""
    await anyio.to_thread.run_sync(
        lambda: wait_until(cluster.has_two, "there are two again", timeout_s=90)
    )
