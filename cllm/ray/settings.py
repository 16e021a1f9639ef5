"""ClusterSettings: how many replicas there are, and what each has.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cllm import EngineConfig, InvalidArgumentError
from cllm.checks import check_float, check_int
from cllm.server.config import ServerConfig

PREFIX = "prefix"
AFFINITIES = ("session", PREFIX, None)
HEADROOM = 64
END_S = 5.0  # seconds that a replica has to end, after its drain timeout
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 600.0
# Number of requests of a replica, as a share of `n_seq_max`, above which another replica is started.
TARGET_SHARE = 0.75
POLICY = "cllm.ray.autoscaling:Autoscaling"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The replicas of one model.

    Parameters
    ----------
    replicas : int or (int, int)
        Number of replicas; or least and most, and the load decides between them.
    num_cpus : int, optional
        Processors that Ray reserves for each replica; also its `n_threads`, if that is None.  None: as
        many as `EngineConfig` has compute threads.
    num_gpus : float
        GPUs of each.
    affinity : str, optional
        "session": requests with the same `x-session-id` go to the same replica.  "prefix" (experimental):
        the same, and requests without it go to the replica with their longest prefix, unless it is much
        busier than another one.  None: each request goes
        to the replica with the fewest connections.

    Raises
    ------
    InvalidArgumentError
        Names the field.
    """

    replicas: int | tuple[int, int] = 1
    num_cpus: int | None = None
    num_gpus: float = 0.0
    affinity: str | None = "session"

    def __post_init__(self) -> None:
        error = InvalidArgumentError
        replicas: int | tuple[int, int]
        if isinstance(self.replicas, tuple | list):  # a list of a YAML file
            if len(self.replicas) != 2:
                raise error("replicas", self.replicas, "a number, or two: at least, at most")
            least = check_int("replicas", self.replicas[0], 1, 4096, error)
            replicas = (least, check_int("replicas", self.replicas[1], least, 4096, error))
        else:
            replicas = check_int("replicas", self.replicas, 1, 4096, error)
        object.__setattr__(self, "replicas", replicas)
        if self.num_cpus is not None:
            num_cpus = check_int("num_cpus", self.num_cpus, 1, 4096, error)
            object.__setattr__(self, "num_cpus", num_cpus)
        num_gpus = check_float("num_gpus", self.num_gpus, 0.0, 64.0, error)
        object.__setattr__(self, "num_gpus", num_gpus)
        if self.affinity not in AFFINITIES:
            raise error("affinity", self.affinity, f"one of {AFFINITIES}")

    def engine(self, engine: EngineConfig) -> EngineConfig:
        """Return the settings of each engine; a missing `n_threads` becomes `num_cpus`.

        Raises
        ------
        InvalidArgumentError
            Several replicas would share RPC servers, which accept one client at a time.
        """
        if engine.rpc and self.replicas not in (1, (1, 1)):
            raise InvalidArgumentError(
                "replicas", self.replicas, "1 with rpc: servers have one client"
            )
        if self.num_cpus is None or engine.n_threads is not None:
            return engine
        return replace(engine, n_threads=self.num_cpus)

    def deployment_options(self, engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
        """Return the options of Ray's deployment."""
        # More than a server takes, so that its own queue decides (priorities, deadlines, 429), and requests
        # for health and metrics do not wait.
        n_requests = 2 * (engine.n_seq_max + engine.max_queue) + HEADROOM
        num_cpus = self.num_cpus if self.num_cpus is not None else engine.compute_threads[0]
        options: dict[str, Any] = {
            "max_ongoing_requests": n_requests,
            "max_queued_requests": n_requests,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": server.drain_timeout_s + END_S,
            "health_check_period_s": HEALTH_PERIOD_S,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            # New replicas start before old ones end, except with RPC servers, which accept one client.
            "max_surge_percent": 0 if engine.rpc else 100,
            "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": self.num_gpus},
        }
        if isinstance(self.replicas, tuple):
            options["autoscaling_config"] = self._autoscaling(engine)
        else:
            options["num_replicas"] = self.replicas
        return options

    def _autoscaling(self, engine: EngineConfig) -> Mapping[str, Any]:
        assert isinstance(self.replicas, tuple)
        least, most = self.replicas
        n_requests = max(1.0, TARGET_SHARE * engine.n_seq_max)
        return {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": n_requests,
            "policy": {
                "policy_function": POLICY,
                "policy_kwargs": {"requests_per_replica": n_requests},
            },
            "upscale_delay_s": UPSCALE_DELAY_S,
            "downscale_delay_s": DOWNSCALE_DELAY_S,
        }
