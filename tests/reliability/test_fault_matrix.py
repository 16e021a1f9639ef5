"""Native calls that fail: the injector does what it says, and who suffers is who the fault says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cllm.bindings import Batch, Context, Model
from cllm.bindings._library import library
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.core.cells import Cells
from cllm.engine.core.detokenizer import Detokenizer
from cllm.engine.core.output_processor import OutputProcessor
from cllm.engine.core.recovery import Recovery, Verdict
from cllm.engine.core.run_queue import RunQueue
from cllm.engine.core.sequence import Sequence
from tests.reliability.fault_matrix import (
    FAMILIES,
    FIRST_FAULT,
    FUNCTIONS,
    ROWS,
    try_rows,
    wrong_in,
)
from tests.reliability.fault_process import ProcessBench
from tests.reliability.fault_workload import NAMES, Bench
from tests.reliability.native_faults import Fault, NativeFaults, Outcome, changes, raises, returns

pytestmark = [pytest.mark.full, pytest.mark.one_loop]

# Half of the moments under each event loop; some ten before the last decode, whose number is chance.
CALLS = {"asyncio": (1, 38), "trio": (13, 42)}


# --- The matrix ----------------------------------------------------------------------------------
@pytest.mark.anyio
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_call_that_fails_at_some_moment_costs_whom_it_is_to_cost(
    family: str, anyio_backend: str
) -> None:
    async with Bench() as bench:
        found = await try_rows(bench, FAMILIES[family], CALLS[anyio_backend])
    assert wrong_in(found) == []


@pytest.mark.anyio
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_same_holds_with_guesses_in_the_batch(family: str, anyio_backend: str) -> None:
    async with Bench(share=0.6) as bench:
        await bench.run()
        counts = bench.engine.statistics()
        found = await try_rows(bench, FAMILIES[family], CALLS[anyio_backend][:1])
    assert wrong_in(found) == []
    assert 0 < counts.n_accepted_tokens < counts.n_drafted_tokens


@pytest.mark.anyio
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_same_holds_in_the_process_of_an_engine(family: str, anyio_backend: str) -> None:
    async with ProcessBench() as bench:
        found = await try_rows(bench, FAMILIES[family], CALLS[anyio_backend])
    assert wrong_in(found) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("function", FUNCTIONS)
async def test_a_call_that_fails_at_any_moment_costs_whom_it_is_to_cost(function: str) -> None:
    async with Bench() as bench:
        rows = [row for row in ROWS if row.function == function]
        found = await try_rows(bench, rows, range(1, 201))
    assert wrong_in(found) == []
    assert sum(tried.n_tried for tried in found) >= len(rows)


@pytest.mark.anyio
@pytest.mark.parametrize("make_bench", [Bench, ProcessBench])
async def test_the_workload_shares_evicts_preempts_and_swaps(
    make_bench: Callable[[], Bench],
) -> None:
    async with make_bench() as bench:
        run = await bench.run()
        bench.check(run, set())
        counts = bench.engine.statistics()
    assert run.wrong == []
    assert run.answers.keys() == set(NAMES)
    assert min(counts.n_cached_tokens, counts.n_evictions, counts.n_preemptions) > 0
    assert counts.n_swaps > 0
    assert run.n_calls["llama_state_seq_set_data"] > 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_function_that_a_serving_engine_calls_is_in_the_matrix() -> None:
    async with Bench() as bench:
        runs = [await bench.run(), await bench.run(FIRST_FAULT)]
    async with ProcessBench() as bench:
        runs += [await bench.run(), await bench.run(FIRST_FAULT)]
    assert set().union(*(run.n_calls for run in runs)) <= set(FUNCTIONS)


# --- The injector --------------------------------------------------------------------------------
@pytest.fixture
def faults() -> Iterator[NativeFaults]:
    with NativeFaults() as faults:
        yield faults


@pytest.fixture
def model(faults: NativeFaults) -> Iterator[Model]:
    with Model(EMBEDDED_MODEL) as model:
        yield model


# One function that releases the GIL, and one that keeps it.
ASKS: dict[str, Callable[[Model], object]] = {
    "llama_tokenize": lambda model: model.vocab.tokenize("abc"),
    "llama_token_to_piece": lambda model: model.vocab.token_to_piece(97),
}


@pytest.mark.parametrize("function", ASKS)
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_fault_happens_at_its_call_and_at_no_other(
    function: str, error: type[Exception], faults: NativeFaults, model: Model
) -> None:
    ask = ASKS[function]
    expected = ask(model)
    fault = Fault(function, 3, raises(error))
    faults.arm(fault)
    assert [ask(model), ask(model)] == [expected, expected]
    assert faults.met == []
    with pytest.raises(error, match="injected"):
        ask(model)
    assert [ask(model), ask(model)] == [expected, expected]
    assert [met.fault for met in faults.met] == [fault]
    assert faults.n_calls[function] == 5


@pytest.mark.parametrize("function", ASKS)
def test_a_call_returns_what_the_fault_says(
    function: str, faults: NativeFaults, model: Model
) -> None:
    """The binding takes it for a buffer that is too small, and asks once more."""
    expected = ASKS[function](model)
    faults.arm(Fault(function, 1, returns(-50)))
    assert ASKS[function](model) == expected
    assert faults.n_calls[function] == 2


@pytest.mark.parametrize(
    ("outcome", "n_left"),
    [
        (returns(False), 3), (returns(True), 3), (raises(RuntimeError), 3),
        (returns(False, after=True), 0), (raises(RuntimeError, after=True), 0),
        (changes("the same", lambda given: given), 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_is_skipped_or_made_as_the_fault_says(
    outcome: Outcome, n_left: int, faults: NativeFaults, model: Model
) -> None:
    with Context(model, n_ctx=256, n_threads=1, n_threads_batch=1) as context:
        batch = Batch(8)
        batch.add(0, [97, 98, 99], 0)
        context.decode(batch)
        faults.arm(Fault("llama_memory_seq_rm", 1, outcome))
        try:
            context.seq_rm(0)
        except RuntimeError:
            assert "RuntimeError" in str(outcome)
        assert context.seq_pos_max(0) == (n_left - 1 if n_left else None)


def test_afterwards_every_function_is_the_real_one_and_open_handles_can_be_freed() -> None:
    real = dict(vars(library()))
    with NativeFaults() as faults:
        assert library().llama_decode is not real["llama_decode"]
        model = Model(EMBEDDED_MODEL)
        assert faults.n_open["llama_model_load_from_file"] == 1
        faults.arm(Fault("llama_model_free", 1, raises(RuntimeError)))
    assert dict(vars(library())) == real
    model.close()
    assert not +faults.n_open


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_owner_of_a_call_is_the_request_that_it_is_made_for() -> None:
    """The first samplers are made for the first requests, and a bias is one request's alone."""
    owners = {
        ("llama_tokenize", 1): {"greedy"},
        ("llama_sampler_init_top_n_sigma", 1): {"seeded"},
        ("llama_sampler_init_logit_bias", 1): {"penalized"},
        ("llama_sampler_init_mirostat", 1): {"mirostat"},
        ("llama_get_logits", 1): {"greedy", "seeded", "penalized"},
    }
    async with Bench() as bench:
        for (function, k), expected in owners.items():
            run = await bench.run(Fault(function, k, changes("the same", lambda given: given)))
            assert {met.owner for met in run.met} <= expected, function
            assert run.met, function


