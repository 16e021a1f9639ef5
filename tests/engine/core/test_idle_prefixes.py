"""Prefixes that no request uses leave the cells: in the unified layout each row visits the cells of all."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.engine.core import cells
from cllm.engine.core.commands import Finished
from tests.engine.core.test_prefix_tiers import MIB, served
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator

PROMPT = bytes(range(200))
N_ROWS_COPY = 64


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than by default, so that a test decodes them fast."""
    monkeypatch.setattr(cells, "N_ROWS_COPY", N_ROWS_COPY)


def simulator(**options: Any) -> Simulator:
    return Simulator(n_ctx=1024, n_seq_max=4, answer=endless, **options)


def decode(sim: Simulator, n_rows: int) -> None:
    """Decode so many rows of a request that shares nothing with the others."""
    served(sim, b"\xff", max_tokens=n_rows + 1)


def is_in_cells(sim: Simulator, prompt: bytes) -> bool:
    """True if a cached prefix begins with a prompt."""
    entries = sim.core.manager.cells.prefixes.entries
    return any(bytes(entry.tokens[: len(prompt)].tolist()) == prompt for entry in entries)


def test_a_prefix_that_many_rows_pass_moves_to_host_memory_and_returns_uncomputed() -> None:
    sim = simulator(prefix_cache_bytes=MIB)
    served(sim, PROMPT)
    decode(sim, N_ROWS_COPY - 2)
    assert is_in_cells(sim, PROMPT)
    assert sim.core.statistics().n_prefix_bytes_host == 0
    decode(sim, 4)
    assert not is_in_cells(sim, PROMPT)
    assert sim.core.statistics().n_prefix_bytes_host > 0
    assert served(sim, PROMPT + b"!") <= 2
    assert sim.core.statistics().n_restored_prefixes == 1
    sim.check_outcomes()
    sim.check_idle()


