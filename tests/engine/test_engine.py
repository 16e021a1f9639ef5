"""Engine and TokenStream keep their contract under asyncio and trio."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import cllm
from cllm import (
    ClosedError,
    Engine,
    EngineConfig,
    EngineFailedError,
    EngineStatus,
    FinishReason,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    QueueFullError,
    SamplingOptions,
    SamplingParams,
)
from cllm.bindings import Batch, Context
from cllm.bindings.context import Logits
from cllm.errors import DecodeFailedError
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio

LONG = "count:1..199"
GREEDY: SamplingOptions = {"temperature": 0.0}


async def wait_idle(engine: Engine) -> None:
    """Wait until nothing runs; an audit is answered after the tick that cleared the cache."""
    with anyio.fail_after(30):
        # Commands are obeyed in their order: the answer comes after what was asked before.
        await engine.audit()
        while engine.statistics().n_running or engine.statistics().n_waiting:
            await engine.audit()


async def test_the_deltas_of_a_stream_add_up_to_the_completion(engine: Engine) -> None:
    async with engine.stream("repeat:你好, 🙂!", **GREEDY) as stream:
        deltas = [delta async for delta in stream]
        completion = await stream.completion()
    assert "".join(d.text for d in deltas) == completion.text == "你好, 🙂!"
    assert tuple(t for d in deltas for t in d.token_ids) == completion.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert completion.stop_reason == completion.token_ids[-1]
    assert completion.usage.n_output == len(completion.token_ids)
    assert completion.timings.ttft_s is not None
    assert 0 < completion.timings.ttft_s <= completion.timings.total_s


async def test_a_stream_can_be_iterated_without_entering_it(engine: Engine) -> None:
    text = "".join([delta.text async for delta in engine.stream("2+3=", **GREEDY)])
    assert text == "5"


async def test_max_tokens_and_stop_strings_end_an_output_with_their_reason(engine: Engine) -> None:
    short = await engine.generate(LONG, max_tokens=3, temperature=0)
    assert (short.finish_reason, short.stop_reason) == ("length", "max_tokens")
    assert short.usage.n_output == 3
    stopped = await engine.generate(LONG, stop=[" 7 "], temperature=0)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " 7 ")
    assert stopped.text == "1 2 3 4 5 6"


async def test_seeds_reproduce_and_differ(engine: Engine) -> None:
    async def draw(seed: int) -> tuple[int, ...]:
        params = SamplingParams(
            temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=12
        )
        return (await engine.generate("xyz", params)).token_ids

    assert await draw(1) == await draw(1) != await draw(2)


async def test_cancelling_frees_the_cells_and_disturbs_nobody(engine: Engine) -> None:
    async with anyio.create_task_group() as tasks:
        scopes = [anyio.CancelScope() for _ in range(4)]

        async def give_up(scope: anyio.CancelScope) -> None:
            with scope:
                async for delta in engine.stream(LONG, **GREEDY):
                    if delta.text == "3":
                        scope.cancel()

        for scope in scopes:
            tasks.start_soon(give_up, scope)
        kept = await engine.generate(LONG, **GREEDY)
    assert kept.text == " ".join(str(n) for n in range(1, 200))
    await wait_idle(engine)
    assert await engine.audit() == []
    assert engine.statistics().n_kv_cells_used == 0
    assert engine.statistics().n_finished[FinishReason.CANCELLED] == 4


async def test_leaving_a_stream_early_cancels_its_request(engine: Engine) -> None:
    async with engine.stream(LONG, **GREEDY) as stream:
        async for _ in stream:
            break
    await wait_idle(engine)
    assert engine.statistics().n_finished[FinishReason.CANCELLED] == 1
    with pytest.raises(ClosedError, match="before its end"):
        await stream.__anext__()
    assert (await stream.completion()).finish_reason is FinishReason.CANCELLED


async def test_a_step_that_is_cancelled_inside_of_the_block_loses_nothing(engine: Engine) -> None:
    async with engine.stream(LONG, **GREEDY) as stream:
        text, n_cancelled = "", 0
        while True:
            with anyio.CancelScope() as scope:
                if n_cancelled < 50:
                    scope.cancel()  # before anything of the step
                try:
                    text += (await stream.__anext__()).text
                except StopAsyncIteration:
                    break
            n_cancelled += scope.cancelled_caught
    assert n_cancelled == 50
    assert text == " ".join(str(n) for n in range(1, 200))
    assert (await stream.completion()).finish_reason is FinishReason.STOP
    await wait_idle(engine)
    assert await engine.audit() == []


async def test_a_step_that_is_cancelled_without_a_block_ends_the_stream_which_says_so(
    engine: Engine,
) -> None:
    stream = engine.stream(LONG, **GREEDY)
    text = ""
    with anyio.CancelScope() as scope:
        async for delta in stream:
            text += delta.text  # one that comes at the same time as the cancellation is not lost
            scope.cancel()
    assert scope.cancelled_caught
    with pytest.raises(ClosedError, match="before its end"):
        await stream.__anext__()
    completion = await stream.completion()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert completion.text.startswith(text)
    await wait_idle(engine)
    assert engine.statistics().n_kv_cells_used == 0


async def test_a_generator_around_a_stream_releases_it_when_its_task_is_cancelled(
    engine: Engine,
) -> None:
    """What FastAPI's StreamingResponse does with a generator when its client leaves."""

    async def texts() -> AsyncIterator[str]:
        async for delta in engine.stream(LONG, **GREEDY):
            yield delta.text

    async with anyio.create_task_group() as tasks:
        generator = texts()

        async def read() -> None:
            async for text in generator:
                if text:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(read)
    with anyio.CancelScope(shield=True):
        await generator.aclose()  # type: ignore[attr-defined]
    gc.collect()
    await wait_idle(engine)
    assert engine.statistics().n_kv_cells_used == 0


