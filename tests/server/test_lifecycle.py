"""How a server begins and ends, and what becomes of its clients when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import some_in_fast
from tests.server.conftest import (
    COMMAND,
    ENDLESS,
    LONG,
    LONG_ANSWER,
    QUIET_OPTIONS,
    ROOT,
    Server,
    is_alive,
    refusal_of,
    running,
    streaming,
    wait_until,
)

MANY: dict[str, Any] = {"max_tokens": 1000}
# A context that no endless stream, and no long prompt, gets through while a test does something.
VAST = ("--n-ctx", "32768")
# Loading begins with a process that tries the model: there is time to ask before it is there.
SLOW_TO_LOAD = ("--preflight",)


def is_refused(server: Server) -> bool:
    """Whether nobody listens any more."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return False
    return False


def text_of(lines: Any) -> str:
    """The text of the rest of a stream, which ends as it should."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    events = [json.loads(line) for line in data]
    assert "error" not in events[-1], events[-1]
    return "".join(event["text"] for event in events)


@pytest.mark.full
def test_health_is_503_while_the_model_is_loaded(tmp_path: Path) -> None:
    with Server(tmp_path / "log", *SLOW_TO_LOAD) as server:  # it listens before its model is there
        response = server.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == "starting"
        assert response.headers["Retry-After"] == "1"
        server.wait_ready()
        assert server.generate("1+1=").json()["text"] == "2"


@pytest.mark.full
def test_a_request_while_the_model_is_loaded_is_503_with_retry_after(tmp_path: Path) -> None:
    with Server(tmp_path / "log", *SLOW_TO_LOAD) as server:
        response = server.generate("1+1=")
        assert refusal_of(response, 503)["type"] == "server_error"
        assert response.headers["Retry-After"] == "1"


MOMENTS = {
    "the address": lambda server: server.url,
    "the process": lambda server: server.engine_pids,
    "an answer": lambda server: server.get("/health"),
    "the model": Server.is_ready,
}


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_ends_a_server_at_any_moment_of_its_start(tmp_path: Path, moment: str) -> None:
    with Server(tmp_path / "log") as server:
        wait_until(lambda: MOMENTS[moment](server), moment)
        code = server.stop()
        assert code == 0
        assert "Traceback" not in server.log
        assert not any(is_alive(pid) for pid in server.engine_pids)


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--no-process",)])
def test_sigterm_admits_nobody_and_finishes_what_runs(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    headers = {"X-Request-ID": "running"}
    with (
        running(tmp_path / "log", *VAST, "--drain-timeout", "200", *options) as server,
        server.client(headers=headers) as client,
    ):
        with streaming(client, max_tokens=4000) as lines:
            server.process.send_signal(signal.SIGTERM)

            wait_until(lambda: is_refused(server), "new connections are refused")
            assert "request running: finished" not in server.log
            assert LONG_ANSWER[9:] in text_of(lines)
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log


@pytest.mark.full
def test_what_waits_in_the_queue_is_finished_too(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    options = (*VAST, "--n-seq-max", "1")
    with running(tmp_path / "log", *options) as server, server.client() as client:
        with streaming(client):  # until it is closed here
            waiting = [
                threading.Thread(target=lambda: answers.append(server.generate("37+58=")))
                for _ in range(4)
            ]
            for thread in waiting:
                thread.start()
            wait_until(lambda: server.metrics()["cllm_requests_waiting"] == 4, "four wait")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(server), "it has heard")
        for thread in waiting:
            thread.join()
        assert server.process.wait(30) == 0
    assert [answer.json()["text"] for answer in answers] == ["95"] * 4


@pytest.mark.full
def test_what_does_not_end_is_given_up_after_the_drain_timeout(tmp_path: Path) -> None:
    with (
        running(tmp_path / "log", *VAST, "--drain-timeout", "1") as server,
        server.client() as client,
        streaming(client) as lines,
    ):
        assert server.stop() == 0
        *_, last, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["finish_reason"] == "cancelled"


@pytest.mark.full
def test_an_openai_client_is_told_that_the_drain_timeout_has_passed(tmp_path: Path) -> None:
    body = {"prompt": LONG, "max_tokens": 30_000, "ignore_eos": True, "temperature": 0}
    answers: list[httpx.Response] = []
    with running(tmp_path / "log", *VAST, "--drain-timeout", "1") as server:
        ask = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            )
        )
        ask.start()
        wait_until(lambda: server.n_in_flight() == 1, "it runs")
        assert server.stop() == 0
        ask.join()
    assert refusal_of(answers[0], 503)["code"] == "unavailable"


@pytest.mark.full
def test_an_idle_connection_does_not_delay_the_end(tmp_path: Path) -> None:
    with running(tmp_path / "log") as server, server.client() as client:
        client.get("/health")
        assert server.stop() == 0


@pytest.mark.parametrize("options", [(), pytest.param(("--no-process",), marks=pytest.mark.full)])
def test_sigint_finishes_what_runs(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path / "log", *options) as server, server.client() as client:
        with streaming(client, **MANY) as lines:
            server.process.send_signal(signal.SIGINT)
            assert LONG_ANSWER[9:] in text_of(lines)
        assert server.process.wait(30) == 130


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--no-process",)])
def test_sigint_twice_is_at_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path / "log", *VAST, *options) as server, server.client() as client:
        with streaming(client) as lines:
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: is_refused(server), "it has heard")
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.TransportError):  # within the answer
                list(lines)
            assert server.process.wait(30) == 130
        assert "Traceback" not in server.log


class Client(threading.Thread):
    """Streams to the end, and keeps what it has read and the longest wait."""

    def __init__(self, server: Server, **fields: Any) -> None:
        super().__init__()
        self._server, self._fields = server, fields
        self.has_begun = threading.Event()
        self.text = ""

    def run(self) -> None:
        with self._server.client() as client, streaming(client, **self._fields) as lines:
            self.has_begun.set()
            self.text = text_of(lines)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
def test_no_client_hears_of_a_process_that_was_killed(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path / "log") as server:
        clients = [Client(server, max_tokens=1500, ignore_eos=False) for _ in range(8)]
        for client in clients:
            client.start()
        assert all(client.has_begun.wait(30) for client in clients)
        first = server.engine_pid
        os.kill(first, number)
        assert server.generate("37+58=").json()["text"] == "95"
        for client in clients:
            client.join()
            assert client.text == LONG_ANSWER
        assert server.engine_pid != first
        assert not is_alive(first)
        assert f"the engine's process ended, and is started again: {number.name}" in server.log
        assert server.metrics()["cllm_restarts_total"] == 1
        server.wait_idle()


@pytest.mark.full
def test_a_server_whose_process_is_killed_again_and_again_gives_up(tmp_path: Path) -> None:
    with running(tmp_path / "log") as server:
        for n_processes in range(1, 7):
            wait_until(lambda n=n_processes: len(server.engine_pids) == n, "a process")  # type: ignore[misc]
            wait_until(server.is_ready, "it serves")
            os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert (
            "its process has ended 6 times in a row, and 0 requests are open: SIGKILL" in server.log
        )
        assert is_refused(server)


@pytest.mark.full
def test_the_process_ends_when_its_server_is_gone(tmp_path: Path) -> None:
    with running(tmp_path / "log") as server:
        server.process.kill()
        wait_until(lambda: not is_alive(server.engine_pid), "the process has ended")
        assert is_refused(server)
        assert "Traceback" not in server.log


def fails(*options: str) -> str:
    """What a server that cannot start says."""
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.full
def test_what_cannot_be_served_is_said_in_one_line(server: Server, tmp_path: Path) -> None:
    (in_use,) = fails("--port", str(server.port)).splitlines()
    assert f"cannot listen on 127.0.0.1:{server.port}" in in_use
    (nowhere,) = fails("--port", "0", "--host", "no.such.host.invalid").splitlines()
    assert "cannot listen on no.such.host.invalid" in nowhere
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(64))
    for options in ((), ("--no-process",)):
        said = fails(*QUIET_OPTIONS, "-m", str(damaged), *options)
        assert "damaged.gguf" in said.splitlines()[-1]
    assert "missing.gguf" in fails(*QUIET_OPTIONS, "-m", "/missing.gguf")


def test_a_server_without_its_extra_says_so() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from cllm.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cllm: uvicorn is not installed: pip install 'cllm[server]'"
    ]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request at a time, and thousands of ticks for a long prompt."""
    path = tmp_path_factory.mktemp("narrow") / "log"
    with running(path, *VAST, "--n-seq-max", "1", "--n-batch", "4", "--kv-unified") as server:
        yield server


