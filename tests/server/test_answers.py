"""Every route that answers with text ends an answer that fails in the same way."""

from __future__ import annotations

import json
import logging
from typing import Any

import anyio
import pytest

from cllm import ClosedError, QueueFullError
from cllm.server import create_app
from cllm.server.answers import answer
from cllm.testing import FakeEngine
from tests.server.conftest import client_of

pytestmark = pytest.mark.anyio
ASK = [{"role": "user", "content": "1+1="}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "1+1="}, "/v1/completions": {"prompt": "1+1="},
    "/v1/chat/completions": {"messages": ASK}, "/v1/responses": {"input": "1+1="},
    "/v1/messages": {"messages": ASK, "max_tokens": 9}, "/completion": {"prompt": "1+1="},
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("error", "status", "is_logged"),
    [
        (RuntimeError("a secret"), 500, True),
        (QueueFullError(1, 1.0), 429, False),
        (ClosedError("closed"), 503, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_fails_is_a_status_before_the_head_and_an_event_after_it(
    path: str,
    error: Exception,
    status: int,
    is_logged: bool,
    has_begun: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_: Any, __: Any, ___: Any, on_admitted: Any) -> Any:
        if has_begun:
            await on_admitted()
        raise error

    monkeypatch.setattr(answer, "run_streams", fail)
    async with FakeEngine(lambda _: "2") as engine, client_of(engine) as client:
        with caplog.at_level(logging.ERROR, "cllm.server"):
            reply = await client.post(path, json={**ROUTES[path], "stream": True})
    assert reply.status_code == (200 if has_begun else status)
    assert "a secret" not in reply.text
    assert '"error":' in reply.text
    if has_begun and path != "/v1/responses":
        told = '"type":"' if path == "/v1/messages" else "data: [DONE]"
        assert told in reply.text
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info[1] for record in logged if record.exc_info] == [error] * is_logged


@pytest.mark.parametrize("path", ROUTES)
async def test_a_client_that_has_left_is_no_error_and_is_sent_nothing_more(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    asked = [
        {"type": "http.request", "body": json.dumps({**ROUTES[path], "stream": True}).encode()}
    ]

    async def receive() -> Any:
        return asked.pop() if asked else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 1:
            raise ConnectionResetError

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    async with FakeEngine(lambda _: "2") as engine:
        app = create_app(engine)
        with caplog.at_level(logging.WARNING, "cllm.server"):
            await app(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    assert not caplog.records
