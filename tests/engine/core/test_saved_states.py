"""States outside the cells: one budget of bytes for sequences and prefixes."""

from __future__ import annotations

import pytest

from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator


def preempting(n_bytes: int) -> Simulator:
    """Two streams that one cache cannot hold to their ends; copies cost less than computing."""
    sim = Simulator(
        n_ctx=256, n_seq_max=2, n_batch=64, answer=endless, latency_s=0.01,
        prefix_cache_bytes=n_bytes,
    )  # fmt: skip
    # A prefix of another request is in host memory.
    sim.submit(bytes(range(100)), max_tokens=1)
    sim.run()
    for entry in list(sim.core.manager.cells.prefixes.entries):
        sim.core.manager.cells.evict(entry)
    return sim


def n_prefix_bytes(sim: Simulator) -> int:
    return sim.core.statistics().n_prefix_bytes_host


def run_two(sim: Simulator) -> list[int]:
    """Run two streams that overfill the cells; return the bytes of prefixes while one is swapped out."""
    for letter in b"xy":
        sim.submit(bytes([letter]) * 90, max_tokens=100)
    seen = []
    while sim.core.has_work:
        sim.tick()
        if any(s.placement.swapped for s in sim.core.queue.waiting):
            seen.append(n_prefix_bytes(sim))
    sim.check_outcomes()
    sim.check_idle()
    return seen


def test_prefixes_leave_to_make_room_for_a_preempted_sequence() -> None:
    roomy = preempting(1 << 20)
    n_kept = n_prefix_bytes(roomy)
    assert n_kept > 0
    assert max(run_two(roomy)) >= n_kept, "both fit"
    state_bytes = int(roomy.core.manager.saved._bytes_per_token * 140)
    tight = preempting(state_bytes)
    assert n_prefix_bytes(tight) == n_kept
    seen = run_two(tight)
    assert tight.core.statistics().n_swaps == 1
    assert min(seen) == 0


def test_a_state_larger_than_the_budget_is_computed_again() -> None:
    sim = preempting(200)
    assert run_two(sim) == []
    statistics = sim.core.statistics()
    assert (statistics.n_preemptions > 0, statistics.n_swaps) == (True, 0)


@pytest.mark.parametrize("n_bytes", [0, 1 << 20])
def test_sequences_are_swapped_where_no_prefixes_are_shared(n_bytes: int) -> None:
    sim = Simulator(
        n_ctx=64, n_seq_max=2, n_batch=16, answer=endless, latency_s=0.01, prefix_cache=False,
        prefix_cache_bytes=n_bytes,
    )  # fmt: skip
    for letter in b"xy":
        sim.submit(bytes([letter]) * 20, max_tokens=40)
    sim.run()
    assert (sim.core.statistics().n_swaps > 0) == (n_bytes > 0)
    assert sim.core.manager.saved.n_bytes == 0
    sim.check_outcomes()
