"""The application of Ray Serve: `app` for `serve.run`, `build` for `serve run` and YAML, `stop`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import ray
from ray import serve

from cllm import EngineConfig, InvalidArgumentError
from cllm.ray.environment import prepare
from cllm.ray.replica import Replica
from cllm.ray.settings import PREFIX, ClusterSettings
from cllm.server.config import ServerConfig

logger: logging.Logger = logging.getLogger("cllm.ray")

NAME = "cllm"


def app(
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    num_cpus: int | None = None,
    num_gpus: float = 0.0,
    affinity: str | None = "session",
) -> serve.Application:
    """Return the application with the replicas of a server, for `serve.run(…, name="cllm")`.

    Sets the environment variables that Ray needs before it starts.  If Ray runs without them, this raises
    an error.

    Parameters
    ----------
    engine, server :
        Configuration of each replica, as for `cllm serve`.  `host` and `port` are set by `serve.start`
        instead.  HAProxy's own timeouts replace those for slow headers and slow readers.
    replicas, num_cpus, num_gpus, affinity :
        See `ClusterSettings`.

    Raises
    ------
    InvalidArgumentError
        Names the field.
    CllmError
        Ray runs without a variable that it needs, or a variable has another value.
    """
    settings = ClusterSettings(
        replicas=replicas, num_cpus=num_cpus, num_gpus=num_gpus, affinity=affinity
    )
    engine = settings.engine(EngineConfig() if engine is None else engine)
    server = ServerConfig() if server is None else server
    prepare(affinity, os.environ, is_running=ray.is_initialized())
    _warn_of_ports(server)
    deployment = serve.deployment(
        serve.ingress()(Replica), name=NAME, **settings.deployment_options(engine, server)
    )
    if affinity == PREFIX:
        # Only then: what it imports is Ray's own affair.
        from cllm.ray.prefix_router import with_prefix_affinity

        return with_prefix_affinity(deployment, engine, server)
    return deployment.bind(engine, server)


def build(args: Mapping[str, Any] | None = None) -> serve.Application:
    """Return the application for names and values: `serve run cllm.ray:build model=m.gguf replicas=2`, or YAML.

    Names are the fields of `EngineConfig`, `ServerConfig` and `ClusterSettings`.  Values of a command line
    are text.  The environment variable `CLLM_API_KEY` is the default of `api_key`.

    Raises
    ------
    InvalidArgumentError
        There is no such name, or its value cannot be used.
    """
    left = dict(args or {})
    parts: list[dict[str, Any]] = []
    for kind in (EngineConfig, ServerConfig, ClusterSettings):
        # By annotation: a field that may be text keeps its text, other fields are converted.
        names = {field.name: "str" in str(field.type) for field in fields(kind)}
        parts.append(
            {
                name: value if names[name] else _value_of(value)
                for name in sorted(names.keys() & left.keys())
                for value in [left.pop(name)]
            }
        )
    if left:
        name = next(iter(left))
        limit = "a field of EngineConfig, ServerConfig or ClusterSettings"
        raise InvalidArgumentError(name, left[name], limit)
    engine, server, cluster = parts
    if (key := os.environ.get("CLLM_API_KEY")) is not None:
        server.setdefault("api_key", key)
    return app(EngineConfig(**engine), ServerConfig(**server), **cluster)


def stop(name: str = NAME) -> None:
    """End an application when its requests have ended, and then Ray Serve, if it serves no other application.

    `serve.shutdown` alone would cut every answer.
    """
    serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()


def _value_of(value: object) -> object:
    """Return the number, bool or None that a text of a command line stands for, else the value itself."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return words[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _warn_of_ports(server: ServerConfig) -> None:
    """Warn, if there is no API key, that Ray opens more ports than the requested one."""
    if not server.needs_key:
        logger.warning(
            "Ray's workers, HAProxy's statistics (8404, 9101) and each replica (30000 to 31000) listen on all "
            "interfaces, and these ports bypass the proxy: set an api_key, and close the ports (docs/ray.md)"
        )
