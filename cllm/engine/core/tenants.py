"""Tenants: who has had how many rows, and whose requests come next.  Pure; inference thread only.

Deficit round robin without a fixed quantum: a tenant's share is its rows divided by its weight, and
the tenant that is furthest behind has the next turn.  A tenant that comes, or comes back, starts level
with the one that is furthest behind: time without requests is not saved up.

A level of priority goes before shares.  A tenant that has had no turn for `AGEING_S` seconds rises by
one level, so that none starves.  Within a tenant its requests have their usual order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from cllm.engine.core.sequence import AGEING_S, Sequence, Tenant

# Names come from clients: of tenants without requests so many are remembered.
N_REMEMBERED = 1000


class Tenants:
    """The tenants that have requests.

    Parameters
    ----------
    weights : mapping of str to float
        Share of each named tenant; 1 for all others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._all: dict[str, Tenant] = {}

    def enter(self, name: str) -> Tenant:
        """Count a new request; return its tenant."""
        tenant = self._all.pop(name, None)
        if tenant is None:
            tenant = Tenant(name, self._weights.get(name, 1.0))
        if not tenant.n_requests:
            least = min((t.served for t in self._all.values() if t.n_requests), default=0.0)
            tenant.served = max(tenant.served, least)
        tenant.n_requests += 1
        self._all[name] = tenant
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Count a request that has ended."""
        tenant.n_requests -= 1
        idle = [t.name for t in self._all.values() if not t.n_requests]
        if len(idle) == len(self._all):
            self._all.clear()
        elif len(idle) > N_REMEMBERED:
            del self._all[idle[0]]


def by_turn(sequences: Iterable[Sequence], now: float) -> Callable[[Sequence], tuple[Any, ...]]:
    """Return the sort key of these sequences: the smallest is served first.

    Sequences of one tenant are sorted by `Sequence.urgency` alone.
    """
    of_tenant: dict[str, list[Sequence]] = {}
    for s in sequences:
        of_tenant.setdefault(s.tenant.name, []).append(s)
    if len(of_tenant) <= 1:
        return lambda s: s.urgency(now)
    turns = {
        name: _turn(min(several, key=lambda s: s.urgency(now)), now)
        for name, several in of_tenant.items()
    }
    return lambda s: (*turns[s.tenant.name], *s.urgency(now))


def _turn(first: Sequence, now: float) -> tuple[int, float, float, str]:
    """Return the sort key of a tenant by its most urgent sequence."""
    tenant, request = first.tenant, first.request
    waited_s = now - max(request.submitted_at, tenant.last_turn_at)
    level = request.priority - int(waited_s / AGEING_S)
    return level, tenant.served, tenant.last_turn_at, tenant.name


def seats(running: Iterable[Sequence]) -> Counter[str]:
    """Return how many of these sequences each tenant has."""
    return Counter(s.tenant.name for s in running)


def yielding(waiting: Sequence, running: Collection[Sequence]) -> Iterator[Sequence]:
    """Yield running sequences that may be preempted for one of a tenant with fewer, one after another.

    They are of tenants that even without them have no less than their share beside it, and no more
    urgent than it.  The newest of the tenant that has most goes first.
    """
    own, taken = waiting.tenant, seats(running)
    n_own = (taken[own.name] + 1) / own.weight
    others = [s for s in running if s.tenant.name != own.name]
    left = [s for s in others if s.request.priority >= waiting.request.priority]

    def share_without(s: Sequence) -> float:
        return (taken[s.tenant.name] - 1) / s.tenant.weight

    while left:
        victim = max(left, key=lambda s: (share_without(s), s.request.priority, s.request.serial))
        if share_without(victim) < n_own:
            return
        left.remove(victim)
        taken[victim.tenant.name] -= 1
        yield victim


def charge(rows: Iterable[tuple[Sequence, int]], now: float) -> None:
    """Count the rows of a tick for the tenants of its sequences."""
    for sequence, n_rows in rows:
        tenant = sequence.tenant
        tenant.served += n_rows / tenant.weight
        tenant.last_turn_at = now
