"""Several models behind one server: loaded when asked for, freed when not, and nobody is cut off for it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cllm import Engine, EngineConfig, ModelLoadError
from cllm.server.config import ServerConfig
from cllm.server.http.problems import Problem, unavailable
from cllm.server.model_pool import Attempts, ModelPool
from cllm.server.several import create_models_app
from cllm.testing import FakeEngine
from tests.conftest import some_in_fast
from tests.server.conftest import refusal_of

pytestmark = pytest.mark.anyio


class Loads:
    """Makes fake engines that say which they are, and what was loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refusals: dict[str, Exception] = {}  # of loading
        self.too_large: set[str] = set()  # beside any other
        self.too_large_for_gpus: set[str] = set()  # beside any other, with all layers
        self.opening: anyio.Event | None = None  # which loading waits for
        self.fetching: dict[str, anyio.Event] = {}  # which a download waits for
        self.fetch_failures = 0  # downloads that fail
        self.closing: dict[str, anyio.Event] = {}  # which the end of an engine waits for
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, config: EngineConfig) -> Engine:
        name, loads = config.model_path.stem, self

        class Named(FakeEngine):
            async def __aenter__(self) -> Any:
                loads.names.append(name)
                if loads.opening is not None:
                    await loads.opening.wait()
                if error := loads.refusals.get(name):
                    raise error
                return await super().__aenter__()

            async def __aexit__(self, *error: Any) -> None:
                if (closing := loads.closing.get(name)) is not None:
                    await closing.wait()
                await super().__aexit__(*error)

            async def fetch(self) -> None:
                if (fetching := loads.fetching.get(name)) is not None:
                    await fetching.wait()
                if loads.fetch_failures:
                    loads.fetch_failures -= 1
                    raise ModelLoadError(name, "the hub is away")

            async def check_memory(self) -> None:
                is_entire = config.n_gpu_layers > 0
                if name in loads.too_large or (is_entire and name in loads.too_large_for_gpus):
                    raise ModelLoadError(name, "it needs more memory than there is")

        def answer(prompt: str) -> str:
            if "slow" in prompt:
                self.go_on.wait(30)
            return name

        return Named(answer, config=EngineConfig(n_ctx=2048))


@pytest.fixture
def loads() -> Loads:
    return Loads()


@asynccontextmanager
async def serving(loads: Loads, *names: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    models = {name: EngineConfig(model=f"{name}.gguf") for name in names}
    app = create_models_app(models, ServerConfig(**settings), make_engine=loads)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, model: str | None, prompt: str = "?") -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": prompt})


async def said(client: httpx.AsyncClient, model: str | None) -> str:
    answer = await ask(client, model)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def statuses(client: httpx.AsyncClient) -> dict[str, str]:
    return {each["id"]: each["status"] for each in (await client.get("/v1/models")).json()["data"]}


async def until(condition: Callable[[], Any]) -> None:
    with anyio.fail_after(30):
        while not await condition():
            await anyio.sleep(0)


async def test_a_request_goes_to_the_model_that_it_names_which_is_loaded_for_it(
    loads: Loads,
) -> None:
    async with serving(loads, "a", "b", "c") as client:
        assert await statuses(client) == dict.fromkeys("abc", "unloaded")
        assert [await said(client, name) for name in ("b", "a", "b")] == ["b", "a", "b"]
        assert loads.names == ["b", "a"]
        assert await statuses(client) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        for path in ("/health", "/livez", "/readyz", "/healthz"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["models"]) == (200, await statuses(client))
            assert answer.json()["ping_interval_s"] == 15
        # Without a name: the first that is loaded.
        assert await said(client, None) == "a"
        assert (await client.get("/v1/models/b")).json()["max_model_len"] == 2048
        assert (await client.get("/slots", params={"model": "b"})).status_code == 200
        assert (await ask(client, "a")).json()["model"] == "a"


async def test_a_request_that_is_cancelled_while_its_model_loads_blocks_no_other(
    loads: Loads,
) -> None:
    loads.opening = anyio.Event()

    async def has_begun() -> bool:
        return loads.names == ["a"]

    loads.too_large.add("a")  # beside any other
    async with serving(loads, "a", "b", max_models=1) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(said, client, "a")
            await until(has_begun)
            tasks.cancel_scope.cancel()
            loads.opening.set()
        with anyio.fail_after(60):
            assert [await said(client, name) for name in "aba"] == ["a", "b", "a"]
    assert loads.names == ["a", "b", "a"]


