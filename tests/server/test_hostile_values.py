"""No text of a client forges or fills the log, and no number of a client breaks the server."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from functools import partial
from types import FrameType
from typing import Any

import httpx
import pytest

from cllm.engine.chat.conversation import mended
from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.server.operation.logs import ConsoleFormatter
from cllm.server.routes import ollama, responses
from cllm.testing import FakeEngine
from tests.server.conftest import client_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

FORGED = "x\n2026-11-25 00:00:00,000 ERROR   forged\x1b[31m\x9b31m\u2028"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "format": "f", "title": "t"}},
        },
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
            {"role": "assistant", "content": "c", "tool_calls": [
                {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "i", "content": [IMAGE]},
        ],
        "tools": [TOOL], "tool_choice": "auto", "reasoning_effort": "low", "user": "u", "stop": ["s"],
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "object", "properties": {"a": {"format": "f"}}}}},
    },
    "/v1/responses": {
        "model": "m", "input": [{"type": "message", "role": "user", "content": "c"}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "instructions": "i",
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "c"}], "system": "s",
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "output_config": {"effort": "low"},
    },
    "/v1/completions": {"model": "m", "prompt": "p", "suffix": "s", "stop": "s", "user": "u"},
    "/completion": {"prompt": "p", "samplers": ["top_k"], "grammar": "g"},
    "/generate": {"prompt": "p", "stop": ["s"], "grammar": "g"},
    "/v1/embeddings": {"model": "m", "input": "t", "encoding_format": "float"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": ["d"]},
}  # fmt: skip


def with_words(value: Any, words: str) -> Iterator[Any]:
    """The value once for each text and each name in it, which is replaced there."""
    if isinstance(value, str):
        yield words
    elif isinstance(value, list):
        for i, item in enumerate(value):
            for other in with_words(item, words):
                changed = copy.copy(value)
                changed[i] = other
                yield changed
    elif isinstance(value, dict):
        for name, item in value.items():
            yield {words if key == name else key: v for key, v in value.items()}
            for other in with_words(item, words):
                yield {**value, name: other}


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeEngine(lambda _: "Yes.") as engine, client_of(engine) as client:
        yield client


# A template that renders everything, but one call in a turn.
ABILITIES = TemplateAbilities(
    **{each.name: each.name != "parallel_tool_calls" for each in fields(TemplateAbilities)}
)


def n_steps(call: Callable[[], object]) -> int:
    """Number of instructions of Python that a call takes."""
    n = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        n += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return n


def responses_of(n: int) -> Callable[[], object]:
    tools = [{"type": "function", "name": f"f{i}", "parameters": {}} for i in range(n)]
    items = [{"type": "additional_tools", "tools": tools}]
    for i in range(n):
        items += [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": f"{i}", "name": "f1", "arguments": "{}"},
            {"type": "web_search_call", "id": f"w{i}"},
        ]
    body = responses.ResponsesBody.model_validate({"input": items})
    return lambda: responses.chat_call_of(body, {})


def calls_of(n: int) -> list[Any]:
    calls = [{"id": f"{i}", "function": {"name": f"f{i % 7}", "arguments": {}}} for i in range(n)]
    results = [{"role": "tool", "content": "r", "tool_name": f"f{i % 5}"} for i in range(n)]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def session_of(n: int) -> Callable[[], object]:
    messages = ollama._messages(calls_of(n))
    return lambda: mended(messages, [], ABILITIES, None)


@pytest.mark.parametrize(
    "of",
    [responses_of, lambda n: partial(ollama._messages, calls_of(n)), session_of],
    ids=["tools and items of Responses", "calls of Ollama", "calls of a template"],
)
def test_four_times_as_many_parts_take_four_times_as_many_steps(
    of: Callable[[int], Callable[[], object]],
) -> None:
    """These run in the event loop, or hold the GIL beside it: 8,000 tools took 17 s."""
    few, many = n_steps(of(60)), n_steps(of(240))
    assert many < 5 * few


@pytest.mark.parametrize("name", [None, ["x"], 5, {}])
async def test_tools_that_are_allowed_beside_one_without_a_name_are_no_error_of_the_server(
    http: httpx.AsyncClient, name: Any
) -> None:
    nameless = {"type": "function", "function": {"description": "d", "name": name}}
    answer = await http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "c"}],
            "tools": [nameless, TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]},
        },
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.name"


@pytest.mark.parametrize("route", BODIES)
async def test_no_text_of_a_client_forges_a_line(
    http: httpx.AsyncClient, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for body in with_words(BODIES[route], FORGED):
        response = await http.post(route, json=body, headers={"x-request-id": "r"})
        assert response.status_code < 500, response.text
    ours = [record for record in caplog.records if record.name.startswith("cllm")]
    for record in ours:
        assert record.getMessage().isprintable()
        assert ConsoleFormatter().format(record).count("\n") == 0


async def test_many_types_of_tools_do_not_fill_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [{"type": f"{n:05}" + "z" * 200} for n in range(3000)]
    body = {"messages": [{"role": "user", "content": "c"}], "tools": tools}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert sum(map(len, caplog.messages)) < 20_000


def test_a_message_of_several_lines_is_one_entry_of_the_log() -> None:
    record = logging.LogRecord(
        "cllm", logging.ERROR, "f", 1, "it ended: %s", ("a\nb\x1b[1m",), None
    )
    lines = ConsoleFormatter().format(record).split("\n")
    assert lines[1] == "    b\\x1b[1m"
    long = logging.LogRecord("cllm", logging.ERROR, "f", 1, "x" * 100_000, None, None)
    assert len(ConsoleFormatter().format(long)) < 9000


NUMBERS = (10**30, -(10**30), 2**63, 2**31, -(2**31) - 1, 1e308, -1e308, 1e-320, -1, 0)
LEAST: dict[str, dict[str, Any]] = {
    **BODIES,
    "/embedding": {"content": "t"}, "/classify": {"input": "t"}, "/tokenize": {"content": "t"},
    "/detokenize": {"tokens": [1]}, "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/apply-template": {"messages": [{"role": "user", "content": "c"}]},
}  # fmt: skip


def is_number(schema: dict[str, Any]) -> bool:
    kinds = [schema, *schema.get("anyOf", [])]
    return any(kind.get("type") in ("integer", "number") for kind in kinds)


async def test_no_number_of_a_client_is_an_error_of_the_server(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas, n_tried = document["components"]["schemas"], 0
    for path, methods in document["paths"].items():
        if path not in LEAST:
            continue
        content = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = schemas[content["$ref"].rpartition("/")[2]]["properties"]
        for field in filter(lambda name: is_number(fields[name]), fields):
            for number in NUMBERS:
                body = {"max_tokens": 2, **LEAST[path], field: number}
                response = await http.post(path, json=body)
                assert response.status_code < 500 or response.status_code == 501, (
                    path, field, number, response.text,
                )  # fmt: skip
                n_tried += 1
    assert n_tried > 500
