"""EngineCore on a fake decoder and a manual clock: what one tick does, and any mix of ticks."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from cllm.engine.handoff import Finished, Progressed
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from cllm.engine.sampling import NotFiniteError
from cllm.engine.tick import EngineCore
from cllm.errors import (
    DecodeFailedError,
    EngineFailedError,
    GenerationError,
    InvalidBatchError,
    LlamaCallError,
    NoKVSlotError,
)
from cllm.testing import FakeDecoder, FakeVocabulary
from cllm.testing.fake_decoder import Answer, Fault

DETERMINISTIC = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=40, database=None
)
VOCABULARY = FakeVocabulary()
END = FakeVocabulary.END
COMPLETED = {FinishReason.STOP, FinishReason.LENGTH}

# Letters, parts of characters and an end now and then: every kind of ending is met.
ALPHABET: tuple[int, ...] = (*b"aaabbbc", *"é€".encode(), 0xFF, END)


def babble(prefix: Sequence[int]) -> int:
    """A token that depends on every token before it."""
    return ALPHABET[zlib.crc32(np.asarray(prefix, np.int32).tobytes()) % len(ALPHABET)]


def endless(prefix: Sequence[int]) -> int:
    """Letters that depend on every token before them, and no end."""
    return ord("a") + zlib.crc32(np.asarray(prefix, np.int32).tobytes()) % 26


def says(text: bytes, *, n_prompt: int) -> Answer:
    """The bytes of a text, then the end, after any prompt of so many tokens."""
    return lambda prefix: (*text, END)[len(prefix) - n_prompt]


class CountingSampler:
    """A sampler with a state: its n-th choice is n letters after the best one."""

    def __init__(self) -> None:
        self.n_chosen = 0
        self.n_closed = 0

    def sample(self, logits: NDArray[np.float32]) -> int:
        token = shifted(int(logits.argmax()), self.n_chosen)
        self.n_chosen += 1
        return token

    def close(self) -> None:
        self.n_closed += 1


def shifted(token: int, n: int) -> int:
    return token if token == END else (token + n) % 256


@dataclass(frozen=True)
class Outcome:
    """All that a request ends with, by the definition of it."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop_reason: str | int | None


def alone(prompt: Sequence[int], params: SamplingParams, n_ctx_seq: int, answer: Answer) -> Outcome:
    """What a request gives alone, without cache, batch, chunks or pieces."""
    tokens = list(prompt)
    while True:
        n_output = len(tokens) - len(prompt)
        token = answer(tokens)
        tokens.append(token if params.is_greedy else shifted(token, n_output))
        output, token = tuple(tokens[len(prompt) :]), tokens[-1]
        if token == END or token in params.stop_token_ids:
            return Outcome(output, text_of(output[:-1]), FinishReason.STOP, token)
        text = text_of(output)
        matches = [(text.index(stop), stop) for stop in params.stop if stop in text]
        if matches:
            start, stop = min(matches)
            return Outcome(output, text[:start], FinishReason.STOP, stop)
        if len(output) == params.max_tokens:
            return Outcome(output, text, FinishReason.LENGTH, "max_tokens")
        if len(tokens) > n_ctx_seq:
            return Outcome(output, text, FinishReason.LENGTH, "context")


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(VOCABULARY.piece(token) for token in tokens).decode(errors="replace")


class WatchedDecoder(FakeDecoder):
    """A fake that remembers its batches: seq_id, rows and output rows of each run."""

    batches: list[list[tuple[int, int, int]]]
    on_decode: Callable[[], None] = staticmethod(lambda: None)

    def decode(self) -> NDArray[np.float32]:
        self.batches.append([(r.seq_id, len(r.tokens), r.n_outputs) for r in self.runs])
        self.on_decode()
        return super().decode()


