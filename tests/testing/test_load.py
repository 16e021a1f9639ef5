"""Loads on the embedded model: everybody gets an answer of his own, and a record of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from cllm import (
    ClosedError,
    Engine,
    FinishReason,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingOptions,
    SamplingParams,
    TokenStream,
)
from cllm.bindings import Batch, Context
from cllm.bindings.context import Logits
from cllm.engine.core.commands import CancelRequest, Command
from cllm.errors import DecodeFailedError
from cllm.testing.load import burst, cancel_storm, oracle, poisson, sequential, slow_readers
from cllm.testing.records import Records, assert_books_agree, assert_isolated, assert_no_drift
from tests.conftest import QUIET, submitted_together
from tests.testing.callers import diary_of_callers

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

GREEDY: SamplingOptions = {"temperature": 0.0}
Prompt = str | Sequence[int]
PROMPTS: list[Prompt] = [
    "37+58=",
    *(f"count:{n}..{n + 15}" for n in range(5)),
    "repeat:你好",
    [256, *b"12+30="],
]
Load = Callable[..., Awaitable[Records]]
LOADS: list[tuple[Load, dict[str, Any]]] = [
    (sequential, {}),
    (burst, {}),
    (poisson, {"rate": 1000.0, "load_seed": 3}),
    (cancel_storm, {"load_seed": 3}),
    (slow_readers, {"load_seed": 3}),
]
EACH_LOAD = pytest.mark.parametrize(
    ("load", "own"), LOADS, ids=lambda x: getattr(x, "__name__", "")
)


@EACH_LOAD
async def test_a_load_gives_a_record_for_each_prompt_in_their_order(
    engine: Engine, load: Load, own: dict[str, Any]
) -> None:
    prompts = PROMPTS * 3
    alone = await oracle(engine, prompts, **GREEDY)
    records = await load(engine, prompts, **own, **GREEDY)
    assert [r.prompt for r in records] == [p if isinstance(p, str) else tuple(p) for p in prompts]
    assert_isolated(records, alone)
    await assert_books_agree(engine)
    for record in records:
        if record.is_by_itself:
            assert record.usage is not None
            assert record.usage.n_output == len(record.token_ids)
            assert record.n_deltas >= 1
            assert record.ttft_s is not None
            assert 0 < record.ttft_s <= record.total_s
    if load is not cancel_storm:
        assert {r.finish_reason for r in records} == {FinishReason.STOP}
        assert records[0].text == "95"


@EACH_LOAD
async def test_a_refused_request_is_a_record_and_ends_no_other(
    engine: Engine, load: Load, own: dict[str, Any]
) -> None:
    own = {**own, **({"share": 0.0} if load is cancel_storm else {})}
    records = await load(engine, ["1+1=", "x" * 9000, [999_999], "2+2="], **own, **GREEDY)
    assert [type(r.error) for r in records] == [
        type(None),
        PromptTooLongError,
        InvalidRequestError,
        type(None),
    ]
    assert [r.finish_reason for r in records] == ["stop", None, None, "stop"]
    assert (records[1].usage, records[1].timings, records[1].first_token_s) == (None, None, None)
    assert records.summary().n_refused == 2


@EACH_LOAD
async def test_a_mistake_in_the_call_is_raised_at_once(
    engine: Engine, load: Load, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*_call: Any, **_options: Any) -> TokenStream:
        raise AssertionError("a request was made")

    monkeypatch.setattr(engine, "stream", stream)
    for prompts, options, message in (
        (["1+1="], {"no_such_option": 1}, "no_such_option"),
        (["1+1="], {"params": SamplingParams(), **GREEDY}, "params"),
        ("1+1=", GREEDY, "one text"),
    ):
        with pytest.raises(TypeError, match=message):
            await load(engine, prompts, **own, **options)
    with pytest.raises(InvalidRequestError, match="top_p"):
        await load(engine, ["1+1="], **own, top_p=2)


@EACH_LOAD
async def test_a_load_has_the_priority_and_the_timeout_of_its_call(
    engine: Engine, load: Load, own: dict[str, Any]
) -> None:
    own = {**own, **({"share": 0.0} if load is cancel_storm else {})}
    records = await load(engine, PROMPTS, **own, timeout=0.0, priority=5, **GREEDY)
    assert {r.finish_reason for r in records} == {FinishReason.DEADLINE}
    assert not any(r.token_ids for r in records)
    refused = await load(engine, ["1+1="], **own, priority=2**40, **GREEDY)
    assert "priority" in str(refused[0].error)


async def test_a_burst_beyond_the_queue_is_refused_and_the_rest_is_right(
    anyio_backend: str,
) -> None:
    async with Engine(n_ctx=512, n_seq_max=2, max_queue=3, **QUIET) as engine:
        alone = await oracle(engine, PROMPTS, **GREEDY)
        records = await burst(engine, PROMPTS, **GREEDY)
        assert records.summary().n_refused == len(PROMPTS) - 5
        assert_isolated(records, alone, errors=(QueueFullError,))
        with pytest.raises(AssertionError, match="QueueFullError"):
            assert_isolated(records, alone)
        await assert_books_agree(engine, n_requests=len(PROMPTS) + 5)


async def test_the_same_seed_comes_at_the_same_times(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_at: list[float] = []

    async def at_once(deadline: float) -> None:
        comes_at.append(deadline)

    monkeypatch.setattr(anyio, "sleep_until", at_once)

    async def gaps(load_seed: int) -> list[float]:
        comes_at.clear()
        await poisson(engine, ["1+1="] * 50, rate=200.0, load_seed=load_seed, **GREEDY)
        return [later - earlier for earlier, later in pairwise(sorted(comes_at))]

    # The clock began long ago: differences of its times are not exact.
    one = await gaps(1)
    assert await gaps(1) == pytest.approx(one, abs=1e-6)
    assert await gaps(2) != pytest.approx(one, abs=1e-6)
    assert 0.5 < sum(one) / (49 / 200.0) < 2
    with pytest.raises(ValueError, match="rate"):
        await poisson(engine, ["1+1="], rate=0.0)


async def test_a_storm_cancels_its_share_at_every_moment_and_the_others_are_right(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is computed to the end before it is cancelled: the buffers are too small for that."""
    cancelled_at: list[tuple[str, int]] = []
    diary = diary_of_callers(monkeypatch)
    was_cancel = TokenStream.cancel

    async def cancel(stream: TokenStream) -> None:
        cancelled_at.append((stream.request_id, diary.count(("read", stream.request_id))))
        await was_cancel(stream)

    monkeypatch.setattr(TokenStream, "cancel", cancel)
    prompts = [f"count:{n}..{n + 9}" for n in range(20)]
    async with Engine(n_ctx=4096, n_seq_max=16, stream_buffer=4, **QUIET) as engine:
        alone = await oracle(engine, prompts, **GREEDY)
        for load_seed in range(3):
            cancelled_at.clear()
            records = await cancel_storm(engine, prompts, load_seed=load_seed, **GREEDY)
            assert_isolated(records, alone)
            n_finished = records.summary().n_finished
            assert n_finished[FinishReason.CANCELLED] == n_finished[FinishReason.STOP] == 10
            cancelled = [r for r in records if r.finish_reason == "cancelled"]
            assert {bool(r.token_ids) for r in cancelled} == {True, False}
            # Two of each `Moment`: entering; queue and prompt; output; twice.
            own = [[what for what, who in diary if who == r.request_id] for r in cancelled]
            assert sum(entries[1] == "leave" for entries in own) == 2
            n_calls = Counter(request_id for request_id, _ in cancelled_at)
            n_deltas = dict(cancelled_at)
            kinds = [
                (n_calls[r.request_id], n_deltas[r.request_id] > 0)
                for r, entries in zip(cancelled, own, strict=True)
                if entries[1] == "read"
            ]
            assert Counter(kinds) == {(1, False): 4, (1, True): 2, (2, True): 2}
            await assert_books_agree(engine)
        with pytest.raises(ValueError, match="share"):
            await cancel_storm(engine, prompts, share=2)


