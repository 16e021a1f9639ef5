"""EngineCore through any mix of requests, cancellations, stopped readers, deadlines and faults."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.output import FinishReason
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import Fault
from tests.conftest import examples
from tests.simulation.simulator import Simulator

DETERMINISTIC = examples(200, stateful_step_count=40)

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 1, 2, 5, 12]),
    temperature=st.sampled_from([0.0, 1.0]),
    stop=st.lists(st.sampled_from(["ab", "ba", "bb", "aaab", "é", "c"]), max_size=2),
    stop_token_ids=st.sampled_from([(), (ord("c"),)]),
)
# Equal heads, heads of heads, and an end that differs: everything there is to share.
PROMPTS = st.builds(
    lambda n_head, letter, n_tail: b"headheadhead"[:n_head] + bytes([letter]) * n_tail,
    st.sampled_from([0, 1, 4, 6, 12]),
    st.sampled_from(b"xyz"),
    st.integers(1, 8),
)
FAULTS: list[Fault] = [1, 2, -1, -2, -3, "nan", RuntimeError("scripted")]


class CoreMachine(RuleBasedStateMachine):
    """After every step: nothing lost, the bookkeeping right, the cells those of the tokens."""

    @initialize(
        n_seq_max=st.integers(1, 4),
        share=st.integers(4, 20),
        n_more_rows=st.integers(0, 4),
        kv_unified=st.booleans(),
        prefix_cache=st.booleans(),
        memory=st.sampled_from(["whole", "whole", "whole", "recurrent", "windowed"]),
        stream_buffer=st.integers(1, 4),
        prefix_cache_bytes=st.sampled_from([1 << 20, 0, 200]),
        latency_s=st.sampled_from([0.0, 0.01]),
    )
    def make(
        self,
        n_seq_max: int,
        share: int,
        n_more_rows: int,
        kv_unified: bool,
        prefix_cache: bool,
        memory: str,
        stream_buffer: int,
        prefix_cache_bytes: int,
        latency_s: float,
    ) -> None:
        self.sim = Simulator(
            n_ctx=n_seq_max * share,
            n_seq_max=n_seq_max,
            n_batch=n_seq_max + n_more_rows,
            kv_unified=kv_unified,
            prefix_cache=prefix_cache,
            has_pos_min=memory == "whole",
            is_windowed=memory == "windowed",
            stream_buffer=stream_buffer,
            prefix_cache_bytes=prefix_cache_bytes,
            latency_s=latency_s,
        )

    def alive(self) -> list[str]:
        return [r for r in self.sim.requests if r not in self.sim.finished]

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        priority=st.integers(-1, 1),
        timeout=st.sampled_from([None, None, None, 3.0, 20.0]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def submit(
        self,
        prompt: bytes,
        params: SamplingParams,
        priority: int,
        timeout: float | None,
        tenant: str,
    ) -> None:
        prompt = prompt[: self.sim.decoder.n_ctx_seq]
        self.sim.submit(prompt, params=params, priority=priority, timeout=timeout, tenant=tenant)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.alive()))
        self.sim.core.queue.cancel(request_id)
        self.sim.hear()
        assert self.sim.finished[request_id].completion.finish_reason is FinishReason.CANCELLED
        self.sim.core.queue.cancel(request_id)  # a second time means nothing
        assert not self.sim.core.take_events()

    @precondition(lambda self: set(self.alive()) - self.sim.stopped)
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        reading = sorted(set(self.alive()) - self.sim.stopped)
        self.sim.stopped.add(data.draw(st.sampled_from(reading)))

    @precondition(lambda self: set(self.alive()) & self.sim.stopped)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        stopped = sorted(set(self.alive()) & self.sim.stopped)
        self.sim.read_on(data.draw(st.sampled_from(stopped)))

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.sim.now += seconds

    @rule()
    def reset_prefix_cache(self) -> None:
        self.sim.core.manager.cells.evict_all()
        assert self.sim.kv_cache.n_cached == 0

    # Several rules that tick: hypothesis leaves some rules out of each example.
    @rule(n_ticks=st.integers(1, 6))
    def tick(self, n_ticks: int) -> None:
        for _ in range(n_ticks):
            self._tick()

    @precondition(lambda self: self.alive())
    @rule(fault=st.sampled_from(FAULTS), n_before=st.integers(0, 3))
    def tick_into_a_fault(self, fault: Fault, n_before: int) -> None:
        self.tick(n_before)
        if not self.sim.core.recovery.is_over:
            return  # a second fault on the same rows would be the requests' own
        self.sim.decoder.faults[self.sim.decoder.n_decodes + 1] = fault
        self.tick(2)

    @precondition(lambda self: self.alive())
    @rule(method=st.sampled_from(["seq_rm", "seq_cp", "state_seq_get_data", "state_seq_set_data"]))
    def tick_into_a_failing_call(self, method: str) -> None:
        decoder = self.sim.decoder
        decoder.call_faults[method, decoder.n_calls[method] + 1] = RuntimeError("scripted")
        self.tick(2)

    @rule(n_tails=st.lists(st.integers(1, 8), min_size=1, max_size=4), params=PARAMS)
    def submit_several_and_tick(self, n_tails: list[int], params: SamplingParams) -> None:
        for n_tail in n_tails:
            self.submit(b"head" + b"w" * n_tail, params, 0, None, "")
        self.tick(2)

    def _tick(self) -> None:
        sim, before = self.sim, set(self.sim.finished)
        n_decodes, n_batches = sim.decoder.n_decodes, len(sim.decoder.batches)
        fault = sim.decoder.faults.get(n_decodes + 1, 0)
        now = sim.now
        due = {r for r in self.alive() if (sim.requests[r].deadline or 1e9) <= now}
        paused = {r for r in self.alive() if sim.is_paused(r)}
        is_faulty = sim.core.manager.cells.fault is not None or bool(sim.decoder.call_faults)
        owners: dict[int, str] = {}

        def look() -> None:
            running = sim.core.queue.running
            owners.update((seq_id_of(s), s.request_id) for s in running)

        sim.decoder.on_decode = look
        heard = sim.tick()
        batches = sim.decoder.batches[n_batches:]
        assert len(batches) == sim.decoder.n_decodes - n_decodes <= 1, "one decode per tick"
        batch = batches[0] if batches else []
        ended = {r: sim.finished[r].completion.finish_reason for r in set(sim.finished) - before}
        in_batch = {owners[seq_id] for seq_id, _, _ in batch}
        outputs = [owners[seq_id] for seq_id, _, n_outputs in batch if n_outputs]
        assert {r for r in ended if ended[r] is FinishReason.DEADLINE} == due
        assert not in_batch & (paused | due), "nothing is computed for those"
        n_ready = len((set(self.alive()) | set(ended)) - paused - due)
        assert is_faulty or bool(batch) == (n_ready > 0), "a tick with work makes progress"
        failed = {r for r in ended if ended[r] is FinishReason.ERROR}
        assert failed == (set(outputs[:1]) if fault == "nan" else set()), "a fault that passes"
        silent = bool(batch) and fault not in (0, "nan")
        assert heard - due - failed == (set() if silent else set(outputs) - failed)

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "sim"):
            self.sim.hear()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        for request_id in self.alive():
            self.sim.read_on(request_id)
        self.sim.decoder.call_faults.clear()
        self.sim.run(at_most=20_000)
        self.sim.check_idle()
        self.sim.check_outcomes()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = DETERMINISTIC