class Bench:
    """A core on a fake decoder, with a clock that stands still, and what its events said."""

    def __init__(
        self,
        *,
        n_ctx: int = 64,
        n_seq_max: int = 4,
        n_batch: int = 8,
        kv_unified: bool = True,
        answer: Answer = babble,
        faults: Mapping[int, Fault] | None = None,
        decoder_type: type[WatchedDecoder] = WatchedDecoder,
    ) -> None:
        self.decoder = decoder_type(
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            kv_unified=kv_unified,
            answer=answer,
            faults=faults,
        )
        self.decoder.batches = []
        self.now = 1.0
        self.books = KVCache(n_cells=n_ctx, n_seq_max=n_seq_max, n_ctx_seq=self.decoder.n_ctx_seq)
        self.samplers: list[CountingSampler] = []
        self.core = EngineCore(
            self.decoder, VOCABULARY, self.books, self._make_sampler, clock=lambda: self.now
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.texts: dict[str, str] = defaultdict(str)
        self.finished: dict[str, Finished] = {}

    def _make_sampler(self, params: SamplingParams) -> CountingSampler | None:
        if params.is_greedy:
            return None
        self.samplers.append(CountingSampler())
        return self.samplers[-1]

    def submit(
        self,
        prompt: Sequence[int] | bytes = b"prompt",
        *,
        params: SamplingParams | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> str:
        serial = len(self.requests)
        request = GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=tuple(prompt),
            params=params or SamplingParams(temperature=0),
            priority=priority,
            submitted_at=self.now,
            deadline=None if timeout is None else self.now + timeout,
        )
        self.requests[request.request_id] = request
        self.core.submit(request)
        return request.request_id

    def tick(self, n_ticks: int = 1) -> set[str]:
        """Tick, and look at everything; the requests that the last tick gave a token or an end."""
        heard: set[str] = set()
        for _ in range(n_ticks):
            self.core.tick()
            heard = self.hear()
        return heard

    def run(self, *, at_most: int = 500) -> None:
        """Tick until there is nothing to do."""
        for _ in range(at_most):
            if not self.core.has_work:
                return
            self.tick()
        raise AssertionError(f"still working: {self.core.running} {self.core.waiting}")

    def hear(self) -> set[str]:
        """Take the events; the requests they are about."""
        events, self.core.events = self.core.events, []
        for event in events:
            assert isinstance(event, Progressed | Finished), event
            request_id, delta = event.request_id, event.delta
            assert request_id not in self.finished, "nothing comes after the last event"
            self.tokens[request_id] += delta.token_ids
            self.texts[request_id] += delta.text
            if isinstance(event, Finished):
                self.finished[request_id] = event
                assert delta.finish_reason == event.completion.finish_reason
                assert delta.stop_reason == event.completion.stop_reason
            else:
                assert delta.finish_reason is None
        self.check()
        return {event.request_id for event in events if isinstance(event, Progressed | Finished)}

    def check(self) -> None:
        """The invariants that hold between any two steps."""
        core, books, decoder = self.core, self.books, self.decoder
        assert core.discrepancies() == []
        held = {s.slot.seq_id: s.tokens[: s.n_computed] for s in core.running if s.slot}
        assert {i: tokens for i, tokens in held.items() if tokens} == decoder.cells
        assert books.n_used == decoder.n_cells_used <= decoder.n_ctx
        assert len(held) == len(core.running) == books.n_used_ids
        assert all(s.slot is None for s in core.waiting)
        alive = {s.request_id for s in core.running + core.waiting}
        assert alive.isdisjoint(self.finished)
        assert alive | set(self.finished) == set(self.requests), "no request is lost"
        assert len(core.running) + len(core.waiting) + len(self.finished) == len(self.requests)

    def check_idle(self) -> None:
        """The invariants of an engine without requests."""
        assert set(self.finished) == set(self.requests), "every request gets its last event"
        assert (self.books.n_used, self.books.n_used_ids, self.decoder.cells) == (0, 0, {})
        assert not self.core.running
        assert not self.core.waiting
        assert not self.core.has_work
        assert self.core.next_deadline is None
        assert all(sampler.n_closed == 1 for sampler in self.samplers)
        statistics = self.core.statistics()
        assert sum(statistics.n_finished.values()) == len(self.requests)
        assert statistics.n_kv_cells_used == statistics.n_seq_ids_used == 0
        assert statistics.n_running == statistics.n_waiting == statistics.n_paused == 0

    def outcome(self, request_id: str) -> Outcome:
        """What a request ended with, if its events and its completion agree on it."""
        completion = self.finished[request_id].completion
        assert completion.token_ids == tuple(self.tokens[request_id])
        assert completion.text == self.texts[request_id]
        assert completion.prompt_token_ids == self.requests[request_id].prompt_token_ids
        assert completion.usage.n_output == len(completion.token_ids)
        return Outcome(
            completion.token_ids,
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
        )

    def alone(self, request_id: str) -> Outcome:
        """What a request would have given alone."""
        request = self.requests[request_id]
        return alone(
            request.prompt_token_ids, request.params, self.decoder.n_ctx_seq, self.decoder.answer
        )

    def check_outcomes(self) -> None:
        """Who ended by itself gave what it gives alone; the others gave the beginning of it."""
        for request_id, event in self.finished.items():
            actual, expected = self.outcome(request_id), self.alone(request_id)
            if actual.reason in COMPLETED:
                assert actual == expected
            else:
                n_output = len(actual.token_ids)
                assert actual.token_ids == expected.token_ids[:n_output]
                assert (event.error is not None) == (actual.reason is FinishReason.ERROR)


# --- Any mix ------------------------------------------------------------------------------------
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([None, 1, 2, 5, 12]),
    temperature=st.sampled_from([0.0, 1.0]),
    stop=st.lists(st.sampled_from(["ab", "ba", "bb", "aaab", "é", "c"]), max_size=2),
    stop_token_ids=st.sampled_from([(), (ord("c"),)]),
)
FAULTS: list[Fault] = [1, 2, -1, -2, -3, "nan"]