async def test_who_gave_up_was_cancelled_even_if_the_engine_was_quicker(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears of a cancellation; one of the five had not even entered its stream."""
    put = engine._parts.inbox.put

    def put_all_but_cancellations(command: Command) -> None:
        if not isinstance(command, CancelRequest):
            put(command)

    monkeypatch.setattr(engine._parts.inbox, "put", put_all_but_cancellations)
    records = await cancel_storm(engine, ["37+58="] * 5, share=1.0, **GREEDY)
    assert engine.statistics().n_finished[FinishReason.STOP] == 5
    [record] = [r for r in records if not r.is_by_itself]
    assert (record.finish_reason, record.stop_reason) == (FinishReason.CANCELLED, None)
    assert (record.token_ids, record.text) == ((), "")


@pytest.mark.parametrize("n_prompts", [1, 2])
async def test_a_storm_on_few_prompts_cancels_one_at_a_moment_of_the_seeds(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch, n_prompts: int
) -> None:
    moments: set[tuple[int, bool]] = set()  # calls of `cancel`, and whether there were tokens
    n_cancelled = 0
    was_cancel = TokenStream.cancel

    async def cancel(stream: TokenStream) -> None:
        nonlocal n_cancelled
        n_cancelled += 1
        await was_cancel(stream)

    monkeypatch.setattr(TokenStream, "cancel", cancel)
    async with Engine(n_ctx=256, n_seq_max=2, stream_buffer=2, **QUIET) as engine:
        for load_seed in range(12):
            n_cancelled = 0
            records = await cancel_storm(
                engine, ["count:1..30"] * n_prompts, load_seed=load_seed, **GREEDY
            )
            [record] = [r for r in records if r.finish_reason is FinishReason.CANCELLED]
            moments.add((n_cancelled, bool(record.token_ids)))
    assert moments == {(1, False), (1, True), (2, True)}


@pytest.mark.full
async def test_a_share_is_rounded_up_but_not_for_an_error_of_floating_point(
    engine: Engine,
) -> None:
    for share, n_prompts, n_expected in ((0.7, 10, 7), (0.71, 10, 8), (0.0, 10, 0)):
        records = await cancel_storm(
            engine, ["count:1..99"] * n_prompts, share=share, load_seed=1, **GREEDY
        )
        assert records.summary().n_finished[FinishReason.CANCELLED] == n_expected


async def test_a_request_that_could_not_be_made_in_time_has_waited_since_it_was_due(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_s: list[float] = []

    async def wakes_late(deadline: float) -> None:
        due_s.append(deadline)
        await engine.generate("count:1..30", **GREEDY)  # the loop is busy with something else

    monkeypatch.setattr(anyio, "sleep_until", wakes_late)
    records = await poisson(engine, ["1+1="] * 3, rate=1e6, **GREEDY)
    assert [r.started_s for r in records] == sorted(due_s)


async def test_one_after_another_means_that_each_begins_when_the_last_has_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = diary_of_callers(monkeypatch)
    records = await sequential(engine, ["count:1..9"] * 5, **GREEDY)
    assert [entry for entry in diary if entry[0] != "read"] == [
        (what, record.request_id) for record in records for what in ("enter", "leave")
    ]


async def test_failed_requests_and_a_closed_engine_are_records_too(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(context: Context, batch: Batch) -> Logits:
        raise DecodeFailedError("llama_decode", -3, "scripted")

    async with Engine(n_ctx=256, n_seq_max=2, **QUIET) as engine:
        monkeypatch.setattr(Context, "decode", fail)
        with submitted_together(engine, 2):  # else the second may find the engine failed
            records = await burst(engine, ["1+1=", "2+2="], **GREEDY)
        assert {r.finish_reason for r in records} == {FinishReason.ERROR}
        assert records.summary().n_errors == 2
    closed = await sequential(engine, ["1+1="], **GREEDY)
    assert isinstance(closed[0].error, ClosedError)
    assert closed[0].finish_reason is None


async def test_an_oracle_answers_each_prompt_once_and_only_what_can_be_repeated(
    engine: Engine,
) -> None:
    alone = await oracle(engine, ["1+1=", [256, *b"2+2="], "1+1="], **GREEDY)
    assert list(alone) == ["1+1=", (256, *b"2+2=")]
    assert sum(engine.statistics().n_finished.values()) == 2
    # The model is so sure of its answers that only this leaves anything to chance.
    seeded = SamplingParams(seed=5, temperature=50.0, top_p=1.0, min_p=0.0, max_tokens=24)
    answers = await oracle(engine, ["xyz"], seeded)
    assert answers == await oracle(engine, ["xyz"], seeded)
    assert answers != await oracle(engine, ["xyz"], replace(seeded, seed=6))
    with pytest.raises(ValueError, match="seed"):
        await oracle(engine, ["1+1="])


async def test_identical_requests_do_not_drift(engine: Engine) -> None:
    records = await sequential(engine, ["12+34="] * 40, **GREEDY)
    assert_no_drift(records)
    assert len({record.n_rows for record in records[1:]}) == 1
