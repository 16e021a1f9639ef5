"""Connections are bounded: clients that do nothing cannot take what streams need."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cllm.server.http import connections, protocol
from cllm.server.http.connections import (
    N_DEFAULT,
    N_MIN,
    Connections,
    n_connections_max,
)
from cllm.server.http.protocol import LingeringTransport, n_unsent
from cllm.system import raise_descriptor_limit
from tests.conftest import some_in_fast
from tests.server.conftest import COMMAND, ENDLESS, QUIET_OPTIONS, Server, running

N_CONNECTIONS = 12


class Kept:
    """A connection that notes its end."""

    is_closed = False

    def close_idle(self) -> None:
        self.is_closed = True


def test_one_more_closes_the_one_that_is_idle_for_longest() -> None:
    kept, all_of_them = [Kept() for _ in range(4)], Connections(3)
    for each in kept[:3]:
        assert all_of_them.add(each)
        all_of_them.set_idle(each, True)
    all_of_them.set_idle(kept[0], False)
    assert all_of_them.add(kept[3])
    assert [each.is_closed for each in kept] == [False, True, False, False]


def test_none_that_works_is_closed_for_another() -> None:
    kept, all_of_them = [Kept() for _ in range(3)], Connections(2)
    assert [all_of_them.add(each) for each in kept] == [True, True, False]
    all_of_them.discard(kept[0])
    assert all_of_them.add(kept[2])
    assert not any(each.is_closed for each in kept)


class Wire:
    """A transport that notes what is done to it."""

    def __init__(self, *, is_tls: bool, n_unsent: int | None) -> None:
        self.is_tls, self.n_unsent = is_tls, n_unsent
        self.done: list[str] = []

    def get_extra_info(self, name: str) -> object:
        return self if name == "ssl_object" and self.is_tls else None

    def is_closing(self) -> bool:
        return bool(self.done)

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_client_of_tls_keeps_its_connection_open_no_longer_than_others(
    is_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PERIOD_S", 0.0)
    monkeypatch.setattr(protocol, "n_unsent", lambda wire: wire.n_unsent)

    async def pause() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def close() -> None:
        idle, reading = Wire(is_tls=is_tls, n_unsent=0), Wire(is_tls=is_tls, n_unsent=9)
        closed, unknown = Wire(is_tls=is_tls, n_unsent=9), Wire(is_tls=is_tls, n_unsent=None)
        unknown_idle = Wire(is_tls=is_tls, n_unsent=None)
        for wire in (idle, reading, unknown_idle):
            LingeringTransport(cast(Any, wire), lambda: False).end()
        for wire in (closed, unknown):
            LingeringTransport(cast(Any, wire), lambda: False).close()
        await pause()
        assert idle.done == (["abort"] if is_tls else ["close"])
        assert reading.done == closed.done == unknown.done == ["close"]
        closed.n_unsent = reading.n_unsent = 0
        await pause()
        assert reading.done == closed.done == (["close", "abort"] if is_tls else ["close"])
        assert unknown.done == unknown_idle.done == ["close"]

    asyncio.run(close())


def test_what_a_peer_has_not_received_is_known() -> None:
    async def send() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            _, writer = await asyncio.open_connection(host, port)
            peer, _ = listener.accept()
            with peer:
                transport = writer.transport
                assert n_unsent(transport) == 0
                data = bytes(64 << 20)
                transport.write(data)
                assert (n_unsent(transport) or 0) > 0
                n_read = 0
                while n_read < len(data):
                    n_read += len(await asyncio.to_thread(peer.recv, 1 << 20))
                while n_unsent(transport):
                    await asyncio.sleep(0)
                transport.abort()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert n_unsent(transport) is None

    asyncio.run(send())


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_follows_from_the_descriptors_that_there_may_be(
    limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 500), hard))
    assert raise_descriptor_limit(65536) == min(hard, 65536)
    monkeypatch.setattr(connections, "_n_open", lambda: 20)
    assert n_connections_max(80, None) == 28
    assert n_connections_max(30, None) == N_MIN
    assert n_connections_max(100_000, None) == N_DEFAULT
    assert n_connections_max(100_000, 50) == 50


def idle_ones(
    server: Server, n: int, stack: ExitStack, sent: bytes = b"GET / HTTP/1.1\r\n"
) -> None:
    """Open `n` connections that send `sent` and then wait."""
    for _ in range(n):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with suppress(ConnectionError):
            client.sendall(sent)


@pytest.mark.parametrize("sent", some_in_fast([b"GET / HTTP/1.1\r\n", b""]))
def test_idle_clients_take_no_stream_its_connection(tmp_path: Path, sent: bytes) -> None:
    with running(tmp_path / "log", "--max-connections", str(N_CONNECTIONS)) as server:
        body = {"prompt": "count:1..400", "max_tokens": 300, "temperature": 0, "stream": True}
        with ExitStack() as stack:
            idle_ones(server, N_CONNECTIONS, stack, sent)
            streams = [
                stack.enter_context(
                    httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60)
                )
                for _ in range(N_CONNECTIONS - 2)
            ]
            idle_ones(server, 5 * N_CONNECTIONS, stack, sent)
            texts = {"".join(texts_of(each)) for each in streams}
        assert texts == {server.generate("count:1..400", max_tokens=300).json()["text"]}
        assert server.log.count("connections are open") == 1


def test_a_connection_too_many_is_told_so_while_all_others_work(tmp_path: Path) -> None:
    body = {**ENDLESS, "stream": True}
    with running(tmp_path / "log", "--max-connections", str(N_MIN)) as server, ExitStack() as stack:
        for _ in range(N_MIN):
            url = f"{server.url}/generate"
            stack.enter_context(httpx.stream("POST", url, json=body, timeout=60))
        refused = httpx.get(f"{server.url}/health", timeout=60)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "too many connections"


def test_a_connection_that_is_kept_open_after_an_answer_makes_room_for_a_new_one(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "log", "--max-connections", str(N_MIN)) as server, ExitStack() as stack:
        kept = [
            stack.enter_context(closing(HTTPConnection("127.0.0.1", server.port, timeout=10)))
            for _ in range(N_MIN)
        ]
        assert {status_over(each) for each in kept} == {200}
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert {status_over(each) for each in kept[1:]} == {200}
        assert kept[0].sock.recv(1) == b""  # it was idle for longest


def status_over(connection: HTTPConnection) -> int:
    """The status of one more answer over a connection."""
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    return response.status


def texts_of(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: ")).get("text", "")


@pytest.mark.full
def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -n 80; exec "$@"', "-", *COMMAND, *QUIET_OPTIONS)
    with Server(tmp_path / "log", command=limited) as server, ExitStack() as stack:
        server.wait_ready()
        idle_ones(server, 90, stack)
        assert server.generate("37+58=").json()["text"] == "95"
        assert len(server.log.splitlines()) < 100