class CoreMachine(RuleBasedStateMachine):
    """Any mix of requests, cancellations, stopped readers, deadlines and faults."""

    @initialize(
        n_seq_max=st.integers(1, 4),
        share=st.integers(4, 16),
        n_more_rows=st.integers(0, 4),
        kv_unified=st.booleans(),
    )
    def make(self, n_seq_max: int, share: int, n_more_rows: int, kv_unified: bool) -> None:
        self.bench = Bench(
            n_ctx=n_seq_max * share,
            n_seq_max=n_seq_max,
            n_batch=n_seq_max + n_more_rows,
            kv_unified=kv_unified,
        )
        self.paused: set[str] = set()

    def alive(self) -> list[str]:
        return [r for r in self.bench.requests if r not in self.bench.finished]

    @rule(
        n_prompt=st.integers(1, 16),
        letter=st.sampled_from(b"xyz"),
        params=PARAMS,
        priority=st.integers(-1, 1),
        timeout=st.sampled_from([None, None, None, 3.0, 20.0]),
    )
    def submit(
        self,
        n_prompt: int,
        letter: int,
        params: SamplingParams,
        priority: int,
        timeout: float | None,
    ) -> None:
        n_prompt = min(n_prompt, self.bench.decoder.n_ctx_seq)
        self.bench.submit([letter] * n_prompt, params=params, priority=priority, timeout=timeout)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.alive()))
        self.bench.core.cancel(request_id)
        self.bench.hear()
        assert self.bench.finished[request_id].completion.finish_reason is FinishReason.CANCELLED
        self.bench.core.cancel(request_id)  # a second time means nothing
        assert not self.bench.core.events

    @precondition(lambda self: set(self.alive()) - self.paused)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.alive()) - self.paused)))
        self.bench.core.set_paused(request_id, True)
        self.paused.add(request_id)

    @precondition(lambda self: set(self.alive()) & self.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.alive()) & self.paused)))
        self.bench.core.set_paused(request_id, False)
        self.paused.remove(request_id)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds

    # Several rules that tick: hypothesis leaves some rules out of each example.
    @rule(n_ticks=st.integers(1, 6))
    def tick(self, n_ticks: int) -> None:
        for _ in range(n_ticks):
            self._tick()

    @precondition(lambda self: self.alive())
    @rule(fault=st.sampled_from(FAULTS), n_before=st.integers(0, 3))
    def tick_into_a_fault(self, fault: Fault, n_before: int) -> None:
        self.tick(n_before)
        self.bench.decoder.faults[self.bench.decoder.n_decodes + 1] = fault
        self.tick(2)

    @rule(n_prompts=st.lists(st.integers(1, 8), min_size=1, max_size=4), params=PARAMS)
    def submit_several_and_tick(self, n_prompts: list[int], params: SamplingParams) -> None:
        for n_prompt in n_prompts:
            self.submit(n_prompt, ord("w"), params, 0, None)
        self.tick(2)

    def _tick(self) -> None:
        bench, before = self.bench, set(self.bench.finished)
        n_decodes, n_batches = bench.decoder.n_decodes, len(bench.decoder.batches)
        fault = bench.decoder.faults.get(n_decodes + 1, 0)
        due = {r for r in self.alive() if (bench.requests[r].deadline or 1e9) <= bench.now}
        owners: dict[int, str] = {}
        bench.decoder.on_decode = lambda: owners.update(
            (s.slot.seq_id, s.request_id) for s in bench.core.running if s.slot
        )
        heard = bench.tick()
        batches = bench.decoder.batches[n_batches:]
        assert len(batches) == bench.decoder.n_decodes - n_decodes <= 1, "one decode per tick"
        batch = batches[0] if batches else []
        ended = {
            r: bench.finished[r].completion.finish_reason for r in set(bench.finished) - before
        }
        in_batch = {owners[seq_id] for seq_id, _, _ in batch}
        outputs = [owners[seq_id] for seq_id, _, n_outputs in batch if n_outputs]
        assert {r for r in ended if ended[r] is FinishReason.DEADLINE} == due
        assert not in_batch & (self.paused | due), "nothing is computed for those"
        n_ready = len(set(self.alive()) - self.paused) + len(ended) - len(due)
        assert bool(batch) == (n_ready > 0), "a tick with anything to do makes progress"
        failed = {r for r in ended if ended[r] is FinishReason.ERROR}
        if fault == "nan":
            assert failed == set(outputs[:1])
        elif fault in (1, -1, -2, -3):
            assert failed == in_batch
        else:
            assert not failed
        silent = bool(batch) and fault in (1, 2, -1, -2, -3)
        assert heard - due - failed == (set() if silent else set(outputs) - failed)

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "bench"):
            self.bench.hear()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for request_id in self.alive():
            self.bench.core.set_paused(request_id, False)
        self.bench.run()
        self.bench.check_idle()
        self.bench.check_outcomes()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = DETERMINISTIC


