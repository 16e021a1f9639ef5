"""Choose the replica for a request by its beginning: HAProxy calls a private hook of Ray.

Ray 2.60 has no public way for a router of one's own in front of an application: this is what its own LLM
library uses (`Application._with_ingress_request_router`).  Hence experimental.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cllm.routing.prefix_table import Key, PrefixTable, keys_of, raw_prompt

logger: logging.Logger = logging.getLogger("cllm.ray")

NAME = "cllm-router"
STATISTICS_PERIOD_S = 0.2
# Timeout for an answer to `get_queue_len`.
ANSWER_S = 1.0
N_ASKED_MAX = 1000


def with_prefix_affinity(deployment: serve.Deployment, *args: Any) -> serve.Application:
    """Return an application whose requests go to the replica with their longest prefix."""
    config = RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=STATISTICS_PERIOD_S
    )
    replicas = deployment.options(request_router_config=config).bind(*args)
    router = serve.deployment(
        serve.ingress()(IngressRouter),
        name=NAME,
        max_ongoing_requests=N_ASKED_MAX,
        ray_actor_options={"num_cpus": 0},
    )
    return replicas._with_ingress_request_router(router.bind(replicas))


class IngressRouter:
    """Answers HAProxy, on each machine with a front."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._replicas._init()

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray's name
        """Return the application that HAProxy queries."""
        app = FastAPI(openapi_url=None)
        app.add_api_route("/internal/route", self.route, methods=["POST"])
        return app

    async def route(self, request: Request) -> dict[str, str]:
        """Return the replica of a request: by its session, or by as much of its body as HAProxy has read."""
        session = request.headers.get("x-session-id", "")
        keys = keys_of(raw_prompt(await request.body()))
        try:
            async with self._replicas.choose_replica(keys, session, _reserve=False) as chosen:
                return {"replica_id": chosen._replica.replica_id.to_full_id_str()}
        except Exception as error:
            logger.exception("no replica is chosen")
            raise HTTPException(503) from error


class PrefixRouter(RequestRouter):  # type: ignore[misc,unused-ignore]
    """Choice of a replica by a `PrefixTable` and the number of its requests, or by the session alone.

    That is the number in the latest statistics of the replica, and each request sent since.  A request
    that has ended since is still counted, and with short answers these are many.  So the replicas are
    asked for their present numbers before a request goes elsewhere for the load of its replica.
    """

    def initialize_state(self, **_: Any) -> None:  # Ray's name
        """Called once, by Ray."""
        self._table = PrefixTable()
        # The statistics that were known when a request was last sent there, and how many were since.
        self._sent: dict[str, tuple[object, int]] = {}
        self._counting: asyncio.Task[None] | None = None

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica for a request, then the others, the least busy first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for gone in self._sent.keys() - by_name.keys():
            self._table.forget(gone)
            del self._sent[gone]
        load = {name: self._load(name, replica) for name, replica in by_name.items()}
        if pending_request is not None and load:
            keys, session = pending_request.args
            if not session and self._table.is_diverted(keys, load):
                # All that would leave at once wait for one answer: each would subtract what has ended.
                if self._counting is None or self._counting.done():
                    self._counting = asyncio.create_task(self._count(by_name))
                await asyncio.shield(self._counting)
                load = {name: self._load(name, replica) for name, replica in by_name.items()}
        order = sorted(load, key=lambda name: load[name])
        if pending_request is not None and order:
            pending_request.routing_context.should_backoff = True
            first = self._first(*pending_request.args, load=load)
            statistics, n_sent = self._sent[first]
            self._sent[first] = statistics, n_sent + 1
            order.sort(key=lambda name: name != first)
        return [[by_name[name]] for name in order]

    def _first(self, keys: list[Key], session: str, *, load: Mapping[str, int]) -> str:
        if session:  # the same on every machine with a front, each of which has a table of its own
            return max(load, key=lambda name: blake2b(f"{session} {name}".encode()).digest())
        return self._table.choose(keys, load)

    async def _count(self, replicas: Mapping[str, RunningReplica]) -> None:
        """Set the load of each replica to its present number of requests; without an answer, leave it."""

        async def ask(name: str, replica: RunningReplica) -> None:
            before, n_before = self._sent[name]
            async with asyncio.timeout(ANSWER_S):
                now = await replica.get_queue_len(deadline_s=ANSWER_S)
            statistics, n_sent = self._sent.get(name, (None, 0))
            if statistics == before:  # otherwise there are newer statistics
                self._sent[name] = statistics, now - _n_open(replica) + n_sent - n_before

        asked = (ask(*each) for each in replicas.items())
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if error is not None:
                logger.debug("a replica has not said how many requests it has", exc_info=error)

    def _load(self, name: str, replica: RunningReplica) -> int:
        statistics, n_sent = self._sent.get(name, (None, 0))
        taken = (replica.routing_stats or {}).get("taken")
        if statistics != taken:
            statistics, n_sent = taken, 0
        self._sent[name] = statistics, n_sent
        return _n_open(replica) + n_sent


def _n_open(replica: RunningReplica) -> int:
    """Number of requests in the latest statistics of a replica."""
    return int((replica.routing_stats or {}).get("open", 0))
