"""Clients of Ollama work unchanged: Ollama's own, and LiteLLM's provider for it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

for module in ("litellm", "ollama"):
    pytest.importorskip(
        module, reason="the clients are in an environment of their own: make test-clients"
    )

import litellm
import ollama

from tests.clients.agents.mcp_server import PIXEL
from tests.clients.test_clients import ASK, TOOL

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def client(base_url: str) -> ollama.Client:
    return ollama.Client(host=base_url)


def test_ollama_streams_a_chat_with_its_thoughts(client: ollama.Client) -> None:
    parts = list(client.chat(model="m", messages=[HELLO], stream=True, think=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello!"
    assert "".join(part.message.thinking or "" for part in parts) == "A greeting."
    assert parts[-1].done
    assert parts[-1].done_reason == "stop"
    assert (parts[-1].eval_count or 0) > 0


def test_ollama_calls_tools_and_gives_their_results(client: ollama.Client) -> None:
    answer = client.chat(model="m", messages=[ASK], tools=[TOOL])
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_name": "get_weather", "content": "20 C"}
    told = client.chat(model="m", messages=[ASK, answer.message, result], tools=[TOOL])
    assert told.message.content == "It is 20 C in Paris."


def test_ollama_sends_images_and_formats(client: ollama.Client) -> None:
    picture = base64.b64decode(PIXEL)
    asked = {"role": "user", "content": "What is this?", "images": [picture]}
    assert client.chat(model="m", messages=[asked]).message.content == "I see 1."
    said = client.generate(model="m", prompt="What?", images=[picture]).response
    assert said == "I see 1."
    told = client.generate(model="m", prompt="user: JSON", format="json", keep_alive="5m")
    assert json.loads(told.response or "")["city"] == "Paris"


def test_ollama_computes_vectors(client: ollama.Client) -> None:
    vectors = client.embed(model="m", input=["a", "b"]).embeddings
    assert len(vectors) == 2
    assert client.embeddings(model="m", prompt="a").embedding == vectors[0]


def test_ollama_lists_models(client: ollama.Client) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model
    shown = client.show(listed.model or "")
    assert "tools" in (shown.capabilities or ())
    assert shown.details is not None
    assert shown.details.format == "gguf"


def test_ollama_shows_errors_as_texts(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options.top_p is 2.0, must be 0 to 1") as info:
        client.chat(model="m", messages=[HELLO], options={"top_p": 2.0})
    assert info.value.status_code == 400


@pytest.mark.anyio
async def test_ollama_streams_over_asyncio(base_url: str) -> None:
    said = ""
    async for part in await ollama.AsyncClient(host=base_url).generate("m", "Hello", stream=True):
        said += part.response or ""
    assert said == "Hello!"


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_chats_as_with_ollama(stream: bool, base_url: str) -> None:
    ways: dict[str, Any] = {"model": "ollama_chat/m", "api_base": base_url, "stream": stream}
    said: Any = litellm.completion(messages=[HELLO], **ways)
    if stream:
        said = litellm.stream_chunk_builder(list(said))
    assert said.choices[0].message.content == "Hello!"


def test_litellm_calls_tools_as_with_ollama(base_url: str) -> None:
    ways: dict[str, Any] = {"model": "ollama_chat/m", "api_base": base_url}
    answer: Any = litellm.completion(messages=[ASK], tools=[TOOL], **ways)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
