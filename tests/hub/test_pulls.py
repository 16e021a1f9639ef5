"""`POST /api/pull`: a server downloads a model while it runs, for the operator alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI

from cllm import Engine, EngineConfig
from cllm.engine.config import EMBEDDED_MODEL
from cllm.hub.cache import cached_files
from cllm.hub.names import parse_name
from cllm.server.app import create_app
from cllm.server.config import ServerConfig
from cllm.server.operation.pulls import Pulls
from cllm.server.several import create_models_app
from cllm.testing import FakeEngine
from tests.conftest import QUIET
from tests.hub.fake_hub import REPO, FakeHub, sha256_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

NAME = f"hf:{REPO}:Q4_K_M"
ADMIN = {"authorization": "Bearer boss"}
CONFIG = ServerConfig(admin_key="boss")


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client,
    ):
        while (await client.get("/health")).status_code != 200:
            await anyio.sleep(0.02)
        yield client


def fake(_: EngineConfig) -> Engine:
    return FakeEngine(lambda _prompt: "yes")


@asynccontextmanager
async def served(config: ServerConfig = CONFIG) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app(EngineConfig(), config, make_engine=fake)) as client:
        yield client


async def pull(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/api/pull", json=body, headers=ADMIN)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("name", [NAME, f"hf.co/{REPO}:Q4_K_M", f"hf:{REPO}:Q8_0"])
async def test_a_pull_reports_its_progress_and_ends_with_the_files_here(
    hub: FakeHub, name: str
) -> None:
    async with served() as client:
        model = parse_name(name.replace("hf.co/", "hf:"))
        last = {"status": "success", "model": str(model)}
        lines = lines_of(await pull(client, model=name))
        assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, last)
        assert cached_files(model)
        # Files that are here are not downloaded again.
        n_sent = hub.n_sent.total()
        assert (await pull(client, name=name, stream=False)).json() == last
        assert hub.n_sent.total() == n_sent


async def test_the_progress_is_reported_while_it_changes(hub: FakeHub) -> None:
    hub.stops_after = 600_000
    pulls, reports = Pulls(), []
    async for report in pulls.reports(NAME):
        reports.append(report)
        if report.get("completed"):
            hub.stops_after = None
            hub.goes_on.set()
    n_bytes = len(hub.files["model-Q4_K_M.gguf"])
    first, *middle, last = reports
    assert (first["status"], last["status"]) == ("pulling manifest", "success")
    assert 0 < len(middle) < 20
    assert {report["total"] for report in middle} == {n_bytes}
    assert {report["digest"] for report in middle} == {
        f"sha256:{sha256_of(hub.files['model-Q4_K_M.gguf'])}"
    }
    completed = [report["completed"] for report in middle]
    assert completed == sorted(set(completed))
    assert 0 < completed[-1] <= n_bytes


async def test_a_server_that_stops_ends_the_reports_and_begins_no_download(hub: FakeHub) -> None:
    hub.stops_after = 1000
    app = create_app(EngineConfig(), CONFIG, make_engine=fake)
    async with client_of(app) as client, anyio.create_task_group() as tasks:
        found: list[dict[str, Any]] = []

        async def ask() -> None:
            found.extend(lines_of(await pull(client, model=NAME)))

        tasks.start_soon(ask)
        assert await anyio.to_thread.run_sync(hub.has_stopped.wait, 30)
        app.state.server.stop()
        assert (await pull(client, model=NAME)).status_code == 503
        hub.stops_after = None
    hub.goes_on.set()
    assert "shutting down" in found[-1]["error"]


async def test_only_the_admin_key_downloads(hub: FakeHub) -> None:
    async with served(ServerConfig(admin_key="boss", api_key="guest")) as client:
        for headers in ({}, {"authorization": "Bearer guest"}):
            response = await client.post("/api/pull", json={"model": NAME}, headers=headers)
            assert response.status_code == 401
    async with served(ServerConfig()) as client:
        response = await pull(client, model=NAME)
        assert response.status_code == 404
        assert "no --admin-key" in response.text
    assert not hub.asked


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "llama3.2"}, 400, "model: "),
        ({"model": "hf:../../etc"}, 400, "model: "),
        ({}, 400, "model: missing"),
        ({"model": NAME, "modle": 1}, 400, "did you mean model?"),
    ],
)
async def test_an_invalid_name_is_rejected_before_the_hub_is_asked(
    hub: FakeHub, body: dict[str, Any], status: int, said: str
) -> None:
    async with served() as client:
        response = await pull(client, **body)
        assert response.status_code == status
        assert said in response.text
    assert not hub.asked


async def test_a_failed_download_is_the_last_line(hub: FakeHub) -> None:
    hub.statuses = [(404, "RepoNotFound")] * 2
    async with served() as client:
        *_, last = lines_of(await pull(client, model=NAME))
        assert "no such repository" in last["error"]
        response = await pull(client, model=NAME, stream=False)
        assert response.status_code == 502
        assert "no such repository" in response.text
        assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"


async def test_one_model_is_downloaded_at_a_time_and_its_download_outlives_its_client(
    hub: FakeHub,
) -> None:
    hub.stops_after = 1000
    async with served() as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pull(client, model=NAME))
            assert await anyio.to_thread.run_sync(hub.has_stopped.wait, 30)
            other = await pull(client, model=f"hf:{REPO}:Q8_0", stream=False)
            assert other.status_code == 409
            assert NAME in other.text
            tasks.cancel_scope.cancel()  # the client leaves
        hub.stops_after = None
        hub.goes_on.set()
        assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"
        assert cached_files(parse_name(NAME))


@pytest.mark.parametrize("n_models", [1, 2])
async def test_a_cancelled_download_ends_its_reports_and_continues_when_asked_again(
    hub: FakeHub, n_models: int
) -> None:
    hub.stops_after = 600_000
    models = dict.fromkeys("ab"[:n_models], EngineConfig())
    app = create_app(EngineConfig(), CONFIG, make_engine=fake)
    async with client_of(
        app if n_models == 1 else create_models_app(models, CONFIG, make_engine=fake)
    ) as client:
        cancel = partial(client.delete, "/api/pull")
        assert (await cancel()).status_code == 401
        nothing = await cancel(headers=ADMIN)
        assert nothing.status_code == 404
        assert "nothing is being downloaded" in nothing.json()["error"]
        found: list[dict[str, Any]] = []

        async def ask() -> None:
            found.extend(lines_of(await pull(client, model=NAME)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            assert await anyio.to_thread.run_sync(hub.has_stopped.wait, 30)
            cancelled = await cancel(headers=ADMIN)
            assert cancelled.json() == {"status": "cancelled", "model": NAME}
        # The hub still sends nothing, and the reports have ended.
        assert "was cancelled; ask again to continue it" in found[-1]["error"]
        assert cached_files(parse_name(NAME)) is None
        hub.stops_after = None
        hub.goes_on.set()
        assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"
        assert (await cancel(headers=ADMIN)).status_code == 404
    assert cached_files(parse_name(NAME))


async def test_of_several_models_the_downloaded_one_is_one_more(hub: FakeHub) -> None:
    app = create_models_app({"a": EngineConfig(), "b": EngineConfig()}, CONFIG, make_engine=fake)
    async with client_of(app) as client:
        assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b", NAME]
        body = {"model": NAME, "messages": [{"role": "user", "content": "?"}]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["model"] == NAME
        assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"
        assert len((await client.get("/v1/models")).json()["data"]) == 3


async def test_several_models_are_served_and_downloaded_in_a_second_lifespan_too(
    hub: FakeHub,
) -> None:
    app = create_models_app({"a": EngineConfig()}, CONFIG, make_engine=fake)
    for _ in range(2):
        async with client_of(app) as client:
            assert lines_of(await pull(client, model=NAME))[-1]["status"] == "success"
            names = [each["name"] for each in (await client.get("/api/tags")).json()["models"]]
            assert names == ["a", NAME]


async def test_of_several_models_none_is_replaced_by_another(hub: FakeHub) -> None:
    app = create_models_app({"a": EngineConfig()}, CONFIG, make_engine=fake)
    async with client_of(app) as client:
        assert (await client.post("/v1/completions", json={"model": "a", "prompt": "x"})).is_success
        reload = partial(client.post, "/admin/reload", headers=ADMIN)
        assert (await reload(json={"model": "a"})).status_code == 200
        assert (await reload(json={"model": "a:latest"})).status_code == 200
        wrong = await reload(params={"model": "a"}, json={"model": "b.gguf"})
        assert wrong.status_code == 400
        assert "'b.gguf' is not this model" in wrong.text


async def test_a_download_without_its_client_is_one_more_model_too(hub: FakeHub) -> None:
    hub.stops_after = 1000
    app = create_models_app({"a": EngineConfig()}, CONFIG, make_engine=fake)
    async with client_of(app) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pull(client, model=NAME))
            assert await anyio.to_thread.run_sync(hub.has_stopped.wait, 30)
            tasks.cancel_scope.cancel()  # the client leaves
        hub.stops_after = None
        hub.goes_on.set()
        while len(listed := (await client.get("/v1/models")).json()["data"]) < 2:
            await anyio.sleep(0.02)
        assert listed[1]["id"] == NAME


@pytest.mark.parametrize(
    ("content", "status"), [(b'{"model": 1}', 400), (b"{", 400), (b"[]", 400), (b"{}", 400)]
)
async def test_wrong_bodies_are_answered_alike_by_one_model_and_by_several(
    hub: FakeHub, content: bytes, status: int
) -> None:
    several = create_models_app({"a": EngineConfig()}, CONFIG, make_engine=fake)
    for app in (create_app(EngineConfig(), CONFIG, make_engine=fake), several):
        async with client_of(app) as client:
            response = await client.post("/api/pull", content=content, headers=ADMIN)
            assert response.status_code == status, response.text
            assert isinstance(response.json()["error"], str)
    assert not hub.asked


async def test_the_model_of_a_server_is_replaced_by_one_that_was_downloaded(hub: FakeHub) -> None:
    hub.files = {"tiny-Q8_0.gguf": EMBEDDED_MODEL.read_bytes()}
    name = f"hf:{REPO}:Q8_0"
    settings = EngineConfig(
        model=EMBEDDED_MODEL, n_ctx="auto", chat_template="{{ messages[0].content }}", **QUIET
    )
    app = create_app(settings, CONFIG)
    async with client_of(app) as client:
        pulled = lines_of(await pull(client, model=name))[-1]["model"]
        for body, expected, has_own in (
            (None, "cllm-tiny", False), ({"model": pulled}, "tiny-Q8_0", True),
            ({"model": "tiny-Q8_0"}, "tiny-Q8_0", True), ({"model": str(EMBEDDED_MODEL)}, "cllm-tiny", False),
        ):  # fmt: skip
            response = await client.post("/admin/reload", json=body, headers=ADMIN)
            assert response.status_code == 200, response.text
            assert response.json()["model"] == expected
            assert (await client.get("/health")).json()["model"] == expected
            template = (await client.get("/props")).json()["chat_template"]
            assert ("im_start" in template) is has_own, template
        for wrong, status in (("gone.gguf", 400), ("/", 400), (f"hf:{REPO}:Q2_K", 502)):
            response = await client.post("/admin/reload", json={"model": wrong}, headers=ADMIN)
            assert response.status_code == status, response.text
        plain = partial(client.post, "/admin/reload", headers=ADMIN)  # as curl -d sends it
        assert (
            "gone.gguf"
            in (await plain(content=b'{"model": "gone.gguf"}')).json()["error"]["message"]
        )
        assert (await plain(content=b"null")).status_code == 200
        assert "must be a JSON object" in (await plain(content=b"[]")).text
        asked = {"prompt": "1+1=", "temperature": 0}
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert answer["choices"][0]["text"] == "2"
