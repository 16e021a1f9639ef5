"""A short soak finds nothing wrong, and a long one would find each thing that can be."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from cllm import Engine, EngineConfig
from cllm.testing.records import assert_books_agree
from tests.reliability.soak import (
    COMMON,
    CONFIGURATIONS,
    MAX_GROWTH_MIB,
    N_FOR_MEDIAN,
    Outcome,
    Sample,
    record_of,
    slope,
    soak,
    tables_of,
)
from tests.reliability.soak_answers import Answers
from tests.reliability.soak_phases import (
    PHASES,
    Ledger,
    Soak,
    at_once,
    faults,
    logprobs_and_scores,
    queue_full,
    with_faults,
)
from tests.time_limits import raise_time_limits

pytestmark = [pytest.mark.anyio, pytest.mark.full]


def sample(minute: float, rss_mib: float = 100.0, **changes: Any) -> Sample:
    """The process at that minute."""
    return replace(Sample(60.0 * minute, rss_mib, 20.0, 9, 3, 0), **changes)


def outcome(*samples: Sample, **changes: Any) -> Outcome:
    """A soak that found nothing wrong, but for this."""
    made = Outcome(Ledger(**changes), samples=list(samples) or [sample(0), sample(2)])
    made.seconds = made.samples[-1].at_s
    return made


def slow_in_the_end() -> Outcome:
    """Three times as slow as in the beginning."""
    made = outcome()
    for third, seconds in ((0, 0.01), (2, 0.03)):
        made.ledger.total_s["one after another", third].extend([seconds] * N_FOR_MEDIAN)
    return made


@pytest.mark.parametrize(
    ("minutes", "n_requests", "phase_s"),
    [(0.0, 6, 0.0), pytest.param(1.0, 24, 0.5, marks=pytest.mark.exhaustive)],
)
async def test_a_soak_finds_no_wrong_answer_and_nothing_that_grows(
    minutes: float, n_requests: int, phase_s: float
) -> None:
    # In a process of its own: other tests leave malloc arenas, that the threads of the soak's
    # engines take by turns, and each of them grows to its largest use (21.8 MiB were seen).
    run = partial(soak, minutes, seed=1, n_requests=n_requests, phase_s=phase_s)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, raise_time_limits) as pool:
        found = await anyio.to_thread.run_sync(pool.submit(anyio.run, run).result)
    assert found.complaints() == []
    assert found.n_rounds >= 1, "every phase, on every kind of engine"
    assert found.n_engines >= len(CONFIGURATIONS)
    assert set(found.ledger.ends) >= {
        "stop", "length", "cancelled", "deadline", "dropped", "scored",
        "InvalidRequestError", "PromptTooLongError", "QueueFullError",
    }  # fmt: skip
    assert found.ledger.ends["error"] == 0
    assert found.ledger.faults.total() >= len(CONFIGURATIONS), "each engine met some"


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: the loads themselves are tested on both."""
    return "asyncio"


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What requests get alone."""

    async def ask() -> Answers:
        async with Engine(config=EngineConfig(**COMMON)) as engine:
            return await Answers.of(engine)

    return anyio.run(ask)


@pytest.fixture
async def short(anyio_backend: str, answers: Answers) -> AsyncIterator[Soak]:
    """A soak of a few requests on an engine of its own."""
    config = EngineConfig(**{**COMMON, "n_ctx": 1024, "n_seq_max": 4})
    async with Engine(config=config) as engine:
        yield Soak(engine, replace(answers), Ledger(), random.Random(1), 6)


# Those whose requests certainly get to their answers.
COMPARING = [phase for phase in PHASES if phase.__name__ != "expired"]


@pytest.mark.parametrize("phase", COMPARING, ids=lambda phase: str(phase.__name__))
async def test_a_phase_sees_an_answer_that_is_not_the_oracles(short: Soak, phase: Any) -> None:
    answers = short.answers
    answers.plain = {prompt: (-1, *ids) for prompt, ids in answers.plain.items()}
    answers.constrained = [(-1, *ids) for ids in answers.constrained]
    answers.chats = [f"not {text}" for text in answers.chats]
    answers.logprobs = {p: tuple(x - 9 for x in values) for p, values in answers.logprobs.items()}
    answers.images = [tuple(x - 9 for x in values) for values in answers.images]
    await phase(short)
    assert short.ledger.n_wrong > 0
    await assert_books_agree(short.engine)


async def test_a_score_that_is_not_the_oracles_is_seen(short: Soak) -> None:
    short.answers.scores = [score - 9 for score in short.answers.scores]
    await logprobs_and_scores(short)
    assert short.ledger.n_wrong > 0


async def test_a_phase_sees_a_request_that_is_not_refused(
    short: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short.engine._parts.gate, "_max_queue", 1000)
    await queue_full(short)
    assert short.ledger.n_wrong == 1
    assert "refused by a full queue: 0, not 7" in short.ledger.wrong[0]


async def test_faults_are_injected_and_cost_new_contexts_and_no_request(short: Soak) -> None:
    await with_faults(short)
    ledger = short.ledger
    assert ledger.wrong == []
    assert short.engine.statistics().n_rebuilds == ledger.n_contexts_due > 0
    assert ledger.n_contexts_due <= ledger.faults["fatal"] + ledger.faults["raises"]


async def test_after_the_faults_the_decoder_is_as_it_was(short: Soak) -> None:
    with faults(short.ledger, random.Random(1)):
        await at_once(short)
    n_faults = short.ledger.faults.total()
    for _ in range(20):
        await at_once(short)
    assert short.ledger.faults.total() == n_faults


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (outcome(sample(0), sample(4), sample(9, 100 + MAX_GROWTH_MIB + 1)), "memory has grown"),
        (outcome(sample(0), sample(4), sample(9, malloc_mib=25.0)), "malloc has given out 5.0 MiB"),
        (slow_in_the_end(), "one after another takes 3.0 times as long in the last third"),
        (outcome(sample(0), sample(2, n_descriptors=10)), "10 descriptors at the end, 9 at"),
        (outcome(sample(0), sample(2, n_threads=4)), "4 threads at the end, 3 at the start"),
        (outcome(wrong=["an answer"], n_wrong=1), "an answer"),
        (outcome(wrong=["an answer"], n_wrong=5), "and 4 more"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_can_be_wrong_is_a_complaint(found: Outcome, complaint: str) -> None:
    assert outcome().complaints() == []
    assert complaint in found.complaints()[-1]


def test_memory_counts_after_the_first_third_and_may_be_given_back() -> None:
    before = (sample(0, 50), sample(0.5, 70))
    warming = outcome(*before, sample(1, 100), sample(2, 90), sample(3, 101))
    assert (warming.growth_mib, warming.complaints()) == (1.0, [])
    assert warming.slope_mib_per_h == pytest.approx(30.0)
    assert [s.at_s for s in warming.minutes()] == [60.0, 120.0, 180.0]
    short = outcome(sample(0, 50), sample(0.1, 100), sample(0.2, 101))
    assert short.growth_mib == 1.0


def test_the_slope_is_that_of_the_least_squares() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 3), (2, 0)]) == pytest.approx(0)
    assert slope([(4, 7)]) == 0


def test_a_record_has_the_numbers_and_the_times_of_the_first_and_the_last_third() -> None:
    found = outcome()
    found.ledger.count("stop", 40)
    for third, seconds in ((0, 0.010), (2, 0.020)):
        found.ledger.ttft_s["at once", third].append(seconds)
        found.ledger.total_s["at once", third].append(2 * seconds)
    figures = record_of(found, "soak").figures
    assert (figures["requests"], figures["output tokens"]) == (1, 40)
    assert figures["descriptors, start and end"] == "9, 9"
    expected = ("at once", 1, 1, "10.0", "20.0", "20.0", "40.0", "20.0", "40.0")
    assert tables_of(found)[-1].rows == [expected]
