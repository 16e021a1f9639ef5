"""The fit of what a tick costs, on machines that are known, and the prompt rows it leads to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.gap_budget import MAX_AIM
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.scheduler import Chunk
from cllm.engine.core.sequence import Sequence
from cllm.engine.core.tick_cost import (
    FIRST_PROMPT_ROWS,
    MAX_GROWTH,
    TickCost,
    cells_attended,
)
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from tests.conftest import examples

DETERMINISTIC = examples(200)
NOISE = 0.05
N_DECODING_MOST, N_CHUNK_MOST = 8, 300


@dataclass(frozen=True)
class Machine:
    """What a tick takes: fixed, per row, per cell attended to, and up to 5 % more or less."""

    fixed: float
    per_row: float
    per_cell: float
    n_rows_min: int = 0  # fewer rows cost as much

    def exact(self, n_rows: int, n_cells: int) -> float:
        n_rows = max(n_rows, self.n_rows_min)
        return self.fixed + self.per_row * n_rows + self.per_cell * n_cells

    def tick(self, n_rows: int, n_cells: int, noise: random.Random) -> float:
        return self.exact(n_rows, n_cells) * noise.uniform(1 - NOISE, 1 + NOISE)

    def times(self, factor: float) -> Machine:
        return Machine(self.fixed * factor, self.per_row * factor, self.per_cell * factor)


MACHINES = [
    Machine(5e-3, 1e-4, 5e-9),
    Machine(2e-3, 1e-3, 1e-8),
    Machine(20e-3, 5e-4, 5e-8),
    Machine(0.0, 1e-3, 1e-8),
    Machine(10e-3, 2e-5, 1e-9),
]
SHAPES = [(n_rows, n_rows * n_each) for n_rows in (1, 4, 20, 150) for n_each in (10, 500, 3000)]


def observe(cost: TickCost, machine: Machine, n_ticks: int, *, seed: int = 3) -> None:
    """Ticks of a few decoding sequences, every third one with a chunk of a prompt."""
    rng = random.Random(seed)
    for i in range(n_ticks):
        n_rows = rng.randint(1, N_DECODING_MOST) + (
            rng.randint(8, N_CHUNK_MOST) if i % 3 == 0 else 0
        )
        n_cells = n_rows * rng.randint(1, 2000)
        cost.observe(n_rows, n_cells, machine.tick(n_rows, n_cells, rng))


# --- The fit ---------------------------------------------------------------------------------
@pytest.mark.parametrize("machine", MACHINES, ids=repr)
def test_shapes_that_were_never_seen_are_predicted(machine: Machine) -> None:
    for seed in range(20):
        cost = TickCost()
        observe(cost, machine, 200, seed=seed)
        for shape in (*SHAPES, (500, 500_000)):
            assert cost.seconds(*shape) == pytest.approx(machine.exact(*shape), rel=0.15), shape


@pytest.mark.parametrize("machine", MACHINES, ids=repr)
@pytest.mark.parametrize("slowdown", [2.0, 0.5])
def test_a_machine_that_has_changed_its_speed_is_known_again_within_100_ticks(
    machine: Machine, slowdown: float
) -> None:
    cost = TickCost()
    observe(cost, machine, 300)
    changed = machine.times(slowdown)
    observe(cost, changed, 100)
    for shape in SHAPES:
        assert cost.seconds(*shape) == pytest.approx(changed.exact(*shape), rel=0.2), shape


@pytest.mark.parametrize("machine", MACHINES, ids=repr)
def test_what_a_row_costs_is_not_forgotten_while_there_is_no_prompt(machine: Machine) -> None:
    cost, rng = TickCost(), random.Random(6)
    observe(cost, machine, 200)
    for _ in range(500):
        cost.observe(4, 2000, machine.tick(4, 2000, rng))
        cost.n_prompt_rows([500] * 4, 0, 0.05)
    for shape in ((100, 10_000), (300, 200_000)):
        assert cost.seconds(*shape) == pytest.approx(machine.exact(*shape), rel=0.3), shape


def test_a_row_costs_the_same_after_a_long_answer_whose_cells_grow_and_whose_ticks_scatter() -> (
    None
):
    """Rows and cells of such ticks grow together, so that their scatter would decide both."""
    machine, rng = Machine(20e-3, 5e-3, 2e-5), random.Random(6)
    cost = TickCost()
    for i in range(60):
        n_rows = 4 + (i % 3) * 5
        n_cells = n_rows * 100
        seconds = machine.tick(n_rows, n_cells, rng)
        cost.observe(n_rows, n_cells, seconds, has_prompts=n_rows > 4)
    for n_each in range(100, 500):
        cost.observe(4, 4 * n_each, machine.tick(4, 4 * n_each, rng))
        cost.n_prompt_rows([n_each] * 4, 0, 0.1)
    assert cost.seconds(14, 14 * 100) == pytest.approx(machine.exact(14, 14 * 100), rel=0.2)


@DETERMINISTIC
@given(
    ticks=st.lists(
        st.tuples(st.integers(1, 512), st.integers(1, 4000), st.floats(1e-5, 10.0)), max_size=30
    )
)
def test_no_coefficient_is_ever_negative(ticks: list[tuple[int, int, float]]) -> None:
    cost = TickCost()
    assert cost.coefficients == (0.0, 0.0, 0.0)
    for n_rows, n_each, seconds in ticks:
        cost.observe(n_rows, n_rows * n_each, seconds)
        assert all(0.0 <= coefficient < float("inf") for coefficient in cost.coefficients)
        assert cost.n_prompt_rows([n_each], 0, 0.05) >= 1


def test_computing_a_sequence_again_costs_its_rows_and_what_they_attend_to() -> None:
    cost, machine = TickCost(), Machine(5e-3, 1e-4, 5e-8)
    observe(cost, machine, 200)
    assert cost.recompute_s(0) == 0.0
    for n_tokens in (100, 2000):
        added = machine.exact(n_tokens, n_tokens**2 // 2) - machine.fixed
        assert cost.recompute_s(n_tokens) == pytest.approx(added, rel=0.15)


def test_a_tick_that_took_no_time_says_nothing() -> None:
    cost = TickCost()
    observe(cost, MACHINES[0], 50)
    before = cost.coefficients
    cost.observe(1000, 10**6, 0.0)
    assert cost.coefficients == before
    assert cost.n_prompt_rows([], 0, 1e3) <= MAX_GROWTH * (N_DECODING_MOST + N_CHUNK_MOST)


@DETERMINISTIC
@given(chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=4))
def test_each_row_attends_to_the_cells_before_it_and_its_own(chunks: list[tuple[int, int]]) -> None:
    kv_cache = KVCache(n_cells=1000, n_seq_ids=4, n_ctx_seq=1000)
    planned = []
    for n_computed, n_tokens in chunks:
        request = GenerationRequest("r", 0, (1,) * 100, SamplingParams(), 0, 0.0, None)
        sequence, slot = Sequence(request), kv_cache.open()
        kv_cache.advance(slot, n_computed)
        sequence.start(slot, 0.0)
        planned.append(Chunk(sequence, n_tokens))
    by_rows = sum(n_computed + i for n_computed, n in chunks for i in range(1, n + 1))
    assert cells_attended(planned) == by_rows


# --- Prompt rows -----------------------------------------------------------------------------
def test_the_rows_are_as_many_as_the_target_allows() -> None:
    cost, machine = TickCost(), Machine(5e-3, 1e-4, 5e-8)
    observe(cost, machine, 200)
    for decoding, n_computed in (([300] * 4, 0), ([300] * 4, 2000), ([10], 500)):
        n_rows = cost.n_prompt_rows(decoding, n_computed, 0.03)

        def expected(m: int, decoding: list[int] = decoding, start: int = n_computed) -> float:
            return cost.seconds(len(decoding) + m, sum(decoding) + m * start + m * m / 2)

        assert n_rows > 1
        assert expected(n_rows) <= MAX_AIM * 0.03 < expected(n_rows + 1)


def test_a_tenth_of_the_target_is_a_prompts_however_late_the_tick_is() -> None:
    cost, machine = TickCost(), Machine(5e-2, 1e-3, 0.0)
    observe(cost, machine, 200)
    assert cost.n_prompt_rows([1000] * 4, 0, 0.04) == pytest.approx(0.1 * 0.04 / 1e-3, abs=1)
    for target_s in (1e-6, 0.0):
        assert cost.n_prompt_rows([1000] * 4, 0, target_s) == 1


def test_rows_in_a_decode_of_their_own_are_fewer_by_what_a_decode_costs() -> None:
    cost, machine = TickCost(), Machine(5e-3, 1e-4, 0.0)
    observe(cost, machine, 200)
    together = cost.n_prompt_rows([300] * 4, 0, 0.03)
    apart = cost.n_prompt_rows([300] * 4, 0, 0.03, is_apart=True)
    assert together - apart == pytest.approx(machine.fixed / machine.per_row, rel=0.1)


def test_batches_much_larger_than_any_seen_are_only_grown_towards() -> None:
    cost, machine = TickCost(), Machine(1e-3, 1e-5, 1e-10)
    chunks = []
    for _ in range(5):
        chunks.append(cost.n_prompt_rows([100], 0, 10.0))
        n_rows = chunks[-1] + 1
        cost.observe(n_rows, n_rows * 50, machine.exact(n_rows, n_rows * 50))
    assert chunks[0] == FIRST_PROMPT_ROWS
    assert all(after == MAX_GROWTH * (before + 1) for before, after in pairwise(chunks))


@pytest.mark.parametrize("machine", MACHINES, ids=repr)
def test_after_equal_ticks_alone_the_first_chunk_is_a_small_one(machine: Machine) -> None:
    cost, rng = TickCost(), random.Random(4)
    for n_each in range(100, 400):
        cost.observe(4, 4 * n_each, machine.tick(4, 4 * n_each, rng))
    assert 1 <= cost.n_prompt_rows([400] * 4, 0, 0.1) <= FIRST_PROMPT_ROWS


# --- The closed loop -------------------------------------------------------------------------
def feed(machine: Machine, target_s: float, n_prompt: int, *, n_alone: int) -> list[float]:
    """Four streams, first alone, then beside a prompt; what the ticks with the prompt took."""
    cost, rng = TickCost(), random.Random(5)
    decoding, n_computed, times = [500] * 4, 0, []
    while n_computed < n_prompt:
        n_rows = 0
        if n_alone > 0:
            n_alone -= 1
        else:
            n_rows = cost.n_prompt_rows(decoding, n_computed, target_s)
            assert n_rows >= 1
            n_rows = min(n_rows, n_prompt - n_computed)
        n_cells = sum(decoding) + 4 + n_rows * n_computed + n_rows * (n_rows + 1) // 2
        seconds = machine.tick(4 + n_rows, n_cells, rng)
        cost.observe(4 + n_rows, n_cells, seconds)
        n_computed += n_rows
        decoding = [n_cells + 1 for n_cells in decoding]
        if n_rows > 0:
            times.append(seconds)
    return times[:-1]  # what is left of a prompt at its end may be little


@pytest.mark.parametrize("n_alone", [0, 200], ids=["from the first tick", "after decoding alone"])
@pytest.mark.parametrize(
    ("machine", "target_s", "n_prompt"),
    [
        (Machine(5e-3, 1e-4, 5e-9), 0.02, 20_000),
        (Machine(5e-3, 1e-4, 5e-9), 0.05, 50_000),
        (Machine(2e-3, 1e-3, 1e-8), 0.05, 10_000),
        (Machine(20e-3, 5e-4, 5e-8), 0.1, 10_000),
        (Machine(0.0, 1e-3, 1e-8), 0.03, 10_000),
        (Machine(10e-3, 2e-5, 1e-9), 0.03, 60_000),
        (Machine(5e-3, 3e-4, 5e-9, n_rows_min=16), 0.03, 20_000),
        (Machine(5e-3, 1e-4, 5e-9, n_rows_min=64), 0.03, 40_000),
    ],
    ids=repr,
)
def test_the_ticks_beside_a_long_prompt_take_what_they_should(
    machine: Machine, target_s: float, n_prompt: int, n_alone: int
) -> None:
    times = feed(machine, target_s, n_prompt, n_alone=n_alone)[10:]
    assert len(times) >= 50
    n_late = sum(seconds > 1.2 * target_s for seconds in times)
    assert n_late <= 0.01 * len(times)
    assert fmean(times) >= 0.8 * target_s


def test_large_batches_of_long_ago_allow_no_large_batch_now() -> None:
    cost, machine = TickCost(), Machine(5e-3, 1e-3, 5e-9)
    cost.observe(2048, 2048 * 1024, machine.exact(2048, 2048 * 1024))
    for _ in range(300):
        cost.observe(12, 6000, machine.exact(12, 6000))
    assert cost.n_prompt_rows([500] * 4, 0, 1e3) == FIRST_PROMPT_ROWS


def test_what_prompts_cost_is_unknown_before_one_was_computed() -> None:
    cost = TickCost()
    cost.observe(1, 64, 0.01)
    assert cost.known_recompute_s(1000) == 0.0
    cost.observe(64, 64 * 64, 0.1)
    assert cost.known_recompute_s(1000) == cost.recompute_s(1000) > 0.5