# --- A matrix that is right about a wrong engine is one that sees it ------------------------------
def _forgets_to_look(self: Cells, seq_id: int, n_tokens: int) -> None:
    self._memory.seq_rm(seq_id, n_tokens or None)


def _convicts_at_once(self: Recovery, chunks: object, *, is_fatal: bool) -> Verdict:
    return Verdict.END


def _ends_others_too(self: OutputProcessor, sequence: Sequence, error: Exception) -> None:
    for other in [sequence, *self._queue.waiting]:
        fail_one(self, other, error)


def _loses_the_sampler(self: RunQueue, sequence: Sequence, *given: Any) -> None:
    sequence.sampler = None
    report_one(self, sequence, *given)


def _loses_letters(self: Detokenizer, piece: bytes) -> str:
    return push(self, piece).replace("e", "")


fail_one, report_one, push = OutputProcessor._fail, RunQueue._report, Detokenizer.push
MUTANT_CALLS = (5, 17, 18)
MUTANTS: dict[str, tuple[type, str, Callable[..., Any], str, str]] = {
    "ignores what seq_rm says": (
        Cells, "_remove", _forgets_to_look, "llama_memory_seq_rm", "False",
    ),
    "ends who fails once": (
        Recovery, "on_failure", _convicts_at_once, "llama_decode", "-3",
    ),
    "ends others too": (
        OutputProcessor, "_fail", _ends_others_too, "llama_get_logits", "a row of nan",
    ),
    "loses letters": (
        Detokenizer, "push", _loses_letters, "llama_token_to_piece", "-3",
    ),
    "keeps samplers": (
        RunQueue, "_report", _loses_the_sampler, "llama_sampler_accept", "RuntimeError",
    ),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mutant", MUTANTS)
async def test_an_engine_that_is_wrong_is_caught(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, replacement, function, outcome = MUTANTS[mutant]
    (row,) = (
        row
        for row in ROWS
        if (row.function, str(row.outcome), row.recovers) == (function, outcome, False)
    )
    async with Bench() as bench:
        sound = await try_rows(bench, [row], MUTANT_CALLS)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, replacement)
            mutated = await try_rows(bench, [row], MUTANT_CALLS)
    assert wrong_in(sound) == []
    assert wrong_in(mutated) != []