# --- Endings ------------------------------------------------------------------------------------
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("params", "text", "token_ids", "reason", "stop_reason"),
    [
        (GREEDY, "hi é", (*"hi é".encode(), END), FinishReason.STOP, END),
        (
            SamplingParams(temperature=0, stop=["é", "i "]),
            "h", tuple(b"hi "), FinishReason.STOP, "i ",
        ),
        (
            SamplingParams(temperature=0, stop_token_ids=[ord("i")]),
            "h", tuple(b"hi"), FinishReason.STOP, ord("i"),
        ),
        (
            SamplingParams(temperature=0, max_tokens=3),
            "hi ", tuple(b"hi "), FinishReason.LENGTH, "max_tokens",
        ),
        (
            SamplingParams(temperature=0, max_tokens=4),
            "hi \ufffd", tuple("hi é".encode()[:4]), FinishReason.LENGTH, "max_tokens",
        ),
        (
            SamplingParams(temperature=0, max_tokens=2, stop=["i and more"]),
            "hi", tuple(b"hi"), FinishReason.LENGTH, "max_tokens",
        ),
    ],
    ids=["end token", "stop string", "stop token", "max_tokens", "half a character", "held back"],
)  # fmt: skip
def test_an_output_ends_where_its_parameters_say(
    params: SamplingParams,
    text: str,
    token_ids: tuple[int, ...],
    reason: FinishReason,
    stop_reason: str | int,
) -> None:
    bench = Bench(answer=says("hi é".encode(), n_prompt=6))
    request_id = bench.submit(b"prompt", params=params)
    bench.run()
    assert bench.outcome(request_id) == Outcome(token_ids, text, reason, stop_reason)
    assert bench.alone(request_id) == bench.outcome(request_id)
    bench.check_idle()


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("n_prompt", [1, 7, 8])
def test_a_sequence_alone_that_fills_its_context_ends_with_length_context(
    n_prompt: int, kv_unified: bool
) -> None:
    bench = Bench(n_ctx=8 if kv_unified else 16, n_seq_max=2, kv_unified=kv_unified, answer=endless)
    request_id = bench.submit(b"p" * n_prompt)
    bench.run()
    outcome = bench.outcome(request_id)
    assert (outcome.reason, outcome.stop_reason) == (FinishReason.LENGTH, "context")
    assert len(outcome.token_ids) == 8 - n_prompt + 1, "every cell is used, and its logits too"
    assert bench.core.recorder.n_preemptions == 0
    bench.check_idle()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deadline_ends_a_request_with_what_there_is(is_paused: bool) -> None:
    bench = Bench(answer=endless)
    late, other = bench.submit(timeout=2.0), bench.submit()
    bench.tick(3)
    n_tokens = len(bench.tokens[late])
    assert n_tokens
    bench.core.set_paused(late, is_paused)
    assert bench.core.next_deadline == 3.0
    bench.now = 2.9
    bench.tick()
    assert late not in bench.finished
    bench.now = 3.0
    assert late in bench.tick()
    assert bench.outcome(late).reason is FinishReason.DEADLINE
    assert len(bench.tokens[late]) == n_tokens + (not is_paused)
    assert bench.core.next_deadline is None
    bench.run()
    assert bench.outcome(other) == bench.alone(other)


