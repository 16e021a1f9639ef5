"""Replica: one whole server of cllm, as a deployment of Ray Serve."""

from __future__ import annotations

from typing import Any

import anyio
from fastapi import FastAPI

from cllm import CllmError, EngineConfig, EngineStatus
from cllm.server.app import create_app
from cllm.server.config import ServerConfig

LOAD_S = 600.0
# A replica recovers while its engine process restarts: its requests wait, and a new replica would lose them.
SERVING = (EngineStatus.READY, EngineStatus.RESTARTING, EngineStatus.DRAINING)


class Replica:
    """Replica of `cllm serve`, with all of its routes; Ray creates it in a process of its own.

    Ray calls its methods by their names; see `ray.serve.deployment`.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._settings = engine, server
        self._app: FastAPI | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray's name
        """Return the application, created in the replica: an engine cannot be sent to another process."""
        self._app = create_app(*self._settings)
        return self._app

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Wait for the model, and return its name and fingerprint; Ray calls this once, before requests come.

        Raises
        ------
        CllmError
            The model cannot be loaded, or not within 600 s.
        """
        app = self._application
        with anyio.move_on_after(LOAD_S):
            await app.state.engine_task.load_ended.wait()
        state = app.state.server
        if state.failure is not None:
            raise state.failure
        if state.engine is None:
            raise CllmError(f"the model was not loaded within {LOAD_S:g} s")
        return {"model": state.model_name, "fingerprint": state.engine.model.fingerprint}

    def check_health(self) -> None:
        """Raise an error if the replica has failed; Ray calls it every few seconds and replaces the replica.

        Raises
        ------
        CllmError
            The engine does not serve requests.
        """
        state = self._application.state.server
        health = None if state.engine is None else state.engine.health()
        if health is None or health.status not in SERVING:
            reason = health.reason if health else state.failure or "its model is not loaded"
            raise CllmError(f"the engine of this replica is not healthy: {reason}")

    def record_routing_stats(self) -> dict[str, float]:
        """Return the number of open requests and of all so far, for `PrefixRouter`; empty without an engine.

        The time is left out, because Ray sends every changed value to every machine.
        """
        engine = self._application.state.server.engine
        if engine is None:
            return {}
        now = engine.statistics()
        n_open = now.n_waiting + now.n_running
        return {"open": float(n_open), "taken": float(n_open + sum(now.n_finished.values()))}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return waiting and running requests and KV cache usage, for `Autoscaling` and the caller's own policies."""
        engine = self._application.state.server.engine
        if engine is None:
            return {}
        now = engine.statistics()
        return {
            "waiting": float(now.n_waiting),
            "running": float(now.n_running),
            "kv_cache_usage": now.kv_cache_usage,
        }

    @property
    def _application(self) -> FastAPI:
        if self._app is None:
            raise CllmError("the replica has not started its application yet")
        return self._app
