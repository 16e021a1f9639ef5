"""More than there is room for: what is said of it lets each client compact its history."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from cllm import PromptTooLongError
from cllm.client.refusals import refusal_of
from cllm.engine.chat import chat_prompt
from cllm.engine.loop import request_call
from cllm.server import ServerConfig, create_app
from cllm.server.http import body
from cllm.server.http.problems import Problem
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio
N_CTX = 4096
LONG = "x " * 20_000
ASK = {"role": "user", "content": "Go."}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
    "/v1/completions": {"prompt": LONG},
    "/generate": {"prompt": LONG},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(lambda _: "Hm.", n_ctx=N_CTX) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_overflow_has_the_texts_the_code_and_the_numbers(
    path: str, is_streamed: bool, http: httpx.AsyncClient
) -> None:
    response = await http.post(path, json={**ROUTES[path], "stream": is_streamed})
    if path == "/v1/responses" and is_streamed:  # Codex knows it from this event alone
        assert response.status_code == 200
        events = [
            json.loads(line[6:]) for line in response.text.splitlines() if line[:6] == "data: "
        ]
        kinds = [event["type"] for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.failed"]
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
        assert "maximum context length" in events[-1]["response"]["error"]["message"]
        return
    assert response.status_code == 400
    error = response.json()["error"]
    n = error["n_prompt_tokens"]
    assert n > N_CTX == error["n_ctx"]
    assert (error["code"], error["type"]) == (
        "context_length_exceeded",
        "exceed_context_size_error",
    )
    for text in (
        f"prompt is too long: {n} tokens > {N_CTX} maximum",  # Claude Code, langchain-anthropic
        f"this model's maximum context length is {N_CTX} tokens",  # LiteLLM, opencode
        "context_length_exceeded",  # langchain-openai
    ):
        assert text in error["message"]
    raised = refusal_of(response.status_code, response.headers, response.content)
    assert isinstance(raised, PromptTooLongError)
    assert (raised.n_prompt, raised.n_ctx) == (n, N_CTX)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"]
)
async def test_too_many_messages_and_too_large_a_body_have_the_code_of_an_overflow(
    path: str,
) -> None:
    config = ServerConfig(max_messages=3, max_body_bytes=5000)
    field = "input" if path == "/v1/responses" else "messages"
    more = {"max_tokens": 9} if path == "/v1/messages" else {}
    async with FakeEngine(lambda _: "Hm.", n_ctx=N_CTX) as engine:
        transport = httpx.ASGITransport(create_app(engine, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            many = await client.post(path, json={field: [ASK] * 4, **more})
            large = await client.post(path, json={field: [{**ASK, "content": "x" * 6000}], **more})
            fine = await client.post(path, json={field: [ASK] * 3, **more})
    assert (many.status_code, large.status_code, fine.status_code) == (400, 413, 200)
    for response, limit in ((many, "--max-messages"), (large, "--max-body-bytes")):
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "prompt is too long" in error["message"]
        assert limit in error["message"]


def test_a_body_of_too_many_values_is_rejected_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "MAX_COMMAS", 100)
    assert body.parsed(b"[%s]" % b",".join([b"0"] * 101)) == [0] * 101
    monkeypatch.setattr(body, "from_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(Problem, match="prompt is too long: more than 100 commas"):
        body.parsed(b"[%s]" % b",".join([b"0"] * 102))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_several_answers_check_their_prompt_once_and_have_seeds_of_their_own(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat of 262,144 values takes the event loop 50 ms."""
    checked: list[object] = []

    def counted(check: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: object) -> Any:
            checked.append(given)
            return check(*given)

        return run

    for module, name in ((chat_prompt, "check_messages"), (request_call, "check_prompt")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    asked = {"messages": [ASK]} if "chat" in path else {"prompt": "Hm"}
    more = {"n_predict": 4} if path == "/completion" else {"max_tokens": 4}
    seeds: list[int | None] = []
    call_init = request_call.RequestCall.__post_init__

    def noted(call: request_call.RequestCall) -> None:
        call_init(call)
        seeds.append(call.params.seed if call.seed is None else call.seed)

    monkeypatch.setattr(request_call.RequestCall, "__post_init__", noted)
    async with FakeEngine(lambda _: "Hm.", n_ctx=N_CTX) as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, json={**asked, **more, "n": 3, "seed": 7})
    assert answer.status_code == 200, answer.text
    assert len(checked) == 1
    assert seeds[:3] == [7, 8, 9]


def test_limits_follow_from_the_context() -> None:
    config = ServerConfig()
    assert (config.n_messages_max(4096), config.n_messages_max(400_000)) == (1024, 25_000)
    assert config.n_body_bytes_max(4096) == 4 << 20
    assert config.n_body_bytes_max(1 << 18) == 1 << 24
    assert ServerConfig(max_messages=5).n_messages_max(1 << 18) == 5


async def test_anthropics_answers_have_their_request_id(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/messages", json={"messages": [ASK], "max_tokens": 9})
    assert response.headers["request-id"] == response.headers["x-request-id"]
