"""Choose the number of replicas by running requests, waiting requests and full KV caches.  Pure.

Ray keeps to `min_replicas` and `max_replicas`, and waits before it follows (`upscale_delay_s`, `downscale_delay_s`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

KV_CACHE_USAGE = 0.8  # of the cells of a replica that live requests are to have at the most


class Load(NamedTuple):
    """Load of a replica, as the mean of the last half minute.

    Attributes
    ----------
    running, waiting : float
        Requests; those that wait want a seat, or cells.
    kv_cache_usage : float
        The share of its cells that live requests hold.
    """

    running: float
    waiting: float
    kv_cache_usage: float


def wanted_replicas(
    n_requests: float, loads: Iterable[Load], *, requests_per_replica: float
) -> float:
    """A number that is not whole is rounded up by Ray.

    Parameters
    ----------
    n_requests : float
        That are served, or wait, in all replicas.
    loads : iterable of Load
    requests_per_replica : float
        That each is to have.
    """
    # A few long requests fill the cells of a replica that has seats enough; who waits will want as many.
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