def test_a_deadline_ends_a_request_that_never_ran() -> None:
    bench = Bench(n_seq_max=1, answer=endless)
    bench.submit()
    bench.tick()
    waiting = bench.submit(timeout=1.0)
    bench.tick()
    bench.now += 1.0
    bench.tick()
    completion = bench.finished[waiting].completion
    assert (completion.finish_reason, completion.token_ids) == (FinishReason.DEADLINE, ())
    assert completion.timings.ttft_s is None
    assert completion.timings.queued_s == completion.timings.total_s == 1.0


def test_cancelling_frees_the_cells_before_the_next_tick() -> None:
    bench = Bench(answer=endless)
    request_id, other = bench.submit(), bench.submit()
    bench.tick(3)
    bench.core.cancel(request_id)
    assert bench.decoder.seq_pos_max(0) is None
    bench.core.cancel("unknown")
    bench.hear()
    bench.run()
    assert bench.outcome(request_id).reason is FinishReason.CANCELLED
    assert bench.outcome(other) == bench.alone(other)


def test_cancelling_all_leaves_nothing() -> None:
    bench = Bench(n_seq_max=2)
    for _ in range(5):
        bench.submit()
    bench.tick(2)
    bench.core.cancel_all()
    bench.hear()
    bench.check_idle()


# --- Order --------------------------------------------------------------------------------------
def test_the_most_urgent_request_runs_first_and_equals_in_order_of_arrival() -> None:
    bench = Bench(n_seq_max=1)
    normal = [bench.submit() for _ in range(2)]
    late = bench.submit(timeout=1e6)
    urgent, background = bench.submit(priority=-1), bench.submit(priority=1)
    bench.run()
    assert list(bench.finished) == [urgent, late, *normal, background]


def test_a_long_prompt_never_makes_a_decoding_request_wait() -> None:
    bench = Bench(n_ctx=256, n_batch=4, answer=endless)
    decoding = bench.submit(b"p")
    bench.tick()
    bench.submit(b"q" * 100, priority=-9)
    for _ in range(30):
        assert decoding in bench.tick()


def test_paused_readers_that_hold_every_seq_id_do_not_stall_the_queue() -> None:
    bench = Bench(n_seq_max=2, answer=endless)
    holders = [bench.submit(b"h" * 5), bench.submit(b"i" * 5)]
    bench.tick(4)
    for request_id in holders:
        bench.core.set_paused(request_id, True)
    third = bench.submit(params=SamplingParams(temperature=0, max_tokens=4))
    bench.run()
    assert set(bench.finished) == {third}
    assert bench.outcome(third) == bench.alone(third)
    for request_id in holders:
        bench.core.set_paused(request_id, False)
    bench.run()
    bench.check_outcomes()
    bench.check_idle()


