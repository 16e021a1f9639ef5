"""The promises of `plan`, for any mix of arrivals, ticks, cancellations and pauses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.engine import scheduler
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import GenerationRequest, SamplingParams
from cllm.engine.scheduler import Chunk, plan
from cllm.engine.sequence import Sequence

DETERMINISTIC = settings(
    derandomize=True, deadline=None, max_examples=80, stateful_step_count=40, database=None
)


def sequence_of(
    n_prompt: int, serial: int = 0, *, priority: int = 0, deadline: float | None = None
) -> Sequence:
    return Sequence(
        GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=tuple(range(n_prompt)),
            params=SamplingParams(),
            priority=priority,
            submitted_at=0.0,
            deadline=deadline,
        )
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come and go; every plan keeps every promise."""

    @initialize(n_seq_max=st.integers(1, 5), data=st.data())
    def make(self, n_seq_max: int, data: st.DataObject) -> None:
        self.books = KVCache(n_cells=10_000, n_seq_max=n_seq_max, n_ctx_seq=10_000)
        self.n_batch = data.draw(st.integers(n_seq_max, 12))
        self.running: list[Sequence] = []
        self.n_arrived = 0

    @precondition(lambda self: self.books.n_free_ids)
    @rule(
        n_prompt=st.integers(1, 30),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, 1.0, 2.0]),
    )
    def arrive(self, n_prompt: int, priority: int, deadline: float | None) -> None:
        self.n_arrived += 1
        arrived = sequence_of(n_prompt, self.n_arrived, priority=priority, deadline=deadline)
        arrived.admit(self.books.open(), 0.0)
        self.running.append(arrived)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        assert sequence.slot is not None
        self.books.release(sequence.slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        sequence.is_paused = not sequence.is_paused

    @rule()
    def tick(self) -> None:
        for chunk in self.check(self.n_batch):
            sequence, completes = chunk.sequence, chunk.completes
            assert sequence.slot is not None
            self.books.advance(sequence.slot, chunk.n_tokens)
            assert completes == (sequence.n_pending == 0), "only a completed chunk is sampled"
            if completes:
                sequence.append(7, 0.0)

    @rule(n_rows=st.integers(-1, 12))
    def look_at_a_plan_for_fewer_rows(self, n_rows: int) -> None:
        self.check(n_rows)

    def check(self, n_rows: int) -> list[Chunk]:
        """A plan for `n_rows` rows, and whether it keeps its promises."""
        active = [s for s in self.running if not s.is_paused]
        decoding = [s for s in active if s.n_pending == 1]
        chunks = plan(self.running, n_rows)
        planned = {id(c.sequence): c.n_tokens for c in chunks}
        assert len(planned) == len(chunks), "a sequence is planned once"
        assert set(planned) <= {id(s) for s in active}, "paused ones are never planned"
        n_wanted = sum(s.n_pending for s in active)
        n_planned = sum(planned.values())
        assert n_planned == min(n_wanted, max(0, n_rows)), "the budget is respected, and used"
        assert all(1 <= c.n_tokens <= c.sequence.n_pending for c in chunks)
        if n_rows >= len(decoding):
            assert {id(s) for s in decoding} <= set(planned), "decoding never waits"
        else:
            assert set(planned) <= {id(s) for s in decoding}
        prompts = sorted((s for s in active if s.n_pending > 1), key=lambda s: s.urgency)
        given = [planned.get(id(s), 0) for s in prompts]
        is_whole = [planned.get(id(s)) == s.n_pending for s in prompts]
        for was_whole, n_next in zip(is_whole, given[1:], strict=False):
            assert was_whole or n_next == 0, "prompts run one after another"
        seq_ids = [c.sequence.slot.seq_id for c in chunks if c.sequence.slot]
        assert seq_ids == sorted(seq_ids), "chunks are in the order of their seq_ids"
        assert chunks == plan(reversed(self.running), n_rows), "the order of the list means nothing"
        return chunks

    @invariant()
    def a_running_sequence_always_has_something_pending(self) -> None:
        assert all(s.n_pending >= 1 for s in getattr(self, "running", []))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = DETERMINISTIC


def running(*sequences: Sequence) -> list[Sequence]:
    """The sequences with seq_ids from 0 on."""
    books = KVCache(n_cells=1000, n_seq_max=8, n_ctx_seq=1000)
    for sequence in sequences:
        sequence.admit(books.open(), 0.0)
    return list(sequences)


def test_a_long_prompt_never_delays_a_decoding_sequence() -> None:
    long, decoding = sequence_of(500, 1, priority=-5), sequence_of(1, 2, priority=5)
    chunks = plan(running(long, decoding), 8)
    assert [(c.sequence, c.n_tokens) for c in chunks] == [(long, 7), (decoding, 1)]


@pytest.mark.parametrize(
    "first",
    [
        sequence_of(9, 5, priority=-1),
        sequence_of(9, 5, deadline=1.0),
        sequence_of(9, 0),
    ],
    ids=["lower priority number", "earlier deadline", "earlier arrival"],
)
def test_the_most_urgent_prompt_is_computed_first(first: Sequence) -> None:
    (chunk,) = plan(running(sequence_of(9, 1, deadline=None), first), 9)
    assert chunk.sequence is first
    waiting = [sequence_of(9, 1), first]
    assert scheduler.next_admitted(waiting, [], 100) is first


def test_nobody_overtakes_the_most_urgent_waiting_sequence() -> None:
    big, small = sequence_of(50, 1), sequence_of(2, 2)
    present = running(sequence_of(1, 0))
    assert scheduler.next_admitted([small, big], present, 40) is None
    big.is_paused = True
    assert scheduler.next_admitted([small, big], present, 40) is small


@pytest.mark.parametrize(("n_free", "admitted"), [(10, True), (9, False)])
def test_a_sequence_is_admitted_when_it_and_the_others_have_room_to_go_on(
    n_free: int, admitted: bool
) -> None:
    # 3 pending + 1 more, and 5 pending + 1 more.
    present, waiting = running(sequence_of(3, 0)), sequence_of(5, 1)
    first = scheduler.next_admitted([waiting], present, n_free)
    assert (first is waiting) == admitted


def test_paused_company_is_promised_nothing() -> None:
    present, waiting = running(sequence_of(3, 0)), sequence_of(5, 1)
    present[0].is_paused = True
    assert scheduler.next_admitted([waiting], present, 5) is waiting
    assert scheduler.next_admitted([waiting], present, 4) is None


def test_a_sequence_alone_may_fill_every_cell() -> None:
    waiting = sequence_of(8, 1)
    assert scheduler.next_admitted([waiting], [], 8) is waiting
    assert scheduler.next_admitted([waiting], [], 7) is None
    assert scheduler.next_admitted([], [], 7) is None


def test_a_paused_sequence_is_preempted_first_then_the_least_urgent_then_the_newest() -> None:
    paused, least = sequence_of(1, 1, priority=-9), sequence_of(1, 2, priority=3)
    oldest, newest = sequence_of(1, 0), sequence_of(1, 9)
    paused.is_paused = True
    left = [oldest, newest, least, paused]
    for expected in (paused, least, newest, oldest):
        chosen = scheduler.choose_preempted(left)
        assert chosen is expected
        left.remove(chosen)


def test_a_tick_needs_one_cell_for_each_decoding_sequence() -> None:
    decoding, paused, prompt = sequence_of(1, 0), sequence_of(1, 1), sequence_of(4, 2)
    paused.is_paused = True
    assert scheduler.n_rows_needed([decoding, paused, prompt]) == 1
