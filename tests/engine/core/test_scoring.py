"""Every prompt token gets one log probability, of the right row, whatever happens meanwhile.

The fake's logits are 1 for the answer to all tokens so far and 0 for the others: what a token has to
get follows from the tokens before it alone, and a row of another place or sequence tells.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cllm.engine.core.cells import MIN_STREAM_SHARE
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.output import FinishReason, TokenLogprob
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import NotFiniteError
from cllm.engine.sampling_params import SamplingParams
from cllm.testing import FakeVocabulary
from cllm.testing.fake_decoder import Fault
from tests.conftest import some_in_fast
from tests.engine.core.test_engine_core_machine import DETERMINISTIC, PARAMS, PROMPTS, CoreMachine
from tests.simulation.reference import COMPLETED, endless
from tests.simulation.simulator import Simulator

LOG_TOTAL = math.log(FakeVocabulary.n_tokens - 1 + math.e)
CULPRIT = b"!"[0]
Scores = tuple[TokenLogprob | None, ...]
N_DECODES = 60
LAYOUTS = pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "per-sequence"])
MEMORIES: list[dict[str, Any]] = [
    {}, {"is_windowed": True}, {"has_pos_min": False}, {"kv_unified": False, "n_ctx": 120},
]  # fmt: skip


def submit_scored(
    sim: Simulator,
    prompt: bytes,
    first_scored: int | None = 1,
    *,
    params: SamplingParams | None = None,
    priority: int = 0,
    **sampling: Any,
) -> str:
    """Submit a request whose prompt is scored from a token on."""
    serial, params = len(sim.requests), params or SamplingParams(temperature=0, **sampling)
    request = GenerationRequest(
        f"r{serial}", serial, tuple(prompt), params, priority, sim.now, None, first_scored
    )
    sim.requests[request.request_id] = request
    sim.core.queue.submit(request)
    return request.request_id


def check_scores(sim: Simulator) -> None:
    """Whoever has a token has all scores of its prompt, the others the beginning of them."""
    for request_id, event in sim.finished.items():
        request, completion = sim.requests[request_id], event.completion
        prompt, params, first = request.prompt_token_ids, request.params, request.first_scored
        scores, of_output = completion.prompt_logprobs, completion.logprobs
        assert (scores is None, of_output is None) == (first is None, params.logprobs is None)
        if scores is not None and first is not None:
            assert scores[:first] == (None,) * first
            is_whole = completion.token_ids or completion.finish_reason in COMPLETED
            assert len(scores) == len(prompt) if is_whole else first <= len(scores) <= len(prompt)
            check_each(sim, prompt, scores[first:], first, params.prompt_logprobs or 0)
        if of_output is not None:
            tokens = prompt + completion.token_ids
            assert len(of_output) == len(completion.token_ids)
            check_each(sim, tokens, of_output, len(prompt), params.logprobs or 0)


def check_each(
    sim: Simulator, tokens: tuple[int, ...], scores: Scores, first: int, n_top: int
) -> None:
    """These are the scores of the tokens from the first on, each after those before it."""
    for index, score in enumerate(scores, first):
        best = sim.decoder.answer(tokens[:index])
        assert score is not None
        assert score.token_id == tokens[index]
        assert score.logprob == pytest.approx((tokens[index] == best) - LOG_TOTAL, abs=1e-6)
        assert [other.token_id for other in score.top[:1]] == [best][:n_top]
        assert len(score.top) == n_top


def check_all(sim: Simulator, *, is_undisturbed: bool = False) -> None:
    """After the last request: scores, tokens, batches, bookkeeping."""
    check_scores(sim)
    sim.check_outcomes()
    n_outputs = [sum(n for _, _, n in batch) for batch in sim.decoder.batches]
    assert max(n_outputs, default=0) <= sim.decoder.n_outputs_max
    if is_undisturbed:
        completions = [event.completion for event in sim.finished.values()]
        n_scores = sum(s is not None for c in completions for s in c.prompt_logprobs or ())
        n_tokens = sum(len(c.token_ids) for c in completions)
        assert sum(n_outputs) == n_scores + n_tokens, "no output row is computed in vain"
        for request_id, event in sim.finished.items():
            first = sim.requests[request_id].first_scored
            assert first is None or event.completion.usage.n_cached <= first - 1
    sim.check_idle()


def prompt_of(n_tokens: int, letter: int = ord("p")) -> bytes:
    """A prompt with likely tokens and unlikely ones."""
    tokens = [letter]
    while len(tokens) < n_tokens:
        tokens.append(endless(tokens) if len(tokens) % 3 else letter)
    return bytes(tokens)


def mixed(**options: Any) -> Simulator:
    """Nine requests on three seq_ids, most of them scored: sharing, preemption, swaps, samplers."""
    values = {"n_ctx": 64, "n_seq_max": 3, "n_batch": 8, "latency_s": 0.01, "is_checked": False}
    sim = Simulator(answer=endless, **{**values, **options})
    for number, letter in enumerate(b"abcdefghi"):
        prompt = b"shared head"[: number % 12] + prompt_of(9 + number, letter)
        params = SamplingParams(
            temperature=float(number % 2), max_tokens=10 + number, prompt_logprobs=number % 3,
            logprobs=(None, 0, 1)[number % 3],
        )  # fmt: skip
        first_scored = None if number % 4 == 3 else 1 if number % 3 else 1 + number
        submit_scored(sim, prompt, first_scored, params=params, priority=number % 2)
    return sim


# --- Chunks, batches, layouts -------------------------------------------------------------------
@LAYOUTS
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n_seq_max", some_in_fast([5, 1, 2]))
@pytest.mark.parametrize(
    "n_batch",
    [5, pytest.param(6, marks=pytest.mark.full), 8, pytest.param(64, marks=pytest.mark.full)],
)
def test_every_prompt_token_is_scored_in_chunks_of_any_size_and_in_any_batch(
    n_batch: int, n_seq_max: int, prefix_cache: bool, kv_unified: bool
) -> None:
    sim = Simulator(
        n_ctx=400, n_seq_max=n_seq_max, n_batch=n_batch, kv_unified=kv_unified, answer=endless,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    for n_tokens in (1, 2, 3, 7, 20, 33, 64, sim.decoder.n_ctx_seq):
        prompt = prompt_of(n_tokens)
        for first_scored in {1, (n_tokens + 1) // 2, n_tokens}:
            submit_scored(sim, prompt, first_scored, prompt_logprobs=1, max_tokens=3, logprobs=2)
        sim.submit(prompt, max_tokens=2, logprobs=0)
    sim.run(at_most=2000)
    assert {event.completion.finish_reason for event in sim.finished.values()} <= COMPLETED
    check_all(sim, is_undisturbed=True)


@pytest.mark.parametrize("n_top", [0, 1, 5, 256])
def test_alternatives_come_as_asked_for(n_top: int) -> None:
    sim = Simulator(answer=endless)
    submit_scored(sim, prompt_of(9), prompt_logprobs=n_top, logprobs=n_top, max_tokens=4)
    sim.run()
    check_all(sim, is_undisturbed=True)


def test_what_was_sampled_does_not_change_how_likely_it_was() -> None:
    sim = Simulator(answer=endless)  # its sampler chooses letters after the best one
    request_id = sim.submit(b"prompt", max_tokens=5, logprobs=1, temperature=1.0)
    sim.run()
    scores = sim.finished[request_id].completion.logprobs or ()
    assert [score.token_id == score.top[0].token_id for score in scores] == [True] + [False] * 4
    check_all(sim, is_undisturbed=True)


def test_scored_prompts_take_the_output_rows_that_nobody_else_needs() -> None:
    sim = Simulator(n_ctx=400, n_seq_max=4, n_batch=64, answer=endless)
    stream = sim.submit(b"stream", max_tokens=100)
    sim.tick()
    for letter in b"pq":
        scored = submit_scored(sim, prompt_of(100, letter), max_tokens=1)
    while scored not in sim.finished:
        assert stream in sim.tick(), "it does not wait"
    n_outputs = [sum(n for _, _, n in batch) for batch in sim.decoder.batches]
    assert set(n_outputs[1:-1]) == {sim.decoder.n_outputs_max}
    sim.run()
    check_all(sim, is_undisturbed=True)


# --- Sharing ------------------------------------------------------------------------------------
@LAYOUTS
@pytest.mark.parametrize("first_scored", [1, 2, 30, 39, 40])
@pytest.mark.parametrize("kind", ["finished", "running"])
def test_a_scored_prompt_shares_what_comes_before_its_first_scored_row(
    kind: str, first_scored: int, kv_unified: bool
) -> None:
    sim = Simulator(n_ctx=16384, n_seq_max=2, n_batch=64, kv_unified=kv_unified, answer=endless)
    prompt = prompt_of(40)
    sim.submit(prompt, max_tokens=1 if kind == "finished" else 30)
    sim.tick(3)
    second = submit_scored(sim, prompt, first_scored, max_tokens=2)
    sim.run()
    is_worth_a_copy = kv_unified or first_scored - 1 >= sim.kv_cache.n_ctx_seq * MIN_STREAM_SHARE
    expected = first_scored - 1 if is_worth_a_copy else 0
    assert sim.finished[second].completion.usage.n_cached == expected
    check_all(sim, is_undisturbed=True)


@pytest.mark.parametrize(("n_ticks", "n_shared"), [(0, 0), (2, 16), (40, 40)])
def test_others_share_what_a_scored_prompt_has_computed(n_ticks: int, n_shared: int) -> None:
    sim = Simulator(n_ctx=1024, n_batch=64, answer=endless)
    submit_scored(sim, prompt_of(40) + b"a", max_tokens=1)
    sim.tick(n_ticks)
    plain = sim.submit(prompt_of(40) + b"b", max_tokens=2)
    sim.run()
    assert sim.finished[plain].completion.usage.n_cached == n_shared
    check_all(sim, is_undisturbed=True)


@pytest.mark.parametrize("at_once", [True, False])
def test_continuations_of_one_prompt_cost_one_prompt(at_once: bool) -> None:
    sim = Simulator(n_ctx=2048, n_seq_max=4, n_batch=64, answer=endless)
    prompt, ends = prompt_of(100), [bytes([letter]) * (1 + letter % 5) for letter in b"abcdefgh"]
    for end in ends:
        submit_scored(sim, prompt + end, len(prompt), max_tokens=1)
        if not at_once:
            sim.run()
    sim.run()
    n_own_rows = sum(1 + len(end) for end in ends)  # the last of the prompt is each one's own
    assert sim.core.statistics().n_prefill_tokens == len(prompt) - 1 + n_own_rows
    check_all(sim, is_undisturbed=True)


# --- Pressure -----------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix_cache_bytes", [1 << 20, 0], ids=["swapped", "recomputed"])
def test_a_prompt_that_is_preempted_half_scored_goes_on_where_it_was(
    prefix_cache_bytes: int,
) -> None:
    sim = Simulator(
        n_ctx=64, n_seq_max=3, n_batch=3, answer=endless, prefix_cache_bytes=prefix_cache_bytes, latency_s=0.01
    )  # fmt: skip
    for letter in b"xy":
        sim.submit(bytes([letter]) * 4, max_tokens=30)
    sim.tick(3)
    scored = submit_scored(sim, prompt_of(30), 3, max_tokens=5)
    while not any(s.n_preemptions for s in sim.core.queue.waiting):
        sim.tick()
    (victim,) = sim.core.queue.waiting
    assert victim.request_id == scored
    assert 3 < victim.n_scored < 30, "half scored"
    assert (victim.placement.swapped is not None) == (prefix_cache_bytes > 0)
    sim.run()
    check_all(sim, is_undisturbed=True)


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("n_batch", [4, 8, 32])
def test_a_mix_under_pressure_is_scored_right(n_batch: int, memory: dict[str, Any]) -> None:
    sim = mixed(n_batch=n_batch, is_checked=True, **memory)
    sim.run(at_most=2000)
    if not memory:
        statistics = sim.core.statistics()
        assert sim.decoder.n_decodes > N_DECODES
        assert min(statistics.n_preemptions, statistics.n_swaps, statistics.n_evictions) > 0
        assert statistics.n_cached_tokens > 0
    check_all(sim, is_undisturbed=True)


# --- Faults -------------------------------------------------------------------------------------
FAULTS: list[Fault] = [1, 2, -1, -2, RuntimeError("scripted"), "nan"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "n_times", "memory"),
    [
        *((fault, 1, {}) for fault in FAULTS),
        *((fault, 2, {}) for fault in FAULTS if fault not in (-1, "nan")),
        *((fault, 1, memory) for fault in (2, -2) for memory in MEMORIES[1:]),
    ],
    ids=str,
)
def test_a_decode_that_fails_costs_no_score_but_of_a_row_that_is_nan(
    fault: Fault, n_times: int, memory: dict[str, Any]
) -> None:
    n_failed = 0
    for n_decode in range(1, N_DECODES + 1, 1 if n_times == 1 and not memory else 3):
        sim = mixed(faults=dict.fromkeys(range(n_decode, n_decode + n_times), fault), **memory)
        sim.run(at_most=2000)
        errors = [sim.finished[request_id].error for request_id in sim.failed()]
        assert len(errors) <= min(fault == "nan", sim.decoder.n_rebuilds), f"decode {n_decode}"
        assert all(isinstance(error and error.__cause__, NotFiniteError) for error in errors)
        n_failed += len(errors)
        check_all(sim)
    assert (n_failed > N_DECODES // 2) == (fault == "nan")


@pytest.mark.parametrize("fault", [-1, -2, RuntimeError("scripted"), "nan"], ids=str)
@pytest.mark.parametrize("place", range(5))
def test_only_the_request_whose_rows_fail_alone_ends_with_an_error(
    fault: Fault, place: int
) -> None:
    sim = Simulator(
        n_ctx=256, n_seq_max=5, n_batch=16, answer=endless,
        poison=lambda run: fault if CULPRIT in run.tokens else None,
    )  # fmt: skip
    for number, letter in enumerate(b"abcde"):
        prompt = prompt_of(20, letter) + bytes([CULPRIT]) * (number == place)
        submit_scored(sim, prompt, 1 + 6 * (number % 3), max_tokens=5)
    sim.run()
    assert sim.failed() == {f"r{place}"}
    check_all(sim)


@pytest.mark.parametrize(
    "method", some_in_fast(["seq_rm", "seq_cp", "state_seq_get_data", "state_seq_set_data"], 2)
)
@pytest.mark.parametrize("fault", [False, RuntimeError("scripted")], ids=str)
def test_a_cache_call_that_fails_costs_no_score(method: str, fault: bool | Exception) -> None:
    sim = mixed()
    sim.run(at_most=2000)
    assert sim.decoder.n_calls[method] > 0
    for n_call in range(1, min(sim.decoder.n_calls[method], N_DECODES) + 1):
        sim = mixed(call_faults={(method, n_call): fault})
        sim.run(at_most=2000)
        assert sim.failed() == set(), f"call {n_call}"
        check_all(sim)


def test_a_request_that_ends_early_has_the_beginning_of_its_scores() -> None:
    seen = set()
    for n_ticks in range(12):
        sim = Simulator(n_ctx=128, n_batch=6, answer=endless)
        cancelled = submit_scored(sim, prompt_of(40), 2, max_tokens=9)
        submit_scored(sim, prompt_of(50), 40, max_tokens=2)
        sim.tick(n_ticks)
        sim.core.queue.cancel(cancelled)
        sim.run()
        assert sim.outcome(cancelled).reason is FinishReason.CANCELLED
        seen.add(len(sim.finished[cancelled].completion.prompt_logprobs or ()))
        check_all(sim)
    assert len(seen) > 5, "at every stage"


@pytest.mark.parametrize("n_before", [0, 1, 20])
def test_a_score_that_cannot_be_made_ends_only_its_request(
    n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spelling(vocabulary: FakeVocabulary, token: int) -> bytes:
        if token == CULPRIT:
            raise RuntimeError("no such spelling")
        return vocabulary.piece(token)

    sim = Simulator(n_ctx=128, answer=endless)
    bad = submit_scored(sim, prompt_of(1 + n_before) + bytes([CULPRIT]) + b"more")
    submit_scored(sim, prompt_of(30), max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(FakeVocabulary, "spelling", spelling)
        sim.run()
    assert sim.failed() == {bad}
    assert len(sim.finished[bad].completion.prompt_logprobs or ()) == 1 + n_before
    check_all(sim)


# --- Any mix of everything ----------------------------------------------------------------------
class ScoringMachine(CoreMachine):
    """The machine of the core, with scored requests among the others."""

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        n_top=st.sampled_from([(0, None), (2, 1)]),
        first_scored=st.integers(1, 20),
        priority=st.integers(-1, 1),
    )
    def submit_scored(
        self, prompt: bytes, params: SamplingParams, n_top: tuple[int, int | None],
        first_scored: int, priority: int,
    ) -> None:  # fmt: skip
        prompt = prompt[: self.sim.decoder.n_ctx_seq]
        params = replace(params, prompt_logprobs=n_top[0], logprobs=n_top[1])
        first = min(first_scored, len(prompt))
        submit_scored(self.sim, prompt, first, params=params, priority=priority)

    def _tick(self) -> None:
        sim, before = self.sim, set(self.sim.finished)
        fault = sim.decoder.faults.get(sim.decoder.n_decodes + 1, 0)
        owners: list[str] = []
        completing: set[str] = set()

        def look() -> None:
            running = {seq_id_of(s): s for s in sim.core.queue.running}
            for run in sim.decoder.runs:
                sequence = running[run.seq_id]
                owners.extend([sequence.request_id] * run.n_outputs)
                if len(run.tokens) == sequence.n_pending:
                    completing.add(sequence.request_id)

        sim.decoder.on_decode = look
        heard = sim.tick()
        ended = {r: sim.finished[r].completion.finish_reason for r in {*sim.finished} - before}
        late = {r for r, reason in ended.items() if reason is FinishReason.DEADLINE}
        failed = {r for r, reason in ended.items() if reason is FinishReason.ERROR}
        assert failed == (set(owners[:1]) if fault == "nan" else set()), "a fault that passes"
        assert heard - late - failed == (completing - failed if fault in (0, "nan") else set())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "sim"):
            check_all(self.sim)


TestScoringMachine = ScoringMachine.TestCase
TestScoringMachine.settings = DETERMINISTIC
