"""A core on a fake decoder with a clock that only tests move, and what requests give by definition."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm import EngineConfig
from cllm.engine.handoff import Finished, Progressed
from cllm.engine.kv_cache import KVCache
from cllm.engine.logprobs import LogprobReader
from cllm.engine.request import FinishReason, GenerationRequest
from cllm.engine.row_scan import RowScan
from cllm.engine.sampling import Mask
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.tick import EngineCore
from cllm.testing import FakeDecoder, FakeVocabulary
from cllm.testing.fake_decoder import Answer, Fault, Poison

VOCABULARY = FakeVocabulary()
END = FakeVocabulary.END
COMPLETED = {FinishReason.STOP, FinishReason.LENGTH}
GREEDY = SamplingParams(temperature=0)

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

    constraint = None

    def __init__(self) -> None:
        self.n_chosen = 0
        self.n_closed = 0

    is_greedy = False

    def may_be(self, token: int) -> bool:
        raise AssertionError(f"{token}: asked of those that are greedy")

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        return shifted(int(scan.row.argmax()), self.n_chosen)

    def accept(self, token: int) -> None:
        self.n_chosen += 1

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


@cache
def alone(
    prompt: tuple[int, ...], params: SamplingParams, n_ctx_seq: int, answer: Answer
) -> Outcome:
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
    """A core, and what its events said.

    A reader takes every delta at once unless its request is in `stopped`.  A decode takes
    `decode_s` of the clock's time, nothing else takes any.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 64,
        n_seq_max: int = 4,
        n_batch: int = 8,
        kv_unified: bool = True,
        answer: Answer = babble,
        faults: Mapping[int, Fault] | None = None,
        call_faults: Mapping[tuple[str, int], bool | Exception] | None = None,
        poison: Poison | None = None,
        decoder_type: type[WatchedDecoder] = WatchedDecoder,
        decode_s: float = 0.0,
        is_checked: bool = True,
        has_pos_min: bool = True,
        is_windowed: bool = False,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(
            n_ctx=n_ctx, n_seq_max=n_seq_max, n_batch=n_batch, kv_unified=kv_unified, **options
        )
        n_seq_ids = self.config.n_seq_ids
        self.decoder = decoder_type(
            n_ctx=n_ctx,
            n_seq_max=n_seq_ids,
            n_batch=max(n_batch, n_seq_ids),
            kv_unified=kv_unified,
            answer=answer,
            faults=faults,
            call_faults=call_faults,
            poison=poison,
        )
        self.decoder.n_batch = n_batch
        self.decoder.batches = []
        self.decode_s = decode_s
        self.decoder.on_decode = self._take_time
        self.now = 1.0
        self.is_checked = is_checked
        self.books = KVCache(
            n_cells=n_ctx,
            n_seq_ids=n_seq_ids,
            n_ctx_seq=self.decoder.n_ctx_seq,
            kv_unified=kv_unified,
            has_pos_min=has_pos_min and not is_windowed,
            is_windowed=is_windowed,
        )
        self.samplers: list[CountingSampler] = []
        self.core = self._make_core()
        self.requests: dict[str, GenerationRequest] = {}
        self.stopped: set[str] = set()
        self.unread: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.texts: dict[str, str] = defaultdict(str)
        self.finished: dict[str, Finished] = {}

    def _make_core(self) -> EngineCore:
        return EngineCore(
            self.decoder,
            VOCABULARY,
            self.books,
            self._make_sampler,
            LogprobReader(VOCABULARY, self.decoder.n_vocab).read,
            self.config,
            clock=lambda: self.now,
        )

    def _take_time(self) -> None:
        self.now += self.decode_s

    def _make_sampler(self, request: GenerationRequest) -> CountingSampler | None:
        if request.params.is_greedy:
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
        **sampling: Any,
    ) -> str:
        serial = len(self.requests)
        request = GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=tuple(prompt),
            params=params or SamplingParams(**{"temperature": 0, **sampling}),
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
        queue = self.core.queue
        raise AssertionError(f"still working: {queue.running} {queue.waiting}")

    def read_on(self, request_id: str) -> None:
        """A reader that had stopped takes what there is, and goes on."""
        self.stopped.discard(request_id)
        self._read(request_id)

    def _read(self, request_id: str) -> None:
        self.core.read(request_id, self.unread.pop(request_id, 0))

    def is_paused(self, request_id: str) -> bool:
        return self.unread[request_id] >= self.config.stream_buffer

    def hear(self) -> set[str]:
        """Take the events; the requests they are about."""
        events = self.core.take_events()
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
                self.unread[request_id] += 1
                assert self.unread[request_id] <= self.config.stream_buffer
                if request_id not in self.stopped:
                    self._read(request_id)
        if self.is_checked:
            self.check()
        return {event.request_id for event in events if isinstance(event, Progressed | Finished)}

    def check(self) -> None:
        """The invariants that hold between any two steps."""
        core, books, decoder, queue = self.core, self.books, self.decoder, self.core.queue
        alive = {s.request_id for s in queue.running + queue.waiting}
        assert alive.isdisjoint(self.finished)
        assert alive | set(self.finished) == set(self.requests), "no request is lost"
        assert len(queue.running) + len(queue.waiting) == len(alive)
        if core.manager.fault is not None:
            return  # the next tick makes the context anew
        assert core.discrepancies() == []
        held = {s.slot.seq_id: s.tokens[: s.n_computed] for s in queue.running if s.slot}
        cached = {e.slot.seq_id: e.tokens.tolist() for e in core.manager.prefixes.entries}
        assert held.keys().isdisjoint(cached)
        occupied = {i: tokens for i, tokens in (held | cached).items() if tokens}
        assert occupied == decoder.cells
        assert books.n_cells - books.n_free == decoder.n_cells_used <= decoder.n_ctx
        assert len(held) == len(queue.running) == books.n_live_ids <= self.config.n_seq_max
        assert books.n_cached_ids == len(cached)
        assert books.n_cached <= self.config.n_prefix_cache_tokens(books.n_cells)
        assert all(s.slot is None for s in queue.waiting)
        assert all(s.swapped is None for s in queue.running)

    def check_idle(self) -> None:
        """The invariants of an engine without requests."""
        queue, books = self.core.queue, self.books
        assert set(self.finished) == set(self.requests), "every request gets its last event"
        assert (books.n_used, books.n_live_ids) == (0, 0)
        assert not queue.running
        assert not queue.waiting
        assert not self.core.has_work
        assert self.core.next_deadline is None
        assert all(sampler.n_closed == 1 for sampler in self.samplers)
        statistics = self.core.statistics()
        assert sum(statistics.n_finished.values()) == len(self.requests)
        assert statistics.n_kv_cells_used == statistics.n_seq_ids_used == 0
        assert statistics.n_running == statistics.n_waiting == statistics.n_paused == 0
        self.core.reset_prefix_cache()
        assert (books.n_cached, books.n_cached_ids, books.n_free) == (0, 0, books.n_cells)
        assert self.decoder.cells == {}
        assert self.core.discrepancies() == []

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

    def failed(self) -> set[str]:
        """Requests that ended with an error."""
        return {r for r, event in self.finished.items() if event.error is not None}

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