async def test_those_who_ask_at_once_have_it_loaded_once(loads: Loads) -> None:
    async with serving(loads, "a", "b") as client, anyio.create_task_group() as tasks:
        for name in "ab" * 8:
            tasks.start_soon(said, client, name)
    assert sorted(loads.names) == ["a", "b"]


async def test_where_there_is_no_room_the_one_is_freed_that_was_used_longest_ago(
    loads: Loads,
) -> None:
    async with serving(loads, "a", "b", "c", max_models=2) as client:
        for name in ("a", "b", "a", "c"):
            assert await said(client, name) == name
        assert await statuses(client) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        loads.too_large.add("b")  # as long as there is another
        assert await said(client, "b") == "b"
        assert await statuses(client) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert loads.names == ["a", "b", "c", "b"]


async def test_unused_models_are_freed_until_all_layers_fit_on_the_gpus_and_used_ones_are_not(
    loads: Loads,
) -> None:
    async with serving(loads, "a", "b", "c") as client, anyio.create_task_group() as tasks:
        for name in ("b", "a"):
            assert await said(client, name) == name
        loads.go_on.clear()
        tasks.start_soon(ask, client, "b", "slow")
        await anyio.wait_all_tasks_blocked()
        loads.too_large_for_gpus.add("c")
        tasks.start_soon(said, client, "c")
        await until(lambda: freed_and_loaded(client))
        loads.go_on.set()
    assert loads.names == ["b", "a", "c"]


async def freed_and_loaded(client: httpx.AsyncClient) -> bool:
    return await statuses(client) == {"a": "unloaded", "b": "loaded", "c": "loaded"}


async def test_a_model_that_is_used_is_not_freed_and_the_other_is_told_to_wait(
    loads: Loads,
) -> None:
    async with serving(loads, "a", "b", max_models=1) as client, anyio.create_task_group() as tasks:
        assert await said(client, "a") == "a"
        loads.go_on.clear()
        answers: list[httpx.Response] = []

        async def slow() -> None:
            answers.append(await ask(client, "a", "slow"))

        tasks.start_soon(slow)
        await anyio.wait_all_tasks_blocked()
        refused = await ask(client, "b")
        assert refusal_of(refused, 503)["message"].startswith("there is no room for the model 'b'")
        assert int(refused.headers["Retry-After"]) > 0
        loads.go_on.set()
        await until(lambda: _is_there(answers))
        assert answers[0].json()["choices"][0]["text"] == "a"
        assert await said(client, "b") == "b"


async def _is_there(answers: list[httpx.Response]) -> bool:
    return bool(answers)


async def test_a_model_that_nobody_uses_is_freed_after_a_while_and_loaded_again(
    loads: Loads,
) -> None:
    async with serving(loads, "a", model_keep_alive_s=0.0) as client:
        assert await said(client, "a") == "a"

        async def is_freed() -> bool:
            return await statuses(client) == {"a": "unloaded"}

        await until(is_freed)
        assert await said(client, "a") == "a"
    assert loads.names == ["a", "a"]


async def test_a_model_that_is_used_again_while_another_is_freed_is_not_freed(
    loads: Loads,
) -> None:
    loads.closing["a"] = anyio.Event()
    async with serving(loads, "a", "b", model_keep_alive_s=0.0) as client:
        pool = pool_of(client)
        a, b = pool.models.values()
        async with pool.using(b), pool.using(a):
            pass  # both end now, so both are due
        await anyio.wait_all_tasks_blocked()
        assert [a.is_loaded, b.is_loaded] == [False, True]
        async with pool.using(b):
            loads.closing["a"].set()
            await a.free()
            await anyio.wait_all_tasks_blocked()
            assert b.is_loaded
    assert loads.names == ["b", "a"]


async def test_one_that_cannot_be_loaded_is_told_and_tried_again_and_ends_nothing_else(
    loads: Loads,
) -> None:
    loads.refusals["b"] = ModelLoadError("b.gguf", "it is damaged")
    async with serving(loads, "a", "b") as client:
        assert "it is damaged" in refusal_of(await ask(client, "b"), 503)["message"]
        assert await said(client, "a") == "a"
        del loads.refusals["b"]
        assert await said(client, "b") == "b"


