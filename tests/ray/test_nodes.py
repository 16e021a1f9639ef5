"""A cluster of two machines (raylets) with a replica each, and affinity by beginnings: by no header, nobody asked for it."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-ray")

from cllm.client import AsyncClient
from tests.ray.cluster_process import GREEDY, Cluster, lose_a_replica, wait_for_two
from tests.server.conftest import LONG

pytestmark = [pytest.mark.ray, pytest.mark.anyio]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("nodes"), cpus=(1, 1), affinity="prefix")
    try:
        made.start()
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
    await lose_a_replica(cluster, lambda: cluster.ask("remove-node"))
    assert (await anyio.to_thread.run_sync(cluster.ask, "add-node"))["done"] == "add-node"
    await wait_for_two(cluster)
