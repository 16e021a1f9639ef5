"""A cluster of two replicas on this machine: what one server promises, Ray's front keeps.

One cluster for all tests, which leave it as it was; the last ends it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest

pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-ray")

from cllm.client import AsyncClient
from tests.ray.cluster_process import (
    GREEDY,
    Cluster,
    PlainStreams,
    lose_a_replica,
    pids_of,
    probe,
    wait_for_two,
)
from tests.server.conftest import LONG, OPTIONS, Server, running, samples_of, wait_for, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.anyio]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same server without Ray."""
    options = ("--deterministic", "--n-ctx", "16384", "--model-name", "embedded")
    with running(tmp_path_factory.mktemp("direct") / "log", *options) as server:
        yield server


CHAT = [{"role": "user", "content": "1+1="}]
ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/props", None),
    ("GET", "/openapi.json", None),
    ("GET", "/lora-adapters", None),
    ("POST", "/generate", {"prompt": "37+58=", **GREEDY}),
    ("POST", "/generate", {"prompt": "count:1..9", "stream": True, **GREEDY}),
    ("POST", "/generate", {"prompt": "1+1=", "regex": "("}),
    ("POST", "/generate", {"prompt": "1+1=", "temperature": -1}),
    ("POST", "/generate", {"nobody": 1}),
    ("POST", "/v1/completions", {"prompt": "37+58=", **GREEDY}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, **GREEDY}),
    ("POST", "/v1/chat/completions", {"messages": CHAT, "stream": True, **GREEDY}),
    ("POST", "/v1/responses", {"input": "1+1=", **GREEDY}),
    ("POST", "/v1/messages", {"messages": CHAT, "max_tokens": 5, **GREEDY}),
    ("POST", "/v1/embeddings", {"input": ["a river"]}),
    ("POST", "/tokenize", {"content": "abc"}),
    ("GET", "/nowhere", None),
]
# What no two answers have alike.
CHANGING = {
    "id", "created", "created_at", "completed_at", "timings", "heartbeat_age_s", "cached_tokens",
    "prompt_tokens_details", "input_tokens_details",
}  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in CHANGING}
    return [*map(plain, value)] if isinstance(value, list) else value


def told(answer: httpx.Response) -> Any:
    """Status and content, without what changes."""
    if "event-stream" in answer.headers.get("content-type", ""):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [plain(json.loads(event)) if event[:1] == "{" else event for event in events]
    return answer.status_code, plain(answer.json())


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_every_route_answers_as_one_server_does(
    cluster: Cluster, direct: Server, method: str, path: str, body: Any
) -> None:
    answers = [
        httpx.request(method, url + path, json=body, **OPTIONS) for url in (cluster.url, direct.url)
    ]
    assert answers[0].status_code == answers[1].status_code
    assert told(answers[0]) == told(answers[1])


async def test_a_client_that_leaves_frees_its_cells(cluster: Cluster) -> None:
    def n_cells() -> float:
        """Of whichever replica has more: sessions meet both."""
        texts = [
            httpx.get(f"{cluster.url}/metrics", headers={"x-session-id": f"{i}"}, **OPTIONS).text
            for i in range(8)
        ]
        return max(samples_of(text)["cllm_kv_cells_used"] for text in texts)

    async with (
        AsyncClient(cluster.url, session_id="leaver") as client,
        client.stream(LONG, ignore_eos=True, temperature=0.0) as stream,
    ):
        await anext(stream)
        await wait_for(lambda: n_cells() > 0, "it runs")
    await wait_for(lambda: n_cells() == 0, "its cells are free")


async def test_a_replica_is_killed_and_no_stream_of_the_client_is_lost(cluster: Cluster) -> None:
    victim = cluster.replica_pids()[0]
    await lose_a_replica(cluster, lambda: os.kill(victim, signal.SIGKILL))
    await wait_for_two(cluster)


async def lose_nothing(cluster: Cluster, change: Callable[[], object]) -> None:
    """Streams that run are whole, and every new request is answered."""
    plain, probes = PlainStreams(cluster.url, 4), list[int]()
    await plain.begin()
    async with anyio.create_task_group() as group:
        group.start_soon(probe, cluster.url, probes)
        await anyio.to_thread.run_sync(change)
        await plain.join()
        group.cancel_scope.cancel()
    assert all(has_end for _, has_end in plain.ends.values())
    assert set(probes) == {200}


async def test_a_redeployment_loses_nothing(cluster: Cluster) -> None:
    await lose_nothing(cluster, lambda: cluster.ask("redeploy"))


async def test_the_controller_is_killed_and_nobody_notices(cluster: Cluster) -> None:
    (controller,) = pids_of("ray::ServeController")

    def kill() -> None:
        os.kill(controller, signal.SIGKILL)
        wait_until(
            lambda: set(pids_of("ray::ServeController")) - {controller},
            "there is another",
            timeout_s=60,
        )

    await lose_nothing(cluster, kill)
    await wait_for_two(cluster)


async def test_the_turns_of_a_session_meet_what_was_computed(cluster: Cluster) -> None:
    found = shared = 0
    for i in range(8):
        prompt, known = f"{LONG} session {i} ", 0
        async with AsyncClient(cluster.url, session_id=f"session {i}") as client:
            for turn in range(3):
                completion = await client.generate(
                    prompt, temperature=0.0, max_tokens=40, ignore_eos=True
                )
                if turn:
                    shared += known
                    found += min(known, completion.usage.n_cached)
                known = len(completion.prompt_token_ids)
                prompt += completion.text + f" turn {turn} "
    assert found >= 0.9 * shared


async def test_stop_lets_what_runs_finish(cluster: Cluster) -> None:
    plain = PlainStreams(cluster.url, 4)
    await plain.begin()
    assert (await anyio.to_thread.run_sync(cluster.ask, "stop"))["done"] == "stop"
    await plain.join()
    assert all(has_end for _, has_end in plain.ends.values())