async def test_a_load_that_fails_is_not_repeated_by_requests_that_waited(loads: Loads) -> None:
    loads.refusals["b"] = ModelLoadError("b.gguf", "it is damaged")
    loads.opening = anyio.Event()
    answers: list[httpx.Response] = []

    async def ask_for_b() -> None:
        answers.append(await ask(client, "b"))

    async with serving(loads, "a", "b") as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask_for_b)
            tasks.start_soon(said, client, "a")
            await anyio.wait_all_tasks_blocked()
            loads.opening.set()
        assert sorted(loads.names) == ["a", "b"]
        assert len(answers) == 8
        assert all("damaged" in refusal_of(each, 503)["message"] for each in answers)
        await ask_for_b()  # a request that comes later tries again
        assert sorted(loads.names) == ["a", "b", "b"]


async def test_a_lack_of_room_is_no_failure_of_a_load() -> None:
    """A model that has no room now may have room when its turn comes."""
    attempts = Attempts(anyio.Lock())
    async with anyio.create_task_group() as tasks:
        is_begun, may_end = anyio.Event(), anyio.Event()

        async def find_no_room() -> None:
            async with attempts.turn():
                is_begun.set()
                await may_end.wait()
                raise unavailable("there is no room")

        async def refused() -> None:
            with pytest.raises(Problem, match="no room"):
                await find_no_room()

        async def served() -> None:
            async with attempts.turn():
                pass

        tasks.start_soon(refused)
        await is_begun.wait()
        tasks.start_soon(served)
        await anyio.wait_all_tasks_blocked()
        may_end.set()


async def test_a_download_that_fails_is_not_repeated_by_requests_that_waited(loads: Loads) -> None:
    loads.fetching["b"] = anyio.Event()
    loads.fetch_failures = 1
    async with serving(loads, "b") as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask, client, "b")
            await anyio.wait_all_tasks_blocked()
            loads.fetching["b"].set()
        assert loads.names == []
        assert await said(client, "b") == "b"


async def test_what_is_wrong_with_a_request_is_told_as_by_a_server_of_one_model(
    loads: Loads,
) -> None:
    async with serving(loads, "a", "b", api_key="right") as client:
        refusal_of(await ask(client, "a"), 401)
        client.headers["Authorization"] = "Bearer right"
        unknown = refusal_of(await ask(client, "z"), 404)
        assert unknown["message"] == "there is no model 'z', only 'a', 'b'"
        assert unknown["param"] == "model"
        refusal_of(await client.post("/v1/completions", content=b"{"), 400)
        refusal_of(await client.post("/v1/completions", content=b"[1]"), 400)
        refusal_of(await client.get("/nowhere"), 404)
        refusal_of(await client.get("/v1/models/z"), 404)
        del client.headers["Authorization"]
        assert (await client.get("/")).status_code == 200
    assert loads.names == ["a"]  # the files of the page need no model


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    some_in_fast([
        ("GET", "/x.png", None, 404), ("GET", "/favicon.ico", None, 404), ("GET", "/generate", None, 405),
        ("OPTIONS", "/v1/completions", None, 405), ("POST", "/nothing", b"{}", 404),
        ("POST", "/v1/completions", b"{", 400), ("POST", "/v1/completions", b"[" + b"[]," * 20_000 + b"0]", 400),
        ("POST", "/completions", b'{"prompt": NaN}', 400), ("GET", "/props", None, 503),
        ("GET", "/slots", None, 503), ("HEAD", "/slots", None, 503), ("PUT", "/v1/completions", b"{}", 405),
    ]),
)  # fmt: skip
async def test_only_a_request_that_can_be_answered_loads_a_model(
    method: str, path: str, body: bytes | None, status: int, loads: Loads
) -> None:
    async with serving(loads, "a", "b", max_models=1) as client:
        assert await said(client, "a") == "a"
        response = await client.request(method, path, params={"model": "b"}, content=body)
        assert response.status_code == status
        assert loads.names == ["a"]
        assert await statuses(client) == {"a": "loaded", "b": "unloaded"}


