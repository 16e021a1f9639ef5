"""Chats, responses and messages say the same answer in their own shapes, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from cllm import Engine, TokenDelta, ToolCallDelta
from cllm.server import create_app
from cllm.server.answers.event_blocks import Blocks
from cllm.server.config import ServerConfig
from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import QUIET, some_in_fast

pytestmark = pytest.mark.anyio
CALLED = FakeAnswer("Let me see.", "I need it.", [("get_weather", {"city": "Oslo"})])
ANSWERS: dict[str, str | FakeAnswer] = {
    "weather": CALLED,
    "20 C": "It is 20 C.",
    "long": "x" * 400,
    "": "Hello!",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
MESSAGES_TOOL = {"name": "get_weather", "input_schema": SCHEMA}
ASK = {"role": "user", "content": "weather?"}


@asynccontextmanager
async def client(**config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(ANSWERS) as engine:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(**config)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
            yield made


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Names and objects of a stream's events."""
    events = []
    for block in response.text.strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        events.append((name.removeprefix("event: "), json.loads(data)))
    return events


async def test_a_chat_has_reasoning_and_calls_of_its_own() -> None:
    async with client() as http:
        body = {"messages": [ASK], "tools": [CHAT_TOOL]}
        (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me see."
        assert message["reasoning_content"] == "I need it."
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
    chunks = [
        json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I need it."
    assert "".join(d.get("content", "") for d in deltas) == "Let me see."
    pieces = [piece for d in deltas for piece in d.get("tool_calls", ())]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"city": "Oslo"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_chat_of_tools_that_may_not_be_called_has_none() -> None:
    async with client() as http:
        body = {"messages": [ASK], "tools": [CHAT_TOOL], "tool_choice": "none"}
        (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "<tool_call>" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


async def test_a_response_has_an_item_for_each_channel() -> None:
    async with client() as http:
        body = {"input": "weather?", "tools": [RESPONSES_TOOL, {"type": "web_search"}]}
        whole = (await http.post("/v1/responses", json=body)).json()
        streamed = events_of(await http.post("/v1/responses", json={**body, "stream": True}))
    assert whole["status"] == "completed"
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I need it."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Oslo"}')
    names = [name for name, _ in streamed]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    assert [event["sequence_number"] for _, event in streamed] == list(range(len(streamed)))
    done = [event["item"] for name, event in streamed if name == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert streamed[-1][1]["response"]["output"] == done


async def test_a_response_goes_on_from_its_items() -> None:
    async with client() as http:
        first = (
            await http.post("/v1/responses", json={"input": "weather?", "tools": [RESPONSES_TOOL]})
        ).json()
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20 C"}
        turns = [{"role": "user", "content": "weather?"}, *first["output"], result]
        body = {"input": turns, "tools": [RESPONSES_TOOL], "instructions": "Be brief."}
        second = (await http.post("/v1/responses", json=body)).json()
        counted = (await http.post("/v1/responses/input_tokens", json=body)).json()
    assert second["output"][-1]["content"][0]["text"] == "It is 20 C."
    assert second["usage"]["input_tokens"] == counted["input_tokens"]


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    async with client() as http:
        body = {"input": "long", "max_output_tokens": 5}
        whole = (await http.post("/v1/responses", json=body)).json()
        streamed = events_of(await http.post("/v1/responses", json={**body, "stream": True}))
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed[-1][0] == "response.incomplete"


async def test_a_message_has_a_block_for_each_channel() -> None:
    async with client() as http:
        body = {"max_tokens": 300, "messages": [ASK], "tools": [MESSAGES_TOOL]}
        whole = (await http.post("/v1/messages", json=body)).json()
        streamed = events_of(await http.post("/v1/messages", json={**body, "stream": True}))
    assert whole["stop_reason"] == "tool_use"
    thought, text, use = whole["content"]
    assert thought["thinking"] == "I need it."
    assert text["text"] == "Let me see."
    assert (use["name"], use["input"]) == ("get_weather", {"city": "Oslo"})
    names = [name for name, _ in streamed]
    assert names[0] == "message_start"
    begun_usage = streamed[0][1]["message"][
        "usage"
    ]  # the prompt's size: what is cached is not known yet
    usage = whole["usage"]
    assert begun_usage == {**usage, "cache_read_input_tokens": 0, "output_tokens": 0}
    assert usage["input_tokens"] > 20
    assert names[-2:] == ["message_delta", "message_stop"]
    assert all(event["type"] == name for name, event in streamed)
    begun = [
        event["content_block"]["type"] for name, event in streamed if name == "content_block_start"
    ]
    assert begun == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for name, event in streamed if name == "content_block_delta"]
    assert "".join(d.get("partial_json", "") for d in deltas) == '{"city": "Oslo"}'


async def test_a_message_goes_on_from_its_blocks_and_leaves_out_what_changes_each_time() -> None:
    async with client() as http:
        first = (
            await http.post(
                "/v1/messages",
                json={"max_tokens": 300, "messages": [ASK], "tools": [MESSAGES_TOOL]},
            )
        ).json()
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][-1]["id"],
            "content": "20 C",
        }
        turns = [
            ASK,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        answers = []
        for billing in ("cch=1", "cch=2"):
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: {billing}"},
                {"type": "text", "text": "Be brief."},
            ]
            body = {
                "max_tokens": 300,
                "messages": turns,
                "tools": [MESSAGES_TOOL],
                "system": system,
            }
            answers.append((await http.post("/v1/messages", json=body)).json())
        counted = (await http.post("/v1/messages/count_tokens", json={"messages": turns})).json()
    first_usage, second_usage = (answer["usage"] for answer in answers)
    assert answers[0]["content"] == [{"type": "text", "text": "It is 20 C."}]
    assert second_usage["input_tokens"] == 1  # all but the last token was there already
    assert first_usage["input_tokens"] > 1
    assert counted["input_tokens"] > 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"messages": [ASK]}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 5, "messages": []}, "messages"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].data",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "tool_choice": {"type": "x"}},
            "tool_choice.type",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "tools": [{}]},
            "tools[0].name",
        ),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "namespace"}]}, "tools[0]"),
        ("/v1/responses", {"input": "x", "tools": [3]}, "tools"),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "tools": [{"type": "bash_20990101"}]},
            "tools[0].type",
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
            "input[0].call_id",
        ),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "x", "text": {"format": "json"}}, "text.format"),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "stop_sequences": [""]},
            "stop_sequences",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [ASK],
                "thinking": {"type": "enabled", "budget_tokens": -3},
            },
            "thinking.budget_tokens",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "output_config": {"effort": "a lot"}},
            "output_config.effort",
        ),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [ASK], "output_config": {"format": "json"}},
            "output_config.format",
        ),
        (
            "/v1/chat/completions",
            {"messages": [ASK], "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": [ASK], "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [ASK], "guided_json": {}}, "guided_json"),
    ],
)
async def test_what_cannot_be_asked_for_is_named(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with client() as http:
        response = await http.post(path, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert (await http.get("/health")).status_code == 200


async def test_the_key_may_come_as_anthropic_sends_it() -> None:
    async with client(api_key="secret") as http:
        body = {"max_tokens": 20, "messages": [ASK]}
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "no"}, 401),
            ({}, 401),
        ):
            response = await http.post("/v1/messages", json=body, headers=headers)
            assert response.status_code == status