@pytest.mark.parametrize(
    "options", [{"prefix_cache_bytes": 0}, {"prefix_cache_bytes": 100}], ids=str
)
def test_where_host_memory_has_no_room_it_stays_until_computing_it_again_is_cheaper(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    monkeypatch.setattr(cells, "N_ROWS_COMPUTE", 3 * N_ROWS_COPY)
    sim = simulator(**options)
    served(sim, PROMPT)
    sim.core.manager.saved._bytes_per_token = 1.0
    decode(sim, 2 * N_ROWS_COPY)
    assert is_in_cells(sim, PROMPT)
    decode(sim, 2 * N_ROWS_COPY)
    assert not is_in_cells(sim, PROMPT)
    assert served(sim, PROMPT + b"!") > len(PROMPT) - 2
    sim.check_outcomes()
    sim.check_idle()


def test_prefixes_that_share_most_cells_are_not_copied() -> None:
    sim = simulator(prefix_cache_bytes=MIB)
    for letter in b"abc":
        served(sim, PROMPT + bytes([letter]) * 30)
    decode(sim, 2 * N_ROWS_COPY)
    assert all(is_in_cells(sim, PROMPT + bytes([letter])) for letter in b"abc")
    assert sim.core.statistics().n_prefix_bytes_host == 0


@pytest.mark.parametrize("n_rows", [N_ROWS_COPY - 1, N_ROWS_COPY + 1])
def test_rows_of_prompts_pass_prefixes_too(n_rows: int) -> None:
    sim = simulator(prefix_cache_bytes=MIB)
    served(sim, PROMPT)
    served(sim, b"\xff" * n_rows)  # its token comes from the last row
    assert is_in_cells(sim, b"\xff"), "no row has passed it"
    sim.core.rest()
    assert is_in_cells(sim, PROMPT) == (n_rows < N_ROWS_COPY)


def test_a_prefix_that_is_used_stays() -> None:
    sim = simulator(prefix_cache_bytes=MIB)
    for number in range(20):
        assert (served(sim, PROMPT) <= 1) == (number > 0)
        decode(sim, N_ROWS_COPY // 4)
    assert sim.core.statistics().n_restored_prefixes == 0


@pytest.mark.parametrize(
    "memory", [{"kv_unified": False}, {"has_pos_min": False}], ids=["per-sequence", "recurrent"]
)
def test_where_rows_visit_no_cells_of_others_prefixes_stay(memory: dict[str, bool]) -> None:
    sim = simulator(prefix_cache_bytes=MIB, **memory)
    served(sim, PROMPT)
    decode(sim, 4 * N_ROWS_COPY // 3)
    assert is_in_cells(sim, PROMPT)


def test_the_prefix_of_a_running_request_stays() -> None:
    sim = simulator(prefix_cache_bytes=MIB)
    served(sim, PROMPT)
    sim.submit(PROMPT, max_tokens=2 * N_ROWS_COPY)
    sim.tick(2 * N_ROWS_COPY - 20)
    assert is_in_cells(sim, PROMPT)
    sim.run()
    sim.check_idle()


def test_a_prefix_behind_much_that_has_left_moves_to_the_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefix that was computed beside others makes its requests visit the cells of those others."""
    monkeypatch.setattr(cells, "N_ROWS_COPY", 16 * N_ROWS_COPY)
    sim = simulator(prefix_cache_bytes=MIB)
    for letter in b"xyz":
        served(sim, bytes([letter]) * 250)
    kv_cache = sim.core.kv_cache
    assert kv_cache.n_visited >= 750
    while kv_cache.n_held:
        served(sim, PROMPT, max_tokens=16)
        sim.core.rest()
    assert served(sim, PROMPT) <= 1, "it is restored"
    sim.core.rest()
    assert is_in_cells(sim, PROMPT)
    assert kv_cache.n_visited < 250
    sim.check_outcomes()
    sim.check_idle()


def test_prefixes_that_would_be_computed_again_move_only_if_much_more_is_free() -> None:
    sim = simulator(prefix_cache_bytes=0)
    for letter in b"xyz":
        served(sim, bytes([letter]) * 250)
    served(sim, PROMPT)
    cells_of_sim = sim.core.manager.cells
    while len(entries := cells_of_sim.prefixes.entries) > 1:
        cells_of_sim.evict(entries[0], saves=False)
    sim.core.rest()
    assert is_in_cells(sim, PROMPT)


def test_prefixes_that_begin_alike_are_not_copied_one_by_one() -> None:
    """They hold 320 cells, and copies would have 720 tokens."""
    sim = simulator(prefix_cache_bytes=MIB)
    served(sim, b"x" * 500)
    for letter in b"abc":
        served(sim, PROMPT + bytes([letter]) * 40)
    sim.core.manager.cells.erase(sim.core.manager.cells.prefixes.entries[0].slot.seq_id)
    sim.core.rest()
    assert is_in_cells(sim, PROMPT)


def test_a_prefix_cut_short_is_where_it_was_computed() -> None:
    sim = simulator(prefix_cache_bytes=MIB, prefix_cache_tokens=100)
    for letter in b"ab":
        served(sim, PROMPT * 3 + bytes([letter]))
        sim.core.rest()
        assert is_in_cells(sim, PROMPT[:100])


@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_a_request_ends_before_the_prefix_of_another_is_copied_for_its_own(
    monkeypatch: pytest.MonkeyPatch, n_seq_max: int
) -> None:
    monkeypatch.setattr(cells, "N_ROWS_COPY", 16 * N_ROWS_COPY)
    sim = Simulator(n_ctx=1024, n_seq_max=n_seq_max, answer=endless, prefix_cache_bytes=MIB)
    for first in range(n_seq_max):  # as many as the prefix cache keeps
        served(sim, bytes([first]) + PROMPT[:100])
    sim.submit(b"\xff" + PROMPT[:100], max_tokens=1)
    while not (events := sim.core.take_events()):
        sim.core.tick()
    assert isinstance(events[0], Finished)
    assert sim.core.statistics().n_prefix_bytes_host == 0
    assert sim.kv_cache.n_cached_ids == n_seq_max + 1
    sim.core.rest()
    assert sim.core.statistics().n_prefix_bytes_host > 0
    assert sim.kv_cache.n_cached_ids == n_seq_max


def test_a_seq_id_for_a_request_is_never_that_of_the_prefix_it_shares() -> None:
    sim = simulator(prefix_cache_bytes=0)
    for first in range(4):  # as many as the prefix cache has seq_ids; the first is the oldest
        served(sim, bytes([first]) * 20)
    for first in range(4, 7):
        sim.submit(bytes([first]) * 20, max_tokens=20)
    sim.tick(2)
    cells_of_sim, running = sim.core.manager.cells, sim.core.queue.running
    # As for a sequence that is preempted within a tick: no seq_id is left.
    slot = running[0].placement.slot
    assert slot is not None
    tokens = running[0].token_array()[: slot.n_computed].copy()
    assert cells_of_sim.keep_copy(slot, tokens, running[0].request.lora) is not None
    assert not sim.kv_cache.free_ids
    newcomer = sim.submit(bytes([0]) * 20 + b"!", max_tokens=2)
    sim.core.queue.admit(sim.now)
    assert not is_in_cells(sim, bytes([1]) * 20), "the oldest but the one that is shared"
    sim.run()
    assert sim.finished[newcomer].completion.usage.n_cached == 20
    sim.check_outcomes()
    sim.check_idle()
