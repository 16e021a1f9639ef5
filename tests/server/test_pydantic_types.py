"""Types of pydantic as openai's SDK and pydantic-ai send them, strict and not."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import logging
import pathlib
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema

from cllm import Engine
from cllm.server import create_app
from tests.conftest import QUIET


class Color(enum.Enum):
    RED = "red"
    TWO = "2"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = []


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = pydantic.Field(default=[], description="Below it.")


TYPES: dict[str, Any] = {
    "Path": pathlib.Path, "SecretStr": pydantic.SecretStr, "bytes": bytes, "UUID": uuid.UUID,
    "IP": ipaddress.IPv4Address, "any IP": pydantic.IPvAnyAddress, "Decimal": decimal.Decimal,
    "set": set[str], "dict of an enum": dict[Color, int], "Json": pydantic.Json[list[int]],
    "one of two": Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], "tree": Tree,
    "date": datetime.date, "duration": datetime.timedelta, "URL": pydantic.HttpUrl, "enum": Color,
    "pair": tuple[int, str], "maybe": str | None, "any": Any,
    "constrained": Annotated[str, pydantic.Field(pattern="^[a-z]+$", max_length=5)],
    "color": Annotated[str, pydantic.Field(json_schema_extra={"format": "color"})],
}  # fmt: skip
# What no grammar enforces; openai's SDK itself keeps these in a strict schema.
NOT_STRICT = {"set": "uniqueItems"}


def model_of(name: str) -> type[pydantic.BaseModel]:
    return pydantic.create_model("Answer", v=(TYPES[name], ...))


pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: nothing here depends on it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with Engine(n_ctx=4096, n_seq_max=1, **QUIET) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


async def asked(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    question = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 1}
    return await http.post("/v1/chat/completions", json={**question, **body})


@pytest.mark.parametrize("name", TYPES)
async def test_a_format_or_a_tool_with_this_type_is_taken(
    name: str, http: httpx.AsyncClient
) -> None:
    schema = model_of(name).model_json_schema()
    function = {"name": "final_result", "parameters": schema}
    form = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": schema}}
    tools = [{"type": "function", "function": function}]
    for body in ({"response_format": form}, {"tools": tools, "tool_choice": "required"}):
        response = await asked(http, **body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", TYPES)
async def test_a_strict_one_is_taken_or_names_the_keyword(
    name: str, http: httpx.AsyncClient
) -> None:
    model = model_of(name)
    schema = {"name": "Answer", "schema": to_strict_json_schema(model), "strict": True}
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": schema}},
        {"tools": [openai.pydantic_function_tool(model)]},
    ):
        response = await asked(http, **body)
        if name in NOT_STRICT:
            assert response.status_code == 400
            assert NOT_STRICT[name] in response.json()["error"]["message"]
        else:
            assert response.status_code == 200, response.text


async def test_a_keyword_that_is_ignored_is_logged(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"v": {"not": {"const": "of this test alone"}}}}
    form = {"type": "json_schema", "json_schema": {"name": "A", "schema": schema}}
    with caplog.at_level(logging.WARNING, "cllm.engine.json_schema"):
        for _ in range(2):
            assert (await asked(http, response_format=form)).status_code == 200
    ignored = [record for record in caplog.records if record.name == "cllm.engine.json_schema"]
    assert len(ignored) <= 1  # said once in a process
