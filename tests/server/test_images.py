"""Images over HTTP: in messages of users and in results of tools, in the form of each API."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm import Engine, Image
from cllm.engine.chat.control_tokens import Piece
from cllm.engine.chat.media_marks import MediaMarks
from cllm.engine.chat.message_checks import check_messages
from cllm.server import ServerConfig
from cllm.server.http import limits
from cllm.server.http.problems import Problem
from cllm.testing import FakeEngine
from tests.conftest import QUIET, examples
from tests.server.conftest import client_of
from tools import make_projector

pytestmark = pytest.mark.anyio
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
ASK = {"role": "user", "content": "Look."}
CALL = {"name": "look", "arguments": "{}"}
BROKEN = "data:image/png;base64," + base64.b64encode(b"\x89PNG broken").decode()


def png(seed: int = 1) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)
    written = io.BytesIO()
    Pillow.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


PNG = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{PNG}"
# An image in the form of each API, and of a result of a tool of MCP.
PARTS: dict[str, dict[str, Any]] = {
    "image_url": {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    "image_url as text": {"type": "image_url", "image_url": URL},
    "input_image": {"type": "input_image", "image_url": URL, "detail": "auto"},
    "image with a source": {
        "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    "image with a data: URL": {"type": "image", "source": {"type": "url", "url": URL}},
    "image of MCP": {"type": "image", "data": PNG, "mimeType": "image/png"},
    "computer_screenshot": {"type": "computer_screenshot", "image_url": URL},
}  # fmt: skip


@asynccontextmanager
async def serving(
    prompts: list[str] | None = None,
) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    def answer(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        return "I see."

    async with (
        FakeEngine(answer, n_ctx=4096) as engine,
        client_of(engine) as http,
    ):
        yield engine, http


def asking(path: str, content: Any) -> dict[str, Any]:
    """A body with this content of a user."""
    if path == "/v1/responses":
        return {"input": [{"role": "user", "content": content}], "max_output_tokens": 6}
    return {"messages": [{"role": "user", "content": content}], **GREEDY}


def with_result(path: str, content: Any) -> dict[str, Any]:
    """A body whose last message is a result of a tool."""
    if path == "/v1/responses":
        return {"input": [
            ASK, {"type": "function_call", "call_id": "c", **CALL},
            {"type": "function_call_output", "call_id": "c", "output": content},
        ], "max_output_tokens": 6}  # fmt: skip
    if path == "/v1/messages":
        used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        messages = [
            ASK,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
        return {"messages": messages, **GREEDY}
    call = {"id": "c", "type": "function", "function": CALL}
    return {"messages": [
        ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ], **GREEDY}  # fmt: skip


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


async def prompts_with(parts: dict[str, Any], path: str, body_of: Any) -> list[str]:
    """The prompts of bodies with one part each, which are forms of the same file."""
    prompts: list[str] = []
    async with serving(prompts) as (engine, http):
        for name, part in parts.items():
            response = await http.post(path, json=body_of(path, [part]))
            assert response.status_code == 200, (name, response.text)
        # One key for all: the rows of the first are shared with the others.
        assert engine.media.n_encoded == 1
    assert len(prompts) == len(parts)
    return prompts


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body_of", [asking, with_result])
async def test_an_image_in_the_form_of_any_api_is_seen(path: str, body_of: Any) -> None:
    prompts = await prompts_with(PARTS, path, body_of)
    assert all("<image>" in prompt and PNG[:40] not in prompt for prompt in prompts)


async def test_images_are_seen_in_any_form_of_a_result_and_no_file_becomes_text() -> None:
    image = PARTS["image of MCP"]
    text = {"type": "text", "text": "Seen:"}
    large = "QUJD" * 2000
    results: list[tuple[Any, int]] = [
        ({"content": [text, image], "isError": False}, 1),  # the result of MCP as it is
        ([{"content": [image, image]}], 2),
        ({"content": ["Seen:"], "total": 5}, 0),  # data of a tool
        ([{"type": "tool_result", "content": [text, image]}], 1),
        ([{"type": "document", "title": "T", "source": {"type": "content", "content": [text, image]}}], 1),
        ([{"type": "resource", "resource": {"mimeType": "image/png", "blob": PNG}}], 1),
        ([{"type": "resource", "resource": {"mimeType": "text/plain", "text": "Seen:"}}], 0),
        ([{"type": "resource", "resource": {"mimeType": "application/pdf", "blob": large}}], 0),
        ([{"type": "audio", "data": large, "mimeType": "audio/wav"}], 0),
        ({"screenshot": f"data:image/png;base64,{large}", "ok": True}, 0),
    ]  # fmt: skip
    prompts: list[str] = []
    async with serving(prompts) as (_, http):
        for content, n_images in results:
            body = with_result("/v1/chat/completions", content)
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            assert prompts[-1].count("<image>") == n_images, content
            assert "QUJDQUJD" not in prompts[-1]
            assert ("Seen:" in json.dumps(content)) == ("Seen:" in prompts[-1])


async def test_the_screenshot_of_a_computer_is_seen() -> None:
    prompts: list[str] = []
    action = {"type": "click", "x": 5, "y": 7}
    items = [
        ASK,
        {"type": "computer_call", "call_id": "c", "action": action, "status": "completed"},
        {"type": "computer_call_output", "call_id": "c", "output": PARTS["computer_screenshot"]},
    ]
    async with serving(prompts) as (_, http):
        response = await http.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert prompts[0].count("<image>") == 1
    assert '"computer"' in prompts[0]


async def test_a_chat_with_thousands_of_images_does_not_stop_the_event_loop() -> None:
    """An image that a prompt has no room for is rejected after one pass over all of them."""
    many = [PARTS["image_url as text"]] * 4000
    seen: list[int] = []

    class Counted(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            seen.append(1)
            return super().get(name, default)

    marks = MediaMarks()
    check_messages([{"role": "user", "content": [Counted(part) for part in many]}], marks)
    assert len(marks.media) == 4000
    assert len(seen) <= 8 * 4000
    pieces = [Piece("".join(f"{marks.nonce}{i}-" for i in range(4000)), is_template=False)]
    assert len(marks.cut(pieces, ("text", "image"))) == 2 * 4000 + 1


async def test_texts_and_images_keep_their_order() -> None:
    prompts: list[str] = []
    text = {"type": "text", "text": "before"}
    async with serving(prompts) as (_, http):
        parts = [text, PARTS["image_url"], {**text, "text": "after"}, {**text, "text": "last"}]
        await http.post("/v1/chat/completions", json=asking("", parts))
    assert "user: before<image>after\nlast\n" in prompts[0]


@pytest.mark.parametrize("path", PATHS)
async def test_the_input_tokens_of_a_chat_count_its_images(path: str) -> None:
    counting = {
        "/v1/chat/completions": "/v1/chat/completions/input_tokens",
        "/v1/responses": "/v1/responses/input_tokens",
        "/v1/messages": "/v1/messages/count_tokens",
    }[path]
    async with serving() as (_, http):
        body = asking(path, [PARTS["image_url"]])
        counted = (await http.post(counting, json=body)).json()["input_tokens"]
        usage = (await http.post(path, json=body)).json()["usage"]
    assert counted == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert counted > 16


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url"}, "image_url"),
    ({"type": "image_url", "image_url": {}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}, "image_url.url"),
    (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,\u00e4\u00f6"}},
        "",
    ),
    ({"type": "image_url", "image_url": {"url": BROKEN}}, ""),
    ({"type": "image"}, "data"),
    ({"type": "image", "data": []}, "data"),
    ({"type": "image", "image": "cat.png"}, "image"),
    ({"type": "image", "source": None}, "source.type"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type"),
    ({"type": "image", "source": {"type": "base64", "data": None}}, "source.data"),
    ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}, "source.url"),
    ({"type": "input_image", "file_id": "f"}, "image_url"),
]


@pytest.mark.parametrize(("part", "field"), WRONG, ids=lambda value: str(value)[:70])
async def test_a_wrong_image_of_a_user_is_rejected_by_name_and_one_of_a_tool_becomes_words(
    part: dict[str, Any], field: str
) -> None:
    prompts: list[str] = []
    async with serving(prompts) as (_, http):
        for path, message in zip(PATHS, ("messages[0]", "input[0]", "messages[0]"), strict=True):
            parts = [{"type": "text", "text": "a"}, part]
            response = await http.post(path, json=asking(path, parts))
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == f"{message}.content[1].{field}".rstrip("."), error
            assert len(error["message"]) < 400
            response = await http.post(path, json=with_result(path, parts))
            assert response.status_code == 200, response.text
    assert all("an image, which this model cannot read" in prompt for prompt in prompts)


async def test_roles_that_have_no_images_are_rejected_by_name() -> None:
    async with serving() as (_, http):
        for role in ("system", "developer"):
            messages = [{"role": role, "content": [PARTS["image_url"]]}, ASK]
            response = await http.post("/v1/chat/completions", json={"messages": messages})
            assert response.json()["error"]["param"] == "messages[0].content[0]"


async def test_a_model_without_a_projector_rejects_images_of_users_and_reads_words_for_others() -> (
    None
):
    async with Engine(n_ctx=1024, n_seq_max=2, **QUIET) as engine, client_of(engine) as http:
        for path in PATHS:
            response = await http.post(path, json=asking(path, [PARTS["image_url"]]))
            assert response.status_code == 400
            assert "no projector" in response.json()["error"]["message"]
            body = with_result(path, [PARTS["image_url"]])
            assert (await http.post(path, json=body)).status_code == 200
        props = (await http.get("/props")).json()
        assert props["modalities"] == {"vision": False, "audio": False}


async def test_a_real_model_gives_over_http_what_it_gives_in_python() -> None:
    projector = make_projector.ensure("embedded")
    async with (
        Engine(mmproj=projector, n_ctx=1024, n_seq_max=2, **QUIET) as engine,
        client_of(engine) as http,
    ):
        props = (await http.get("/props")).json()
        assert props["modalities"] == {"vision": True, "audio": False}
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["architecture"]["input_modalities"] == ["text", "image"]
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": Image(png())}]
        expected = await engine.chat([{"role": "user", "content": parts}], **GREEDY)
        assert expected.usage.n_image_tokens == 64
        body = asking("/v1/chat/completions", [parts[0], PARTS["image_url"]])
        told = (await http.post("/v1/chat/completions", json=body)).json()
        assert told["choices"][0]["message"]["content"] == expected.text
        assert told["usage"]["prompt_tokens"] == expected.usage.n_prompt


# --- Prompts ----------------------------------------------------------------------------------------
async def test_prompts_of_generate_and_of_llama_server_have_images() -> None:
    image = PARTS["image_url"]
    projector = make_projector.ensure("embedded")
    async with (
        Engine(mmproj=projector, n_ctx=1024, n_seq_max=2, **QUIET) as engine,
        client_of(engine) as http,
    ):
        parts: list[Any] = ["a", Image(png()), "b"]
        expected = await engine.generate(parts, parse_special=True, **GREEDY)
        body: dict[str, Any] = {"prompt": ["a", image, "b"], **GREEDY}
        told = (await http.post("/generate", json=body)).json()
        assert told["token_ids"] == list(expected.token_ids)
        assert told["usage"]["image_tokens"] == 64
        marker = (await http.get("/props")).json()["media_marker"]
        prompt: dict[str, Any] = {"prompt_string": f"a{marker}b", "multimodal_data": [PNG]}
        two = {"prompt_string": f"a{marker}{marker}b", "multimodal_data": [PNG, PNG]}
        told = (await http.post("/completion", json={"prompt": two, **GREEDY})).json()
        assert told["prompt"] == two["prompt_string"]
        told = (await http.post("/completion", json={"prompt": prompt, **GREEDY})).json()
        assert told["content"] == expected.text
        assert told["prompt"] == prompt["prompt_string"]
        assert told["tokens_evaluated"] == expected.usage.n_prompt
        wrong: dict[str, Any]
        for wrong, field in (
            ({"prompt": {**prompt, "multimodal_data": [PNG, PNG]}}, "prompt.multimodal_data"),
            ({"prompt": {**prompt, "multimodal_data": "x"}}, "prompt.multimodal_data"),
            ({"prompt": {**prompt, "multimodal_data": [5]}}, "prompt.multimodal_data[0].data"),
            ({"prompt": {**prompt, "prompt_string": 5}}, "prompt.prompt_string"),
        ):
            response = await http.post("/completion", json={**wrong, **GREEDY})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field
        for body, field in (
            ({"prompt": ["a", {}]}, "prompt[1]"),
            ({"prompt": [{"type": "image_url"}]}, "prompt[0].image_url"),
            ({"prompt": [image, 5]}, "prompt[1]"),
        ):
            response = await http.post("/generate", json={**body, **GREEDY})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field


# --- Limits ----------------------------------------------------------------------------------------
async def test_bodies_may_be_larger_if_the_model_takes_images() -> None:
    config = ServerConfig()
    assert config.n_body_bytes_max(4096, takes_media=True) == 32 << 20
    assert ServerConfig(max_body_bytes=99).n_body_bytes_max(4096, takes_media=True) == 99
    large = {**asking("/v1/chat/completions", "a"), "metadata": {"x": "A" * (5 << 20)}}
    async with serving() as (_, http):
        assert (await http.post("/v1/chat/completions", json=large)).status_code == 200
    async with Engine(n_ctx=256, n_seq_max=2, **QUIET) as engine, client_of(engine) as http:
        assert (await http.post("/v1/chat/completions", json=large)).status_code == 413


async def test_large_bodies_of_open_requests_are_limited_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LARGE_BYTES", 3 << 20)
    begun, may_end = anyio.Event(), anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if len(await request.body()) > 1 << 20:
            begun.set()
            await may_end.wait()
        await Response("read")(scope, receive, send)

    guarded = limits.Limits(app, ServerConfig(), lambda: 4 << 20)
    transport = httpx.ASGITransport(guarded)
    large = bytes(2 << 20)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(http.post, "/", content=large))
            await begun.wait()
            with pytest.raises(Problem, match="large bodies of open requests") as caught:
                await http.post("/", content=large)
            assert caught.value.status == 429
            assert (await http.post("/", content=b"small")).status_code == 200
            may_end.set()
        assert (await http.post("/", content=large)).status_code == 200


async def test_the_pixels_of_one_prompt_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.engine.loop.prompt_tokenizer.MAX_PROMPT_BYTES", 2 * 40 * 48 * 3)
    async with serving() as (_, http):
        parts = [PARTS["image_url"]] * 3
        response = await http.post("/v1/chat/completions", json=asking("", parts[:2]))
        assert response.status_code == 200
        response = await http.post("/v1/chat/completions", json=asking("", parts))
        assert response.json()["error"]["param"] == "messages[0].content[2]"
        assert "17280 bytes" in response.json()["error"]["message"]


# --- Anything ---------------------------------------------------------------------------------------
NAMES = (
    "image_url",
    "image",
    "source",
    "data",
    "url",
    "detail",
    "media_type",
    "mimeType",
    "file_id",
    "input_audio",
    "audio_url",
    "audio",
    "resource",
    "blob",
    "text",
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20) | st.sampled_from([URL, PNG, BROKEN, "data:", "http://127.0.0.1/", "type", "base64", "url"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(("type", *NAMES)), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TYPES = (
    "image",
    "image_url",
    "input_image",
    "computer_screenshot",
    "text",
    "input_audio",
    "audio_url",
    "audio",
    "resource",
    "file",
    "",
)
MEDIA = st.one_of(
    st.sampled_from([*PARTS.values()]),
    st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=3).flatmap(
        lambda fields: st.sampled_from(TYPES).map(lambda kind: {**fields, "type": kind})
    ),
    JUNK,
)


@pytest.mark.full
@given(parts=st.lists(MEDIA, min_size=8, max_size=8))
@examples(8)
def test_any_media_part_is_answered_or_rejected_and_never_a_fault_of_the_server(
    parts: list[Any],
) -> None:
    async def ask() -> None:
        async with serving() as (engine, http), engine.stream("a", max_tokens=3) as other:
            for part in parts:
                for path in PATHS:
                    response = await http.post(path, json=asking(path, [part]))
                    assert response.status_code in (200, 400), (part, response.text)
                    response = await http.post(path, json=with_result(path, [part, "a"]))
                    assert response.status_code in (200, 400), (part, response.text)
                for path, prompt in (
                    ("/generate", ["a", part]),
                    ("/completion", {"prompt_string": "a<__media__>", "multimodal_data": [part]}),
                    ("/completion", part),
                ):
                    response = await http.post(path, json={"prompt": prompt, **GREEDY})
                    assert response.status_code in (200, 400), (part, response.text)
            assert (await other.completion()).text == "I s"

    anyio.run(ask)