async def values(client: httpx.AsyncClient, name: str, **params: str) -> dict[str, float]:
    """Values of a metric, by the model of the sample."""
    answer = await client.get("/metrics", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == name:
                model = sample.labels.get("model", "")
                found[model] = found.get(model, 0.0) + sample.value
    return found


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_request_to_unload_loads_no_model(path: str, loads: Loads) -> None:
    async with serving(loads, "a") as client:
        for keep_alive in (0, "0", "0s"):
            answer = await client.post(path, json={"model": "a", "keep_alive": keep_alive})
            said = answer.json()
            assert (said["model"], said["done"], said["done_reason"]) == ("a", True, "unload")
        assert loads.names == []
        for body in ({}, {"keep_alive": "5m"}, {"keep_alive": 0}):  # the first one loads
            answer = await client.post(path, json={"model": "a", **body})
            assert answer.json()["done_reason"] == "load"
        assert loads.names == ["a"]


async def test_the_metrics_are_those_of_all_models_and_of_what_reached_none(loads: Loads) -> None:
    async with serving(loads, "a", "b", max_models=1) as client:
        assert await values(client, "cllm_ticks_total") == {}
        assert loads.names == []
        refusal_of(await ask(client, "z"), 404)
        for name in "ab":
            assert await said(client, name) == name
        durations = await values(client, "cllm_request_duration_seconds_count")
        assert durations == {"a": 1.0, "b": 1.0}
        assert (await values(client, "cllm_ticks_total")).keys() == {"b"}  # the loaded one
        answers = await values(client, "cllm_http_responses_total", model="b")
        assert answers.keys() == {"", "b"}
        refusal_of(await client.get("/metrics", params={"model": "z"}), 404)
        answer = await client.get("/metrics")
        counted = [
            sample.labels["status"]
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name == "cllm_http_responses_total" and "model" not in sample.labels
        ]
        assert "404" in counted
        assert loads.names == ["a", "b"]


async def test_what_only_looks_at_a_model_keeps_it_no_longer(loads: Loads) -> None:
    async with serving(loads, "a", "b", max_models=1) as client:
        assert await said(client, "a") == "a"
        used_at = pool_of(client).models["a"].used_at
        for path in ("/metrics", "/slots", "/props", "/v1/models/a"):
            assert (await client.get(path, params={"model": "a"})).status_code == 200
        assert pool_of(client).models["a"].used_at == used_at


def pool_of(client: httpx.AsyncClient) -> ModelPool:
    pool: ModelPool = cast(Any, client)._transport.app.state.server
    return pool


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "//v1/models", "/models/b"])
async def test_other_spellings_of_a_path_mean_the_same_as_with_one_model(
    path: str, loads: Loads
) -> None:
    async with serving(loads, "a", "b") as client:
        told = (await client.get(f"http://localhost{path}")).json()
        assert [each["id"] for each in told.get("data", [told])] in (["a", "b"], ["b"])


async def test_a_request_for_a_model_that_is_being_freed_waits_for_it(loads: Loads) -> None:
    async with serving(loads, "a", max_models=1) as client, anyio.create_task_group() as tasks:
        assert await said(client, "a") == "a"
        loads.go_on.clear()
        tasks.start_soon(ask, client, "a", "slow")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(pool_of(client).models["a"].free)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(said, client, "a")
        await anyio.wait_all_tasks_blocked()
        loads.go_on.set()
    assert loads.names == ["a", "a"]


async def test_a_server_that_ends_waits_for_no_model_that_is_being_loaded(loads: Loads) -> None:
    loads.opening = anyio.Event()

    async def has_begun() -> bool:
        return loads.names == ["a"]

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks, serving(loads, "a") as client:
            tasks.start_soon(ask, client, "a")
            await until(has_begun)


async def test_a_model_that_is_being_downloaded_keeps_no_other_waiting(loads: Loads) -> None:
    loads.fetching["b"] = anyio.Event()
    async with serving(loads, "a", "b") as client, anyio.create_task_group() as tasks:
        tasks.start_soon(said, client, "b")
        await anyio.wait_all_tasks_blocked()
        assert await said(client, "a") == "a"
        loads.fetching["b"].set()
    assert loads.names == ["a", "b"]


async def test_a_client_that_leaves_before_its_body_loads_no_model(loads: Loads) -> None:
    async with serving(loads, "a") as client:
        app = cast(Any, client)._transport.app

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "raw_path": b"/v1/completions", "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        await app(scope, receive, send)
    assert loads.names == []
