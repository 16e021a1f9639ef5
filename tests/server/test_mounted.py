"""An application that is mounted in another has no lifespan of its own, and serves all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.middleware.base import RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cllm import Engine, EngineConfig, PromptTooLongError, TemplateAbilities
from cllm.server import create_app
from cllm.server.config import ServerConfig
from cllm.server.engine_task import EngineTask
from cllm.testing import FakeEngine
from tests.conftest import EVENT_LOOPS, QUIET, our_threads

QUESTION = {"prompt": "1+1=", "temperature": 0}


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.anyio
async def test_the_first_request_builds_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI would change the filters of warnings then, which other threads have, too."""
    app = create_app(EngineConfig(n_ctx=256, **QUIET), make_engine=lambda config: FakeEngine())

    def build(*_: object, **__: object) -> None:
        raise AssertionError("a route is built")

    monkeypatch.setattr("fastapi.dependencies.utils.create_model_field", build)
    monkeypatch.setattr("fastapi.routing.create_model_field", build)
    async with client_of(app) as client:
        assert (await client.get("/v1/models")).status_code in (200, 503)
        assert (await client.post("/nowhere")).status_code == 404


def mounted(app: FastAPI) -> FastAPI:
    outer = FastAPI()
    outer.mount("/llm", app)
    return outer


@pytest.mark.parametrize("backend", EVENT_LOOPS)
def test_a_mounted_application_loads_its_model_with_the_first_request(backend: str) -> None:
    async def main() -> None:
        async with client_of(mounted(create_app(EngineConfig(**QUIET)))) as client:
            health = await client.get("/llm/health")
            assert (health.status_code, health.json()["status"]) == (503, "starting")
            answer = await client.post("/llm/generate", json=QUESTION)
            assert (answer.status_code, answer.json()["text"]) == (200, "2")
            assert (await client.get("/llm/health")).status_code == 200

    anyio.run(main, backend=backend)
    assert our_threads() == [], "the end of the event loop ends the engine"


@pytest.mark.anyio
async def test_a_mounted_application_that_cannot_load_its_model_says_why() -> None:
    app = create_app(EngineConfig(model="/nowhere/model.gguf"))
    async with client_of(mounted(app)) as client:
        refused = await client.post("/llm/generate", json=QUESTION)
        assert refused.status_code == 503
        assert "/nowhere/model.gguf" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_an_application_serves_an_engine_of_its_caller_and_leaves_it_open() -> None:
    async with Engine(**QUIET) as engine:
        async with client_of(mounted(create_app(engine))) as client:
            answer = await client.post("/llm/generate", json=QUESTION)
            assert answer.json()["text"] == "2"
        assert engine.health().status == "ready"
        assert (await engine.generate("2+2=", temperature=0)).text == "4"


@pytest.mark.anyio
async def test_what_is_open_without_a_key_is_open_wherever_it_is_mounted() -> None:
    app = create_app(EngineConfig(**QUIET), ServerConfig(api_key="right"))
    async with client_of(mounted(app)) as client:
        assert (await client.get("/llm/health")).status_code == 503
        assert (await client.get("/llm/docs")).status_code == 200
        assert (await client.post("/llm/generate", json=QUESTION)).status_code == 401
        headers = {"Authorization": "Bearer right"}
        answer = await client.post("/llm/generate", json=QUESTION, headers=headers)
        assert answer.json()["text"] == "2"


@pytest.mark.anyio
async def test_middleware_around_the_application_sees_each_part_of_a_stream() -> None:
    """The application's own middleware sees only the first message and the last."""
    async with FakeEngine() as engine:
        app, seen = create_app(engine), list[bytes]()

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def watching(message: Message) -> None:
                seen.append(message.get("body", b""))
                await send(message)

            await mounted(app)(scope, receive, watching)

        transport = httpx.ASGITransport(watched)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = {"prompt": "hello", "stream": True}
            answer = await client.post("/llm/v1/completions", json=asked)
    assert b"".join(seen) == answer.content
    assert len(seen) > len("hello")


