"""The servers, each with the same model, library, threads and cache."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.records import (
    BARE_SERVER,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LLAMA_SERVER,
    PYTHON_SERVER,
)
from benchmarks.side_by_side.workload import Setup

START_S = 120.0


@dataclass(frozen=True)
class ServerPeer:
    """How to start a server.

    Attributes
    ----------
    missing : str
        Reason why the server cannot be started; "" if it can.
    """

    name: str
    health: str
    missing: str
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    stdin: str = ""


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def cllm_serve(setup: Setup, port: int, *, process: bool = True) -> ServerPeer:
    """Return `cllm serve`, with the engine in its own process (the default) or in a thread of the server."""
    command = (
        *(sys.executable, "-m", "cllm", "serve", "--port", str(port), "-m", str(setup.model)),
        *("--n-ctx", str(setup.n_ctx), "--n-seq-max", str(setup.n_seq_max)),
        *("--n-batch", str(setup.n_batch), "--n-threads", str(setup.n_threads)),
        *("--no-preflight", "--max-queue", "4096"),
        "--process" if process else "--no-process",
    )
    name = CLLM_SERVE if process else CLLM_SERVE_THREAD
    return ServerPeer(name, "/health", "", command, (("CLLM_LOG_LEVEL", "warning"),))


def llama_server(setup: Setup, port: int, peers: Peers) -> ServerPeer:
    """Return llama.cpp's own server, llama-server."""
    health, missing = "/health", peers.missing[LLAMA_SERVER]
    if missing or peers.tools is None:
        return ServerPeer(LLAMA_SERVER, health, missing)
    program = str(peers.tools / LLAMA_SERVER)
    command = (
        *(program, "--host", "127.0.0.1", "--port", str(port), "-m", str(setup.model)),
        *("-c", str(setup.n_ctx), "-np", str(setup.n_seq_max), "--kv-unified"),
        *("-b", str(setup.n_batch), "-ub", str(setup.n_ubatch), "--no-webui"),
        *("-t", str(setup.n_threads), "-tb", str(setup.n_threads), "--log-disable"),
        *(("--embedding",) if setup.embeds else ()),
    )
    return ServerPeer(LLAMA_SERVER, health, "", command)


def python_server(setup: Setup, port: int, peers: Peers) -> ServerPeer:
    """Return the example server of llama-cpp-python, over the llama.cpp of its distribution."""
    health, missing = "/healthz", peers.missing[PYTHON_SERVER]
    if missing:
        return ServerPeer(PYTHON_SERVER, health, missing)
    config = {
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "alias": "model",
            "path": str(setup.model),
            "n_ctx": setup.n_ctx,
            "n_seq_max": setup.n_seq_max,
            "n_batch": setup.n_batch,
            "n_ubatch": setup.n_ubatch,
            "threads": setup.n_threads,
            "threads_batch": setup.n_threads,
            "kv_unified": True,
            "embedding": setup.embeds,
        },
    }
    command = (str(peers.python), str(peers.example_server), "-C", "/dev/stdin")
    return ServerPeer(PYTHON_SERVER, health, "", command, stdin=json.dumps(config))


def bare_server(setup: Setup, port: int) -> ServerPeer:
    """Return the server that does the least, over the library of cllm."""
    command = (sys.executable, "-m", "benchmarks.side_by_side.bare_server", str(port))
    stdin = json.dumps(dataclasses.asdict(setup), default=str)
    return ServerPeer(BARE_SERVER, "/", "", command, stdin=stdin)


@contextmanager
def running(peer: ServerPeer, port: int) -> Iterator[int]:
    """Start a server, yield its process id when it is ready, and stop it afterwards."""
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as stdin:
        stdin.write(peer.stdin.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            peer.command,
            stdin=stdin,
            stdout=log,
            stderr=log,
            env={**os.environ, **dict(peer.environment)},
            process_group=0,
        )
        try:
            _wait(f"http://127.0.0.1:{port}{peer.health}", process)
            yield process.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-3000:].decode("utf-8", "replace"))
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} is not ready at {url}")