def test_a_paused_request_is_not_work_and_goes_on_where_it_stopped() -> None:
    bench = Bench(answer=endless)
    request_id = bench.submit()
    bench.tick(3)
    bench.core.set_paused(request_id, True)
    assert not bench.core.has_work
    n_decodes = bench.decoder.n_decodes
    assert bench.tick(5) == set()
    assert bench.decoder.n_decodes == n_decodes
    bench.core.set_paused(request_id, False)
    bench.run()
    assert bench.core.recorder.n_preemptions == 0
    assert bench.outcome(request_id) == bench.alone(request_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_stream_goes_on_with_the_same_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    bench = Bench(n_ctx=24, n_seq_max=3, n_batch=4, answer=endless)
    request_ids = [bench.submit(bytes([letter]) * 4, params=params) for letter in b"xyz"]
    bench.run()
    assert bench.core.recorder.n_preemptions > 0
    preempted = [r for r in request_ids if bench.finished[r].completion.timings.n_preemptions]
    assert preempted, "the completion says so"
    assert request_ids[0] not in preempted, "the oldest never is"
    for request_id in request_ids:
        assert bench.outcome(request_id) == bench.alone(request_id)
        assert len(bench.tokens[request_id]) == 24 - 4 + 1
    bench.check_idle()


def test_the_thousandth_request_costs_what_the_first_did() -> None:
    bench = Bench(n_seq_max=2, answer=says(b"answer", n_prompt=6))
    costs = []
    for _ in range(200):
        before = (bench.core.recorder.n_ticks, bench.core.recorder.n_decode_rows)
        bench.submit(b"prompt")
        bench.run()
        after = (bench.core.recorder.n_ticks, bench.core.recorder.n_decode_rows)
        costs.append((after[0] - before[0], after[1] - before[1]))
    assert set(costs) == {(7, 12)}
    bench.check_idle()


# --- Faults -------------------------------------------------------------------------------------
FAILING: list[tuple[Fault, type[LlamaCallError]]] = [
    (1, NoKVSlotError), (-1, InvalidBatchError), (-2, DecodeFailedError), (-3, DecodeFailedError),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "error_type"), FAILING)
@pytest.mark.parametrize("n_decode", [1, 2, 3, 4])
def test_a_failed_decode_ends_what_was_in_it_and_nothing_else(
    fault: Fault, error_type: type[LlamaCallError], n_decode: int
) -> None:
    bench = Bench(n_seq_max=2, n_batch=4, answer=endless, faults={n_decode: fault})
    inside = [bench.submit(b"xy"), bench.submit(b"yz")]
    outside = bench.submit(b"z")
    bench.run()
    for request_id in inside:
        error = bench.finished[request_id].error
        assert isinstance(error, GenerationError)
        assert isinstance(error.__cause__, error_type)
        assert error.completion is bench.finished[request_id].completion
        assert len(error.completion.token_ids) == n_decode - 1
    assert bench.outcome(outside) == bench.alone(outside)
    bench.check_outcomes()
    bench.check_idle()


@pytest.mark.parametrize("n_decode", [1, 2, 3, 4, 5])
def test_an_aborted_decode_is_tried_again_and_nobody_notices(n_decode: int) -> None:
    bench = Bench(n_seq_max=2, n_batch=4, answer=endless, faults={n_decode: 2})
    for prompt in (b"uvwx", b"vw", b"w"):
        bench.submit(prompt, params=SamplingParams(temperature=0, max_tokens=6))
    bench.run(at_most=60)
    bench.check_outcomes()
    assert {event.error for event in bench.finished.values()} == {None}
    bench.check_idle()


def test_nan_in_one_row_ends_only_its_request() -> None:
    bench = Bench(answer=endless, faults={3: "nan"})
    request_ids = [bench.submit(prompt) for prompt in (b"x", b"y", b"z")]
    bench.run()
    error = bench.finished[request_ids[0]].error
    assert isinstance(error, GenerationError)
    assert isinstance(error.__cause__, NotFiniteError)
    assert len(bench.tokens[request_ids[0]]) == 2
    for request_id in request_ids[1:]:
        assert bench.outcome(request_id) == bench.alone(request_id)
    bench.check_idle()


