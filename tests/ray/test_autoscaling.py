"""How many replicas are wanted; without Ray."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from cllm import EngineConfig
from cllm.ray import ClusterSettings
from cllm.ray.autoscaling import KV_CACHE_USAGE, Autoscaling, Load, wanted_replicas
from cllm.server.config import ServerConfig


def loads(running: list[float], waiting: list[float], usage: list[float]) -> list[Load]:
    return [Load(*each) for each in zip(running, waiting, usage, strict=True)]


@pytest.mark.parametrize(
    ("n_requests", "running", "waiting", "usage", "wanted"),
    [
        (0, [0, 0], [0, 0], [0.0, 0.0], 0),
        (24, [12, 12], [0, 0], [0.1, 0.1], 2),
        (25, [13, 12], [0, 0], [0.1, 0.1], 3),  # seats
        (4, [2, 2], [0, 0], [0.95, 0.9], 3),  # cells
        (6, [2, 2], [2, 0], [0.9, 0.2], 3),  # two wait for as many cells as two have
        (6, [2, 2], [2, 0], [0.2, 0.2], 1),
        (8, [2] * 4, [0] * 4, [0.3] * 4, 2),  # two would have the cells
        (8, [2] * 4, [0] * 4, [0.5] * 4, 3),
        (4, [], [], [], 1),  # nobody has told yet
    ],
)
def test_replicas_follow_what_is_asked_what_waits_and_the_cells(
    n_requests: float, running: list[float], waiting: list[float], usage: list[float], wanted: int
) -> None:
    told = loads(running, waiting, usage)
    assert math.ceil(wanted_replicas(n_requests, told, requests_per_replica=12)) == wanted


def test_after_it_has_grown_it_neither_shrinks_nor_goes_on_growing() -> None:
    """The same requests over more replicas want no other number."""
    told = loads([2] * 4, [0] * 4, [KV_CACHE_USAGE + 0.1] * 4)
    grown = math.ceil(wanted_replicas(8, told, requests_per_replica=12))
    assert grown == 5
    share = 4 * (KV_CACHE_USAGE + 0.1) / grown
    spread = loads([8 / grown] * grown, [0] * grown, [share] * grown)
    assert math.ceil(wanted_replicas(8, spread, requests_per_replica=12)) == grown


def test_ray_is_told_of_it_by_a_name_that_can_be_sent() -> None:
    options = ClusterSettings(replicas=(1, 4)).deployment_options(
        EngineConfig(n_seq_max=16), ServerConfig()
    )
    policy = options["autoscaling_config"]["policy"]
    module, _, name = policy["policy_function"].partition(":")
    assert (module, name) == (Autoscaling.__module__, Autoscaling.__name__)
    told: dict[str, Any] = {
        "running": {"a": 4.0}, "waiting": {"a": 4.0}, "kv_cache_usage": {"a": 0.8},
    }  # fmt: skip
    context = SimpleNamespace(total_num_requests=8.0, aggregated_metrics=told)
    assert Autoscaling(**policy["policy_kwargs"])(context) == (2, {})
    context.aggregated_metrics = None
    assert Autoscaling(**policy["policy_kwargs"])(context) == (8 / 12, {})
