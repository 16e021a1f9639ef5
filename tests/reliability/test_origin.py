"""The field reports' findings, O1 to O5, O10 and O11, each by a test that bears its name.

An earlier server embedded llama.cpp, and five reports tell what went wrong in it: one position for
all requests (O1), a seq_id for each place in a batch (O2), new requests that were guessed (O3),
sequences that were cleared sometimes (O4), records that stayed (O5), positions with gaps (O10),
latency that grew (O11).  O6 to O9, O12 and O13 are in test_origin_design.py.

The embedded model's answers are the oracle.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import pytest

from benchmarks import drift
from cllm import Completion, Engine
from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.core.run_queue import RunQueue
from cllm.engine.core.sequence import Sequence as RunningSequence
from cllm.engine.thread import inference_thread
from cllm.engine.thread.inference_thread import InferenceThread
from cllm.errors import GenerationError, PositionError
from cllm.testing.load import sequential
from cllm.testing.records import assert_no_drift
from tests.conftest import QUIET
from tests.reliability.origin import (
    GREEDY,
    MIXED,
    assert_idle_and_clean,
    cancel_one,
    check,
    counting,
    starts_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def context() -> Iterator[Context]:
    """Two sequences of the embedded model."""
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(model, n_ctx=256, n_seq_max=2, n_threads=1, n_threads_batch=1) as context,
    ):
        yield context


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where requests start: see `starts_of`."""
    return starts_of(monkeypatch)


# --- O1: one position for all requests ------------------------------------------------------------
async def test_o1_the_second_and_the_third_request_are_as_good_as_the_first(
    engine: Engine,
) -> None:
    """Second failed, third crashed; three different prompts, one after another."""
    for question, answer in MIXED[:3]:
        check([await engine.generate(question, **GREEDY)], [answer])
        await assert_idle_and_clean(engine)


@pytest.mark.parametrize("max_tokens", [16, 1])
async def test_o1_ten_identical_requests_in_a_row_get_identical_answers(
    engine: Engine, max_tokens: int
) -> None:
    completions = []
    for _ in range(10):
        completion = await engine.generate("count:1..40", max_tokens=max_tokens, temperature=0)
        completions.append(completion)
        await assert_idle_and_clean(engine)
    assert {c.token_ids for c in completions} == {completions[0].token_ids}
    assert {(c.finish_reason, c.stop_reason) for c in completions} == {("length", "max_tokens")}
    assert {c.usage.n_output for c in completions} == {max_tokens}


@pytest.mark.parametrize("n_requests", [3, 10])
async def test_o1_requests_one_after_another_never_fail(engine: Engine, n_requests: int) -> None:
    for number in range(n_requests):
        completion = await engine.generate(f"{number}+{number}=", max_tokens=10, temperature=0)
        check([completion], [str(2 * number)])
        await assert_idle_and_clean(engine)


async def test_o1_five_at_once_after_that_never_mix(engine: Engine) -> None:
    await engine.generate("1+1=", **GREEDY)
    completions = await engine.generate_all([q for q, _ in MIXED], **GREEDY)
    check(completions, [answer for _, answer in MIXED])
    await assert_idle_and_clean(engine)


@pytest.mark.parametrize("how", ["finished", "cancelled"])
async def test_o1_the_position_is_zero_again_after_every_request(
    anyio_backend: str, starts: list[tuple[int, int]], how: str
) -> None:
    async with Engine(n_ctx=512, n_seq_max=1, prefix_cache=False, **QUIET) as engine:
        for number in range(4):
            prompt = counting(number, 99)[0]
            if how == "finished":
                await engine.generate(prompt, max_tokens=4, temperature=0)
            else:
                assert (await cancel_one(engine, prompt)).finish_reason == "cancelled"
            await assert_idle_and_clean(engine)
    assert starts == [(0, 0)] * 4


# --- O2: a seq_id for each place in a batch -------------------------------------------------------
async def test_o2_a_sequence_keeps_its_seq_id_whatever_its_row(engine: Engine) -> None:
    """Long answers go on while short ones come and go around them, changing every row."""
    long = [counting(10 * n, 10 * n + 30) for n in range(4)]
    completions: list[Completion] = []
    seq_ids: dict[str, set[int]] = {}

    async def short_ones() -> None:
        for n in range(30):
            completions.append(await engine.generate(f"{n}+7=", **GREEDY))
            for slot in await engine.slots():
                if slot.request_id is not None:
                    seq_ids.setdefault(slot.request_id, set()).add(slot.seq_id)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(short_ones)
        results = await engine.generate_all([q for q, _ in long], **GREEDY)
    check(results, [answer for _, answer in long])
    check(completions, [str(n + 7) for n in range(30)])
    assert seq_ids
    assert all(len(ids) == 1 for ids in seq_ids.values()), "one from admission to completion"
    await assert_idle_and_clean(engine)


