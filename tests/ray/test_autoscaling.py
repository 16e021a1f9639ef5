"""How many replicas are wanted; without Ray."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from cllm import EngineConfig
from cllm.ray import ClusterSettings
from cllm.ray.autoscaling import KV_CACHE_USAGE, Autoscaling, wanted_replicas
from cllm.server.config import ServerConfig


@pytest.mark.parametrize(
    ("n_replicas", "n_requests", "waiting", "usage", "wanted"),
    [
        (2, 0, [0, 0], [0.0, 0.0], 0),
        (2, 24, [0, 0], [0.1, 0.1], 2),
        (2, 25, [0, 0], [0.1, 0.1], 3),  # seats
        (2, 4, [0, 0], [0.95, 0.9], 3),  # cells
        (2, 4, [1, 0], [0.2, 0.2], 3),  # something waits all the time
        (2, 4, [0.2, 0.2], [0.2, 0.2], 1),  # now and then
        (4, 8, [0] * 4, [0.3] * 4, 2),  # two would have the cells
        (4, 8, [0] * 4, [0.5] * 4, 3),
        (2, 4, [], [], 1),  # nobody has told yet
    ],
)
def test_replicas_follow_what_is_asked_what_waits_and_the_cells(
    n_replicas: int, n_requests: float, waiting: list[float], usage: list[float], wanted: int
) -> None:
    found = wanted_replicas(n_replicas, n_requests, waiting, usage, requests_per_replica=12)
    assert math.ceil(found) == wanted


def test_after_it_has_grown_by_cells_it_does_not_shrink_at_once() -> None:
    """The same cells over one replica more are below what is allowed, and above what one less would have."""
    usage = [KV_CACHE_USAGE + 0.1] * 4
    grown = math.ceil(wanted_replicas(4, 4, [], usage, requests_per_replica=12))
    spread = [sum(usage) / grown] * grown
    assert grown == 5
    assert math.ceil(wanted_replicas(grown, 4, [], spread, requests_per_replica=12)) == grown


def test_ray_is_told_of_it_by_a_name_that_can_be_sent() -> None:
    options = ClusterSettings(replicas=(1, 4)).deployment_options(
        EngineConfig(n_seq_max=16), ServerConfig()
    )
    policy = options["autoscaling_config"]["policy"]
    module, _, name = policy["policy_function"].partition(":")
    assert (module, name) == (Autoscaling.__module__, Autoscaling.__name__)
    told: dict[str, Any] = {"waiting": {"a": 3.0}, "kv_cache_usage": {"a": 0.5}}
    context = SimpleNamespace(
        current_num_replicas=1, total_num_requests=4.0, aggregated_metrics=told
    )
    assert Autoscaling(**policy["policy_kwargs"])(context) == (2, {})
    context.aggregated_metrics = None
    assert Autoscaling(**policy["policy_kwargs"])(context) == (4 / 12, {})
