"""Simulator: the core of an engine on a fake decoder, with a clock that only its user moves.

It needs no thread, no event loop and no libllama.  All invariants are checked after each `tick`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm import EngineConfig
from cllm.bindings._rollback import Rollback
from cllm.bindings.batch import Run
from cllm.engine.core.commands import Finished, MediaEncoded, Progressed
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.media_store import MediaStore
from cllm.engine.core.ngram_drafter import NgramDrafter
from cllm.engine.core.row_cost import RowCost
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.core.sequence import Sequence as RunningSequence
from cllm.engine.core.speculation import N_DRAFT_ROWS, BudgetedSpeculation, Drafter
from cllm.engine.loop.request_call import texts_told
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.media import MediaInput
from cllm.engine.media_rows import Spans
from cllm.engine.output import FinishReason
from cllm.engine.request import GenerationRequest, SequenceState
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import Answer, FakeDecoder, Fault, Latency, Poison
from cllm.testing.fake_media import FakeChunk
from tests.simulation.expect import demand, expect
from tests.simulation.oracle_drafter import NextToken, OracleDrafter
from tests.simulation.reference import (
    COMPLETED,
    END,
    VOCABULARY,
    CountingSampler,
    Outcome,
    alone,
    babble,
    shifted,
)

ABOUT_REQUESTS = (Progressed, Finished)


class WatchedDecoder(FakeDecoder):
    """A fake that remembers its batches: seq_id, rows and output rows of each run."""

    batches: list[list[tuple[int, int, int]]]
    on_decode: Callable[[], None] = staticmethod(lambda: None)
    rollback: Rollback | None = None  # of memory with states

    def decode(self) -> NDArray[np.float32]:
        self.batches.append([(r.seq_id, len(r.tokens), r.n_outputs) for r in self.runs])
        self.on_decode()
        logits = super().decode()
        if self.rollback is not None:
            self.rollback.decoded([Run(r.seq_id, r.p0, len(r.tokens)) for r in self.runs])
        return logits

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        end = (self.seq_pos_max(seq_id) or 0) + 1
        if self.rollback and p0 and p0 < end and not self.rollback.take(seq_id, end - p0):
            return False
        return super().seq_rm(seq_id, p0, p1)


class FakeEncoder:
    """An encoder that encodes a chunk whenever the simulator says so.

    An image is its rows: the pixels are their numbers, int32.
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[MediaInput, int]] = []
        self.n_encoded = 0

    @property
    def is_computing(self) -> bool:
        """True while a chunk waits."""
        return bool(self.jobs)

    def encode(self, media: MediaInput, ordinals: tuple[int, ...]) -> None:
        self.jobs += [(media, ordinal) for ordinal in ordinals]

    def cancel(self, digest: bytes) -> None:
        self.jobs = [job for job in self.jobs if job[0].digest != digest]

    def next(self) -> MediaEncoded:
        media, ordinal = self.jobs.pop(0)
        self.n_encoded += 1
        rows = np.frombuffer(media.data, np.int32).tolist()
        span = Spans.of(rows)[ordinal]
        return MediaEncoded(media.digest, ordinal, FakeChunk(rows[span.start : span.end]))


