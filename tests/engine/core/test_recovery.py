"""Who suffers when decodes fail, on sequences that are computed by a loop of a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.recovery import Recovery, Verdict
from cllm.engine.core.scheduler import Chunk, plan
from cllm.engine.core.sequence import Sequence
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from tests.conftest import examples

DETERMINISTIC = examples(400)
N_PROMPT, N_TOKENS = 3, 8


@dataclass
class World:
    """Sequences that run until they have `N_TOKENS` tokens, and what became of them.

    Attributes
    ----------
    culprits : mapping of int to int
        By the serial of a sequence, the position that no decode gets past.
    is_fatal : bool
        How such a decode fails.
    """

    n_sequences: int
    culprits: Mapping[int, int] = field(default_factory=dict)
    is_fatal: bool = True
    n_rows: int = 64
    verdicts: list[Verdict] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    completed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.recovery = Recovery()
        self.kv_cache = KVCache(n_cells=1000, n_seq_ids=16, n_ctx_seq=1000)
        self.running = [self._admitted(serial) for serial in range(self.n_sequences)]

    def _admitted(self, serial: int) -> Sequence:
        prompt = (1,) * N_PROMPT
        request = GenerationRequest(f"r{serial}", serial, prompt, SamplingParams(), 0, 0.0, None)
        sequence = Sequence(request, stream_buffer=1)
        sequence.start(self.kv_cache.open(), 0.0)
        sequence.place(0)
        return sequence

    def plan(self) -> list[Chunk]:
        return plan(self.recovery.restrict(self.running), self.n_rows, n_outputs_max=256, now=0.0)

    def batch(self, *, fails: bool = False) -> list[int]:
        """The serials of those that are in the next decode."""
        serials = [chunk.sequence.request.serial for chunk in self.plan()]
        self.tick(fails=fails)
        return serials

    def tick(self, *, fails: bool | None = None) -> None:
        """One decode, which fails if `fails`, or by default if a culprit is in the batch."""
        chunks = self.plan()
        if fails is None:
            fails = any(self.is_poisoned(chunk) for chunk in chunks)
        if not fails:
            self.succeed(chunks)
            return
        verdict = self.recovery.on_failure(chunks, is_fatal=self.is_fatal)
        self.verdicts.append(verdict)
        if verdict is Verdict.REBUILD:
            for sequence in self.running:
                assert sequence.placement.slot is not None
                self.kv_cache.truncate(sequence.placement.slot, 0)
        elif verdict is Verdict.END:
            (chunk,) = chunks
            self.ended.append(chunk.sequence.request.serial)
            self.leave(chunk.sequence)

    def is_poisoned(self, chunk: Chunk) -> bool:
        start, position = (
            chunk.sequence.n_computed,
            self.culprits.get(chunk.sequence.request.serial),
        )
        return position is not None and start <= position < start + chunk.n_tokens

    def succeed(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            assert sequence.placement.slot is not None
            self.kv_cache.advance(sequence.placement.slot, chunk.n_tokens)
            if completes:
                sequence.tokens.append(1)
        self.recovery.on_success()
        for sequence in list(self.running):
            if len(sequence.tokens) > N_TOKENS:
                self.completed.add(sequence.request.serial)
                self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        assert sequence.placement.slot is not None
        self.running.remove(sequence)
        self.kv_cache.release(sequence.placement.slot)
        self.recovery.forget(sequence)
        sequence.placement.leave()

    def run(self) -> None:
        for _ in range(300):
            if not self.running:
                return
            self.tick()
        raise AssertionError(f"no end after {self.verdicts}")

    def check_only_the_culprits_ended(self) -> None:
        assert sorted(self.ended) == sorted(self.culprits)
        assert self.completed == set(range(self.n_sequences)) - set(self.culprits)
        assert self.verdicts.count(Verdict.REBUILD) <= self.is_fatal * len(self.culprits)
        assert self.recovery.is_over


def n_halvings(n_sequences: int) -> int:
    """Failures until a culprit is alone in the batch, and the one there."""
    return 1 + ceil(log2(n_sequences))


# --- Transient failures ----------------------------------------------------------------------
@pytest.mark.parametrize("n_sequences", range(1, 9))
@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_after_one_fatal_failure_the_context_is_recreated_and_nobody_ends(
    n_sequences: int, n_before: int
) -> None:
    world = World(n_sequences)
    for _ in range(n_before):
        world.tick()
    world.tick(fails=True)
    world.run()
    assert world.verdicts == [Verdict.REBUILD]
    assert world.completed == set(range(n_sequences))


@pytest.mark.parametrize("n_sequences", range(1, 9))
def test_a_batch_that_was_refused_once_is_bisected_and_nobody_ends(n_sequences: int) -> None:
    world = World(n_sequences, is_fatal=False)
    world.tick(fails=True)
    world.run()
    assert world.verdicts == [Verdict.BISECT]
    assert world.completed == set(range(n_sequences))


def test_fatal_failures_long_apart_each_count_as_the_first() -> None:
    world = World(3)
    for _ in range(3):
        world.tick(fails=True)
        assert not world.recovery.is_over
        for _ in range(2):  # what failed is computed once more, and more
            world.tick()
        assert world.recovery.is_over
    world.run()
    assert world.verdicts == [Verdict.REBUILD] * 3
    assert world.completed == {0, 1, 2}


def test_refused_batches_long_apart_each_count_as_the_first() -> None:
    world = World(1, is_fatal=False)
    for _ in range(3):
        world.tick(fails=True)
        assert not world.recovery.is_over
        world.tick()
        assert world.recovery.is_over
    world.run()
    assert world.verdicts == [Verdict.BISECT] * 3
    assert world.completed == {0}


def test_a_failure_before_all_sequences_got_as_far_again_is_not_the_first() -> None:
    world = World(2, n_rows=4)
    world.tick()
    assert world.batch(fails=True) == [0, 1]
    assert world.batch() == [0]
    assert world.batch(fails=True) == [0, 1]
    world.run()
    assert world.verdicts == [Verdict.REBUILD, Verdict.BISECT]
    assert world.completed == {0, 1}


def test_a_failure_of_others_than_those_that_failed_is_the_first() -> None:
    world = World(2)
    world.running[1].n_unread = 1
    world.tick(fails=True)
    world.running[0].n_unread, world.running[1].n_unread = 1, 0
    world.tick(fails=True)
    assert world.verdicts == [Verdict.REBUILD, Verdict.REBUILD]


# --- Culprits --------------------------------------------------------------------------------
@pytest.mark.parametrize("n_sequences", range(1, 9))
@pytest.mark.parametrize("position", [0, N_PROMPT - 1, N_PROMPT, N_TOKENS - 1])
@pytest.mark.parametrize("is_fatal", [True, False], ids=["fatal", "refused"])
def test_a_culprit_anywhere_is_the_only_one_that_ends_and_soon(
    n_sequences: int, position: int, is_fatal: bool
) -> None:
    for culprit in range(n_sequences):
        world = World(n_sequences, {culprit: position}, is_fatal)
        world.run()
        world.check_only_the_culprits_ended()
        # One more for the new context; a refused batch of one is tried once more.
        n_most = max(n_halvings(n_sequences), 2) + is_fatal
        assert len(world.verdicts) <= n_most


@pytest.mark.parametrize("n_sequences", range(2, 9))
@pytest.mark.parametrize("positions", [(0, 0), (0, 5), (2, 4)])
@pytest.mark.parametrize("is_fatal", [True, False], ids=["fatal", "refused"])
def test_of_two_culprits_exactly_these_two_end(
    n_sequences: int, positions: tuple[int, int], is_fatal: bool
) -> None:
    for culprits in combinations(range(n_sequences), 2):
        world = World(n_sequences, dict(zip(culprits, positions, strict=True)), is_fatal)
        world.run()
        world.check_only_the_culprits_ended()
        assert len(world.verdicts) <= 2 * (max(n_halvings(n_sequences), 2) + is_fatal)


@DETERMINISTIC
@given(
    n_sequences=st.integers(1, 8),
    culprits=st.dictionaries(st.integers(0, 7), st.integers(0, N_TOKENS - 1), max_size=4),
    is_fatal=st.booleans(),
    n_rows=st.integers(1, 24),
)
def test_any_culprits_in_batches_of_any_size_are_the_only_ones_that_end(
    n_sequences: int, culprits: dict[int, int], is_fatal: bool, n_rows: int
) -> None:
    present = {serial: p for serial, p in culprits.items() if serial < n_sequences}
    world = World(n_sequences, present, is_fatal, n_rows)
    world.run()
    world.check_only_the_culprits_ended()
    assert len(world.verdicts) <= len(present) * (max(n_halvings(n_sequences), 2) + is_fatal)


def test_a_refused_batch_of_one_is_tried_once_more() -> None:
    world = World(1, {0: 0}, is_fatal=False)
    world.run()
    assert world.verdicts == [Verdict.BISECT, Verdict.END]


# --- Groups ----------------------------------------------------------------------------------
def test_nothing_is_restricted_before_anything_failed() -> None:
    world = World(3)
    assert world.recovery.restrict(world.running) == world.running
    assert world.recovery.is_over


def test_a_refused_batch_is_decoded_by_halves_before_the_others_go_on() -> None:
    world = World(5, is_fatal=False)
    late = world.running.pop()
    world.tick(fails=True)
    world.running.append(late)
    assert world.batch(fails=True) == [0, 1]
    batches = [world.batch() for _ in range(4)]
    assert batches == [[0], [1], [2, 3], [0, 1, 2, 3, 4]]


def test_only_running_sequences_are_in_a_group() -> None:
    world = World(4, is_fatal=False)
    world.tick(fails=True)
    assert world.recovery.restrict(world.running[1:]) == world.running[1:2]
    assert world.recovery.restrict(world.running[2:]) == world.running[2:]


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "ended"])
def test_groups_whose_sequences_have_ended_or_paused_are_dropped(is_paused: bool) -> None:
    world = World(4, is_fatal=False)
    first, second, third, fourth = world.running
    world.tick(fails=True)
    for gone, left in (first, [second]), (second, [third, fourth]), (third, [fourth]):
        if is_paused:
            gone.n_unread = 1
        else:
            world.leave(gone)
        assert world.recovery.restrict(world.running) == left
    for sequence in (first, second, third):
        sequence.n_unread = 0
    world.tick()
    assert world.recovery.restrict(world.running) == world.running


def test_what_was_dropped_is_not_suspected_when_it_goes_on() -> None:
    world = World(2, is_fatal=False)
    paused = world.running[0]
    world.tick(fails=True)
    paused.n_unread = 1
    assert world.batch() == [1]
    paused.n_unread = 0
    assert world.batch() == [0, 1]
