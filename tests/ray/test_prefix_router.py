"""PrefixRouter keeps the replica of a beginning while that replica is not busy, however old its statistics are."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is in an environment of its own: make test-ray")

with warnings.catch_warnings():  # of pydantic: Ray's own affair
    warnings.simplefilter("ignore")
    from cllm.ray.prefix_router import PrefixRouter
from cllm.routing.prefix_table import keys_of

pytestmark = [pytest.mark.ray, pytest.mark.anyio]

N_REQUESTS = 40


@dataclass
class FakeReplica:
    """A replica whose statistics are those of the start; it has `n_now` requests."""

    name: str
    n_now: int = 0
    fails: bool = False
    routing_stats: dict[str, float] = field(default_factory=lambda: {"open": 0.0, "taken": 0.0})

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(0)
        if self.fails:
            raise ConnectionError("the replica is gone")
        return self.n_now


def pending(session: str = "") -> Any:
    """A request with the beginning that all have."""
    return SimpleNamespace(
        args=(keys_of(b"a long conversation" * 50), session),
        routing_context=SimpleNamespace(should_backoff=False),
    )


async def names(
    replicas: list[FakeReplica], *, stays: bool = False, session: str = ""
) -> list[str]:
    """The first choices for requests with one beginning; each ends at once, or stays."""
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    chosen: list[str] = []
    for _ in range(N_REQUESTS):
        ((first,), *_) = await router.choose_replicas(replicas, pending(session))
        chosen.append(first.name)
        first.n_now += stays
    return chosen


async def test_requests_that_have_ended_divert_none() -> None:
    assert len(set(await names([FakeReplica("a"), FakeReplica("b")]))) == 1


async def test_requests_that_stay_divert_some() -> None:
    chosen = await names([FakeReplica("a"), FakeReplica("b")], stays=True)
    assert min(chosen.count("a"), chosen.count("b")) >= N_REQUESTS // 2 - 8


async def test_a_replica_that_does_not_answer_keeps_the_number_that_was_counted() -> None:
    chosen = await names([FakeReplica("a", fails=True), FakeReplica("b", fails=True)])
    assert min(chosen.count("a"), chosen.count("b")) >= N_REQUESTS // 2 - 8


async def test_a_session_stays_without_a_question() -> None:
    chosen = await names([FakeReplica("a", fails=True), FakeReplica("b", fails=True)], session="s")
    assert len(set(chosen)) == 1


async def test_a_burst_after_requests_that_have_ended_is_shared() -> None:
    replicas = [FakeReplica("a"), FakeReplica("b")]
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()

    async def choose() -> str:
        ((first,), *_) = await router.choose_replicas(replicas, pending())
        first.n_now += 1
        return str(first.name)

    ended = [await choose() for _ in range(9)]
    for replica in replicas:
        replica.n_now = 0
    burst = await asyncio.gather(*(choose() for _ in range(N_REQUESTS)))
    assert len(set(ended)) == 1
    assert min(burst.count("a"), burst.count("b")) >= N_REQUESTS // 2 - 8