async def test_o2_a_seq_id_that_is_used_again_meets_a_fresh_cache(
    anyio_backend: str, starts: list[tuple[int, int]]
) -> None:
    """Ten different requests on two seq_ids: each starts at position 0, and is right."""
    async with Engine(n_ctx=512, n_seq_max=2, prefix_cache=False, **QUIET) as engine:
        questions = [counting(n, n + 9) for n in range(10)]
        completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        check(completions, [answer for _, answer in questions])
        await assert_idle_and_clean(engine)
    assert len(starts) == 10
    assert {seq_id for seq_id, _ in starts} == {0, 1}
    assert {p0 for _, p0 in starts} == {0}


# --- O3: new requests that were guessed -----------------------------------------------------------
async def test_o3_a_prompt_of_one_token_is_a_new_request_like_any_other(engine: Engine) -> None:
    """No length of a prompt makes a request new, or not new."""
    bos = (await engine.tokenize(""))[0]
    first = await engine.generate([bos], max_tokens=4, temperature=0)
    await engine.generate("12+34=", **GREEDY)
    again = await engine.generate([bos], max_tokens=4, temperature=0)
    assert first.token_ids == again.token_ids
    assert first.usage.n_prompt == 1


# --- O4: sequences that were cleared sometimes ----------------------------------------------------
ENDLESS: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
BANS = {ord(digit): float("-inf") for digit in "0123456789"}
N_CTX = 512


async def expired(engine: Engine) -> Completion:
    """A request whose time is over when it has a token, however slow or fast the machine is."""
    expire = RunQueue.expire

    def expire_what_has_a_token(queue: RunQueue, now: float) -> None:
        expire(queue, float("inf") if any(s.n_output for s in queue.running) else now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunQueue, "expire", expire_what_has_a_token)
        return await engine.generate([256], timeout=1000, max_tokens=10**6, **ENDLESS)


async def failed(engine: Engine) -> Completion:
    """A request that nothing is left for, after its prompt."""
    with pytest.raises(GenerationError) as caught:
        await engine.generate("1+1=", regex="[0-9]+", logit_bias=BANS)
    assert caught.value.completion is not None
    return caught.value.completion


ENDINGS: dict[str, tuple[str, Callable[[Engine], Awaitable[Completion]]]] = {
    "stop": ("stop", lambda engine: engine.generate("2+2=", **GREEDY)),
    "max_tokens": ("length", lambda e: e.generate("count:1..200", max_tokens=5, temperature=0)),
    # A position of 0 was taken for nothing to clear.
    "one token": ("length", lambda e: e.generate([256], max_tokens=1, **ENDLESS)),
    "context": ("length", lambda e: e.generate([65] * (N_CTX - 3), max_tokens=99, **ENDLESS)),
    "cancelled": ("cancelled", lambda engine: cancel_one(engine, "count:1..200")),
    "deadline": ("deadline", expired),
    "error": ("error", failed),
}


@pytest.mark.parametrize("kv_unified", [True, False], ids=["unified", "per sequence"])
@pytest.mark.parametrize("how", ENDINGS)
async def test_o4_every_ending_clears_the_sequence(
    anyio_backend: str, how: str, kv_unified: bool
) -> None:
    reason, ask = ENDINGS[how]
    n_ctx = N_CTX if kv_unified else 2 * N_CTX
    async with Engine(n_ctx=n_ctx, n_seq_max=2, kv_unified=kv_unified, **QUIET) as engine:
        assert (await ask(engine)).finish_reason == reason
        await assert_idle_and_clean(engine)
        check([await engine.generate("37+58=", **GREEDY)], ["95"])