async def test_a_dropped_stream_is_cancelled_with_a_warning(engine: Engine) -> None:
    streams = [engine.stream(LONG, **GREEDY)]
    await streams[0].__anext__()
    with pytest.warns(ResourceWarning, match="dropped"):
        streams.clear()
    await wait_idle(engine)
    assert engine.statistics().n_kv_cells_used == 0


async def test_a_full_queue_refuses_with_an_honest_delay(anyio_backend: str) -> None:
    async with Engine(n_ctx=1024, n_seq_max=1, max_queue=1, stream_buffer=1, **QUIET) as engine:
        async with engine.stream(LONG, **GREEDY), engine.stream(LONG, **GREEDY):
            with pytest.raises(QueueFullError) as caught:
                await engine.generate("1+1=", **GREEDY)
        assert caught.value.n_waiting == 1
        assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**32 - 1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"timeout": float("inf")}, "timeout"),
        ({"priority": "high"}, "priority"),
        ({"request_id": ""}, "request_id"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_a_bad_field_is_named_and_nothing_else_is_disturbed(
    engine: Engine, arguments: dict[str, Any], field: str | None
) -> None:
    arguments = {"prompt": "1+1=", "temperature": 0, "max_tokens": 4, **arguments}
    if field is None:  # this model's prompt is never empty: it begins with a token of its own
        assert (await engine.generate(**arguments)).usage.n_prompt == 1
    else:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(**arguments)
        assert caught.value.field == field
        assert field in str(caught.value)
    assert (await engine.generate("3+4=", **GREEDY)).text == "7"
    assert await engine.audit() == []


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    engine: Engine,
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        await engine.generate("x" * 5000)
    assert (caught.value.n_prompt, caught.value.n_ctx) == (5001, 4096)


async def test_a_request_id_can_be_used_again_but_not_twice_at_once(engine: Engine) -> None:
    async with engine.stream(LONG, request_id="mine", **GREEDY):
        with pytest.raises(InvalidRequestError, match="not in use"):
            await engine.generate("1+1=", request_id="mine")
    await wait_idle(engine)
    assert (await engine.generate("1+1=", request_id="mine", **GREEDY)).request_id == "mine"


async def test_tokenize_and_detokenize_are_inverse_for_short_and_long_texts(
    engine: Engine,
) -> None:
    for text in ("héllo 你好 🙂", "a . b , c", "long " * 1000):
        tokens = await engine.tokenize(text, add_special=False)
        assert await engine.detokenize(tokens) == text
    assert await engine.tokenize("<|im_end|>", add_special=False, parse_special=True) == [257]


async def test_the_model_describes_itself(engine: Engine) -> None:
    assert engine.model.name == "cllm-tiny"
    assert engine.model.architecture == "llama"
    assert engine.model.n_ctx_train == 2048
    assert engine.model.chat_template is not None
    assert "im_start" in engine.model.chat_template


@pytest.mark.parametrize("timeout", ["abc", float("nan"), -1, True, 10**400])
async def test_a_drain_with_a_wrong_timeout_changes_nothing(engine: Engine, timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        await engine.drain(timeout)
    assert (await engine.generate("1+1=", max_tokens=1)).text
    with pytest.raises(InvalidRequestError, match="timeout"):
        await engine.rerank("a", ["b"], timeout=timeout, template="{query}{document}")


async def test_draining_refuses_new_requests_and_finishes_the_running(engine: Engine) -> None:
    async with (
        engine.stream("repeat:drain", **GREEDY) as stream,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engine.drain, 30)
        done = await stream.completion()
        assert done.text == "drain"
        # Answers of requests that finish may need the text of their tokens.
        assert await stream.detokenize(done.prompt_token_ids) == "repeat:drain"
        assert b"".join(await stream.pieces(done.token_ids)) == b"drain"
    assert engine.health().status is EngineStatus.DRAINING
    with pytest.raises(ClosedError, match="draining"):
        await engine.generate("1+1=")


async def test_debug_lines_tell_the_life_of_a_request(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="cllm.engine")
    await engine.generate("1+1=", request_id="mine", **GREEDY)
    await wait_idle(engine)
    lines = [r.getMessage() for r in caplog.records if "request mine: " in r.getMessage()]
    assert [line.removeprefix("request mine: ") for line in lines] == [
        "new, 5 prompt tokens",
        "prefill in <Slot seq_id=0 n_computed=0>",
        "cleared KV cache, seq_id 0, 6 positions, 0 cells freed, 6 shared",
        "finished, stop (257), 2 output tokens",
    ]
    await engine.reset_prefix_cache()
    assert "cached prefix of 6 tokens: evicted, 6 cells" in caplog.messages


async def test_closing_cancels_what_runs(anyio_backend: str) -> None:
    async with Engine(n_ctx=1024, n_seq_max=2, **QUIET) as engine:
        stream = engine.stream(LONG, **GREEDY)
        await stream.__anext__()
    assert (await stream.completion()).finish_reason is FinishReason.CANCELLED


async def test_what_was_submitted_just_before_the_end_is_cancelled_like_the_rest(
    anyio_backend: str,
) -> None:
    """Commands that arrive together with the last one are obeyed."""
    for _ in range(5):
        async with Engine(n_ctx=512, n_seq_max=2, **QUIET) as engine:
            long = engine.stream(LONG, **GREEDY)
            await long.__anext__()
            late = [engine.stream("count:1..99", **GREEDY) for _ in range(3)]
            for stream in late:
                await stream.__aenter__()
        for stream in (long, *late):
            assert (await stream.completion()).finish_reason is FinishReason.CANCELLED


@pytest.mark.same_process("its decoder is replaced")
async def test_a_fatal_decode_costs_a_new_context_and_no_request(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, n_calls = Context.decode, 0

    def fail_now_and_then(context: Context, batch: Batch) -> Logits:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (3, 40):
            raise DecodeFailedError("llama_decode", -3, "scripted")
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", fail_now_and_then)
    async with Engine(n_ctx=1024, n_seq_max=4, **QUIET) as engine:
        results = await engine.generate_all([f"count:{n}..{n + 30}" for n in range(6)], **GREEDY)
        assert [r.text for r in results] == [
            " ".join(str(k) for k in range(n, n + 31)) for n in range(6)
        ]
        assert engine.statistics().n_rebuilds == 2
        assert await engine.audit() == []


@pytest.mark.same_process("its decoder is replaced")
async def test_an_engine_whose_every_decode_fails_fails_with_the_cause(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = DecodeFailedError("llama_decode", -3, "scripted")

    def fail(context: Context, batch: Batch) -> Logits:
        raise cause

    async with Engine(n_ctx=1024, n_seq_max=4, **QUIET) as engine:
        assert (await engine.generate("1+1=", **GREEDY)).text == "2"
        monkeypatch.setattr(Context, "decode", fail)
        results = await engine.generate_all(["1+1=", "2+2="], return_exceptions=True, **GREEDY)
        assert all(isinstance(r, EngineFailedError) for r in results)
        assert engine.health().status is EngineStatus.FAILED
        with pytest.raises(EngineFailedError) as caught:
            await engine.generate("1+1=", **GREEDY)
        assert "every decode fails" in repr(caught.value.__cause__)


async def test_a_model_that_cannot_be_loaded_says_why_and_leaves_no_thread(
    anyio_backend: str, tmp_path: Any
) -> None:
    missing = Engine(tmp_path / "missing.gguf")
    with pytest.raises(ModelLoadError, match="No such file"):
        await missing.__aenter__()
    assert not missing._parts.thread.is_alive
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError):
        async with Engine(damaged):
            raise AssertionError("it loaded")


def test_engine_options_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(TypeError, match="n_cxt"):
        Engine(n_cxt=5)  # type: ignore[call-arg]  # the test of it
    with pytest.raises(InvalidArgumentError, match="n_batch"):
        Engine(n_seq_max=64, n_batch=8)
    with pytest.raises(TypeError, match="config"):
        Engine("x.gguf", config=EngineConfig())
    with pytest.raises(InvalidArgumentError, match="config is 5, must be an EngineConfig"):
        Engine(config=5)  # type: ignore[arg-type]


def test_every_public_name_exists_and_is_documented() -> None:
    assert list(cllm.__all__) == sorted(cllm.__all__)
    for name in cllm.__all__:
        assert getattr(cllm, name).__doc__, name


async def test_sampling_parameters_reach_the_model(engine: Engine) -> None:
    """On questions that the embedded model is sure about."""
    five = (await engine.tokenize("5", add_special=False))[0]
    plain = await engine.generate("2+3=", **GREEDY)
    assert plain.text == "5"
    banned = await engine.generate("2+3=", logit_bias={five: float("-inf")}, temperature=0)
    assert not banned.text.startswith("5")
    longer = await engine.generate("2+3=", min_tokens=6, max_tokens=9, temperature=0)
    assert longer.usage.n_output >= 6
    endless = await engine.generate("2+3=", ignore_eos=True, max_tokens=20, temperature=0)
    assert (endless.finish_reason, endless.usage.n_output) == (FinishReason.LENGTH, 20)
    loop = await engine.generate("repeat:aaaaaaaa", repeat_penalty=5.0, max_tokens=8, temperature=0)
    assert loop.text != "aaaaaaaa"
    seeded: list[SamplingOptions] = [
        {"seed": 3, "mirostat": 2}, {"seed": 3, "samplers": []},
        {"seed": 3, "top_k": 0, "min_p": 0.2, "top_p": 1.0},
    ]  # fmt: skip
    for options in seeded:
        again = [await engine.generate("12+30=", **options) for _ in range(2)]
        assert again[0].token_ids == again[1].token_ids, "the seed decides"


async def test_a_sampler_that_is_refused_leaves_nothing_open(anyio_backend: str) -> None:
    """One that did kept the model from being freed, and the thread died of it at the end."""
    failures = []
    async with Engine(n_ctx=256, n_seq_max=1, **QUIET) as engine:
        ban = dict.fromkeys(range(engine.model.n_vocab), float("-inf"))
        for sampling in ({}, {"temperature": 0}, {"grammar": 'root ::= "2"'}):
            with pytest.raises(GenerationError) as caught:
                await engine.generate("1+1=", logit_bias=ban, **sampling)
            failures.append(caught.value)  # alive, with all that its traceback holds
    assert len(failures) == 3


async def test_the_default_configuration_warns_of_nothing(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One buffer of 4,096 cells for sixteen sequences is no sequence longer than the model's 2,048."""
    with caplog.at_level(logging.WARNING, "cllm"):
        async with Engine() as engine:
            await engine.generate("1+1=", max_tokens=2)
    assert caplog.messages == []


async def test_a_prompt_longer_than_the_model_was_trained_on_warns_once(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(n_ctx=4096, **QUIET) as engine:
        n_tokens = engine.model.n_ctx_train + 1
        with caplog.at_level(logging.WARNING, "cllm"):
            for _ in range(2):
                await engine.generate([65] * n_tokens, max_tokens=1)
    assert len(caplog.messages) == 1
    assert f"a prompt has {n_tokens} tokens" in caplog.text


async def test_a_stream_that_was_never_submitted_can_be_closed(engine: Engine) -> None:
    stream = engine.stream("1+1=")
    await stream.cancel()
    await stream.aclose()
    assert engine.statistics().n_finished[FinishReason.CANCELLED] == 0


async def test_a_request_id_in_use_is_refused_by_name(engine: Engine) -> None:
    async with engine.stream(LONG, request_id="one"):
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate("1+1=", request_id="one")
    assert (caught.value.field, caught.value.value) == ("request_id", "one")


async def test_a_reader_of_what_has_arrived_lets_others_run_at_each_step(engine: Engine) -> None:
    n_turns = 0

    async def take_turns() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await anyio.lowlevel.checkpoint()

    async with engine.stream("count:1..20", **GREEDY) as stream:
        await wait_idle(engine)  # all of it is there: nothing is waited for
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take_turns)
            n_deltas = len([delta async for delta in stream])
            tasks.cancel_scope.cancel()
    assert n_deltas > 20
    assert n_turns > n_deltas // 2  # where it never lets them: one or two
