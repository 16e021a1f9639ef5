"""The process of `cluster.py` as tests hold it, and those who ask its front."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.server.conftest import LONG, samples_of

ENGINE: dict[str, Any] = {"n_ctx": 16384, "n_seq_max": 16, "n_threads": 1, "deterministic": True}
SERVER: dict[str, Any] = {"model_name": "embedded", "allow_grammar": True, "drain_timeout_s": 20.0}
CLUSTER: dict[str, Any] = {"replicas": 2, "num_cpus": 1}
START_S = 180.0
REPLICA_PORTS = 30000, 30016  # the first that Ray gives its replicas
GREEDY: dict[str, Any] = {"temperature": 0.0}
COUNTING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}


class Cluster:
    """The process that holds the cluster."""

    def __init__(self, directory: Path, *, cpus: tuple[int, ...] = (8,), **changes: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = map(json.dumps, (ENGINE, SERVER, CLUSTER | changes))
        command = [sys.executable, "-m", "tests.ray.cluster", *settings, "--port", str(port)]
        command += ["--cpus", *map(str, cpus)]
        # Sockets of HAProxy and of Ray have short names at the most.
        environment = os.environ | {"CLLM_RAY_DIRECTORY": f"/tmp/cllm-ray-{os.getpid()}"}
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip

    def ask(self, what: str) -> dict[str, Any]:
        """Have something done, and wait until it is."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self) -> dict[str, Any]:
        """The next thing that it has done; Ray says things of its own between them."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"done"'):
                told: dict[str, Any] = json.loads(line)
                return told
        raise AssertionError(Path(self._log.name).read_text()[-3000:])

    def end(self) -> None:
        """Stop it, if it runs."""
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
        """The processes of its replicas."""
        return pids_of("ray::ServeReplica:cllm:cllm")

    def replica_metrics(self) -> list[dict[str, float]]:
        """What each replica says at its own port, past the front."""
        found = []
        for port in range(*REPLICA_PORTS):
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5)
                found += [samples_of(answer.text)] if "cllm_" in answer.text else []
        return found

    def has_two(self) -> bool:
        """Whether both replicas run."""
        return bool(self.ask("status")["replicas"] == {"RUNNING": 2})


def pids_of(title: str) -> list[int]:
    """The processes whose title begins like that."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(int(entry.name))
    return found


def plain_prompt(i: int) -> str:
    return f"{LONG} plain {i}"


def plain_stream(url: str, i: int, ends: dict[int, tuple[str, bool]], begun: set[int]) -> None:
    """Read a stream as any client does: its text, and whether it has an end."""
    text, has_end = "", False
    try:
        body = {"prompt": plain_prompt(i), "stream": True, **COUNTING}
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    has_end = True
                elif line.startswith("data: "):
                    begun.add(i)
                    text += json.loads(line[6:])["text"]
    except httpx.TransportError:
        pass
    ends[i] = text, has_end


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


async def probe(url: str, statuses: list[int]) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        while True:
            try:
                body = {"prompt": "1+1=", **GREEDY}
                statuses.append((await client.post(f"{url}/generate", json=body)).status_code)
            except httpx.TransportError:
                statuses.append(0)
