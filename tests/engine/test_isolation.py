"""The checks of the field reports, O1 to O10: requests never disturb each other.

The embedded model's answers are the oracle.  See the page of origins for what each report says.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from cllm import Completion, Engine, FinishReason, SamplingOptions
from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.errors import PositionError, WrongThreadError
from tests.conftest import QUIET, submitted_together

pytestmark = pytest.mark.anyio

GREEDY: SamplingOptions = {"temperature": 0.0}


def counting(first: int, last: int) -> tuple[str, str]:
    """A question and its answer of many tokens."""
    return f"count:{first}..{last}", " ".join(str(n) for n in range(first, last + 1))


MIXED: list[tuple[str, str]] = [
    ("1+1=", "2"),
    ("37+58=", "95"),
    ("99+99=", "198"),
    counting(1, 40),
    ("repeat:你好🙂", "你好🙂"),
    ("reverse:streams", "smaerts"),
    counting(123, 150),
    ("repeat:Hello, world", "Hello, world"),
]


def check(completions: Sequence[Completion], expected: Sequence[str]) -> None:
    """Every text is right and every request stopped by itself."""
    assert [c.text for c in completions] == list(expected)
    assert {c.finish_reason for c in completions} == {FinishReason.STOP}


async def assert_idle_and_clean(engine: Engine) -> None:
    """Books agree with llama.cpp's, no cell and no seq_id is held."""
    assert await engine.audit() == []
    statistics = engine.statistics()
    assert (statistics.n_kv_cells_used, statistics.n_seq_ids_used) == (0, 0)
    assert (statistics.n_waiting, statistics.n_running) == (0, 0)


@pytest.mark.parametrize("n_requests", [3, 10])
async def test_o1_requests_one_after_another_never_fail(engine: Engine, n_requests: int) -> None:
    for number in range(n_requests):
        completion = await engine.generate(f"{number}+{number}=", max_tokens=10, temperature=0)
        check([completion], [str(2 * number)])
        await assert_idle_and_clean(engine)


async def test_o1_five_at_once_after_that_never_mix(engine: Engine) -> None:
    await engine.generate("1+1=", **GREEDY)
    questions = MIXED[:5]
    completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
    check(completions, [answer for _, answer in questions])
    await assert_idle_and_clean(engine)


async def test_o2_a_sequence_keeps_its_seq_id_whatever_its_row(engine: Engine) -> None:
    """Long answers go on while short ones come and go around them, changing every row."""
    long = [counting(10 * n, 10 * n + 30) for n in range(4)]
    completions: list[Completion] = []

    async def short_ones() -> None:
        for n in range(30):
            completions.append(await engine.generate(f"{n}+7=", **GREEDY))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(short_ones)
        results = await engine.generate_all([q for q, _ in long], **GREEDY)
    check(results, [answer for _, answer in long])
    check(completions, [str(n + 7) for n in range(30)])
    await assert_idle_and_clean(engine)


async def test_o3_a_prompt_of_one_token_is_a_new_request_like_any_other(engine: Engine) -> None:
    """No length of a prompt makes a request new, or not new."""
    bos = (await engine.tokenize(""))[0]
    first = await engine.generate([bos], max_tokens=4, temperature=0)
    await engine.generate("12+34=", **GREEDY)
    again = await engine.generate([bos], max_tokens=4, temperature=0)
    assert first.token_ids == again.token_ids
    assert first.usage.n_prompt == 1


@pytest.mark.parametrize("how", ["stop", "length", "cancelled", "deadline"])
async def test_o4_every_ending_clears_the_sequence(engine: Engine, how: str) -> None:
    prompt = counting(1, 200)[0]
    if how == "stop":
        completion = await engine.generate("2+2=", **GREEDY)
    elif how == "length":
        completion = await engine.generate(prompt, max_tokens=5, temperature=0)
    elif how == "deadline":
        completion = await engine.generate(prompt, timeout=0.0, **GREEDY)
    else:
        async with engine.stream(prompt, **GREEDY) as stream:
            await stream.__anext__()
            await stream.cancel()
            completion = await stream.completion()
    assert completion.finish_reason == how
    await assert_idle_and_clean(engine)