async def test_a_stream_that_fails_ends_with_an_error_in_its_own_shape() -> None:
    async with FakeEngine(ANSWERS) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        engine.decoder.poison = lambda run: "nan" if len(run.tokens) == 1 else None
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"max_tokens": 300, "messages": [{"role": "user", "content": "long"}]}
            streamed = events_of(await http.post("/v1/messages", json={**body, "stream": True}))
            body = {"input": "long", "stream": True}
            responses = events_of(await http.post("/v1/responses", json=body))
    assert streamed[-1][0] == "error"
    assert responses[-1][0] == "response.failed"


async def test_the_template_and_what_it_can_do_are_told() -> None:
    async with client() as http:
        props = (await http.get("/props")).json()
        prompt = (
            await http.post("/apply-template", json={"messages": [ASK], "tools": [CHAT_TOOL]})
        ).json()
        counted = await http.post("/v1/chat/completions/input_tokens", json={"messages": [ASK]})
        assert (await http.get("/v1/health")).json()["status"] == "ok"
    assert props["chat_template_caps"]["tools"]
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert prompt["prompt"].endswith("user: weather?\nassistant: ")
    assert "get_weather" in prompt["prompt"]
    assert counted.json()["input_tokens"] == len("user: weather?\nassistant: ")


# --- What strangers send ---------------------------------------------------------------------
def offered(n: int = 0, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool{n}", "parameters": SCHEMA, **function}}


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "tool0", "arguments": arguments}}
    return [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]


