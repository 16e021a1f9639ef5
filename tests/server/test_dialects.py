"""What clients of other servers send by themselves asks for nothing, and is taken."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cllm.server import create_app
from cllm.server.bodies.dialects import translated
from cllm.server.bodies.schemas import ChatBody
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio
ASK = {"role": "user", "content": "Go."}
NEUTRAL: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("max_completion_tokens", -1), ("max_tokens", None), ("stop", ""), ("stop", [""]),
    ("stop", []), ("stop", ["a", None]), ("top_logprobs", 0), ("logprobs", False), ("temperature", 1e-5),
    ("repetition_penalty", 1.0), ("logit_bias", []), ("logit_bias", [[5, 1.5]]), ("logit_bias", {}),
    ("tools", []), ("seed", -1), ("n", None), ("reasoning", {"effort": "high"}), ("top_k", -1),
    ("reasoning", {"enabled": False}), ("reasoning", {"exclude": True}), ("include_reasoning", True),
    ("thinking", {"type": "disabled"}), ("thinking", {"type": "enabled", "budget_tokens": 100}),
    ("enable_thinking", False), ("think", False), ("reasoning_effort", "minimal"),
    ("reasoning_effort", "xhigh"), ("reasoning_effort", "default"), ("reasoning_effort", ""),
    ("keep_alive", "5m"), ("provider", {"sort": "price"}), ("transforms", []), ("usage", {"include": True}),
    ("length_penalty", 1.0), ("use_beam_search", False), ("echo", False), ("documents", None),
    ("stream_options", {"include_usage": True, "continuous_usage_stats": True}), ("cache_salt", "x"),
    ("web_search_options", {}), ("chat_template_kwargs", {"enable_thinking": False}), ("stream", None),
    ("tool_choice", "auto"), ("tool_choice", "none"), ("response_format", None), ("session_id", "x"),
    ("safe_prompt", False), ("cache_prompt", True), ("id_slot", -1), ("n_probs", 0), ("top_a", 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(lambda _: "Hm.", n_ctx=4096) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=str)
async def test_what_asks_for_nothing_is_taken(
    name: str, value: Any, http: httpx.AsyncClient
) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": [ASK], name: value})
    assert response.status_code == 200, response.text


MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1e-5}, {"temperature": 0}), ({"temperature": 0.001}, {"temperature": 0.001}),
    ({"stop": ["a", "", None]}, {"stop": ["a"]}), ({"logit_bias": [[5, 1]]}, {"logit_bias": {"5": 1}}),
    ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ({"reasoning": {"enabled": False}}, {"reasoning_effort": "none"}),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ({"think": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ({"think": True, "chat_template_kwargs": {"enable_thinking": False}},
     {"chat_template_kwargs": {"enable_thinking": False}}),
    ({"top_logprobs": 0}, {}), ({"top_logprobs": 0, "logprobs": True}, {"top_logprobs": 0, "logprobs": True}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "meant"), MEANT, ids=str)
def test_other_words_mean_the_same(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert translated(given, ChatBody.model_fields) == meant


@pytest.mark.parametrize("body", [
    {"repetition_penalty": 1.2}, {"use_beam_search": True}, {"n_probs": 3}, {"max_tokens": -2},
    {"reasoning_effort": "a lot"}, {"top_logprobs": 2}, {"logit_bias": [[5]]},
])  # fmt: skip
async def test_what_asks_for_something_is_not_dropped(
    body: dict[str, Any], http: httpx.AsyncClient
) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": [ASK], **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == next(iter(body))


async def test_an_effort_that_changes_nothing_is_logged_once_and_ignored(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [ASK], "reasoning_effort": "high"},
        "/v1/responses": {"input": "Go.", "reasoning": {"effort": "high"}},
        "/v1/messages": {"messages": [ASK], "max_tokens": 9, "output_config": {"effort": "high"}},
        "/generate": {"messages": [ASK], "reasoning_effort": "high"},
        "/apply-template": {"messages": [ASK], "reasoning_effort": "high"},
        "/v1/messages/count_tokens": {
            "messages": [ASK],
            "output_config": {"effort": "high"},
            "max_tokens": 5,
        },
    }
    with caplog.at_level(logging.WARNING, "cllm.server"):
        for path, body in bodies.items():
            response = await http.post(path, json=body)
            assert response.status_code == 200, (path, response.text)
    assert [record.message for record in caplog.records if "effort" in record.message] == [
        "the effort high is ignored: the chat template has nothing that it changes"
    ]


async def test_anthropics_thread_is_rejected_as_its_tool_runner_understands(
    http: httpx.AsyncClient,
) -> None:
    body = {"messages": [ASK], "max_tokens": 9, "thread": {"type": "create"}}
    response = await http.post("/v1/messages", json=body)
    assert response.status_code == 400
    details = response.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    response = await http.post("/v1/messages", json={**body, "thread": None})
    assert response.status_code == 200
