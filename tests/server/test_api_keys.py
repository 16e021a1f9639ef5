"""Keys of several clients: their limits, their names, and the tokens that are counted for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cllm import (
    EngineConfig,
    InvalidArgumentError,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
)
from cllm.server import ServerConfig, create_app
from cllm.server.answers.running import Observation, run_streams
from cllm.server.http.api_keys import Allowance, KeyRing, read_keys
from cllm.server.http.problems import Problem
from cllm.server.operation.metrics import Metrics
from cllm.server.operation.tracing import Tracing
from cllm.server.operation.usage import Access
from cllm.server.several import create_models_app
from cllm.testing import FakeEngine
from tests.conftest import QUIET

KEYS = """
[alice]
key = "a"
requests_per_minute = 3
priority = 5

[bob]
key = "b"
tokens_per_minute = 100
max_concurrent = 2
weight = 2
"""


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def refusal(ring: KeyRing, token: bytes, access: Access | None = None) -> str | None:
    """Text of the refusal of a request with this key; None if it is admitted."""
    key = ring.find(token)
    assert key is not None
    try:
        with key.admitted(access):
            return None
    except Problem as problem:
        return f"{problem} {problem.headers['Retry-After']}"


# --- The file --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a", "api_keys is"),
        ("", "at least one key"),
        ("a = 1", "api_keys: a is a secret, must be a table with a key"),
        ("[a]\nrequests_per_minute = 1", "a.key is a secret, must be text that is not blank"),
        ('[a]\nkey = " "', "a.key is a secret"),
        ('[a]\nkey = "x"\nrequest_per_minute = 1', "a.request_per_minute is a secret, must be called 'requests_per_minute'"),
        ('[a]\nkey = "x"\nmax_concurrent = 0', "a.max_concurrent is 0, must be 1 to"),
        ('[a]\nkey = "x"\nweight = "heavy"', "a.weight is 'heavy'"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "b.key is a secret, must be another one than that of a"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_names_the_client_the_field_and_the_limit(
    text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as raised:
        read_keys(path)
    assert says in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        KeyRing(str(tmp_path / "nowhere.toml"))


def test_a_changed_file_holds_after_a_second_and_a_broken_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    ring = KeyRing(str(file), clock)
    assert ring.find(b"c") is None
    alice = ring.find(b"a")
    assert refusal(ring, b"a") is None
    file.write_text(KEYS.replace('"a"', '"c"') + "# longer")
    assert ring.find(b"c") is None
    clock.now += 1
    assert ring.find(b"c") is alice  # what it has used stays known
    assert alice is not None
    assert alice.n_requests == 1
    assert ring.find(b"a") is None
    assert "2 API keys read from" in caplog.text
    file.write_text("[broken")
    for _ in range(3):
        clock.now += 1
        assert ring.find(b"c") is alice
    assert caplog.text.count("the present API keys stay in force") == 1
    file.unlink()
    clock.now += 1
    assert ring.find(b"b") is not None


# --- Limits ----------------------------------------------------------------------------------
def test_requests_a_minute_are_limited_and_come_back(file: Path) -> None:
    clock = Clock()
    ring = KeyRing(str(file), clock)
    assert [refusal(ring, b"a") for _ in range(3)] == [None] * 3
    told = refusal(ring, b"a")
    assert told == "the key 'alice' has reached its requests_per_minute (3) 20"
    assert refusal(ring, b"b") is None
    clock.now += 20
    assert refusal(ring, b"a") is None
    assert refusal(ring, b"a") is not None
    clock.now += 3600
    assert [refusal(ring, b"a") is None for _ in range(4)] == [True, True, True, False]


def test_tokens_a_minute_are_counted_at_the_end_without_cached_ones(file: Path) -> None:
    clock = Clock()
    ring = KeyRing(str(file), clock)
    assert refusal(ring, b"b", Access(n_prompt=90, n_cached=80, n_output=140)) is None
    told = refusal(ring, b"b")
    assert told == "the key 'bob' has reached its tokens_per_minute (100) 31"
    clock.now += 31
    assert refusal(ring, b"b") is None


def test_a_change_of_another_setting_keeps_what_a_key_has_used(file: Path) -> None:
    clock = Clock()
    ring = KeyRing(str(file), clock)
    assert [refusal(ring, b"a") for _ in range(3)] == [None] * 3
    file.write_text(KEYS.replace("priority = 5", "priority = 55"))
    clock.now += 1.5
    assert refusal(ring, b"a") is not None
    file.write_text(KEYS.replace("requests_per_minute = 3", "requests_per_minute = 4"))
    clock.now += 1.5
    assert [refusal(ring, b"a") is None for _ in range(5)] == [True, True, True, True, False]


def test_requests_at_once_are_limited(file: Path) -> None:
    ring = KeyRing(str(file), Clock())
    bob = ring.find(b"b")
    assert bob is not None
    with ExitStack() as opened:
        opened.enter_context(bob.admitted(None))
        opened.enter_context(bob.admitted(None))
        assert "max_concurrent (2)" in str(refusal(ring, b"b"))
    assert refusal(ring, b"b") is None
    assert (bob.n_requests, bob.n_refused) == (3, 1)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40),
)
def test_no_more_than_a_minutes_units_and_the_rate_are_ever_used(
    n_per_minute: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    allowance, n_used, begun = Allowance(n_per_minute, clock), 0, clock.now
    for seconds, n in steps:
        clock.now += seconds
        for _ in range(n):
            if allowance.wait_s() == 0:
                allowance.use(1)
                n_used += 1
    assert n_used <= n_per_minute * (1 + (clock.now - begun) / 60) + 1e-6


# --- Over HTTP -------------------------------------------------------------------------------
@asynccontextmanager
async def served(file: Path, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    """A client of a server with these keys, and its engine."""
    async with FakeEngine(lambda _: "abc") as engine:
        app = create_app(engine, ServerConfig(api_keys=str(file), **more))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, engine


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def samples(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and values of a metric."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels, sample.value


@pytest.mark.anyio
async def test_each_key_is_known_by_its_name_and_others_are_refused(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cllm.access")
    body = {"prompt": "hi", "tenant": "other"}
    async with served(file, api_key="whole") as (client, _):
        for key, status in {"a": 200, "b": 200, "whole": 200, "c": 401, "": 401}.items():
            response = await client.post("/generate", json=body, headers=bearer(key))
            assert response.status_code == status, key
        anthropic = await client.post("/generate", json=body, headers={"x-api-key": "b"})
        assert anthropic.status_code == 200
        for _ in range(2):
            await client.post("/generate", json=body, headers=bearer("a"))
        refused = await client.post("/generate", json=body, headers=bearer("a"))
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        text = (await client.get("/metrics", headers=bearer("whole"))).text
        assert "bob" not in (await client.get("/metrics", headers=bearer("a"))).text
        assert (await client.get("/health")).status_code == 200
    names = [record.fields.get("key") for record in caplog.records]  # type: ignore[attr-defined]
    assert names == ["alice", "bob", None, None, None, "bob", "alice", "alice", "alice"]
    counted = {labels["key"]: n for labels, n in samples(text, "cllm_key_requests_total")}
    assert counted == {"alice": 3, "bob": 2}
    assert ({"key": "alice"}, 1.0) in list(samples(text, "cllm_key_refusals_total"))
    tokens = {
        (labels["key"], labels["kind"]): n for labels, n in samples(text, "cllm_key_tokens_total")
    }
    assert tokens["bob", "output"] > 0
    assert tokens["bob", "prompt"] >= tokens["bob", "cached"]


@pytest.mark.anyio
async def test_a_key_is_the_tenant_and_the_priority_of_its_requests(file: Path) -> None:
    async with served(file) as (client, engine):
        asked: list[dict[str, Any]] = []
        stream = engine.stream

        def noting(*arguments: Any, **options: Any) -> Any:
            asked.append(options)
            return stream(*arguments, **options)

        engine.stream = noting  # type: ignore[method-assign]
        for given, kept in {1: 5, 9: 9, None: 5}.items():
            headers = {**bearer("a"), "X-Tenant": "other"}
            body = {"prompt": "hi", "tenant": "other"} | ({"priority": given} if given else {})
            assert (await client.post("/generate", json=body, headers=headers)).status_code == 200
            assert (asked[-1]["tenant"], asked[-1]["priority"]) == ("alice", kept)


@pytest.mark.anyio
async def test_vectors_count_as_tokens_too(file: Path) -> None:
    async with served(file, api_key="whole") as (client, _):
        body = {"input": ["some text", "more"]}
        said = (await client.post("/v1/embeddings", json=body, headers=bearer("b"))).json()
        text = (await client.get("/metrics", headers=bearer("whole"))).text
    tokens = {
        (labels["key"], labels["kind"]): n for labels, n in samples(text, "cllm_key_tokens_total")
    }
    assert tokens["bob", "prompt"] == said["usage"]["prompt_tokens"] > 0


@pytest.mark.anyio
async def test_limits_hold_for_several_models_together(file: Path) -> None:
    models = {name: EngineConfig(n_ctx=256, **QUIET) for name in ("x", "y")}
    config = ServerConfig(api_keys=str(file), api_key="whole")
    app = create_models_app(
        models, config, make_engine=lambda config: FakeEngine(lambda _: "abc", n_ctx=256)
    )
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            statuses = [
                (
                    await client.post(
                        "/generate", json={"prompt": "hi", "model": model}, headers=bearer("a")
                    )
                ).status_code
                for model in ("x", "y", "x", "y")
            ]
            assert statuses == [200, 200, 200, 429]
            text = (await client.get("/metrics", headers=bearer("whole"))).text
    assert ({"key": "alice"}, 3.0) in list(samples(text, "cllm_key_requests_total"))


@pytest.mark.anyio
async def test_tokens_of_an_answer_that_its_client_does_not_take_count(file: Path) -> None:
    ring = KeyRing(str(file), Clock())
    access = Access()

    async def leave(_: int, delta: TokenDelta) -> None:
        raise ConnectionError("the client has left")

    async with FakeEngine(lambda _: "abc") as engine:
        observed = Observation(Metrics(), Tracing(), {}, "chat", "m", SamplingParams(), access)
        with pytest.raises(ConnectionError):
            await run_streams([engine.stream("some prompt")], observed, leave)
    assert access.n_prompt == len("some prompt")
    assert access.n_output >= 1
    assert refusal(ring, b"b", access) is None
    bob = ring.find(b"b")
    assert bob is not None
    assert (bob.n_prompt, bob.n_output) == (access.n_prompt, access.n_output)


async def run_left(engine: FakeEngine, prompts: Sequence[str], *, at: str) -> Access:
    """Return what is counted of streams whose client leaves at its first delta, or at the head."""
    access = Access()

    async def leave(*_: object) -> None:
        raise ConnectionError("the client has left")

    observed = Observation(Metrics(), Tracing(), {}, "chat", "m", SamplingParams(), access)
    places = {"delta": (leave, None), "head": (None, leave)}[at]
    with pytest.raises((ConnectionError, PromptTooLongError)):
        await run_streams([engine.stream(prompt) for prompt in prompts], observed, *places)
    return access


@pytest.mark.anyio
async def test_what_was_cached_or_never_computed_of_an_answer_that_is_left_does_not_count() -> None:
    head = "some long head of a conversation: "
    async with FakeEngine(lambda _: "abc" * 100, n_ctx=1024, n_seq_max=1) as engine:
        await engine.generate(head, max_tokens=3)
        access = await run_left(engine, [head + "x"], at="delta")
        assert access.n_prompt == len(head) + 1
        assert access.n_cached >= len(head) - 1
        engine.decoder.latency_s = 0.05
        async with engine.stream("y" * 100) as other:  # it has the only place for long
            await anext(other)
            waiting = await run_left(engine, ["z" * 100], at="head")
            assert (waiting.n_prompt, waiting.n_output) == (0, 0)


@pytest.mark.anyio
async def test_prompts_beside_one_that_is_rejected_count_if_they_were_computed() -> None:
    async with FakeEngine(lambda _: "abc", n_ctx=512) as engine:
        access = await run_left(engine, ["x" * 100, "y" * 600], at="head")
        assert not engine.statistics().n_prefill_tokens or access.n_prompt == 100


@pytest.mark.anyio
async def test_a_priority_that_is_a_whole_float_is_one(file: Path) -> None:
    async with served(file) as (client, engine):
        seen = list[int]()
        stream = engine.stream

        def noting(*given: Any, **options: Any) -> Any:
            seen.append(options["priority"])
            return stream(*given, **options)

        engine.stream = noting  # type: ignore[method-assign]
        for priority in (9, 9.0):
            body = {"prompt": "hi", "priority": priority}
            assert (await client.post("/generate", json=body, headers=bearer("b"))).is_success
    assert seen == [9, 9]


@pytest.mark.anyio
async def test_a_scored_prompt_counts(file: Path) -> None:
    async with served(file, api_key="whole") as (client, _):
        body = {"prompt": "a long prompt", "continuation": "b"}
        assert (await client.post("/generate/score", json=body, headers=bearer("b"))).is_success
        text = (await client.get("/metrics", headers=bearer("whole"))).text
    tokens = {
        (labels["key"], labels["kind"]): n for labels, n in samples(text, "cllm_key_tokens_total")
    }
    assert tokens["bob", "prompt"] >= len("a long prompt")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/embedding", "/generate/score", "/api/embed"],
)
async def test_texts_that_were_computed_in_vain_count(file: Path, path: str) -> None:
    texts = ["some text of some length"] * 4
    bodies: dict[str, dict[str, Any]] = {
        "/embedding": {"content": texts},
        "/generate/score": {"prompt": texts[0], "continuation": texts[1]},
        "/api/embed": {"model": "m", "input": texts},
    }
    async with served(file, api_key="whole") as (client, _):
        body = {**bodies.get(path, {"input": texts}), "timeout": 0.0}
        said = await client.post(path, json=body, headers=bearer("b"))
        assert said.status_code == 408, said.text
        text = (await client.get("/metrics", headers=bearer("whole"))).text
    tokens = {
        (labels["key"], labels["kind"]): n for labels, n in samples(text, "cllm_key_tokens_total")
    }
    assert tokens["bob", "prompt"] >= len(texts[0]) // 4


@pytest.mark.anyio
async def test_what_is_only_looked_at_is_not_limited(file: Path) -> None:
    async with served(file) as (client, _):
        for _ in range(5):
            assert (await client.get("/v1/models", headers=bearer("a"))).status_code == 200
        body = {"prompt": "hi"}
        assert (await client.post("/generate", json=body, headers=bearer("a"))).status_code == 200


@pytest.mark.anyio
async def test_a_request_whose_client_leaves_is_open_no_longer(file: Path) -> None:
    async with served(file) as (client, _):
        for _ in range(3):  # more than max_concurrent
            with anyio.move_on_after(0):
                await client.post("/generate", json={"prompt": "hi"}, headers=bearer("b"))
        response = await client.post("/generate", json={"prompt": "hi"}, headers=bearer("b"))
        assert response.status_code == 200
