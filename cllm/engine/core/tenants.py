"""Tenants: how many rows each has had, and whose requests come next.  Inference thread only.

Deficit round robin without a fixed quantum: a tenant's share is its rows divided by its weight, and
the tenant that is furthest behind has the next turn.  A free seq_id goes first to tenants that have fewer
than their weights give them: so a client that sends its next request at once keeps its place beside a
flood.  Nothing is saved up: a tenant that comes, or comes back, starts level with the one that is furthest
behind.  A tenant with little to do counts as at most `MAX_DEFICIT` rows behind.

Priority goes before shares.  A waiting request of the tenant that is furthest behind rises by one level
for every `AGEING_S` seconds without an admitted request of this tenant.  So no tenant starves, and a
tenant gains nothing by many requests.  Requests of one tenant have their usual order, and a request is
at least as urgent as those behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from cllm.checks import INT32_MAX
from cllm.engine.core.sequence import AGEING_S, Sequence, Tenant

# Names come from clients, so the number of tenants without requests that are remembered is limited.
N_REMEMBERED = 1000
MAX_DEFICIT = 256  # rows, or twice those of a tick if they are more
RECENT_S = 10.0  # a tenant whose last request began so long ago may send another at any time


class Tenants:
    """The tenants that have requests.

    Parameters
    ----------
    weights : mapping of str to float
        Share of each named tenant; 1 for all others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._all: dict[str, Tenant] = {}

    @property
    def are_several(self) -> bool:
        """True if more than one tenant is known."""
        return len(self._all) > 1

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
        if not tenant.n_requests:
            idle = [t.name for t in self._all.values() if not t.n_requests]
            if len(idle) == len(self._all):
                self._all.clear()
            elif len(idle) > N_REMEMBERED:
                del self._all[idle[0]]

    def may_come(self, tenant: Tenant, present: Collection[Tenant], now: float) -> bool:
        """Return True if a tenant that would come before `tenant` may send a request at any time.

        Tenants in `present` have one that waits for this tick.
        """
        had = tenant.served, tenant.n_requests
        return any(
            (other.served, other.n_requests) < had
            and now - other.admitted_at < RECENT_S
            and other not in present
            for other in self._all.values()
        )

    def charge(self, rows: Iterable[tuple[Sequence, int]]) -> None:
        """Count the rows of a planned tick for the tenants of its sequences; they count if the decode fails, too."""
        if not self.are_several:
            return
        n_in_all = 0
        for sequence, n_rows in rows:
            sequence.tenant.served += n_rows / sequence.tenant.weight
            n_in_all += n_rows
        most = max(t.served for t in self._all.values())
        for tenant in self._all.values():
            bound = max(MAX_DEFICIT, 2 * n_in_all) / tenant.weight
            tenant.served = max(tenant.served, most - bound)


def by_turn(
    wanting: Iterable[Sequence],
    now: float,
    satisfied: Collection[str] = (),
    *,
    prefers_few: bool = False,
) -> Callable[[Sequence], tuple[Any, ...]]:
    """Return the sort key of sequences that compete for rows or a seq_id: the smallest comes first.

    Sequences of one tenant are sorted by `Sequence.urgency` alone.  Within a priority, those of the tenants
    in `satisfied` come last.  With `prefers_few`, of tenants that have had as much, that with fewer requests comes
    first: for sequences that run, since new tenants without end could keep another from starting.
    """
    of_tenant: dict[str, list[Sequence]] = {}
    for s in wanting:
        of_tenant.setdefault(s.tenant.name, []).append(s)
    if len(of_tenant) <= 1:
        return lambda s: s.urgency(now)
    tenants = [several[0].tenant for several in of_tenant.values()]

    def share_of(tenant: Tenant) -> tuple[bool, float]:
        return tenant.name in satisfied, tenant.served

    first, second = sorted(tenants, key=share_of)[:2]
    rises = first if share_of(first) < share_of(second) else None

    def level_of(s: Sequence) -> int:
        """Return the level of a request among those of other tenants."""
        waited_s = now - max(s.request.submitted_at, s.tenant.admitted_at)
        return s.request.priority - (int(waited_s / AGEING_S) if s.tenant is rises else 0)

    levels: dict[Sequence, int] = {}
    for several in of_tenant.values():
        level = INT32_MAX
        for s in sorted(several, key=lambda s: s.urgency(now), reverse=True):
            level = levels[s] = min(level, level_of(s))

    def key(s: Sequence) -> tuple[Any, ...]:
        level = levels[s] if s in levels else level_of(s)
        tenant = s.tenant
        n_requests = tenant.n_requests if prefers_few else 0
        return (
            *(level, *share_of(tenant), n_requests, tenant.admitted_at, tenant.name),
            *s.urgency(now),
        )

    return key


def with_their_seats(
    waiting: Iterable[Sequence], running: Collection[Sequence], n_seats: int
) -> set[str]:
    """Return the tenants that have as many of `n_seats` seq_ids as their weights give them, rounded down."""
    tenants = {s.tenant.name: s.tenant for s in (*waiting, *running)}
    total, taken = sum(t.weight for t in tenants.values()), seats(running)
    return {t.name for t in tenants.values() if taken[t.name] >= int(n_seats * t.weight / total)}


def seats(running: Iterable[Sequence]) -> Counter[str]:
    """Return how many of these sequences each tenant has."""
    return Counter(s.tenant.name for s in running)


def share_without(s: Sequence, taken: Mapping[str, int]) -> float:
    """Return the sequences that its tenant would still have without this one, divided by its weight."""
    return (taken[s.tenant.name] - 1) / s.tenant.weight


def may_yield(waiting: Iterable[Sequence], running: Collection[Sequence]) -> bool:
    """Return True if `yielding` has a sequence for any of those that wait: the queue need not be sorted otherwise."""
    taken = seats(running)
    least_urgent: dict[str, int] = {}
    for s in running:
        name = s.tenant.name
        least_urgent[name] = max(s.request.priority, least_urgent.get(name, s.request.priority))
    tenants = {s.tenant.name: s.tenant for s in running}
    most_urgent: dict[str, tuple[Tenant, int]] = {}
    for s in waiting:
        known = most_urgent.get(s.tenant.name)
        if known is None or s.request.priority < known[1]:
            most_urgent[s.tenant.name] = s.tenant, s.request.priority
    return any(
        name != own.name
        and priority >= urgency
        and (taken[name] - 1) / tenants[name].weight >= (taken[own.name] + 1) / own.weight
        for own, urgency in most_urgent.values()
        for name, priority in least_urgent.items()
    )


def yielding(waiting: Sequence, running: Collection[Sequence]) -> Iterator[Sequence]:
    """Yield the running sequences that may be preempted for `waiting`, one after another.

    Each is no more urgent than `waiting`.  Without it, its tenant still has at least as many sequences for
    its weight as the tenant of `waiting` would have with it.  The tenant with most comes first, with its
    least urgent and newest sequence.
    """
    own, taken = waiting.tenant, seats(running)
    n_own = (taken[own.name] + 1) / own.weight
    others = [s for s in running if s.tenant.name != own.name]
    left = [s for s in others if s.request.priority >= waiting.request.priority]

    def key(s: Sequence) -> tuple[float, int, int]:
        return share_without(s, taken), s.request.priority, s.request.serial

    while left:
        victim = max(left, key=key)
        if share_without(victim, taken) < n_own:
            return
        left.remove(victim)
        taken[victim.tenant.name] -= 1
        yield victim
