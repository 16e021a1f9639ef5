"""Faults of every call at every moment: who suffers is who caused it, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cllm.engine.constraint import Mask
from cllm.engine.core.commands import Finished
from cllm.engine.core.scheduler import seq_id_of
from cllm.engine.output import FinishReason
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.batch_sampler import NotFiniteError
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SamplingParams
from cllm.errors import (
    DecodeFailedError,
    EngineFailedError,
    GenerationError,
    InvalidBatchError,
)
from cllm.testing import FakeVocabulary
from cllm.testing.fake_decoder import FakeRun, Fault
from tests.conftest import few_in_fast, some_in_fast
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator, WatchedDecoder

N_CALLS = 200
# Every moment of the beginning, and then of every stage some; a proof tries all of the real calls.
SOME_CALLS = (*range(1, 21), *range(23, N_CALLS + 1, 6))
EVERY_CALL = range(1, N_CALLS + 1)
calls = pytest.mark.parametrize(
    "calls",
    [
        pytest.param(SOME_CALLS, id="some calls"),
        pytest.param(EVERY_CALL, id="every call", marks=pytest.mark.exhaustive),
    ],
)
CULPRIT = b"!"[0]


def mixed(**options: object) -> Simulator:
    """Nine requests on three seq_ids: sharing, eviction, preemption, swaps, samplers."""
    values = {"n_ctx": 64, "n_seq_max": 3, "n_batch": 8, "latency_s": 0.01, "is_checked": False}
    sim = Simulator(answer=endless, **{**values, **options})  # type: ignore[arg-type]
    for number, letter in enumerate(b"abcdefghi"):
        sim.submit(
            b"shared head"[: number % 12] + bytes([letter]) * (3 + number),
            params=SamplingParams(temperature=float(number % 2), max_tokens=33 + number),
            priority=number % 2,
        )
    return sim


def test_the_mix_meets_everything() -> None:
    sim = mixed(is_checked=True)
    sim.run(at_most=1000)
    statistics = sim.core.statistics()
    assert sim.decoder.n_decodes > N_CALLS
    assert min(statistics.n_preemptions, statistics.n_swaps, statistics.n_evictions) > 0
    assert statistics.n_cached_tokens > 0
    sim.check_outcomes()
    sim.check_idle()


# --- Faults that pass ---------------------------------------------------------------------------
PASSING: list[Fault] = [1, 2, -1, -2, -3, RuntimeError("scripted"), MemoryError("scripted")]


@calls
@pytest.mark.parametrize("fault", few_in_fast(PASSING, (1,).__contains__), ids=str)
def test_a_decode_that_fails_once_costs_nobody_anything(fault: Fault, calls: Sequence[int]) -> None:
    """At each call: all answers are those of the undisturbed run, the bookkeeping right."""
    for n_decode in calls:
        sim = mixed(faults={n_decode: fault})
        sim.run(at_most=1000)
        assert sim.failed() == set(), f"decode {n_decode}"
        sim.check_outcomes()
        sim.check_idle()


@calls
def test_nan_in_a_row_ends_only_the_request_of_that_row(calls: Sequence[int]) -> None:
    n_failed = 0
    for n_decode in calls:
        sim = mixed(faults={n_decode: "nan"})
        owners: list[str] = []

        def look(sim: Simulator = sim, owners: list[str] = owners, n: int = n_decode) -> None:
            if sim.decoder.n_decodes + 1 == n:
                ids = {seq_id_of(s): s.request_id for s in sim.core.queue.running}
                owners += [ids[run.seq_id] for run in sim.decoder.runs if run.n_outputs][:1]

        sim.decoder.on_decode = look
        sim.run(at_most=1000)
        assert sim.failed() == set(owners), f"decode {n_decode}"
        for request_id in owners:
            assert isinstance(sim.finished[request_id].error.__cause__, NotFiniteError)  # type: ignore[union-attr]
        n_failed += len(owners)
        sim.check_outcomes()
        sim.check_idle()
    assert n_failed > len(calls) // 2


@calls
@pytest.mark.parametrize(
    ("method", "fault"),
    some_in_fast([
        ("seq_rm", False), ("seq_rm", RuntimeError("scripted")),
        ("seq_cp", False), ("seq_cp", RuntimeError("scripted")),
        ("state_seq_get_data", False), ("state_seq_get_data", RuntimeError("scripted")),
        ("state_seq_set_data", False), ("state_seq_set_data", RuntimeError("scripted")),
    ]),
)  # fmt: skip
def test_a_cache_call_that_fails_costs_nobody_anything(
    method: str, fault: bool | Exception, calls: Sequence[int]
) -> None:
    sim = mixed()
    sim.run(at_most=1000)
    n_calls = sim.decoder.n_calls[method]
    assert n_calls
    for n_call in (call for call in calls if call <= n_calls):
        sim = mixed(call_faults={(method, n_call): fault})
        sim.run(at_most=1000)
        assert sim.failed() == set(), f"call {n_call}"
        sim.check_outcomes()
        sim.check_idle()


class _Uncopying(WatchedDecoder):
    """A cache that never shares."""

    def seq_cp(
        self, seq_id_src: int, seq_id_dst: int, p0: int | None = None, p1: int | None = None
    ) -> None:
        raise RuntimeError("no copies")


def test_new_contexts_that_do_not_help_are_the_end_of_the_engine() -> None:
    sim = Simulator(n_ctx=256, n_batch=8, answer=endless, decoder_type=_Uncopying)
    for letter in b"ab":
        sim.submit(b"h" * 40 + bytes([letter]), max_tokens=3)
    with pytest.raises(EngineFailedError, match="a new context does not help: no copies"):
        sim.run()


def test_a_context_that_cannot_be_recreated_is_the_end_of_the_engine() -> None:
    sim = mixed(faults={7: -3}, call_faults={("rebuild", 1): RuntimeError("no memory")})
    with pytest.raises(EngineFailedError, match="no memory") as caught:
        sim.run()
    assert isinstance(caught.value.__cause__, DecodeFailedError)


# --- Faults that stay: they belong to a request ---------------------------------------------------
def poisoned(fault: Fault) -> Callable[[FakeRun], Fault | None]:
    return lambda run: fault if CULPRIT in run.tokens else None


def from_position(p0: int, fault: Fault) -> Callable[[FakeRun], Fault | None]:
    return lambda run: fault if run.p0 + len(run.tokens) > p0 else None


@pytest.mark.parametrize("fault", [-1, -2, -3, RuntimeError("scripted"), "nan"], ids=str)
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("n_culprits", [1, 2])
def test_only_the_request_whose_rows_fail_alone_ends_with_an_error(
    fault: Fault, place: int, n_culprits: int
) -> None:
    sim = Simulator(n_ctx=256, n_seq_max=6, n_batch=16, answer=endless, poison=poisoned(fault))
    prompts = [bytes([letter]) * 4 for letter in b"abcdef"]
    culprits = [place, (place + 1) % 6][:n_culprits]
    for index in culprits:
        prompts[index] += bytes([CULPRIT])
    request_ids = [sim.submit(prompt, max_tokens=12) for prompt in prompts]
    sim.run()
    assert sim.failed() == {request_ids[index] for index in culprits}
    for request_id in sim.failed():
        error = sim.finished[request_id].error
        assert isinstance(error, GenerationError)
        assert error.completion is sim.finished[request_id].completion
        assert isinstance(error.__cause__, Exception)
    sim.check_outcomes()
    sim.check_idle()


def test_a_poisoned_output_token_ends_its_request_with_what_it_had() -> None:
    sim = Simulator(n_ctx=256, answer=endless, poison=from_position(17, -3))
    long = sim.submit(b"prompt")
    sim.submit(b"other", max_tokens=5)
    sim.run()
    assert sim.failed() == {long}
    assert len(sim.tokens[long]) == 17 - 6 + 1
    sim.check_outcomes()
    sim.check_idle()


@pytest.mark.parametrize("fault", [1, -1, -3])
@pytest.mark.parametrize("position", [3, 20, 50])
def test_a_fault_that_stays_ends_where_memory_forgets_too(fault: Fault, position: int) -> None:
    """A recurrent model gives up all of a sequence after a failure, and computes it again."""
    sim = Simulator(
        n_ctx=256,
        answer=endless,
        has_pos_min=False,
        poison=lambda run: fault if CULPRIT in run.tokens else None,
    )
    culprit = sim.submit(b"x" * position + bytes([CULPRIT]) + b"y" * 9)
    other = sim.submit(b"z" * 30, max_tokens=9)
    sim.run()
    assert sim.outcome(other) == sim.alone(other)
    outcome = sim.outcome(culprit)
    assert outcome.reason is (FinishReason.LENGTH if fault == 1 else FinishReason.ERROR)
    assert sim.decoder.n_rebuilds <= 1
    sim.check_idle()


def test_a_refused_batch_does_not_cost_the_context() -> None:
    sim = Simulator(answer=endless, faults={4: -1})
    for prompt in (b"x", b"y", b"z"):
        sim.submit(prompt, max_tokens=9)
    sim.run()
    assert sim.decoder.n_rebuilds == 0
    sim.check_outcomes()


def test_when_every_decode_fails_it_is_the_engine() -> None:
    sim = Simulator(answer=endless)
    request_ids = {sim.submit(bytes([letter]) * 3) for letter in b"abc"}
    sim.tick(3)
    sim.decoder.poison = lambda run: -3
    with pytest.raises(EngineFailedError) as caught:
        sim.run()
    assert isinstance(caught.value.__cause__, DecodeFailedError)
    cells = dict(sim.decoder.cells)
    sim.core.fail_all(caught.value)
    assert sim.decoder.cells == cells, "llama.cpp is left alone"
    ends = [event for event in sim.core.take_events() if isinstance(event, Finished)]
    assert {event.request_id for event in ends} == request_ids
    for event in ends:
        assert isinstance(event.error, EngineFailedError)
        assert event.error.__cause__ is caught.value
        assert event.error.completion is event.completion


def test_a_cache_that_has_no_room_at_all_ends_a_request_alone_with_length_context() -> None:
    sim = Simulator(n_ctx=64, answer=endless, poison=from_position(20, 1))
    request_ids = [sim.submit(bytes([letter]) * 4) for letter in b"xyz"]
    sim.run()
    for request_id in request_ids:
        outcome = sim.outcome(request_id)
        assert (outcome.reason, outcome.stop_reason) == (FinishReason.LENGTH, "context")
        assert outcome.token_ids == sim.alone(request_id).token_ids[:17]
    sim.check_idle()


# --- Faults of one request's own making -----------------------------------------------------------
def test_a_sampler_that_cannot_be_made_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Simulator()
    refuse = RuntimeError("no such sampler")
    good = sim.submit()

    def make_sampler(request: GenerationRequest) -> None:
        raise refuse

    monkeypatch.setattr(sim.core.queue, "_make_sampler", make_sampler)
    bad = sim.submit()
    sim.hear()
    error = sim.finished[bad].error
    assert error is not None
    assert error.__cause__ is refuse
    sim.run()
    assert sim.outcome(good) == sim.alone(good)
    sim.check_idle()


def test_a_sampler_that_fails_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulator(answer=endless)
    bad, good = sim.submit(params=SamplingParams()), sim.submit(params=SamplingParams())

    def fail(scan: RowScan, allowed: Mask | None = None) -> int:
        raise RuntimeError("no choice")

    monkeypatch.setattr(sim.samplers[0], "choose", fail)
    sim.run()
    error = sim.finished[bad].error
    assert error is not None
    assert isinstance(error.__cause__, RuntimeError)
    assert sim.outcome(good) == sim.alone(good)
    sim.check_idle()


@pytest.mark.parametrize("n_piece", [1, 2, 7])
def test_a_text_that_fails_ends_only_its_request(
    n_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prefix: Sequence[int]) -> int:
        is_bad = prefix[0] == b"x"[0] and len(prefix) == 2 + n_piece - 1
        return CULPRIT if is_bad else endless(prefix)

    def piece(vocabulary: FakeVocabulary, token: int) -> bytes:
        if token == CULPRIT:
            raise RuntimeError("no such piece")
        return bytes([token])

    sim = Simulator(answer=answer)
    bad, good = sim.submit(b"xy"), sim.submit(b"yz")
    with monkeypatch.context() as patch:
        patch.setattr(FakeVocabulary, "piece", piece)
        sim.run()
    assert sim.failed() == {bad}
    assert len(sim.tokens[bad]) == n_piece
    assert sim.outcome(good) == sim.alone(good)
    sim.check_idle()


def test_what_fails_after_the_end_of_a_request_changes_nothing_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Simulator(answer=endless)
    bad, good = sim.submit(b"xy", temperature=1.0, max_tokens=3), sim.submit(b"yz")

    def fail() -> None:
        raise RuntimeError("cannot be freed")

    monkeypatch.setattr(sim.samplers[0], "close", fail)
    sim.run()
    assert sim.finished[bad].completion.finish_reason is FinishReason.LENGTH
    assert sim.outcome(good) == sim.alone(good)


class _Refusing(WatchedDecoder):
    """A cache that gives nothing up once it has been told to refuse, until it is recreated."""

    is_refusing = False

    def seq_rm(self, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        return False if self.is_refusing else super().seq_rm(seq_id, p0, p1)

    def rebuild(self) -> None:
        self.is_refusing = False
        super().rebuild()


def test_a_sequence_that_does_not_leave_the_cache_costs_a_new_context_and_no_request() -> None:
    sim = Simulator(answer=endless, decoder_type=_Refusing)
    cancelled, other = sim.submit(b"xy"), sim.submit(b"yz")
    sim.tick(3)
    sim.decoder.is_refusing = True  # type: ignore[attr-defined]
    sim.core.queue.cancel(cancelled)
    assert sim.core.has_work
    sim.run()
    assert sim.core.statistics().n_rebuilds == 1
    assert sim.outcome(cancelled).reason is FinishReason.CANCELLED
    assert sim.outcome(other) == sim.alone(other)
    sim.check_idle()


def test_an_abort_that_stored_everything_computes_the_last_row_again() -> None:
    sim = Simulator(answer=endless, faults={3: 2})
    request_id = sim.submit(b"x", max_tokens=9)
    sim.run()
    assert sim.decoder.n_rebuilds == 0
    assert sim.outcome(request_id) == sim.alone(request_id)


def test_a_refused_batch_is_an_error_with_its_cause() -> None:
    sim = Simulator(answer=endless, poison=lambda run: -1)
    sim.decoder.poison = lambda run: -1 if len(run.tokens) > 1 else None
    request_id = sim.submit(b"xyz")
    sim.run()
    error = sim.finished[request_id].error
    assert error is not None
    assert isinstance(error.__cause__, InvalidBatchError)


@pytest.mark.parametrize("n_before", [0, 1, 5])
def test_each_token_of_a_request_that_fails_has_its_log_probability(
    n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose own cannot be made is none of the request's."""
    n_calls = 0

    def spelling(vocabulary: FakeVocabulary, token: int) -> bytes:
        nonlocal n_calls
        n_calls += 1
        if n_calls > n_before:
            raise RuntimeError("no such spelling")
        return vocabulary.piece(token)

    sim = Simulator(n_ctx=128, answer=endless)
    bad = sim.submit(b"prompt", params=SamplingParams(temperature=0, logprobs=0, max_tokens=9))
    sim.submit(b"other", max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(FakeVocabulary, "spelling", spelling)
        sim.run()
    assert sim.failed() == {bad}
    completion = sim.finished[bad].completion
    assert len(completion.logprobs or ()) == len(completion.token_ids) == n_before
    assert completion.usage.n_output == n_before
    sim.check_outcomes()
    sim.check_idle()
