"""A request whose time has passed is no answer, and says so on every route."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cllm.testing import FakeEngine
from tests.server.conftest import LONG, client_of

CHAT = [{"role": "user", "content": LONG}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 4000, "ignore_eos": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4000},
    "/completion": {"prompt": LONG, "n_predict": 4000, "ignore_eos": True},
}


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_token_it_is_an_error(client: httpx.Client, route: str) -> None:
    response = client.post(route, json={**ROUTES[route], "timeout": 0})
    assert response.status_code == 408, response.text
    assert "deadline of the request passed" in response.text


def test_a_continuation_that_is_not_scored_in_time_is_an_error(client: httpx.Client) -> None:
    body = {"prompt": LONG, "continuation": LONG, "timeout": 0}
    response = client.post("/generate/score", json=body)
    assert response.status_code == 408, response.text
    assert "deadline passed before the continuation was scored" in response.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_without_a_token_ends_with_an_error(client: httpx.Client, route: str) -> None:
    response = client.post(route, json={**ROUTES[route], "timeout": 0, "stream": True})
    assert "deadline of the request passed" in response.text
    ends = ('"finish_reason":"length"', '"stop_reason":"deadline"', '"stop":true')
    assert not any(end in response.text.replace(" ", "") for end in ends)


@pytest.mark.anyio
@pytest.mark.parametrize("n", [1, 2])
async def test_a_chat_that_expires_before_it_is_read_needs_no_scripted_answer(n: int) -> None:
    async with FakeEngine({"weather": "Sunny."}) as engine, client_of(engine) as http:
        body = {"messages": [{"role": "user", "content": "weather"}], "timeout": 0, "n": n}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 408, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/completion"])
def test_with_tokens_a_field_says_it(client: httpx.Client, route: str, stream: bool) -> None:
    response = client.post(route, json={**ROUTES[route], "timeout": 0.2, "stream": stream})
    text = response.text.replace(" ", "")
    # On a busy machine no token may have come.
    assert '"stop_reason":"deadline"' in text or "deadline of the request passed" in response.text
    assert (
        '"length"' in text or '"limit"' in text or "deadline of the request passed" in response.text
    )
