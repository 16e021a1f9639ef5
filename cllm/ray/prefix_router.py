"""Choose the replica for a request by its prefix; HAProxy queries this router for each request.

Experimental: Ray 2.60 has no public way to put one's own router before an application.  This uses the
private hook of Ray's own LLM library, `Application._with_ingress_request_router`.
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
    """HTTP application that tells HAProxy the replica of a request; one on each machine with a proxy."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._replicas._init()

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray's name
        """Return the application that HAProxy queries."""
        app = FastAPI(openapi_url=None)
        app.add_api_route("/internal/route", self.route, methods=["POST"])
        return app

    async def route(self, request: Request) -> dict[str, str]:
        """Return the replica's id for a request, by session or by the body that HAProxy has read; else 503."""
        session = request.headers.get("x-session-id", "")
        keys = keys_of(raw_prompt(await request.body()))
        try:
            async with self._replicas.choose_replica(keys, session, _reserve=False) as chosen:
                return {"replica_id": chosen._replica.replica_id.to_full_id_str()}
        except Exception as error:
            logger.exception("no replica is chosen")
            raise HTTPException(503) from error


class PrefixRouter(RequestRouter):  # type: ignore[misc,unused-ignore]
    """Choice of a replica by a `PrefixTable` and the load of the replicas, or by the session alone.

    The load is the number of requests in the latest statistics of a replica, plus each one sent since.
    Requests that have ended since are still counted, which matters with short answers.  Replicas are
    therefore queried for their present numbers before a request goes elsewhere because of load.
    """

    def initialize_state(self, **_: Any) -> None:  # Ray's name
        """Create the table; Ray calls this once."""
        self._table = PrefixTable()
        # By replica: its last known `taken`, and the number of requests sent since (see `_count`).
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
                # Requests diverted at once share one query: each query would subtract all ended requests.
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
        """Set the load of each replica to its present number of requests, plus those sent meanwhile.

        A replica that does not answer within `ANSWER_S` keeps its load.
        """

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
                logger.debug("a replica did not report its number of requests", exc_info=error)

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
