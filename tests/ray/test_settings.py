"""What Ray is told of replicas, and what has to be in its environment."""

from __future__ import annotations

from typing import Any

import pytest

from cllm import CllmError, EngineConfig, InvalidArgumentError
from cllm.ray import environment
from cllm.ray.settings import ClusterSettings
from cllm.server.config import ServerConfig

ENGINE = EngineConfig(n_seq_max=8, max_queue=50, n_threads=3)


def options_of(**settings: Any) -> dict[str, Any]:
    return ClusterSettings(**settings).deployment_options(ENGINE, ServerConfig(drain_timeout_s=40))


def test_a_replica_takes_more_than_its_queue_does_and_may_finish_it() -> None:
    options = options_of(replicas=3)
    assert options["num_replicas"] == 3
    assert options["max_ongoing_requests"] == options["max_queued_requests"] > 58
    assert options["graceful_shutdown_timeout_s"] > 40
    assert options["max_surge_percent"] == 100
    assert options["ray_actor_options"] == {"num_cpus": 3, "num_gpus": 0.0}
    assert "autoscaling_config" not in options


def test_between_two_numbers_it_is_scaled_before_the_seats_are_full() -> None:
    options = options_of(replicas=(1, 4))
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 4)
    assert scaling["target_ongoing_requests"] == 6.0
    assert "num_replicas" not in options


def test_an_engine_has_as_many_threads_as_its_replica_has_processors() -> None:
    settings = ClusterSettings(num_cpus=2)
    assert settings.engine(EngineConfig()).n_threads == 2
    assert settings.engine(ENGINE).n_threads == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 0},
        {"replicas": (2, 1)},
        {"replicas": (0, 1)},
        {"replicas": (1, 2, 3)},
        {"replicas": "two"},
        {"num_cpus": 0},
        {"num_gpus": -1.0},
        {"affinity": "nearest"},
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        ClusterSettings(**wrong)


def test_the_environment_is_made_before_ray_starts() -> None:
    environ = {"PATH": "/bin"}
    environment.prepare("session", environ, is_running=False)
    assert environ == {"PATH": "/bin", **environment.wanted("session")}
    environment.prepare("session", environ, is_running=True)
    assert environment.BALANCE not in environment.wanted(None)


@pytest.mark.parametrize("is_running", [False, True])
def test_what_ray_should_have_had_is_named(is_running: bool) -> None:
    environ = {**environment.wanted("session"), environment.HAPROXY: "0"}
    with pytest.raises(CllmError, match="RAY_SERVE_ENABLE_HA_PROXY='1'"):
        environment.prepare("session", environ, is_running=is_running)
    if is_running:
        with pytest.raises(CllmError, match="x-session-id"):
            environment.prepare("session", environment.wanted(None), is_running=True)
