"""Choose the number of replicas by running requests, waiting requests and full KV caches.  Pure.

Ray keeps it between `min_replicas` and `max_replicas`.  Ray delays changes by `upscale_delay_s` or
`downscale_delay_s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

KV_CACHE_USAGE = 0.8  # target: share of the KV cells of a replica that live requests hold


class Load(NamedTuple):
    """Load of a replica, as the mean of the last half minute.

    Attributes
    ----------
    running, waiting : float
        Number of requests; those that wait need one of the `n_seq_max` sequences, or KV cells.
    kv_cache_usage : float
        Share of the KV cells that live requests hold, 0 to 1.
    """

    running: float
    waiting: float
    kv_cache_usage: float


def wanted_replicas(
    n_requests: float, loads: Iterable[Load], *, requests_per_replica: float
) -> float:
    """Return the number of replicas that the load needs; Ray rounds it up.

    Parameters
    ----------
    n_requests : float
        Number of requests that run or wait, in all replicas.
    loads : iterable of Load
    requests_per_replica : float
        Number of requests that each replica should have.
    """
    # A few long requests can fill the cells of a replica before all its sequences are in use.  Waiting
    # requests are assumed to need as many cells as running ones.
    n_caches = sum(
        load.kv_cache_usage * (load.running + load.waiting) / max(1.0, load.running)
        for load in loads
    )
    return max(n_requests / requests_per_replica, n_caches / KV_CACHE_USAGE)


class Autoscaling:
    """Autoscaling policy for Ray's controller, by the statistics of `Replica`."""

    def __init__(self, *, requests_per_replica: float) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and no state for Ray."""
        told = context.aggregated_metrics or {}
        of = [told.get(name, {}) for name in Load._fields]
        loads = [Load(*(each.get(replica, 0.0) for each in of)) for replica in of[-1]]
        wanted = wanted_replicas(
            context.total_num_requests, loads, requests_per_replica=self._requests_per_replica
        )
        return wanted, {}
