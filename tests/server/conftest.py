"""A real `cllm serve` in a process of its own, and what tests read from it."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio.to_thread
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cllm import Engine
from cllm.server import ServerConfig, create_app

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "cllm", "serve")
# Without guesses: the number of ticks of an answer would depend on the speed of the machine.
QUIET_OPTIONS = ("--port", "0", "--n-threads", "1", "--speculation", "")
# Few rows per tick: a long prompt takes many ticks, so a test can act while it is computed.
SLOW_PREFILL = ("--n-batch", "16")
LONG = "count:1..199"
LONG_ANSWER = " ".join(str(n) for n in range(1, 200))
# A request that runs until the context is full: several seconds and 4,000 tokens.
ENDLESS = {"prompt": LONG, "temperature": 0, "ignore_eos": True}
TIMEOUT_S = 30.0
# One TLS context for all clients.  httpx would load another one for each, although none uses TLS.
OPTIONS: dict[str, Any] = {"timeout": TIMEOUT_S, "verify": ssl.create_default_context()}


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
    """Call `condition` every 5 ms until its result is true, and return that."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)
    return answer


async def wait_for(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
    """Run `wait_until` in a thread, so that the event loop is not blocked."""
    return await anyio.to_thread.run_sync(wait_until, condition, what, timeout_s)


def is_alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


class Server:
    """A server process: its URL, its log, and its end.

    Parameters
    ----------
    log_path : Path
        Takes its standard error.
    command : sequence of str
        By default `cllm serve` on a free port, with one compute thread.
    """

    def __init__(
        self,
        log_path: Path,
        *options: str,
        command: Sequence[str] = (*COMMAND, *QUIET_OPTIONS),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stderr=log,
                # These log lines have the pid of the engine's process and the end of each request.
                env={**os.environ, "CLLM_LOG_LEVEL": "debug", **(environment or {})},
                process_group=0,
            )
        self.url: str = ""

    def __enter__(self) -> Server:
        """Wait for the address, not for the model."""
        try:
            self.url = wait_until(self._find_url, "an address on stderr") or ""
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None or self.process.poll() is not None:
            self.kill()
            return
        try:
            assert self.stop() == 0, self.log[-4000:]
        finally:
            self.kill()
        assert "Traceback" not in self.log, self.log[-4000:]

    def _find_url(self) -> str | None:
        found = re.search(
            r'^(?:cllm: |\{).*? at ((?:https?|unix):[^\s"]+)[\s"]', self.log, re.MULTILINE
        )
        if found is None:
            assert self.process.poll() is None, self.log
        return found and found[1]

    @property
    def log(self) -> str:
        """Standard error of the server so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pids(self) -> list[int]:
        """Process ids of the engine, in the order of its starts; the last one is the newest."""
        return [int(pid) for pid in re.findall(r" engine process (\d+)$", self.log, re.MULTILINE)]

    @property
    def engine_pid(self) -> int:
        """Process id of the newest engine process."""
        return wait_until(lambda: self.engine_pids, "the engine's process")[-1]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{**OPTIONS, **options})

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, **{**OPTIONS, **options})

    def get(self, path: str) -> httpx.Response:
        """One request on a connection of its own."""
        return httpx.get(self.url + path, **OPTIONS)

    def generate(self, prompt: str, **fields: Any) -> httpx.Response:
        """One request on a connection of its own, greedy."""
        body = {"prompt": prompt, "temperature": 0, **fields}
        return httpx.post(self.url + "/generate", json=body, **OPTIONS)

    def is_ready(self) -> bool:
        """Return True if /health answers 200."""
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        wait_until(self.is_ready, "/health is 200")

    def metrics(self) -> dict[str, float]:
        """Samples by name, with their labels as Prometheus writes them."""
        return samples_of(self.get("/metrics").text)

    def n_in_flight(self) -> int:
        """Requests that the engine holds."""
        now = self.metrics()
        return int(now["cllm_requests_running"] + now["cllm_requests_waiting"])

    def wait_idle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the engine holds no request, and no sequence of one."""
        wait_until(lambda: self.n_in_flight() == 0, "no request is left", timeout_s)
        states = {slot["state"] for slot in self.get("/slots").json()}
        assert states <= {"free", "cached"}, states

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send a signal, SIGTERM by default, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the server and its engine's process if they still run."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.engine_pids[-1:]:  # only the newest can be alive
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def samples_of(text: str) -> dict[str, float]:
    """Parse Prometheus' text format with its own client; return the samples by name and labels."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def ask(client: httpx.Client, prompt: Any = "1+1=", **fields: Any) -> httpx.Response:
    """One greedy request."""
    return client.post("/generate", json={"prompt": prompt, "temperature": 0, **fields})


def refusal_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check that a response is an error of the documented shape, and return its "error" object."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """Return the JSON events of a stream; the last event, `[DONE]`, is checked and left out."""
    assert response.status_code == 200, response.text
    *lines, end = response.text.split("\n\n")
    assert end == ""
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextmanager
def streaming(client: httpx.Client, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of an endless stream that has begun; leaving it closes the connection."""
    with client.stream("POST", "/generate", json={**ENDLESS, "stream": True, **fields}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # if dropped, it would close the connection
        next(lines)
        yield lines


@contextmanager
def running(path: Path, *options: str, **settings: Any) -> Iterator[Server]:
    """A server that is ready; ended by SIGTERM, with exit code 0 and without a traceback."""
    with Server(path, *options, **settings) as server:
        server.wait_ready()
        yield server


@contextmanager
def hasty(path: Path, **settings: Any) -> Iterator[Server]:
    """A server of one process, with fields of `ServerConfig`: see `tests.server.hasty`."""
    command = (sys.executable, "-m", "tests.server.hasty", json.dumps(settings))
    with running(path, command=command) as server:
        yield server


@pytest.fixture
def anyio_backend() -> str:
    """The clients run on one loop; the server has its own."""
    return "asyncio"


@asynccontextmanager
async def client_of(engine: Engine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app of an engine, in this process."""
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(**settings)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with the defaults of `cllm serve`; for tests that leave it as it was."""
    with running(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """Speaks to the session's server."""
    with server.client() as client:
        yield client
