"""Tenants over HTTP: the field `tenant` of every route that generates, and the header of a proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from cllm.client import AsyncClient
from cllm.engine.loop.request_call import RequestCall
from cllm.engine.loop.stream import TokenStream
from cllm.testing import FakeEngine
from tests.server.conftest import Server, client_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

CHAT = [{"role": "user", "content": "1+1="}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "1+1="},
    "/completion": {"prompt": "1+1="},
    "/v1/completions": {"prompt": "1+1="},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "1+1="},
    "/generate/score": {"prompt": "1+1=", "continuation": "2"},
}


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tenants of the requests that reach an engine."""
    found: list[str] = []
    real = TokenStream.__init__

    def open_stream(stream: TokenStream, call: RequestCall, *rest: Any) -> None:
        found.append(call.tenant)
        real(stream, call, *rest)

    monkeypatch.setattr(TokenStream, "__init__", open_stream)
    return found


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(lambda prompt: "2") as engine, client_of(engine) as client:
        yield client


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_that_generates_takes_a_tenant_and_the_header_goes_before_the_field(
    path: str, http: httpx.AsyncClient, tenants: list[str]
) -> None:
    for field, headers, expected in (
        ({}, {}, ""),
        ({"tenant": "a"}, {}, "a"),
        ({}, {"X-Tenant": "b"}, "b"),
        ({"tenant": "a"}, {"X-Tenant": "b"}, "b"),
    ):
        tenants.clear()
        response = await http.post(path, json={**ROUTES[path], **field}, headers=headers)
        assert response.status_code == 200, response.text
        assert tenants == [expected]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_name_that_is_too_long_is_rejected_by_field(
    path: str, http: httpx.AsyncClient
) -> None:
    response = await http.post(path, json={**ROUTES[path], "tenant": "x" * 257})
    assert response.status_code == 400
    assert "tenant" in response.text


def test_a_client_tells_the_server_its_tenant(server: Server) -> None:
    async def ask() -> tuple[Any, Any, str]:
        async with AsyncClient(server.url) as client:
            named, plain = client.stream("1+1=", tenant="a"), client.stream("1+1=")
            answer = await client.generate("1+1=", tenant="a", max_tokens=1, temperature=0.0)
            return named._body.get("tenant"), plain._body.get("tenant"), answer.text

    assert anyio.run(ask) == ("a", None, "2")