class _Clock:
    """The clock of a simulator.

    The core refers only to the clock and the list of samplers, not to the simulator.  So there is no
    reference cycle, and an unused simulator is freed at once, without the garbage collector.
    """

    def __init__(self) -> None:
        self.now = 1.0

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Simulator:
    """The core of an engine on a fake decoder, and the events of its requests.

    A reader takes every delta at once unless its request is in `stopped`.  Only decodes take time.  Output
    token n of a request that is not greedy, counted from 0, is n letters after the best one: this shows
    lost and repeated choices.

    Parameters
    ----------
    n_ctx, n_seq_max, n_batch, kv_unified, **options
        Fields of `EngineConfig`.
    answer, faults, call_faults, poison, latency_s
        Options of `FakeDecoder`; its latency advances `now`.
    decoder_type : type, optional
        Another decoder, for example one with faults.
    is_checked : bool
        True: `check` runs after every tick.
    has_pos_min, is_windowed : bool
        `has_pos_min=False` is the memory of recurrent models, `is_windowed=True` that of a sliding window.
    n_rollback : int
        Number of positions of its last decode that a sequence of a recurrent model can remove.
    can_copy : bool
        False: no sequence can be copied.
    draft_share : float, optional
        Share of right drafts of an `OracleDrafter`; None: `speculation` of the configuration decides.

    Attributes
    ----------
    core : EngineCore
    decoder : WatchedDecoder
    kv_cache : KVCache
    now : float
        Present time in seconds; starts at 1.
    requests : dict
        All submitted requests by id.
    stopped : set of str
        Ids of requests whose readers do not read.
    tokens, texts : dict
        Tokens and text of all deltas so far, by request id.
    finished : dict
        Last event of each ended request, by request id.
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
        latency_s: Latency = 0.0,
        is_checked: bool = True,
        has_pos_min: bool = True,
        is_windowed: bool = False,
        n_rollback: int = 0,
        can_copy: bool = True,
        draft_share: float | None = None,
        separates_prompts: bool = False,
        max_tick_s: float | None = None,
        prefix_cache_bytes: int = 1 << 20,
        media_cache_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            kv_unified=kv_unified,
            prefix_cache_bytes=prefix_cache_bytes,
            **options,
        )
        state_bytes = int(not (has_pos_min or is_windowed))
        layout = self.config.kv_layout(
            n_ctx, state_bytes=state_bytes, is_windowed=is_windowed, can_copy=can_copy
        )
        n_seq_ids = min(layout.n_seq_ids, n_ctx)
        self._clock = _Clock()
        is_drafting = draft_share is not None or self.config.reserves_drafts
        self.decoder = decoder_type(
            n_ctx=n_ctx,
            n_seq_max=n_seq_ids,
            n_batch=n_batch,
            kv_unified=kv_unified,
            n_outputs_max=n_seq_ids + (N_DRAFT_ROWS if is_drafting else 0),
            answer=answer,
            faults=faults,
            call_faults=call_faults,
            poison=poison,
            latency_s=latency_s,
            wait=self._clock.wait,
            separates_prompts=separates_prompts,
            max_tick_s=max_tick_s,
        )
        self.decoder.batches = []
        if n_rollback and state_bytes:
            n_ubatch = min(self.config.n_ubatch, n_batch)
            self.decoder.rollback = Rollback(n_rollback, n_ubatch, any_order=kv_unified)
        self.is_checked = is_checked
        self.kv_cache = KVCache(
            n_cells=n_ctx,
            n_seq_ids=n_seq_ids,
            n_ctx_seq=self.decoder.n_ctx_seq,
            kv_unified=kv_unified,
            has_pos_min=has_pos_min and not is_windowed,
            is_windowed=is_windowed,
            n_rollback=n_rollback,
            can_copy=can_copy,
        )
        self.encoder = FakeEncoder()
        self.samplers: list[CountingSampler] = []
        self._make_sampler = partial(_make_sampler, self.samplers)
        self._drafter: Drafter | None = None
        if draft_share is not None:
            self._drafter = OracleDrafter(_next_token_of(answer), draft_share)
        elif self.config.reserves_drafts:
            self._drafter = NgramDrafter()
        self._media_cache_bytes = media_cache_bytes
        self.core = self._make_core()
        self.requests: dict[str, GenerationRequest] = {}
        self.stopped: set[str] = set()
        self.unread: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.texts: dict[str, str] = defaultdict(str)
        self.finished: dict[str, Finished] = {}

    def _make_core(self) -> EngineCore:
        row_cost, speculation = RowCost(), None
        if self._drafter is not None:
            speculation = BudgetedSpeculation(
                self._drafter,
                row_cost,
                self.kv_cache,
                stream_buffer=self.config.stream_buffer,
            )
        return EngineCore(
            self.decoder,
            VOCABULARY,
            self.kv_cache,
            self._make_sampler,
            LogprobReader(VOCABULARY, self.decoder.n_vocab).read,
            self.config,
            clock=self._clock.read,
            speculation=speculation,
            row_cost=row_cost,
            media=MediaStore(self.encoder, self._media_cache_bytes),
        )

    @property
    def now(self) -> float:
        return self._clock.now

    @now.setter
    def now(self, seconds: float) -> None:
        self._clock.now = seconds

    def submit(
        self,
        prompt: Sequence[int] | bytes = b"prompt",
        *,
        params: SamplingParams | None = None,
        priority: int = 0,
        timeout: float | None = None,
        generated: Sequence[int] = (),
        resamples: bool = False,
        lora: LoraUse = NO_LORA,
        state: SequenceState | None = None,
        tenant: str = "",
        media: Sequence[MediaInput] = (),
        **sampling: Any,
    ) -> str:
        """Submit a request, with temperature 0 by default, and return its id (r0, r1, …)."""
        serial = len(self.requests)
        request = GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=tuple(prompt),
            params=params or SamplingParams(**{"temperature": 0, **sampling}),
            priority=priority,
            submitted_at=self.now,
            deadline=None if timeout is None else self.now + timeout,
            generated_token_ids=tuple(generated),
            resamples=resamples,
            lora=lora,
            state=state,
            tenant=tenant,
            media=tuple(media),
        )
        self.requests[request.request_id] = request
        self.core.queue.submit(request)
        return request.request_id

    def tick(self, n_ticks: int = 1) -> set[str]:
        """Run ticks with checks; return the requests that got a token or an end in the last one."""
        heard: set[str] = set()
        for _ in range(n_ticks):
            self.core.tick()
            if self.encoder.jobs:  # one chunk in the time of a tick
                self.core.handle(self.encoder.next())
            heard = self.hear()
            self.trim()
        return heard

    def trim(self) -> None:
        """Let the prefixes go that are too many after a tick, and check the limits."""
        kv_cache, cells = self.kv_cache, self.core.manager.cells
        cells.trim()
        if self.is_checked and cells.fault is None:
            self.check()
            n_cells = self.config.n_prefix_cache_tokens(kv_cache.n_cells)
            demand(kv_cache.n_cached <= n_cells, "more cells cached than may be")
            n_ids = kv_cache.n_seq_ids - self.config.n_seq_max * kv_cache.shares_cells
            demand(kv_cache.n_cached_ids <= n_ids, "more seq_ids cached than may be")

    def run(self, *, at_most: int = 500) -> None:
        """Tick until there is nothing to do."""
        for _ in range(at_most):
            if not (self.core.has_work or self.encoder.jobs):
                return
            self.tick()
        queue = self.core.queue
        raise AssertionError(f"still working: {queue.running} {queue.waiting}")

    def read_on(self, request_id: str) -> None:
        """Let a stopped reader take all unread deltas, and read on from there."""
        self.stopped.discard(request_id)
        self._read(request_id)

    def _read(self, request_id: str) -> None:
        self.core.queue.read(request_id, self.unread.pop(request_id, 0))

    def is_paused(self, request_id: str) -> bool:
        return self.unread[request_id] >= self.config.stream_buffer

    def hear(self) -> set[str]:
        """Take and check the events of the core; return the ids of their requests."""
        heard: set[str] = set()
        for event in self.core.take_events():
            if not isinstance(event, ABOUT_REQUESTS):
                raise AssertionError(f"an event about no request: {event}")
            request_id, delta = event.request_id, event.delta
            heard.add(request_id)
            demand(request_id not in self.finished, "an event after the last one")
            self.tokens[request_id] += delta.token_ids
            self.texts[request_id] += delta.text
            if isinstance(event, Finished):
                self.finished[request_id] = event
                ended = event.completion
                expect(delta.finish_reason, ended.finish_reason, "finish_reason of the last delta")
                expect(delta.stop_reason, ended.stop_reason, "stop_reason of the last delta")
            else:
                expect(delta.finish_reason, None, "finish_reason of a delta before the last")
                self.unread[request_id] += 1
                n_unread = self.unread[request_id]
                demand(n_unread <= self.config.stream_buffer, "more deltas than stream_buffer")
                if request_id not in self.stopped:
                    self._read(request_id)
        if self.is_checked:
            self.check()
        return heard

    def check(self) -> None:
        """Check the invariants that hold between any two steps."""
        core, kv_cache, decoder, queue = self.core, self.kv_cache, self.decoder, self.core.queue
        alive = {s.request.request_id for s in queue.running + queue.waiting}
        demand(alive.isdisjoint(self.finished), "a request runs or waits after its last event")
        expect(alive | self.finished.keys(), self.requests.keys(), "requests alive or ended")
        expect(len(queue.running) + len(queue.waiting), len(alive), "places in the queue")
        if core.manager.cells.fault is not None:
            return  # the next tick recreates the context
        expect(core.discrepancies(), [], "where the bookkeeping and the cache differ")
        held = {seq_id_of(s): s.tokens[: s.n_computed] for s in queue.running}
        cached = {e.slot.seq_id: e.tokens.tolist() for e in core.manager.cells.prefixes.entries}
        demand(held.keys().isdisjoint(cached), "a seq_id has a request and is cached")
        occupied = {i: tokens for i, tokens in (held | cached).items() if tokens}
        expect(decoder.cells, occupied, "tokens in the cache, by seq_id")
        uses = {seq_id_of(s): s.request.lora for s in queue.running}
        uses |= {e.slot.seq_id: e.lora for e in core.manager.cells.prefixes.entries}
        for seq_id, loras in decoder.cell_loras.items():
            expect(
                loras, [*map(uses[seq_id].at, range(len(loras)))], f"adapters of seq_id {seq_id}"
            )
        expect(decoder.n_cells_used, kv_cache.n_held, "cells in use")
        demand(decoder.n_cells_used <= decoder.n_ctx, "more cells in use than there are")
        expect(
            (len(held), len(kv_cache.live_ids)), (len(queue.running),) * 2, "seq_ids of requests"
        )
        demand(len(held) <= self.config.n_seq_max, "more sequences run than n_seq_max")
        expect(kv_cache.n_cached_ids, len(cached), "seq_ids of the prefix cache")
        demand(
            all(s.placement.slot is None for s in queue.waiting), "a waiting request has a seq_id"
        )
        demand(
            all(s.placement.swapped is None for s in queue.running),
            "a running request is swapped out",
        )
        saved, n_prefix_bytes = core.manager.saved, 0
        if saved.tiers is not None:
            n_prefix_bytes = saved.tiers.n_bytes
        placements = [s.placement for s in queue.waiting]
        demand(all(p.restores is None for p in placements), "who waits holds a prefix of others")
        states = [p.swapped for p in placements if p.swapped is not None]
        n_bytes = n_prefix_bytes + sum(len(state.data) for state in states)
        expect(saved.n_bytes, n_bytes, "bytes of states in host memory")
        # The state of a resumed request may exceed the limit; then no prefix is held.
        n_most = max(self.config.prefix_cache_bytes or 0, n_bytes - n_prefix_bytes)
        demand(n_bytes <= n_most, "more bytes of states than may be")

    def check_idle(self) -> None:
        """Check the invariants of an engine without requests, and empty its prefix cache."""
        queue, kv_cache = self.core.queue, self.kv_cache
        expect(sorted(self.finished), sorted(self.requests), "requests that got their last event")
        expect(
            (kv_cache.n_used, len(kv_cache.live_ids)), (0, 0), "cells and seq_ids of requests, idle"
        )
        expect((queue.running, queue.waiting), ([], []), "who runs and who waits, idle")
        expect((self.core.has_work, self.core.next_deadline), (False, None), "work, and deadlines")
        demand(all(s.n_closed == 1 for s in self.samplers), "a sampler was not closed once")
        told = self.core.statistics()
        expect(sum(told.n_finished.values()), len(self.requests), "n_finished")
        expect(
            (told.n_kv_cells_used, told.n_seq_ids_used), (0, 0), "n_kv_cells_used, n_seq_ids_used"
        )
        n_alive = told.n_running, told.n_waiting, told.n_paused
        expect(n_alive, (0, 0, 0), "n_running, n_waiting, n_paused")
        self.core.manager.cells.evict_all()
        n_left = kv_cache.n_cached, kv_cache.n_cached_ids, kv_cache.n_free
        expect(
            n_left, (0, 0, kv_cache.n_cells), "cells, seq_ids, free cells of an empty prefix cache"
        )
        expect(self.decoder.cells, {}, "tokens in an empty cache")
        expect(self.core.discrepancies(), [], "where the bookkeeping and an empty cache differ")

    def outcome(self, request_id: str) -> Outcome:
        """Return the outcome of a request, after a check that its events and its completion agree."""
        completion = self.finished[request_id].completion
        prompt = self.requests[request_id].prompt_token_ids
        expect(tuple(self.tokens[request_id]), completion.token_ids, f"deltas of {request_id}")
        expect(self.texts[request_id], completion.text, f"texts of the deltas of {request_id}")
        expect(completion.prompt_token_ids, prompt, f"prompt of {request_id}")
        expect(completion.usage.n_output, len(completion.token_ids), f"n_output of {request_id}")
        return Outcome(
            completion.token_ids,
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
        )

    def _whole(self, request_id: str) -> Outcome:
        """Return the outcome with the tokens, and their text, that the request continued from."""
        outcome, request = self.outcome(request_id), self.requests[request_id]
        told = texts_told(
            request.generated_token_ids, request.params, VOCABULARY, spelled={}, strips_space=False
        )
        return outcome._replace(
            token_ids=request.generated_token_ids + outcome.token_ids,
            text="".join(told) + outcome.text,
        )

    def alone(self, request_id: str) -> Outcome:
        """Return the expected outcome of a request that runs alone."""
        request = self.requests[request_id]
        return alone(
            request.prompt_token_ids,
            request.params,
            self.decoder.n_ctx_seq,
            self.decoder.answer,
            request.lora,
        )

    def failed(self) -> set[str]:
        """Requests that ended with an error."""
        return {r for r, event in self.finished.items() if event.error is not None}

    def check_outcomes(self) -> None:
        """Check each answer: complete ones equal the answer alone, the others are a beginning of it."""
        for request_id, event in self.finished.items():
            actual, expected = self._whole(request_id), self.alone(request_id)
            if actual.reason in COMPLETED:
                expect(actual, expected, f"answer of {request_id}")
            else:
                beginning = expected.token_ids[: len(actual.token_ids)]
                expect(actual.token_ids, beginning, f"beginning of the answer of {request_id}")
                is_error = actual.reason is FinishReason.ERROR
                expect(event.error is not None, is_error, f"whether {request_id} has an error")


def _next_token_of(answer: Answer) -> NextToken:
    def next_token(sequence: RunningSequence, tokens: list[int]) -> int | None:
        token = answer(tokens)
        if token == END:
            return None
        n_said = len(tokens) - sequence.n_prompt
        return token if sequence.request.params.is_greedy else shifted(token, n_said)

    return next_token


def _make_sampler(
    samplers: list[CountingSampler], request: GenerationRequest
) -> CountingSampler | None:
    if request.params.is_greedy:
        return None
    samplers.append(CountingSampler())
    return samplers[-1]
