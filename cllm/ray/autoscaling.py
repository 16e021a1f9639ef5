"""How many replicas there are to be: by what is asked, what waits, and how full the KV caches are.  Pure.

Ray keeps to `min_replicas` and `max_replicas`, and waits before it follows (`upscale_delay_s`, `downscale_delay_s`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

KV_CACHE_USAGE = 0.8  # of the cells of a replica that live requests are to have at the most


def wanted_replicas(
    n_replicas: int,
    n_requests: float,
    waiting: Iterable[float],
    kv_cache_usage: Iterable[float],
    *,
    requests_per_replica: float,
) -> float:
    """A number that is not whole is rounded up by Ray.

    Parameters
    ----------
    n_replicas : int
        That there are.
    n_requests : float
        That are served, or wait, in all of them.
    waiting, kv_cache_usage : iterable of float
        Of each replica, the mean of the last half minute: requests that wait for a seat or for cells, and the
        share of its cells that live requests hold.
    requests_per_replica : float
        That each is to have.
    """
    # A few long requests fill the cells of a replica that has seats enough.
    by_cells = sum(kv_cache_usage) / KV_CACHE_USAGE
    by_waiting = n_replicas + 1 if sum(waiting) >= 1.0 else 0
    return max(n_requests / requests_per_replica, by_cells, by_waiting)


class Autoscaling:
    """`wanted_replicas` as Ray's controller asks: its `AutoscalingContext`, and what `Replica` has told."""

    def __init__(self, *, requests_per_replica: float) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number, and what Ray is to remember: nothing."""
        told = context.aggregated_metrics or {}
        wanted = wanted_replicas(
            context.current_num_replicas,
            context.total_num_requests,
            told.get("waiting", {}).values(),
            told.get("kv_cache_usage", {}).values(),
            requests_per_replica=self._requests_per_replica,
        )
        return wanted, {}