MIB = 1 << 20
LARGE = {"type": "object", "properties": {f"a_long_name_{n}": {} for n in range(20)}}
PARAMETERS = "tools[0].function.parameters"
NO_SUCH_REF = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ten thousand tools": ("tools", {"tools": [offered(n) for n in range(10_000)]}),
    "tools longer than the context": (
        "messages", {"tools": [offered(n, parameters=LARGE) for n in range(200)]},
    ),
    "a megabyte of arguments": ("messages", {"messages": called(f'{{"city": "{"x" * MIB}"}}')}),
    "the id of a call that nobody made": (
        "messages[1].tool_call_id",
        {"messages": [ASK, {"role": "tool", "tool_call_id": "z", "content": "1"}]},
    ),
    "a schema of no type": (
        PARAMETERS, {"tools": [offered(parameters={"type": "none"})], "tool_choice": "required"},
    ),
    "a strict schema that leads nowhere": (
        PARAMETERS, {"tools": [offered(strict=True, parameters=NO_SUCH_REF)]},
    ),
    "the second schema": (
        "tools[1].function.parameters",
        {"tools": [offered(), offered(1, parameters=NO_SUCH_REF)], "tool_choice": "required"},
    ),
    "a schema that is a number": (PARAMETERS, {"tools": [offered(parameters=3)]}),
    "a tool without a name": (
        "tools[0].function.name", {"tools": [{"type": "function", "function": {}}]},
    ),
    "a name of a megabyte": ("tools[0].function.name", {"tools": [offered(name="x" * MIB)]}),
    "messages twice": (
        "chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}},
    ),
    "a role that nobody has": ("messages[0].role", {"messages": [{**ASK, "role": "hammer"}]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: the engine's own suites run both."""
    return "asyncio"


@pytest.fixture(scope="module")
async def real_engine(anyio_backend: str) -> AsyncIterator[Engine]:
    """With a tokenizer and a compiler of grammars."""
    async with Engine(n_ctx=4096, n_seq_max=4, **QUIET) as engine:
        yield engine


@pytest.mark.parametrize("name", some_in_fast(REFUSED))
async def test_what_strangers_send_is_refused_by_its_name_and_nobody_else_notices(
    name: str, real_engine: Engine
) -> None:
    field, changes = REFUSED[name]
    transport = httpx.ASGITransport(create_app(real_engine))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        real_engine.stream("count:1..60", temperature=0) as other,
    ):
        response = await http.post("/v1/chat/completions", json={"messages": [ASK], **changes})
        assert response.status_code == 400, response.text[:500]
        error = response.json()["error"]
        assert error["param"] == field
        assert len(error["message"]) < 500
        text = "".join([delta.text async for delta in other])
    assert text == " ".join(str(n) for n in range(1, 61))


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": 7}, {"type": "mcp"}, offered()])
async def test_tools_of_unknown_types_are_left_out_and_the_chat_is_answered(
    tool: dict[str, Any], real_engine: Engine
) -> None:
    body = {"messages": [{"role": "user", "content": "1+1="}], "tools": [tool], "max_tokens": 8}
    transport = httpx.ASGITransport(create_app(real_engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


# --- What was wrong once ---------------------------------------------------------------------
def spied(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each chat."""
    seen: list[dict[str, Any]] = []
    real = engine.stream_chat

    def stream_chat(messages: Any, params: Any = None, **options: Any) -> Any:
        seen.append({"messages": messages, "params": params, **options})
        return real(messages, params, **options)

    monkeypatch.setattr(engine, "stream_chat", stream_chat)
    return seen


async def sent(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[httpx.Response, dict[str, Any]]:
    """The answer, and what the engine was asked for."""
    async with FakeEngine(ANSWERS) as engine:
        seen = spied(engine, monkeypatch)
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            response = await http.post(path, json=body)
    return response, seen[0] if seen else {}


TURN = {"role": "user", "content": "20 C"}
BLOCKS = {"type": "tool_result", "tool_use_id": "a"}
USED = [
    ASK,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
]
BAD_BODIES: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [ASK, {"role": "tool", "tool_call_id": {}, "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": [], "output": "x"}]},
        "input[0].call_id",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "reasoning", "summary": True}, {"role": "user", "content": "x"}]},
        "input[0].content",
    ),
    (
        "/v1/messages",
        {"messages": [*USED, {"role": "user", "content": [{**BLOCKS, "tool_use_id": {}}]}]},
        "messages[2].content[0].tool_use_id",
    ),
    ("/v1/messages", {"messages": [ASK], "tool_choice": {"type": []}}, "tool_choice.type"),
    ("/v1/messages", {"messages": [], "system": "Be brief."}, "messages"),
    ("/v1/messages", {"messages": [{"role": "system", "content": []}]}, "messages"),
    (
        "/v1/messages",
        {"messages": [ASK, {**TURN, "role": "hammer"}], "system": "Be brief."},
        "messages[1].role",
    ),
    ("/v1/messages", {"messages": [TURN] * 1025}, "messages"),
    ("/v1/responses", {"input": [TURN] * 1025}, "input"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
async def test_a_malformed_body_is_the_clients_and_is_named_as_the_client_knows_it(
    path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {"max_tokens": 5} if path == "/v1/messages" else {}
    response, _ = await sent(path, {**body, **tokens}, monkeypatch)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["type"] == "error"


@pytest.mark.parametrize("number", ["1e999", "-1e400", "1" + "0" * 400 + ".0"])
async def test_numbers_that_are_too_large_are_refused(number: str) -> None:
    async with client() as http:
        text = f'{{"input": "hi", "text": {{"x": {number}}}}}'
        response = await http.post("/v1/responses", content=text)
    assert response.status_code == 400, response.text
    assert "too large" in response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [TURN, {"role": "assistant", "content": []}, TURN]}),
        (
            "/v1/messages",
            {
                "messages": [
                    TURN,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
                    TURN,
                ]
            },
        ),
        (
            "/v1/responses",
            {"input": [TURN, {"type": "reasoning", "content": [], "summary": []}, TURN]},
        ),
        ("/v1/responses", {"input": [{"type": None, **TURN}], "context_management": None}),
        (
            "/v1/responses",
            {
                "input": [
                    TURN,
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                    TURN,
                ]
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    TURN,
                    {"role": "assistant", "content": None, "reasoning_content": "hm"},
                    TURN,
                ],
                "audio": None, "functions": None, "priority": None, "web_search_options": None,
                "stream_options": {"include_usage": None},
            },
        ),
    ],
)  # fmt: skip
async def test_what_a_server_has_said_and_what_clients_leave_empty_is_taken(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {"max_tokens": 50} if path == "/v1/messages" else {}
    response, _ = await sent(path, {**body, **tokens}, monkeypatch)
    assert response.status_code == 200, response.text


async def test_what_anthropics_clients_ask_for_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {
        "max_tokens": 50,
        "messages": [
            *USED,
            {"role": "user", "content": [{**BLOCKS, "content": "no such city", "is_error": True}]},
        ],
        "tools": [{**MESSAGES_TOOL, "type": None, "strict": True}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    _, asked = await sent("/v1/messages", body, monkeypatch)
    assert asked["messages"][-1]["content"] == "Error: no such city"
    assert asked["tools"][0]["function"]["strict"] is True
    lenient = {"x-guidance": {"lenient": True}, **SCHEMA}
    assert json.loads(asked["params"].json_schema) == lenient
    assert asked["continue_final_message"] is False
    begun = [ASK, {"role": "assistant", "content": "It is"}]
    _, asked = await sent("/v1/messages", {"max_tokens": 5, "messages": begun}, monkeypatch)
    assert asked["continue_final_message"] is True


def system(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **fields}


def tool_change(kind: str, name: str) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


DEFINED = {"type": "tool_definition", "definition": {**MESSAGES_TOOL, "name": "two"}}
DEFINED_AGAIN = {"type": "tool_definition", "definition": {**MESSAGES_TOOL, "description": "new"}}
BRIEF = {"type": "text", "text": "Be brief."}
# System messages among `messages`, with the texts and the names of tools that reach the engine.
SYSTEMS: dict[str, tuple[list[dict[str, Any]], list[str], list[str] | None]] = {
    "an effort": ([system(output_config={"effort": "low"})], [], ["get_weather"]),
    "an effort with text": ([system(BRIEF, output_config={"effort": "low"})], ["Be brief."], ["get_weather"]),
    "an effort without content": (
        [{"role": "system", "output_config": {"effort": "low"}}], [], ["get_weather"],
    ),
    "no content": ([{**system(), "content": None}], [], ["get_weather"]),
    "an empty block": (
        [system({"type": "text", "text": ""}, tool_change("removal", "get_weather"))], [], None,
    ),
    "a block of other roles": (
        [system({"type": "image", "source": {}}, {"type": "tool_use", "name": "f", "input": {}})],
        ["[an image, which this model cannot read]\n[tool_use: f]"], ["get_weather"],
    ),
    "a text of one turn": (
        [{**system(BRIEF), "clear_at": "next_user_message"}, ASK, {**system(BRIEF), "clear_at": "next_user_message"}],
        ["Be brief."], ["get_weather"],
    ),
    "an empty text": ([{**system(), "content": ""}], [], ["get_weather"]),
    "a tool that is known": ([system(tool_change("addition", "get_weather"))], [], ["get_weather"]),
    "a tool that is defined": (
        [system({"type": "tool_addition", "tool": DEFINED})], [], ["get_weather", "two"],
    ),
    "a tool that is removed": ([system(tool_change("removal", "get_weather"))], [], None),
    "a tool that is removed, with text": (
        [system(BRIEF, tool_change("removal", "get_weather"))], ["Be brief."], None,
    ),
    "a tool that is removed and offered again": (
        [system(tool_change("removal", "get_weather")), ASK, system(tool_change("addition", "get_weather"))],
        [], ["get_weather"],
    ),
    "a tool that is removed and defined anew": (
        [system(tool_change("removal", "get_weather")), ASK,
         system({"type": "tool_addition", "tool": DEFINED_AGAIN})],
        [], ["get_weather"],
    ),
    "a tool of MCP": (
        [system({"type": "tool_removal",
                 "tool": {"type": "mcp_tool_reference", "server_name": "s", "name": "get_weather"}})],
        [], ["get_weather"],
    ),
    "a tool that is nothing": ([system({"type": "tool_removal", "tool": 3})], [], ["get_weather"]),
    "an unknown block": (
        [system({"type": "new_block", "text": "Hm."})], ["[new_block: Hm.]"], ["get_weather"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
async def test_a_system_message_of_anthropics_changes_the_tools(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients leave these messages in place: a rejected one would end the chat."""
    said, texts, tools = SYSTEMS[name]
    body = {"messages": [ASK, *said], "tools": [MESSAGES_TOOL]}
    response, asked = await sent("/v1/messages", {**body, "max_tokens": 9}, monkeypatch)
    assert response.status_code == 200, response.text
    systems = [each["content"] for each in asked["messages"] if each["role"] == "system"]
    assert systems == texts
    functions = asked["tools"] and [tool["function"] for tool in asked["tools"]]
    assert (functions and [each["name"] for each in functions]) == tools
    if "anew" in name:
        assert functions[0]["description"] == "new"
    async with client() as http:
        counted = await http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200, counted.text


async def test_the_last_effort_of_anthropics_messages_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unknown(engine: Engine) -> None:
        """Return None: the abilities of the template are unknown."""

    monkeypatch.setattr(FakeEngine, "template_abilities", unknown)
    efforts = [system(BRIEF, output_config={"effort": each}) for each in ("max", "low")]
    body = {"max_tokens": 9, "output_config": {"effort": "high"}}
    for messages, effort in (([ASK], "high"), ([efforts[0], ASK, efforts[1], ASK], "low")):
        _, asked = await sent("/v1/messages", {**body, "messages": messages}, monkeypatch)
        assert asked["reasoning_effort"] == effort


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (system(output_config={"effort": "a lot"}), "messages[1].output_config.effort"),
        (
            system({"type": "tool_addition", "tool": {"type": "tool_definition"}}),
            "messages[1].content[0].tool.definition",
        ),
        (
            system(
                {
                    "type": "tool_addition",
                    "tool": {"type": "tool_definition", "definition": {"name": 3}},
                }
            ),
            "messages[1].content[0].tool.definition.name",
        ),
    ],
)
async def test_what_is_wrong_in_a_system_message_is_named(
    message: dict[str, Any], param: str
) -> None:
    async with client() as http:
        body = {"messages": [ASK, message], "max_tokens": 5}
        response = await http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_of_the_tools_some_may_be_allowed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [{"type": "function", "name": "two"}]
    given: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": named}
    if path == "/v1/chat/completions":
        inner = [{"type": "function", "function": {"name": "two"}}]
        given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": inner}}
    tools = [{**RESPONSES_TOOL, "name": name} for name in ("one", "two")]
    if path == "/v1/chat/completions":
        tools = [{"type": "function", "function": {**tool}} for tool in tools]
    body = {"tools": tools, "tool_choice": given, "input": "x", "messages": [ASK]}
    del body["input" if path == "/v1/chat/completions" else "messages"]
    _, asked = await sent(path, body, monkeypatch)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["two"]
    assert asked["tool_choice"] == "auto"


async def test_calls_have_ids_of_their_own_whatever_the_request_is_called() -> None:
    async with client() as http:
        body = {"messages": [ASK], "tools": [CHAT_TOOL]}
        headers = {"X-Request-ID": "gateway"}
        answers = [
            (await http.post("/v1/chat/completions", json=body, headers=headers)).json()
            for _ in range(2)
        ]
    ids = [answer["choices"][0]["message"]["tool_calls"][0]["id"] for answer in answers]
    assert len(set(ids)) == 2


async def test_no_id_of_a_request_is_that_of_anothers_second_answer() -> None:
    """An output of the first request has an id that no client can send."""
    answers = []

    async def ask(http: httpx.AsyncClient, path: str, request_id: str, **body: Any) -> None:
        headers = {"X-Request-ID": request_id}
        answers.append((await http.post(path, json=body, headers=headers)).status_code)

    async with client() as http, anyio.create_task_group() as group:
        for request_id in ("a", "a-0-1", "a-1-0", "a-1"):
            messages = {"messages": [ASK], "n": 2 if request_id == "a" else 1}
            group.start_soon(partial(ask, http, "/v1/chat/completions", request_id, **messages))
            prompts = {"prompt": ["weather"] * (2 if request_id == "a" else 1)}
            group.start_soon(partial(ask, http, "/v1/completions", request_id + ".c", **prompts))
    assert answers == [200] * 8


async def test_whole_and_streamed_answers_have_texts_and_calls_in_the_same_order() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = f"First.{call}\nThen.{call}Last."
    async with FakeEngine({"": answer}) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            bodies: dict[str, dict[str, Any]] = {
                "/v1/responses": {"input": "x", "tools": [RESPONSES_TOOL]},
                "/v1/messages": {"messages": [ASK], "max_tokens": 900, "tools": [MESSAGES_TOOL]},
            }
            for path, body in bodies.items():
                whole = (await http.post(path, json=body)).json()
                events = events_of(await http.post(path, json={**body, "stream": True}))
                if path == "/v1/responses":
                    kinds = [item["type"] for item in whole["output"]]
                    streamed = [item["type"] for item in events[-1][1]["response"]["output"]]
                    assert kinds == [
                        "message",
                        "function_call",
                        "message",
                        "function_call",
                        "message",
                    ]
                else:
                    kinds = [block["type"] for block in whole["content"]]
                    streamed = [
                        event["content_block"]["type"]
                        for name, event in events
                        if name == "content_block_start"
                    ]
                    assert kinds == ["text", "tool_use", "text", "tool_use", "text"]
                assert kinds == streamed


def test_the_end_of_a_call_stays_in_its_block() -> None:
    blocks = Blocks()
    begun = TokenDelta("", (), tool_calls=(ToolCallDelta(0, "a", "f", '{"x":1'),))
    last = TokenDelta("Hello", (), tool_calls=(ToolCallDelta(0, None, None, "}"),))
    steps = [*blocks.steps(begun), *blocks.steps(last), *blocks.end()]
    assert [block.text for block in blocks.done] == ['{"x":1}', "Hello"]
    assert [step.what for step in steps] == [
        "begin", "grow", "grow", "end", "begin", "grow", "end",
    ]  # fmt: skip


async def test_a_call_that_a_stop_string_cut_off_is_no_call_in_any_form() -> None:
    """A runner of tools would call the tool with arguments that are no JSON."""
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "x" * 400 + "STOP"
    asked = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": RESPONSES_TOOL | {"type": "function"}}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": asked, "tools": tools, "stop": ["STOP"]},
        "/v1/messages": {
            "messages": asked, "max_tokens": 900, "stop_sequences": ["STOP"],
            "tools": [{"name": "get_weather", "input_schema": RESPONSES_TOOL["parameters"]}],
        },
        "/v1/responses": {"input": "x", "tools": [RESPONSES_TOOL]},
    }  # fmt: skip
    async with FakeEngine({"": answer}) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            said = {path: (await http.post(path, json=body)) for path, body in bodies.items()}
            streamed = await http.post(
                "/v1/responses", json=bodies["/v1/responses"] | {"stream": True}
            )
    assert said["/v1/chat/completions"].json()["choices"][0]["finish_reason"] == "stop"
    message = said["/v1/messages"].json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    (item,) = said["/v1/responses"].json()["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    (done,) = [e for name, e in events_of(streamed) if name == "response.output_item.done"]
    assert done["item"]["status"] == "incomplete"


async def test_a_call_that_is_cut_off_is_told_of_as_such() -> None:
    cut = FakeAnswer(tool_calls=[("get_weather", '{"city": "' + "x" * 400 + '"}')])
    async with FakeEngine({"": cut}) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"input": "x", "tools": [RESPONSES_TOOL], "max_output_tokens": 400}
            events = events_of(await http.post("/v1/responses", json={**body, "stream": True}))
    (done,) = [event for name, event in events if name == "response.output_item.done"]
    assert done["item"]["status"] == "incomplete"
    assert events[-1][0] == "response.incomplete"