def leave(server: Server, request_id: str, is_there: Callable[[], bool], **fields: Any) -> str:
    """What becomes of a request whose client goes as soon as `is_there`, in the log's words."""
    body = json.dumps({**ENDLESS, **fields}).encode()
    head = "".join(
        f"{line}\r\n"
        for line in (
            "POST /generate HTTP/1.1", "Host: localhost", f"X-Request-ID: {request_id}",
            f"Content-Length: {len(body)}", "",
        )
    )  # fmt: skip
    n_before = server.n_in_flight()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(is_there, "it has come so far")
        assert server.n_in_flight() == n_before + 1
    wait_until(lambda: server.n_in_flight() == n_before, "it is gone")
    pattern = rf"request {request_id}: finished, (.*), \d+ output tokens"
    said: list[str] = wait_until(lambda: re.findall(pattern, server.log), "it has finished")
    return said[0]


@pytest.mark.parametrize("stream", some_in_fast([True, False]))
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
def test_a_client_that_leaves_ends_its_request_wherever_it_was(
    narrow: Server, state: str, stream: bool
) -> None:

    def is_there() -> bool:
        if state == "waiting":
            return narrow.metrics()["cllm_requests_waiting"] == 1
        return any(slot["state"] == state for slot in narrow.get("/slots").json())

    prompt = f"{stream}" + "a long prompt " * 2000 if state == "prefill" else LONG
    with narrow.client() as client, ExitStack() as running_too:
        if state == "waiting":
            running_too.enter_context(streaming(client))
        end = leave(narrow, f"{state}-{stream}", is_there, prompt=prompt, stream=stream)
    assert end == "cancelled (None)"  # or it would have gone on to the end of its context
    narrow.wait_idle()
    assert narrow.generate("1+1=").json()["text"] == "2"