async def test_o4_seq_rm_is_called_for_the_whole_sequence_at_every_end(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unconditionally where no prefix is kept, and the engine looks afterwards what is left."""
    calls: list[tuple[str, int]] = []
    seq_rm, seq_pos_max = Context.seq_rm, Context.seq_pos_max

    def remove(context: Context, seq_id: int, p0: int | None = None, p1: int | None = None) -> bool:
        if p0 is p1 is None:
            calls.append(("remove", seq_id))
        return seq_rm(context, seq_id, p0, p1)

    def look(context: Context, seq_id: int) -> int | None:
        last = seq_pos_max(context, seq_id)
        calls.append(("look" if last is None else "look in vain", seq_id))
        return last

    # Audits look as well, that of an idle engine whenever its thread comes to it.
    monkeypatch.setattr(inference_thread, "AUDIT_EVERY_TICK", False)
    monkeypatch.setattr(InferenceThread, "_audit_when_idle", lambda thread, core: None)
    async with Engine(n_ctx=512, n_seq_max=1, prefix_cache=False, **QUIET) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "seq_rm", remove)
            patch.setattr(Context, "seq_pos_max", look)
            for number in range(1, 4):
                await engine.generate([256], max_tokens=1, temperature=0)
                await cancel_one(engine, counting(1, 99)[0])
                await engine.slots()  # obeyed after the cancellation
                assert calls == [("remove", 0), ("look", 0)] * 2 * number


# --- O5: records that stayed ----------------------------------------------------------------------
async def test_o5_nothing_is_left_of_finished_requests(engine: Engine) -> None:
    await engine.generate_all([f"{n}+1=" for n in range(50)], **GREEDY)
    await cancel_one(engine, counting(1, 99)[0])
    assert len(engine._parts.dispatcher._channels) == 0
    assert engine._parts.gate.n_open == 0
    assert {slot.request_id for slot in await engine.slots()} == {None}
    await assert_idle_and_clean(engine)


async def test_o5_no_sequence_of_a_finished_request_is_kept_anywhere(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a map of ids, not in a list of those that run, not in the prefix cache."""
    made: list[weakref.ref[RunningSequence]] = []
    init = RunningSequence.__init__

    def listen(sequence: RunningSequence, *arguments: object, **options: object) -> None:
        init(sequence, *arguments, **options)  # type: ignore[arg-type]  # passed on
        made.append(weakref.ref(sequence))

    monkeypatch.setattr(RunningSequence, "__init__", listen)
    await engine.generate_all([f"{n}+1=" for n in range(20)], **GREEDY)
    await cancel_one(engine, counting(1, 99)[0])
    await engine.audit()
    gc.collect()
    assert len(made) == 21
    assert [sequence for sequence in made if sequence() is not None] == []


# --- O10: positions with gaps ---------------------------------------------------------------------
@pytest.mark.parametrize("first_pos", [0, 3, 5], ids=["restarted", "repeated", "a gap"])
def test_o10_a_gap_in_positions_is_an_error_that_names_sequence_x_and_y(
    context: Context, first_pos: int
) -> None:
    batch = Batch(16)
    batch.add(1, [1, 2, 3, 4], 0)
    context.decode(batch)
    batch.clear()
    batch.add(1, [5], first_pos)
    with pytest.raises(PositionError) as caught:
        context.decode(batch)
    error = caught.value
    assert (error.seq_id, error.last_pos, error.first_pos) == (1, 3, first_pos)
    assert "X = 3" in str(error)
    assert f"Y = {first_pos}" in str(error)
    assert context.seq_pos_max(1) == 3, "nothing was computed"


def test_o10_a_batch_that_skips_a_position_is_not_even_filled() -> None:
    batch = Batch(16)
    batch.add(0, [1, 2], 0)
    with pytest.raises(PositionError) as caught:
        batch.add(0, [3], 3)
    assert (caught.value.seq_id, caught.value.last_pos, caught.value.first_pos) == (0, 1, 3)


# --- O11: latency that grew -----------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no prefix cache", "prefix cache"])
@pytest.mark.parametrize(
    ("n_requests", "max_tokens"),
    [(200, 1), (60, 16), pytest.param(1000, 16, marks=pytest.mark.exhaustive)],
)
async def test_o11_identical_requests_compute_identical_rows(
    anyio_backend: str, n_requests: int, max_tokens: int, prefix_cache: bool
) -> None:
    """Latency grew where rows did; `benchmarks/drift.py` measures the times, and the memory."""
    async with Engine(n_ctx=1024, n_seq_max=8, prefix_cache=prefix_cache, **QUIET) as engine:
        prompt, n_rows = "count:100..140", []
        n_prompt = len(await engine.tokenize(prompt))
        for _ in range(n_requests):
            before = engine.statistics().n_decode_rows
            records = await sequential(engine, [prompt], max_tokens=max_tokens, temperature=0)
            assert records[0].finish_reason == "length"
            await engine.audit()
            n_rows.append(engine.statistics().n_decode_rows - before)
        n_first = n_prompt + max_tokens - 1
        assert n_rows[0] == n_first
        assert set(n_rows[1:]) == {max_tokens if prefix_cache else n_first}
        await assert_idle_and_clean(engine)


@pytest.mark.full
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("is_distinct", [False, True])
async def test_o11_the_thousandth_request_computes_the_rows_of_the_first(
    anyio_backend: str, is_distinct: bool, prefix_cache: bool
) -> None:
    async with Engine(n_ctx=1024, n_seq_max=8, prefix_cache=prefix_cache, **QUIET) as engine:
        n_rows, n_prompt = [], len(await engine.tokenize("100+100="))
        for number in range(1000):
            before = engine.statistics().n_decode_rows
            first = 100 + number % 900 if is_distinct else 100
            await engine.generate(f"{first}+{1099 - first}=", max_tokens=1, temperature=0)
            await engine.audit()
            n_rows.append(engine.statistics().n_decode_rows - before)
        if not prefix_cache:
            assert set(n_rows) == {n_prompt}
        elif not is_distinct:
            assert n_rows == [n_prompt] + [1] * 999
        else:
            assert max(n_rows[1:]) < n_prompt, "at least the first token is shared"
        await assert_idle_and_clean(engine)


@pytest.mark.full
async def test_o11_a_load_of_identical_requests_does_not_drift(engine: Engine) -> None:
    assert_no_drift(await sequential(engine, ["count:1..9"] * 100, **GREEDY))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no prefix cache", "prefix cache"])
@pytest.mark.parametrize("max_tokens", [1, 16])
async def test_o11_the_last_hundred_of_a_thousand_take_as_long_as_the_first(
    max_tokens: int, prefix_cache: bool
) -> None:
    """Medians of decode time, the best of three."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "prefix_cache": prefix_cache}
    runs = [await drift.sequential(1000, is_distinct=False, **options) for _ in range(3)]
    assert min(run.ratio for run in runs) <= 1.02