@pytest.mark.anyio
async def test_middleware_between_two_applications_sees_the_inner_ones_streams() -> None:
    async with FakeEngine() as engine:
        app = create_app(engine)
        app.mount("/b", GZipMiddleware(create_app(engine), minimum_size=0))
        async with client_of(app) as client:
            answer = await client.post(
                "/b/api/generate", json={"model": "x", "prompt": "hello", "raw": True}
            )
    assert answer.headers["content-encoding"] == "gzip"
    assert "".join(json.loads(line)["response"] for line in answer.iter_lines()) == "hello"


@pytest.mark.anyio
async def test_head_is_answered_where_get_is() -> None:
    async with Engine(**QUIET) as engine, client_of(create_app(engine)) as client:
        for path in ("/health", "/metrics", "/v1/models", "/slots", "/docs", "/openapi.json"):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            if path != "/metrics":  # which counts these very answers
                assert head.headers["content-length"] == got.headers["content-length"]
        assert (await client.head("/generate")).status_code == 405
        assert (await client.head("/nowhere")).status_code == 404


@pytest.mark.anyio
async def test_a_request_that_waits_for_the_model_is_not_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its body has time from when it is read, also behind a middleware that takes it first."""
    is_read = anyio.Event()
    real = EngineTask.run

    async def run_late(self: EngineTask, finished: anyio.Event | None = None) -> None:
        await is_read.wait()
        await real(self, finished)

    monkeypatch.setattr(EngineTask, "run", run_late)
    outer = mounted(create_app(EngineConfig(**QUIET), ServerConfig(body_timeout_s=0.5)))

    @outer.middleware("http")
    async def beside(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    async with client_of(outer) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            answer = await client.post("/llm/generate", json=QUESTION)
            assert (answer.status_code, answer.json()["text"]) == (200, "2")

        tasks.start_soon(ask)
        started = anyio.current_time()
        while anyio.current_time() < started + 0.6:  # longer than a body may take
            await anyio.lowlevel.checkpoint()
        is_read.set()


def test_a_mounted_application_starts_again_in_the_next_event_loop() -> None:
    """A test client without a `with` makes an event loop for each request."""
    app = mounted(create_app(EngineConfig(**QUIET)))

    async def ask() -> str:
        async with client_of(app) as client:
            text: str = (await client.post("/llm/generate", json=QUESTION)).json()["text"]
            return text

    assert [anyio.run(ask) for _ in range(2)] == ["2", "2"]


@pytest.mark.anyio
async def test_ready_is_said_when_the_template_has_been_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the first chat would wait for it: five times as long for its first token as the second."""
    begun, go_on = anyio.Event(), anyio.Event()
    real = Engine.template_abilities

    async def try_it_later(self: Engine) -> TemplateAbilities | None:
        begun.set()
        await go_on.wait()
        return await real(self)

    monkeypatch.setattr(Engine, "template_abilities", try_it_later)
    async with client_of(mounted(create_app(EngineConfig(**QUIET)))) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, "/llm/generate", json=QUESTION))
            await begun.wait()
            assert (await client.get("/llm/health")).json()["status"] == "starting"
            go_on.set()
        assert (await client.get("/llm/health")).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("error", [RuntimeError("no"), PromptTooLongError(9, 5)], ids=str)
async def test_a_model_is_served_whatever_its_template_does_when_it_is_tried(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Engine) -> None:
        raise error

    monkeypatch.setattr(Engine, "template_abilities", fail)
    async with client_of(mounted(create_app(EngineConfig(**QUIET)))) as client:
        assert (await client.post("/llm/generate", json=QUESTION)).json()["text"] == "2"


@pytest.mark.anyio
async def test_a_model_whose_template_cannot_be_used_is_served_but_for_chats() -> None:
    app = create_app(EngineConfig(chat_template="{% endif %}", **QUIET))
    async with client_of(mounted(app)) as client:
        assert (await client.post("/llm/generate", json=QUESTION)).json()["text"] == "2"
        chat = {"model": "x", "messages": [{"role": "user", "content": "1+1="}]}
        assert (await client.post("/llm/v1/chat/completions", json=chat)).status_code == 400
