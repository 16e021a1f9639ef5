"""Every parameter of the SDKs: obeyed, ignored, or rejected with an alternative."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

for module in ("anthropic", "openai"):
    pytest.importorskip(
        module, reason="the clients are in an environment of their own: make test-clients"
    )

import anthropic
import openai

from cllm.server.bodies.schemas import HINTS, ChatBody, CompletionBody
from cllm.server.routes.messages import CountBody, MessagesBody
from cllm.server.routes.responses import ResponsesBody

OPENAI = openai.OpenAI(api_key="none")
ANTHROPIC = anthropic.Anthropic(api_key="none")
OWN = {
    "self",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
}  # of the SDK, not of the API
OF_SDK = {"betas"}  # sent as a header
# Methods, the bodies that they send, and what is rejected where it asks for something.
ROUTES: dict[str, tuple[Callable[..., Any], Any, set[str]]] = {
    "chat": (
        OPENAI.chat.completions.create, ChatBody, {"audio", "function_call", "functions", "modalities"},
    ),
    "completions": (OPENAI.completions.create, CompletionBody, {"best_of", "suffix"}),
    "responses": (
        OPENAI.responses.create, ResponsesBody,
        {"background", "conversation", "previous_response_id", "prompt", "truncation"},
    ),
    "input tokens": (
        OPENAI.responses.input_tokens.count, ResponsesBody,
        {"conversation", "previous_response_id", "truncation"},
    ),
    "messages": (ANTHROPIC.messages.create, MessagesBody, set()),
    "beta messages": (ANTHROPIC.beta.messages.create, MessagesBody, {"thread"}),
    "count": (ANTHROPIC.messages.count_tokens, CountBody, set()),
    "beta count": (ANTHROPIC.beta.messages.count_tokens, CountBody, set()),
}  # fmt: skip
IGNORED = {
    # of OpenAI: what its own service does with a request
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "user",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity",
    "web_search_options", "max_tool_calls", "context_management", "access_programs",
    "background_options", "image", "personality",
    # of Anthropic
    "cache_control", "container", "diagnostics", "inference_geo", "speed", "user_profile_id",
    "workspace_id", "billing_policy", "fallback_credit_token", "fallbacks", "mcp_servers",
    "compaction",
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_each_parameter_of_an_sdk_is_obeyed_ignored_or_rejected_as_said_here(name: str) -> None:
    method, body, rejected = ROUTES[name]
    parameters = set(inspect.signature(method).parameters) - OWN - OF_SDK
    assert rejected <= parameters
    obeyed = parameters & set(body.model_fields) - {"thread"}
    ignored = (parameters - obeyed) & body.harmless
    assert ignored <= IGNORED
    assert parameters - obeyed - ignored == rejected
    for parameter in rejected - {"thread"}:
        assert parameter in body.neutral or parameter in HINTS, "there is no alternative to it"


def test_anthropics_tool_runner_goes_on_without_a_thread(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="none")

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "20 C"

    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=300, tools=[get_weather],
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    )  # fmt: skip
    last = runner.until_done()
    assert last.content[-1].type == "text"
    assert "20 C" in last.content[-1].text
