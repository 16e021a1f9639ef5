"""A cluster of two machines (raylets) with a replica each, and affinity by beginnings: by no header, nobody asked for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest

pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-ray")

from cllm.client import AsyncClient
from tests.ray.cluster_process import (
    COUNTING,
    GREEDY,
    Cluster,
    joined,
    plain_prompt,
    plain_stream,
    probe,
)
from tests.server.conftest import LONG, wait_for, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The cluster has its own loops."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("nodes"), cpus=(1, 1), affinity="prefix")
    try:
        assert made.wait()["done"] == "start"
        yield made
    finally:
        made.end()


async def test_turns_meet_what_was_computed_without_a_header(cluster: Cluster) -> None:
    found = shared = 0
    prompts = [f"conversation {i}: {LONG} " * 20 for i in range(8)]
    known = [0] * 8
    async with AsyncClient(cluster.url) as client:
        for turn in range(3):
            for i in range(8):
                completion = await client.generate(
                    prompts[i], max_tokens=20, ignore_eos=True, **GREEDY
                )
                if turn:
                    shared += known[i]
                    found += min(known[i], completion.usage.n_cached)
                known[i] = len(completion.prompt_token_ids)
                prompts[i] += completion.text + f" turn {turn} "
    assert found >= 0.9 * shared
    n_output = [each["cllm_output_tokens_total"] for each in cluster.replica_metrics()]
    assert len(n_output) == 2
    assert sum(n_output) == 8 * 3 * 20
    assert min(n_output) >= 0.25 * sum(n_output), "both have some of the conversations"


async def test_a_machine_goes_and_no_stream_of_the_client_is_lost(cluster: Cluster) -> None:
    n_streams, probes = 6, list[int]()
    ends, begun = dict[int, tuple[str, bool]](), set[int]()
    async with AsyncClient(cluster.url) as client:
        asked = [f"{i} moved {LONG}" for i in range(n_streams)]
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
        async with anyio.create_task_group() as group:
            group.start_soon(probe, cluster.url, probes)
            assert (await anyio.to_thread.run_sync(cluster.ask, "remove-node"))["done"]
            ended = [await stream.completion() for stream in streams]
            await anyio.to_thread.run_sync(joined, threads)
            group.cancel_scope.cancel()
    assert [one.token_ids for one in ended] == [one.token_ids for one in alone]
    assert any(stream.n_moves for stream in streams)
    for i, (text, has_end) in ends.items():
        assert text == wholes[i] if has_end else wholes[i].startswith(text)
    bad = [status for status in probes if status != 200]
    assert len(bad) <= max(1, len(probes) // 100), (bad, len(probes))
    assert (await anyio.to_thread.run_sync(cluster.ask, "add-node"))["done"]
    await anyio.to_thread.run_sync(
        lambda: wait_until(cluster.has_two, "it is replaced", timeout_s=90)
    )