async def test_o5_nothing_is_left_of_finished_requests(engine: Engine) -> None:
    await engine.generate_all([f"{n}+1=" for n in range(50)], **GREEDY)
    assert engine._dispatcher.n_channels == 0
    assert engine._gate.n_open == 0
    await assert_idle_and_clean(engine)


def test_o7_the_books_refuse_every_other_thread() -> None:
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(model, n_ctx=256, n_threads=1, n_threads_batch=1) as context,
    ):
        errors: list[BaseException] = []

        async def from_another_thread() -> None:
            def ask() -> None:
                try:
                    context.seq_pos_max(0)
                except BaseException as error:
                    errors.append(error)

            await anyio.to_thread.run_sync(ask)

        anyio.run(from_another_thread)
        assert [type(error) for error in errors] == [WrongThreadError]


def test_o10_a_gap_in_positions_is_an_error_that_names_sequence_x_and_y() -> None:
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(model, n_ctx=256, n_seq_max=2, n_threads=1, n_threads_batch=1) as context,
    ):
        batch = Batch(16)
        batch.add(1, [1, 2, 3, 4], 0)
        context.decode(batch)
        batch.clear()
        batch.add(1, [5], 0)
        with pytest.raises(PositionError) as caught:
            context.decode(batch)
        error = caught.value
        assert (error.seq_id, error.last_pos, error.first_pos) == (1, 3, 0)
        assert "X = 3" in str(error)
        assert "Y = 0" in str(error)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("is_distinct", [False, True])
async def test_o11_the_thousandth_request_computes_the_rows_of_the_first(
    anyio_backend: str, is_distinct: bool, prefix_cache: bool
) -> None:
    """Latency grew where rows did; `benchmarks/drift.py` has the times and the memory."""
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


async def test_all_ten_thousand_sums_are_right_64_at_once(anyio_backend: str) -> None:
    """And afterwards the proof that bypasses the books holds: the cache has every cell again."""
    n_ctx = 4096
    async with Engine(n_ctx=n_ctx, n_seq_max=64, **QUIET) as engine:
        pairs = [(a, b) for a in range(100) for b in range(100)]
        completions = await engine.generate_all([f"{a}+{b}=" for a, b in pairs], **GREEDY)
        check(completions, [str(a + b) for a, b in pairs])
        await assert_idle_and_clean(engine)
        assert engine.statistics().n_finished[FinishReason.STOP] == 10_000
        # llama.h cannot count cells.  If one was still held, exactly n_ctx tokens would not fit.
        full = await engine.generate([65] * n_ctx, max_tokens=1, temperature=0)
        assert full.usage.n_prompt == n_ctx
        assert (full.finish_reason, full.stop_reason) == ("length", "max_tokens")
        await assert_idle_and_clean(engine)


async def test_batched_equals_alone_in_both_kv_layouts(anyio_backend: str) -> None:
    for kv_unified in (True, False):
        async with Engine(n_ctx=4096, n_seq_max=8, kv_unified=kv_unified, **QUIET) as engine:
            alone = [await engine.generate(q, **GREEDY) for q, _ in MIXED]
            together = await engine.generate_all([q for q, _ in MIXED], **GREEDY)
            assert [c.token_ids for c in alone] == [c.token_ids for c in together]
            check(together, [answer for _, answer in MIXED])
            await assert_idle_and_clean(engine)


async def test_eight_prompts_share_their_ticks(anyio_backend: str) -> None:
    async with Engine(n_ctx=4096, n_seq_max=8, **QUIET) as engine:
        questions = [counting(100 + n, 130 + n) for n in range(8)]
        with submitted_together(engine, 8):
            completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        check(completions, [answer for _, answer in questions])
        statistics = engine.statistics()
        assert statistics.n_decoding_rows / statistics.n_decoding_ticks >= 6


async def test_too_small_a_cache_preempts_and_every_answer_stays_right(anyio_backend: str) -> None:
    """Eight answers of 160 tokens in a cache for a bit more than two."""
    async with Engine(n_ctx=512, n_seq_max=8, n_batch=32, **QUIET) as engine:
        questions = [counting(100 + n, 138 + n) for n in range(8)]
        completions = await engine.generate_all([q for q, _ in questions], **GREEDY)
        check(completions, [answer for _, answer in questions])
        assert engine.statistics().n_preemptions > 0
        assert sum(c.timings.n_preemptions for c in completions) > 0
        await assert_idle_and_clean(engine)
