"""Ollama's routes take what its clients send, and answer as it does; `tests/clients` has its own client."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cllm import Engine, EngineConfig, FimTokens
from cllm.server import ServerConfig, create_app
from cllm.server.routes.ollama import _messages
from cllm.server.several import create_models_app
from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import QUIET
from tests.server.test_images import png

pytestmark = pytest.mark.anyio
CALLS = FakeAnswer("", reasoning="Hm.", tool_calls=[("f", {"x": 1}), ("g", {})])
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}  # fmt: skip
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


def answer(prompt: str) -> FakeAnswer | str:
    """Calls for a prompt with tools; otherwise the prompt itself, so that tests see it."""
    return CALLS if '"name"' in prompt and "user: call" in prompt else f"[{prompt}]"


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(answer, n_ctx=4096) as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(model_name="m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def lines(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a streamed answer."""
    response = await http.post(path, json=body)
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def whole(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """A whole answer."""
    response = await http.post(path, json={"model": "m", "stream": False, **body})
    assert response.status_code == 200, response.text
    said: dict[str, Any] = response.json()
    return said


async def test_a_chat_is_lines_of_json_by_default(http: httpx.AsyncClient) -> None:
    *parts, last = await lines(http, "/api/chat", {"model": "m", "messages": [USER]})
    assert all(part["message"]["role"] == "assistant" and not part["done"] for part in parts)
    assert "user: hi" in "".join(part["message"]["content"] for part in parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] > 0
    assert last["prompt_eval_count"] > 0
    for name in ("total_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(last[name], int)


async def test_a_whole_chat_is_one_object(http: httpx.AsyncClient) -> None:
    said = await whole(http, "/api/chat", messages=[USER])
    assert "user: hi" in said["message"]["content"]
    assert (said["model"], said["done"]) == ("m", True)
    assert said["created_at"].endswith("Z")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_calls_come_whole_with_objects_as_arguments(
    is_streamed: bool, http: httpx.AsyncClient
) -> None:
    messages = [{"role": "user", "content": "call"}]
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": is_streamed}
    if is_streamed:
        said = await lines(http, "/api/chat", body)
        (part,) = [line for line in said if "tool_calls" in line["message"]]
        assert "".join(line["message"].get("thinking", "") for line in said) == "Hm."
        assert said[-1]["done_reason"] == "stop"
    else:
        part = await whole(http, "/api/chat", **body)
        assert part["message"]["thinking"] == "Hm."
    calls = [call["function"] for call in part["message"]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", {"x": 1}), ("g", {})]


async def test_results_of_tools_belong_to_the_calls_that_they_name() -> None:
    calls: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f")
    ]
    said = _messages(
        [
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
            {"role": "tool", "content": "1", "tool_name": "g"},
            {"role": "tool", "content": "2", "tool_name": "f"},
            {"role": "tool", "content": "3"},
        ]
    )
    mine = [{"id": "x", "function": {"name": "f"}}, {"id": "y", "function": {"name": "f"}}]
    later = _messages(
        [
            {"role": "assistant", "tool_calls": calls[:1]},  # its result never came
            {"role": "assistant", "tool_calls": mine},
            {"role": "tool", "content": "2", "tool_call_id": "y", "tool_name": "f"},
            {"role": "tool", "content": "1", "tool_name": "f"},
        ]
    )
    assert [message["tool_call_id"] for message in later[2:]] == ["y", "x"]
    ids = [call["id"] for call in said[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [message["tool_call_id"] for message in said[1:]] == [ids[1], ids[0], ids[2]]
    assert said[0]["reasoning_content"] == "Hm."


async def test_a_prompt_is_answered_as_a_chat_and_raw_ones_are_continued(
    http: httpx.AsyncClient,
) -> None:
    said = await whole(http, "/api/generate", prompt="hi", system="Be brief.")
    assert "user: hi" in said["response"]
    assert "Be brief." in said["response"]
    assert (await whole(http, "/api/generate", prompt="hi", raw=True))["response"] == "[hi]"
    *parts, last = await lines(http, "/api/generate", {"model": "m", "prompt": "hi", "raw": True})
    assert "".join(part["response"] for part in parts) == "[hi]"
    assert (last["response"], last["done"]) == ("", True)


@pytest.mark.parametrize(("path", "key"), [("chat", "message"), ("generate", "response")])
async def test_a_request_without_a_prompt_loads(
    path: str, key: str, http: httpx.AsyncClient
) -> None:
    said = await whole(http, f"/api/{path}", keep_alive="5m")
    assert key in said
    assert (said["done"], said["done_reason"]) == (True, "load")


async def test_options_are_ollamas_and_limits_name_them(http: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {
        "num_predict": 2,
        "num_ctx": 4096,
        "temperature": 0,
        "seed": 1,
        "stop": ["x"],
    }
    said = await whole(http, "/api/generate", prompt="hi", raw=True, options=options)
    assert (said["eval_count"], said["done_reason"]) == (2, "length")
    for options in ({"num_predict": -1}, {"num_predict": -2, "seed": -1}, {"seed": 1 << 60}):
        assert (await whole(http, "/api/generate", prompt="hi", raw=True, options=options))["done"]
    for wrong, text in {
        "top_p": "options.top_p is 2.0, must be 0 to 1",
        "prompt_logprobs": "prompt_logprobs: is not known",
        "temprature": "temprature: is not known: did you mean temperature?",
    }.items():
        body = {"model": "m", "prompt": "hi", "options": {wrong: 2}}
        response = await http.post("/api/generate", json=body)
        assert response.status_code == 400
        assert text in response.json()["error"]


async def test_errors_are_texts_as_with_ollama(http: httpx.AsyncClient) -> None:
    for path, body in {
        "/api/chat": {"messages": [USER]},  # without a model
        "/api/generate": {"model": "m", "prompt": "hi", "context": [1]},
        "/api/embed": {"model": "m", "input": 1},
    }.items():
        response = await http.post(path, json=body)
        assert response.status_code == 400
        assert isinstance(response.json()["error"], str)
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * 9000}]}
    response = await http.post("/api/chat", json=long)
    assert response.status_code == 400
    assert "too long" in response.json()["error"]


@pytest.mark.parametrize(
    "form",
    [
        "json",
        {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ],
)
async def test_a_format_constrains_the_answer(form: object) -> None:
    async with Engine(n_ctx=1024, **QUIET) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            options = {"num_predict": 200, "seed": 1}
            said = await whole(client, "/api/chat", messages=[USER], format=form, options=options)
            text = said["message"]["content"]
            assert text.lstrip().startswith("{")
            if form != "json":
                assert json.loads(text) == {"a": 1}
            wrong = {"model": "m", "messages": [USER], "format": "xml"}
            response = await client.post("/api/chat", json=wrong)
            assert response.json()["error"] == 'format: must be "json" or a schema'


async def test_images_stand_before_their_message(http: httpx.AsyncClient) -> None:
    image = base64.b64encode(png()).decode()
    said = await whole(http, "/api/chat", messages=[{**USER, "images": [image, image]}])
    assert said["message"]["content"].count("<image>") == 2
    said = await whole(http, "/api/generate", prompt="hi", images=[image])
    assert said["response"].count("<image>") == 1
    wrong = {"model": "m", "messages": [{**USER, "images": ["?"]}]}
    response = await http.post("/api/chat", json=wrong)
    assert response.status_code == 400
    assert "messages[0]" in response.json()["error"]
    thinking = {"model": "m", "messages": [USER], "think": "a lot"}
    response = await http.post("/api/chat", json=thinking)
    assert response.json()["error"].startswith("think is")


async def test_text_is_filled_in_or_that_is_said_to_be_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(lambda prompt: "middle", n_ctx=256)
    async with engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"model": "m", "prompt": "a", "suffix": "b", "stream": False}
            response = await client.post("/api/generate", json=body)
            assert response.json() == {"error": "'m' does not support insert"}
            model = replace(engine.model, fim=FimTokens(prefix=1, suffix=2, middle=3))
            monkeypatch.setattr(type(engine), "model", property(lambda _: model))
            assert (await whole(client, "/api/generate", prompt="a", suffix="b"))[
                "response"
            ] == "middle"


async def test_vectors_have_length_one(http: httpx.AsyncClient) -> None:
    said = await whole(http, "/api/embed", input=["a", "b"])
    assert [
        math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in said["embeddings"]
    ] == [True] * 2
    assert said["prompt_eval_count"] == 2
    (vector,) = (await whole(http, "/api/embed", input="a", dimensions=2))["embeddings"]
    assert len(vector) == 2
    assert (await whole(http, "/api/embeddings", prompt="a"))["embedding"] == said["embeddings"][0]
    assert (await whole(http, "/api/embeddings"))["embedding"] == []
    nothings: tuple[Any, ...] = ("", [])  # clients load a model with it
    for nothing in nothings:
        assert (await whole(http, "/api/embed", input=nothing))["embeddings"] == []


async def test_the_model_is_described(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/version")).json()["version"].count(".") == 2
    (listed,) = (await http.get("/api/tags")).json()["models"]
    (running,) = (await http.get("/api/ps")).json()["models"]
    assert listed["name"] == running["model"] == "m"
    assert listed["digest"] == running["digest"]
    assert len(listed["digest"]) == 64
    assert running["context_length"] == 4096
    shown = (await http.post("/api/show", json={"model": "m:latest"})).json()
    assert {"completion", "vision", "tools"} <= set(shown["capabilities"])
    assert shown["details"] == listed["details"]
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == 4096


async def test_several_models_are_listed_and_one_is_named_with_its_tag() -> None:
    models = {name: EngineConfig(n_ctx=256, **QUIET) for name in ("a", "b")}
    app = create_models_app(models, make_engine=lambda config: FakeEngine(answer, n_ctx=256))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/api/version")).status_code == 200
            for field in ("model", "name"):  # clients ask about all of them: that loads none
                shown = await client.post("/api/show", json={field: "b"})
                assert shown.json()["capabilities"] == ["completion"]
                assert (await client.post("/api/show", json={field: "c"})).status_code == 404
            listed = (await client.get("/api/tags")).json()["models"]
            assert [model["name"] for model in listed] == ["a", "b"]
            assert (await client.get("/api/ps")).json() == {"models": []}
            said = await whole(client, "/api/chat", model="b:latest", messages=[USER])
            assert said["model"] == "b:latest"
            (running,) = (await client.get("/api/ps")).json()["models"]
            assert running["name"] == "b"
            response = await client.post("/api/chat", json={"model": "c", "messages": [USER]})
            assert response.status_code == 404
            assert response.json()["error"].startswith("there is no model 'c'")