def test_a_sampler_that_cannot_be_made_ends_only_its_request() -> None:
    bench = Bench()
    refuse = RuntimeError("no such sampler")

    def make_sampler(params: SamplingParams) -> None:
        if params.top_k == 7:
            raise refuse

    bench.core = EngineCore(bench.decoder, VOCABULARY, bench.books, make_sampler)
    good = bench.submit()
    bad = bench.submit(params=SamplingParams(top_k=7))
    bench.hear()
    error = bench.finished[bad].error
    assert error is not None
    assert error.__cause__ is refuse
    bench.run()
    assert bench.outcome(good) == bench.alone(good)
    bench.check_idle()


def test_a_sampler_that_fails_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(answer=endless)
    bad, good = bench.submit(params=SamplingParams()), bench.submit(params=SamplingParams())

    def fail(logits: NDArray[np.float32]) -> int:
        raise RuntimeError("no choice")

    monkeypatch.setattr(bench.samplers[0], "sample", fail)
    bench.run()
    error = bench.finished[bad].error
    assert error is not None
    assert isinstance(error.__cause__, RuntimeError)
    assert bench.outcome(good) == bench.alone(good)
    bench.check_idle()


class _Refusing(WatchedDecoder):
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return False


class _Pretending(WatchedDecoder):
    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return True


@pytest.mark.parametrize("decoder_type", [_Refusing, _Pretending])
def test_a_sequence_that_does_not_leave_the_cache_is_an_error(
    decoder_type: type[WatchedDecoder],
) -> None:
    bench = Bench(answer=endless, decoder_type=decoder_type)
    request_id = bench.submit(b"xy")
    bench.tick()
    with pytest.raises(LlamaCallError, match="seq_id 0 still ends at 1") as caught:
        bench.core.cancel(request_id)
    assert caught.value.function == "llama_memory_seq_rm"


def test_a_failed_engine_ends_every_request_and_leaves_the_decoder_alone() -> None:
    bench = Bench(n_seq_max=1, answer=endless)
    running, waiting = bench.submit(b"xy"), bench.submit(b"yz", params=SamplingParams())
    bench.tick(2)
    cells, cause = dict(bench.decoder.cells), RuntimeError("power cut")
    bench.core.fail_all(cause)
    assert bench.decoder.cells == cells
    ends = [event for event in bench.core.events if isinstance(event, Finished)]
    assert {event.request_id for event in ends} == {running, waiting}
    for event in ends:
        assert isinstance(event.error, EngineFailedError)
        assert event.error.__cause__ is cause
        assert event.error.completion is event.completion
    assert [sampler.n_closed for sampler in bench.samplers] == [1]


def test_another_exception_of_a_decode_is_not_swallowed() -> None:
    bench = Bench(faults={1: MemoryError("scripted")})
    bench.submit()
    with pytest.raises(MemoryError, match="scripted"):
        bench.core.tick()


# --- Statistics ---------------------------------------------------------------------------------
def test_statistics_count_what_was_computed() -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=6))
    bench.submit(b"prompt")
    bench.run()
    statistics = bench.core.statistics()
    assert (statistics.n_ticks, statistics.n_decoding_ticks) == (5, 4)
    assert statistics.n_prefill_tokens == 6
    assert statistics.n_output_tokens == statistics.n_decoding_rows == 4
    assert statistics.n_decode_rows == 6 + 3
    assert statistics.n_finished == {FinishReason.STOP: 1}


def test_an_aborted_decode_counts_no_prompt_token_twice() -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=6), faults={1: 2})
    bench.submit(b"prompt")
    bench.run(at_most=60)
    assert bench.core.statistics().n_prefill_tokens <= 6


def test_timings_are_taken_from_the_clock() -> None:
    bench = Bench(n_batch=4, answer=says(b"abc", n_prompt=6))
    request_id = bench.submit(b"prompt")
    for _ in range(5):
        bench.now += 1.0
        bench.tick()
    timings = bench.finished[request_id].completion.timings
    assert (timings.queued_s, timings.prefill_s, timings.decode_s) == (1.0, 1.0, 3.0)
    assert (timings.ttft_s, timings.total_s) == (2.0, 5.0)
    assert (timings.itl_p50_s, timings.itl_max_s, timings.n_preemptions) == (1.0, 1.0, 0)
