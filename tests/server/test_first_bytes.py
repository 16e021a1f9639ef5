"""A stream says that it was admitted before its first token, and goes on to say that it waits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from cllm.server import ServerConfig, create_app
from cllm.server.http.replies import PING, Writer
from cllm.testing import FakeEngine
from tests.server.conftest import TIMEOUT_S

pytestmark = pytest.mark.anyio
LONG = "x" * 4000  # tokens
ASK = [{"role": "user", "content": LONG}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": LONG}, "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": ASK}, "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
}  # fmt: skip
# What a stream repeats while it waits.
PINGS = {
    "/v1/responses": b"event: response.in_progress\n", "/v1/messages": b"event: ping\n",
}  # fmt: skip


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both: pings are a task of the loop's."""
    return str(request.param)


async def answered(
    path: str, config: ServerConfig, opens: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The messages of one streamed answer, whose engine computes nothing until one of them `opens` it."""
    gate = threading.Event()
    sent: list[dict[str, Any]] = []
    body = json.dumps({**ROUTES[path], "stream": True}).encode()

    def answer(_: str) -> str:
        assert gate.wait(TIMEOUT_S), "nothing was sent before the first tick"
        return "H"

    async def receive() -> dict[str, Any]:
        if not sent and not asked:
            asked.append(True)
            return {"type": "http.request", "body": body, "more_body": False}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)
        if opens(message):
            gate.set()

    asked: list[bool] = []
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        "asgi": {"version": "3.0"}, "root_path": "",
    }  # fmt: skip
    async with FakeEngine(answer, n_ctx=8192) as engine:
        await create_app(engine, config)(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", ROUTES)
async def test_the_head_of_a_stream_is_sent_before_the_first_tick_of_its_prompt(path: str) -> None:
    config = ServerConfig(ping_interval_s=0)
    sent = await answered(path, config, lambda message: message["type"] == "http.response.start")
    assert (sent[0]["status"], sent[-1]["more_body"]) == (200, False)
    body = b"".join(message.get("body", b"") for message in sent)
    assert b'"H"' in body
    assert b": ping" not in body
    assert body.count(PINGS.get(path, b"event: ping\n")) <= 1


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_waits_says_so_again_and_again(path: str) -> None:
    ping, n_seen = PINGS.get(path, b": ping\n\n"), 0

    def opens(message: dict[str, Any]) -> bool:
        nonlocal n_seen
        n_seen += ping in message.get("body", b"")
        return n_seen == 3

    sent = await answered(path, ServerConfig(ping_interval_s=0.01), opens)
    body = b"".join(message.get("body", b"") for message in sent)
    assert body.count(ping) >= 3
    assert b'"H"' in body
    if path == "/v1/responses":
        events = [
            json.loads(line[6:]) for line in body.decode().splitlines() if line[:6] == "data: "
        ]
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))


async def test_no_keep_alive_comes_after_the_end_of_a_stream() -> None:
    """The client stops reading at the last event, so the keep-alive waits; then the client reads on."""
    reads, sent = anyio.Event(), list[Any]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()
        if message.get("body") == PING:  # it comes to the wire late
            await anyio.wait_all_tasks_blocked()
        sent.append(message)

    async def finish() -> None:
        await writer.events([(None, "last")])
        await writer.end([])

    async def receive() -> Any:
        raise AssertionError

    writer = Writer({"type": "http"}, receive, send)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        tasks.start_soon(writer.ping, 0.0, lambda: None)
        await anyio.wait_all_tasks_blocked()
        reads.set()
    assert [message.get("more_body") for message in sent] == [None, True, True, False]


@pytest.mark.parametrize("path", ROUTES)
async def test_each_step_of_an_answer_is_one_part_of_its_body(path: str) -> None:
    """The events before the first token, those of this token, and the last delta with all that follows."""
    _, *parts = await answered(path, ServerConfig(ping_interval_s=0), lambda _: True)
    begins = path in ("/v1/responses", "/v1/messages")
    assert [part["more_body"] for part in parts] == [True] * (1 + begins) + [False]
    assert b'"H"' in parts[begins]["body"]


async def test_what_is_refused_before_it_is_admitted_keeps_its_status() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": ASK, "temperature": -1},
        "/v1/messages": {"messages": ASK, "max_tokens": 9, "tools": [{}]},
        "/v1/responses": {"input": "x", "temperature": -1},
        "/generate": {"prompt": "x" * 9000},
    }
    async with FakeEngine(lambda _: "Hm.", n_ctx=8192) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for path, body in bodies.items():
                response = await http.post(path, json={**body, "stream": True})
                assert response.status_code == 400, (path, response.text)
