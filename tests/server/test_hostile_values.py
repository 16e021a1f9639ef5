"""No text of a client forges or fills the log, and no number of a client breaks the server."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from cllm.server.operation.logs import ConsoleFormatter
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
