"""Log probabilities of prompts and outputs, and `Engine.score`, with the embedded model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import ClosedError, Engine, InvalidRequestError, PromptTooLongError, SamplingParams
from cllm.bindings import Batch, Context, Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.output import Completion, TokenLogprob
from cllm.errors import RequestError
from tests.conftest import QUIET, submitted_together

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

TOLERANCE = 0.02  # rounding depends on the other rows of a batch: 0.0105 was measured
END = 257
DIGITS = "0123456789"
# As many tokens as bytes, and one that begins every text of this model.
LONG_TEXT = ("repeat:the quick brown fox, 12+30=42, 你好! count:1..9 " * 4)[:150]


@pytest.fixture
async def scoring(anyio_backend: str) -> AsyncIterator[Engine]:
    """An engine that is found clean afterwards.

    Without flash attention, whose sums depend on the order of a sequence's cells in the cache.
    """
    async with Engine(n_ctx=4096, n_seq_max=16, flash_attn=False, **QUIET) as engine:
        yield engine
        await check_idle(engine)


async def check_idle(engine: Engine) -> None:
    with anyio.fail_after(30):
        while engine.statistics().n_running or engine.statistics().n_waiting:
            assert await engine.audit() == []
    assert await engine.audit() == []
    assert engine.statistics().n_kv_cells_used == 0
    await engine.reset_prefix_cache()
    assert engine.statistics().n_kv_cells_cached == 0


def logprobs_of(scores: Sequence[TokenLogprob | None] | None) -> list[float]:
    """Those of all tokens that have one."""
    assert scores is not None
    return [score.logprob for score in scores if score is not None]


def computed_directly(tokens: Sequence[int], n_rows: int, flash_attn: bool | None) -> list[float]:
    """Of all but the first token, in a context of its own, in batches of so many rows."""
    options: dict[str, Any] = {"n_ctx": 512, "n_batch": 256, "n_outputs_max": 256, **QUIET}
    found: list[float] = []
    with (
        Model(EMBEDDED_MODEL) as model,
        Context(model, flash_attn=flash_attn, **options) as context,
    ):
        for start in range(0, len(tokens), n_rows):
            chunk = tokens[start : start + n_rows]
            batch = Batch(256)
            batch.add(0, chunk, start, n_outputs=len(chunk))
            rows = context.decode(batch).rows.astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
            after = tokens[start + 1 : start + n_rows + 1]
            found += [float(row[token]) for row, token in zip(rows, after, strict=False)]
    return found


async def scored(engine: Engine, prompt: str | Sequence[int], **sampling: Any) -> Completion:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 0, **sampling}
    return await engine.generate(prompt, **options)


# --- Prompts ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n_rows", "flash_attn", "tolerance"),
    [
        (32, None, TOLERANCE),  # as many as the engine computes at once
        (32, False, TOLERANCE),
        (200, False, TOLERANCE),
        # llama.cpp has other kernels for one row, and for many with flash attention: what they
        # compute differs, and with it the chance of some tokens by a few percent.
        (1, False, 0.1),
        (200, None, 0.1),
    ],
)
async def test_a_prompt_of_200_tokens_has_the_log_probabilities_of_a_direct_computation(
    anyio_backend: str, n_rows: int, flash_attn: bool | None, tolerance: float
) -> None:
    async with Engine(n_ctx=512, n_seq_max=16, flash_attn=flash_attn, **QUIET) as engine:
        tokens = (await engine.tokenize(LONG_TEXT * 2))[:200]
        scores = (await scored(engine, tokens)).prompt_logprobs
        await check_idle(engine)
    assert scores is not None
    assert scores[0] is None
    assert [score.token_id for score in scores if score] == tokens[1:]
    spelled = b"".join(score.bytes for score in scores if score)
    assert spelled == (LONG_TEXT * 2).encode()[: len(spelled)]
    expected = computed_directly(tokens, n_rows, flash_attn)
    assert logprobs_of(scores) == pytest.approx(expected, abs=tolerance)


async def test_a_prompt_is_scored_the_same_alone_and_in_company_of_eight(
    anyio_backend: str,
) -> None:
    """With flash attention, which looks at no cell of another sequence.

    Four streams that nobody reads, and five prompts that come at once: were one's last chunk alone
    in a batch, other kernels would compute it.
    """
    found: dict[str, Completion] = {}

    async def run(prompt: str, n_top: int) -> None:
        found[prompt] = await scored(engine, prompt, prompt_logprobs=n_top)

    async with Engine(n_ctx=4096, n_seq_max=16, stream_buffer=1000, **QUIET) as engine:
        alone = await scored(engine, LONG_TEXT, prompt_logprobs=3)
        await engine.reset_prefix_cache()
        async with AsyncExitStack() as stack:
            for number in range(4):
                stream = engine.stream(
                    f"count:{number}..99", temperature=0, ignore_eos=True, max_tokens=800
                )
                await (await stack.enter_async_context(stream)).__anext__()
            with submitted_together(engine, 5):
                async with anyio.create_task_group() as tasks:
                    for length in (20, 50, 80, 110):
                        tasks.start_soon(run, LONG_TEXT[:length] + "?", 0)
                    tasks.start_soon(run, LONG_TEXT, 3)
        batched = found[LONG_TEXT]
        assert batched.token_ids == alone.token_ids
        expected, actual = logprobs_of(alone.prompt_logprobs), logprobs_of(batched.prompt_logprobs)
        assert actual == pytest.approx(expected, abs=TOLERANCE)
        await check_idle(engine)


@pytest.mark.parametrize("n_top", [0, 5, 256])
async def test_prompt_and_output_have_as_many_alternatives_as_asked_for(
    scoring: Engine, n_top: int
) -> None:
    completion = await scored(scoring, "12+30=", prompt_logprobs=n_top, logprobs=n_top)
    assert completion.text == "42"
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(completion.prompt_token_ids)
    assert completion.prompt_logprobs[0] is None
    for score in (*completion.prompt_logprobs[1:], *(completion.logprobs or ())):
        assert score is not None
        assert len(score.top) == n_top
        chances = [math.exp(other.logprob) for other in score.top]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1 + TOLERANCE


async def test_a_token_that_the_vocabulary_does_not_have_is_not_scored(scoring: Engine) -> None:
    n_vocab = scoring.model.n_vocab
    await scoring.score("1+1=", [n_vocab - 1])
    with pytest.raises(InvalidRequestError, match=f"continuation is {n_vocab}"):
        await scoring.score("1+1=", [n_vocab])


async def test_a_prompt_of_one_token_has_nothing_to_score(scoring: Engine) -> None:
    completion = await scored(scoring, [65])
    assert completion.prompt_logprobs == (None,)
    assert completion.logprobs is None


# --- Outputs ------------------------------------------------------------------------------------
async def test_every_delta_has_the_log_probabilities_of_its_tokens_the_last_one_too(
    scoring: Engine,
) -> None:
    params = SamplingParams(temperature=0, logprobs=1)
    async with scoring.stream("1+1=", params) as stream:
        deltas = [delta async for delta in stream]
        completion = await stream.completion()
    for delta in deltas:
        assert delta.logprobs is not None
        assert tuple(score.token_id for score in delta.logprobs) == delta.token_ids
    assert tuple(s for delta in deltas for s in delta.logprobs or ()) == completion.logprobs
    assert completion.logprobs is not None
    two, end = completion.logprobs
    assert (two.text, two.bytes, end.text, end.bytes) == ("2", b"2", "<|im_end|>", b"")
    assert end.token_id == completion.token_ids[-1] == END
    assert all(score.top[0].token_id == score.token_id for score in (two, end)), "greedy"
    assert completion.prompt_logprobs is None


async def test_an_output_nobody_asked_about_has_no_log_probabilities(scoring: Engine) -> None:
    async with scoring.stream("1+1=", temperature=0) as stream:
        assert [delta.logprobs async for delta in stream] == [None, None]
        assert (await stream.completion()).logprobs is None


async def test_no_sampler_changes_how_likely_a_token_was(scoring: Engine) -> None:
    two = (await scoring.tokenize("2", add_special=False))[0]
    plain = await scored(scoring, "1+1=", prompt_logprobs=None, logprobs=3)
    assert plain.logprobs is not None
    seeded: list[dict[str, Any]] = [
        {"temperature": 5.0, "seed": 3, "top_k": 1},
        {"logit_bias": {two: -math.inf}},
        {"temperature": 1.0, "seed": 3, "logit_bias": {65: 100.0}},
        {"repeat_penalty": 5.0, "presence_penalty": 3.0},
    ]
    for options in seeded:
        await scoring.reset_prefix_cache()  # one row alone is computed differently
        options = {"prompt_logprobs": None, "logprobs": 3, "max_tokens": 1, **options}
        (score,) = (await scored(scoring, "1+1=", **options)).logprobs or ()
        expected = plain.logprobs[0].top
        assert [other.token_id for other in score.top] == [other.token_id for other in expected]
        assert logprobs_of(score.top) == pytest.approx(logprobs_of(expected), abs=TOLERANCE)


# --- score --------------------------------------------------------------------------------------
async def test_the_model_knows_that_one_and_one_are_two(scoring: Engine) -> None:
    totals = {digit: (await scoring.score("1+1=", digit)).total for digit in DIGITS}
    assert max(totals, key=lambda digit: totals[digit]) == "2"
    assert sum(map(math.exp, totals.values())) <= 1 + TOLERANCE
    assert totals["2"] > math.log(0.5)


@pytest.mark.parametrize("end", ["42", " 7 8", "你好", "x"])
async def test_a_score_is_that_of_the_end_of_the_whole_text(scoring: Engine, end: str) -> None:
    start = "count:1..9 12+30="
    score = await scoring.score(start, end)
    whole = await scored(scoring, start + end)
    n_end = len(end.encode())
    assert score.token_ids == whole.prompt_token_ids[-n_end:]
    assert score.logprobs == pytest.approx(
        logprobs_of(whole.prompt_logprobs)[-n_end:], abs=TOLERANCE
    )
    assert score.total == pytest.approx(math.fsum(score.logprobs))
    alike = await scoring.score(await scoring.tokenize(start), list(score.token_ids))
    assert alike.token_ids == score.token_ids
    assert alike.logprobs == pytest.approx(score.logprobs, abs=TOLERANCE)


async def test_text_and_token_ids_can_be_mixed(scoring: Engine) -> None:
    start = await scoring.tokenize("1+1=")
    end = await scoring.tokenize("2.", add_special=False)
    pairs: list[tuple[Any, Any]] = [("1+1=", end), (start, "2."), (tuple(start), tuple(end))]
    expected = await scoring.score("1+1=", "2.")
    for prompt, continuation in pairs:
        score = await scoring.score(prompt, continuation)
        assert score.token_ids == expected.token_ids
        assert score.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


async def test_to_compare_continuations_costs_one_prompt(scoring: Engine) -> None:
    prompt = "count:1..199 " + "and so on, " * 20
    n_prompt = len(await scoring.tokenize(prompt))
    await scoring.score(prompt, "yes")
    for end in ("no", "maybe", "y"):
        before = scoring.statistics()
        await scoring.score(prompt, end)
        after = scoring.statistics()
        assert after.n_cached_tokens - before.n_cached_tokens == n_prompt - 1
        assert after.n_prefill_tokens - before.n_prefill_tokens == 1 + len(end)


async def test_many_scores_at_once_are_those_one_after_another(scoring: Engine) -> None:
    prompt = "count:1..9 12+30="
    found: dict[str, float] = {}

    async def run(end: str) -> None:
        found[end] = (await scoring.score(prompt, end)).total

    async with anyio.create_task_group() as tasks:
        for digit in DIGITS * 2:
            tasks.start_soon(run, digit + "2")
    for digit in DIGITS:
        alone = (await scoring.score(prompt, digit + "2")).total
        assert found[digit + "2"] == pytest.approx(alone, abs=0.1), "other cells, other sums"


async def test_a_score_that_is_given_up_leaves_nothing(scoring: Engine) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(scoring.score, LONG_TEXT * 8, "end")
        while not scoring.statistics().n_running:
            await scoring.audit()
        tasks.cancel_scope.cancel()
    assert (await scoring.score("1+1=", "2")).total > math.log(0.5)


# --- What cannot be scored ----------------------------------------------------------------------
@pytest.mark.parametrize("bad", [None, 7, b"bytes", 1.5, [1.5], [True], ["a"], [-1], [], "\ud800"])
@pytest.mark.parametrize("field", ["prompt", "continuation"])
async def test_what_is_no_text_and_no_tokens_is_refused_by_its_name(
    scoring: Engine, field: str, bad: Any
) -> None:
    arguments = {"prompt": "1+1=", "continuation": "2", field: bad}
    with pytest.raises(InvalidRequestError) as caught:
        await scoring.score(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["prompt", "continuation"])
async def test_a_token_that_the_model_does_not_have_is_refused_by_its_name(
    scoring: Engine, field: str
) -> None:
    arguments: dict[str, Any] = {"prompt": "1+1=", "continuation": "2", field: [999_999]}
    with pytest.raises(InvalidRequestError) as caught:
        await scoring.score(**arguments)
    assert caught.value.field == field


async def test_an_empty_continuation_is_refused(scoring: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await scoring.score("1+1=", "")
    assert (caught.value.field, caught.value.limit) == ("continuation", "at least one token")


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [("x" * 4095, "yy"), ("x", "y" * 5000), ("x" * 300_000, "y"), ("x", "y" * 300_000),
     ([65] * 4000, [66] * 97), ("1+1=", [66] * 4096)],
)  # fmt: skip
async def test_what_is_longer_than_the_context_is_refused(
    scoring: Engine, prompt: Any, continuation: Any
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        await scoring.score(prompt, continuation)
    assert caught.value.n_prompt > caught.value.n_ctx == 4096
    assert isinstance(caught.value, RequestError)


async def test_a_prompt_and_a_continuation_may_fill_the_context(anyio_backend: str) -> None:
    async with Engine(n_ctx=256, n_seq_max=2, **QUIET) as engine:
        score = await engine.score([65] * 250, [66] * 6)
        assert len(score.logprobs) == 6
        assert await engine.audit() == []


async def test_nothing_is_scored_before_and_after_the_life_of_an_engine(
    anyio_backend: str,
) -> None:
    engine = Engine(n_ctx=256, n_seq_max=1, **QUIET)
    with pytest.raises(ClosedError):
        await engine.score("1+1=", "2")
    async with engine:
        assert (await engine.score("1+1=", "2")).token_ids
    with pytest.raises(ClosedError):
        await engine.score("1+1=", "2")


async def test_a_score_that_the_end_of_the_engine_interrupts_is_no_score(
    anyio_backend: str,
) -> None:
    async def score(engine: Engine) -> None:
        with pytest.raises(ClosedError, match="closed"):
            await engine.score([65] * 8000, "end")

    async with (
        anyio.create_task_group() as tasks,
        Engine(n_ctx=8192, n_seq_max=1, n_batch=64, kv_unified=True, **QUIET) as engine,
    ):
        tasks.start_soon(score, engine)
        while not engine.statistics().n_running:
            await engine.audit()
