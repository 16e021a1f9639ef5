"""The promises of `plan`, for any mix of arrivals, ticks, cancellations and pauses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.engine.core import scheduler
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.scheduler import Chunk, plan, seq_id_of
from cllm.engine.core.sequence import AGEING_S, Sequence
from tests.engine.core.test_scheduler import DETERMINISTIC, STREAM_BUFFER, sequence_of


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come and go; every plan keeps every promise."""

    @initialize(n_seq_ids=st.integers(2, 6), data=st.data())
    def make(self, n_seq_ids: int, data: st.DataObject) -> None:
        self.kv_cache = KVCache(n_cells=10_000, n_seq_ids=n_seq_ids, n_ctx_seq=10_000)
        self.n_batch = data.draw(st.integers(n_seq_ids, 12))
        self.running: list[Sequence] = []
        self.n_arrived = 0
        self.now = 0.0

    @precondition(lambda self: self.kv_cache.free_ids)
    @rule(
        n_prompt=st.just(1) | st.integers(2, 30),
        priority=st.integers(-1, 1),
        due_in=st.sampled_from([None, 100.0, 200.0]),
        data=st.data(),
    )
    def arrive(
        self, n_prompt: int, priority: int, due_in: float | None, data: st.DataObject
    ) -> None:
        """Some compute all of their tokens, others wait for a leader."""
        self.n_arrived += 1
        arrived = sequence_of(
            n_prompt, self.n_arrived, priority=priority, submitted_at=self.now,
            deadline=None if due_in is None else self.now + due_in,
        )  # fmt: skip
        arrived.start(self.kv_cache.open(), self.now)
        leaders = [s for s in self.running if s.placement.is_placed and s.n_prompt > 1]
        if n_prompt > 1 and leaders and data.draw(st.booleans()):
            arrived.placement.leader = data.draw(st.sampled_from(leaders))
            arrived.placement.n_expected = min(arrived.placement.leader.n_prompt, n_prompt) - 1
        else:
            arrived.place(0)
        self.running.append(arrived)

    @precondition(lambda self: any(s.placement.leader for s in self.running))
    @rule()
    def the_followers_have_waited_enough(self) -> None:
        for sequence in self.running:
            if not sequence.placement.is_placed:
                sequence.place(0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """The followers of one that has ended may still name it when the next tick is planned."""
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        assert sequence.placement.slot is not None
        self.kv_cache.release(sequence.placement.slot)
        sequence.placement.leave()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), n_unread=st.sampled_from([0, 0, STREAM_BUFFER, STREAM_BUFFER + 1]))
    def read(self, data: st.DataObject, n_unread: int) -> None:
        data.draw(st.sampled_from(self.running)).n_unread = n_unread

    @rule(seconds=st.sampled_from([0.1, 1.0, AGEING_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(n_prompt_rows=st.none() | st.integers(0, 9))
    def tick(self, n_prompt_rows: int | None) -> None:
        for chunk in self.check(self.n_batch, n_prompt_rows):
            sequence, completes = chunk.sequence, chunk.completes
            assert sequence.placement.slot is not None
            self.kv_cache.advance(sequence.placement.slot, chunk.n_tokens)
            assert completes == (sequence.n_pending == 0), "only a completed chunk is sampled"
            if completes:
                sequence.tokens.append(7)
                sequence.n_unread += 1

    @rule(n_rows=st.integers(-1, 5), n_prompt_rows=st.none() | st.integers(-1, 5))
    def look_at_a_plan_for_fewer_rows(self, n_rows: int, n_prompt_rows: int | None) -> None:
        self.check(n_rows, n_prompt_rows)

    def urgency(self, sequence: Sequence) -> tuple[int, int, float, int]:
        """A leader's is that of the most urgent sequence that waits for it, if that is more."""
        followers = [s for s in self.running if s.placement.leader is sequence and not s.is_paused]
        return min(s.urgency(self.now) for s in (sequence, *followers))

    def check(self, n_rows: int, n_prompt_rows: int | None) -> list[Chunk]:
        """A plan, and whether it keeps its promises."""
        ready = [s for s in self.running if s.placement.is_placed and not s.is_paused]
        decoding = [s for s in ready if s.n_pending == 1]
        prompts = sorted((s for s in ready if s.n_pending > 1), key=self.urgency)
        chunks = plan(self.running, n_rows, n_prompt_rows, n_outputs_max=256, now=self.now)
        planned = {c.sequence: c.n_tokens for c in chunks}
        assert len(planned) == len(chunks), "a sequence is planned once"

        decoding.sort(key=lambda s: s.urgency(self.now))
        n_most = max(0, n_rows)
        expected = dict.fromkeys(decoding[:n_most], 1)  # decoding waits for nothing but rows
        n_rows_left = n_most - len(expected)
        if n_prompt_rows is not None:
            n_rows_left = min(n_rows_left, n_prompt_rows)
        for sequence in prompts:  # one after another, the most urgent first
            if n_rows_left > 0:
                expected[sequence] = min(sequence.n_pending, n_rows_left)
                n_rows_left -= expected[sequence]
        assert planned == expected, "all rows are used, by those and only those who may"

        seq_ids = [seq_id_of(c.sequence) for c in chunks]
        assert seq_ids == sorted(seq_ids), "chunks are in the order of their seq_ids"
        turned = plan(
            reversed(self.running), n_rows, n_prompt_rows, n_outputs_max=256, now=self.now
        )
        assert chunks == turned, "the order of the list means nothing"
        n_wanted = scheduler.n_rows_wanted(self.running, n_most)
        assert n_wanted == sum(
            c.n_tokens for c in plan(self.running, n_rows, n_outputs_max=256, now=self.now)
        )
        return chunks

    @invariant()
    def a_running_sequence_always_has_something_pending(self) -> None:
        assert all(s.n_pending >= 1 for s in getattr(self, "running", []))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = DETERMINISTIC
