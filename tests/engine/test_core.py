"""EngineCore on a fake decoder and a manual clock: what one tick does, and any mix of ticks."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from cllm.engine.handoff import Finished, Progressed
from cllm.engine.kv_cache import KVCache
from cllm.engine.request import FinishReason, GenerationRequest, SamplingParams
from cllm.engine.tick import EngineCore
from cllm.testing import FakeDecoder, FakeVocabulary
from cllm.testing.fake_decoder import Answer, Fault

DETERMINISTIC = settings(
    derandomize=True, deadline=None, max_examples=150, stateful_step_count=50, database=None
)
VOCABULARY = FakeVocabulary()
END = FakeVocabulary.END
COMPLETED = {FinishReason.STOP, FinishReason.LENGTH}

# Letters, parts of characters and an end now and then: every kind of ending is met.
ALPHABET = (*b"aaabbbc", *"é€".encode(), 0xFF, END)


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

    def run(self, *, at_most: int = 2000) -> None:
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

    @rule(fault=st.sampled_from(FAULTS))
    def break_the_next_decode(self, fault: Fault) -> None:
        self.bench.decoder.faults[self.bench.decoder.n_decodes + 1] = fault

    @rule(n_ticks=st.integers(1, 5))
    def tick(self, n_ticks: int) -> None:
        for _ in range(n_ticks):
            self._tick()

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
