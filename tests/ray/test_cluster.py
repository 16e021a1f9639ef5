"""A cluster of two replicas on this machine: what one server promises, Ray's front keeps.

One cluster for all tests, which leave it as it was; the last ends it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-ray")

from cllm.client import AsyncClient
from tests.ray.cluster_process import (
    COUNTING,
    GREEDY,
    Cluster,
    joined,
    pids_of,
    plain_prompt,
    plain_stream,
    probe,
)
from tests.server.conftest import LONG, OPTIONS, Server, running, samples_of, wait_for, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The cluster has its own loops."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        assert made.wait()["done"] == "start"
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same server without Ray."""
    options = ("--deterministic", "--n-ctx", "16384", "--allow-grammar", "--model-name", "embedded")
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
    n_streams, probes = 6, list[int]()
    ends, begun = dict[int, tuple[str, bool]](), set[int]()
    async with AsyncClient(cluster.url, session_id=None) as client:
        asked = [f"{LONG} moved {i}" for i in range(n_streams)]
        alone = [await client.generate(prompt, **COUNTING) for prompt in asked]
        wholes = [
            (await client.generate(plain_prompt(i), **COUNTING)).text for i in range(n_streams)
        ]
        threads = [
            threading.Thread(target=plain_stream, args=(cluster.url, i, ends, begun))
            for i in range(n_streams)
        ]
        streams = [client.stream(prompt, **COUNTING) for prompt in asked]
        for stream in streams:
            await anext(stream)
        for thread in threads:
            thread.start()
        await wait_for(lambda: len(begun) == n_streams, "all run")
        victim = cluster.replica_pids()[0]
        os.kill(victim, signal.SIGKILL)
        async with anyio.create_task_group() as group:
            group.start_soon(probe, cluster.url, probes)
            ended = [await stream.completion() for stream in streams]
            await anyio.to_thread.run_sync(joined, threads)
            group.cancel_scope.cancel()
    assert [one.token_ids for one in ended] == [one.token_ids for one in alone]
    assert any(stream.n_moves for stream in streams)
    # Without it: some are cut, and not as if that were the end; the others are whole.
    assert {has_end for _, has_end in ends.values()} == {True, False}
    for i, (text, has_end) in ends.items():
        assert text == wholes[i] if has_end else wholes[i].startswith(text)
    bad = [status for status in probes if status != 200]
    assert len(bad) <= max(1, len(probes) // 100), (bad, len(probes))
    await anyio.to_thread.run_sync(
        lambda: wait_until(cluster.has_two, "it is replaced", timeout_s=60)
    )


async def test_a_redeployment_loses_nothing(cluster: Cluster) -> None:
    ends, begun = dict[int, tuple[str, bool]](), set[int]()
    threads = [
        threading.Thread(target=plain_stream, args=(cluster.url, i, ends, begun)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    await wait_for(lambda: len(begun) == 4, "all run")
    probes: list[int] = []
    async with anyio.create_task_group() as group:
        group.start_soon(probe, cluster.url, probes)
        assert (await anyio.to_thread.run_sync(cluster.ask, "redeploy"))["done"] == "redeploy"
        await anyio.to_thread.run_sync(joined, threads)
        group.cancel_scope.cancel()
    assert all(has_end for _, has_end in ends.values())
    assert set(probes) == {200}


async def test_the_controller_is_killed_and_nobody_notices(cluster: Cluster) -> None:
    ends, begun = dict[int, tuple[str, bool]](), set[int]()
    threads = [
        threading.Thread(target=plain_stream, args=(cluster.url, i, ends, begun)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    await wait_for(lambda: len(begun) == 4, "all run")
    probes: list[int] = []
    (controller,) = pids_of("ray::ServeController")
    async with anyio.create_task_group() as group:
        group.start_soon(probe, cluster.url, probes)
        os.kill(controller, signal.SIGKILL)
        await anyio.to_thread.run_sync(joined, threads)
        await anyio.to_thread.run_sync(
            lambda: wait_until(
                lambda: pids_of("ray::ServeController"), "there is another", timeout_s=60
            )
        )
        group.cancel_scope.cancel()
    assert all(has_end for _, has_end in ends.values())
    assert set(probes) == {200}
    await anyio.to_thread.run_sync(
        lambda: wait_until(cluster.has_two, "it knows its replicas", timeout_s=60)
    )


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
    ends, begun = dict[int, tuple[str, bool]](), set[int]()
    threads = [
        threading.Thread(target=plain_stream, args=(cluster.url, i, ends, begun)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(begun) == 4, "all run")
    assert cluster.ask("stop")["done"] == "stop"
    for thread in threads:
        thread.join()
    assert all(has_end for _, has_end in ends.values())
