"""FakeEngine: an engine without a library that says what it was told, and fails when it was told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import anyio.lowlevel
import numpy as np
import pytest

import cllm
from cllm import FinishReason
from cllm.engine.thread.interrupter import MIN_ROWS
from cllm.testing import FakeEngine
from cllm.testing.fake_decoder import FakeRun
from tests.conftest import our_threads, running_batch, submitted_together

pytestmark = pytest.mark.anyio


async def test_it_says_what_it_was_told(anyio_backend: str) -> None:
    async with FakeEngine({"1+1=": "2", "capital": "Paris"}) as engine:
        completion = await engine.generate("1+1=")
        assert (completion.text, completion.finish_reason) == ("2", FinishReason.STOP)
        assert (await engine.generate("What is the capital?")).text == "Paris"
        async with engine.stream("capital", max_tokens=3) as stream:
            assert [delta.text async for delta in stream] == ["P", "a", "r"]
        assert await engine.audit() == []


async def test_the_last_question_of_a_chat_is_answered(anyio_backend: str) -> None:
    async with FakeEngine({"1+1": "2", "2+2": "4"}) as engine:
        messages = [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "2+2"},
        ]
        assert (await engine.chat(messages)).text == "4"


async def test_images_are_counted_shared_and_named_in_the_prompt(anyio_backend: str) -> None:
    cat = cllm.Image(np.zeros((64, 96, 3), np.uint8))
    dog = cllm.Image(np.ones((64, 96, 3), np.uint8))
    async with FakeEngine({"a<image>b": "a cat", "<image> and <image>?": "two"}) as engine:
        assert engine.model.modalities == ("text", "image", "audio")
        first = await engine.generate(["a", cat, "b"])
        assert (first.text, first.usage.n_image_tokens) == ("a cat", 6)
        assert (await engine.generate(["a", cat, "b"])).usage.n_cached == 1 + 6
        assert engine.media.n_encoded == 1
        parts = [{"type": "image", "image": image} for image in (cat, dog)]
        parts.insert(1, {"type": "text", "text": " and "})
        parts.append({"type": "text", "text": "?"})
        assert (await engine.chat([{"role": "user", "content": parts}])).text == "two"
        assert await engine.audit() == []


async def test_audio_is_counted_and_named_in_the_prompt(anyio_backend: str) -> None:
    sound = cllm.Audio(np.zeros(16_000, np.float32))
    async with FakeEngine({"a<audio><image>": "both"}) as engine:
        picture = cllm.Image(np.zeros((32, 32, 3), np.uint8))
        both = await engine.generate(["a", sound, picture])
        assert both.text == "both"
        assert (both.usage.n_audio_tokens, both.usage.n_image_tokens) == (10, 5)
        assert await engine.audit() == []


async def test_another_chat_template_is_rendered_and_its_calls_are_found(
    anyio_backend: str,
) -> None:
    llama = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<|python_tag|>{"name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}<|eom_id|>{% endfor %}{% endfor %}'
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    answers = {
        "Oslo": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eom_id|>'
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    async with FakeEngine(answers, chat_template=llama) as engine:
        messages = [{"role": "user", "content": "Oslo"}]
        rendered = await engine.render_chat(messages)
        assert rendered.text == "<|user|>Oslo<|assistant|>"
        completion = await engine.chat(messages, tools=[tool])
        assert [call.name for call in completion.tool_calls] == ["get_weather"]


async def test_answers_may_be_a_function_and_are_the_prompt_by_default(anyio_backend: str) -> None:
    async with FakeEngine(str.upper) as engine:
        assert (await engine.generate("hello")).text == "HELLO"
    async with FakeEngine() as engine:
        assert (await engine.generate("你好🙂")).text == "你好🙂"
        assert (await engine.score("ab", "cd")).token_ids == tuple(b"cd")


async def test_a_prompt_without_an_answer_fails_alone_and_says_so(anyio_backend: str) -> None:
    async with FakeEngine({"a": "b"}) as engine:
        with pytest.raises(cllm.GenerationError, match="no answer is scripted for 'x'"):
            await engine.generate("x")
        assert (await engine.generate("a")).text == "b"


async def test_the_empty_key_is_for_prompts_that_no_other_answers(anyio_backend: str) -> None:
    async with FakeEngine({"": "default", "capital": "Paris"}) as engine:
        assert (await engine.generate("What is the capital?")).text == "Paris"
        assert (await engine.generate("What is the time?")).text == "default"


async def test_a_prompt_whose_log_probabilities_are_wanted_is_answered_like_any_other(
    anyio_backend: str,
) -> None:
    async with FakeEngine({"capital": "Paris"}) as engine:
        completion = await engine.generate("What is the capital?", prompt_logprobs=0)
        assert completion.text == "Paris"
        assert (await engine.score("capital", "x")).token_ids == tuple(b"x")
        unscripted = await engine.score("no such", "key")
        assert unscripted.token_ids == tuple(b"key")
        assert unscripted == await engine.score("no such", "key"), "the same every time"


@pytest.mark.parametrize("answers", ["model.gguf", b"model.gguf", 4, ["a"]])
async def test_what_answers_nothing_is_refused_before_the_engine_starts(answers: object) -> None:
    """A program that makes `Engine("model.gguf")` is told so when it gets a fake one."""
    with pytest.raises(cllm.InvalidArgumentError, match=r"answers.*a mapping from prompts"):
        FakeEngine(answers)  # type: ignore[arg-type]  # the question


async def test_a_batch_may_be_smaller_than_the_seq_ids_are_many(anyio_backend: str) -> None:
    async with FakeEngine(n_seq_max=2, n_batch=2) as engine:
        assert engine.decoder.n_seq_max > engine.decoder.n_batch == 2
        assert (await engine.generate("prompt")).text == "prompt"


async def test_the_next_decode_that_fails_is_not_the_one_that_runs(anyio_backend: str) -> None:
    has_begun = False

    def latency(runs: Sequence[FakeRun]) -> float:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            engine.fail_next_decode("nan")
        return 0.0

    engine = FakeEngine(latency_s=latency)
    async with engine:
        with pytest.raises(cllm.GenerationError) as caught:
            await engine.generate("ab")
        assert caught.value.completion is not None
        assert caught.value.completion.text == "a", "the first decode gave its token"


async def test_a_fault_costs_who_it_is_meant_for(anyio_backend: str) -> None:
    async with FakeEngine() as engine:
        engine.fail_next_decode(-3)
        assert (await engine.generate("nobody notices")).text == "nobody notices"
        assert engine.decoder.n_rebuilds == 1
        engine.fail_next_decode("nan")
        with pytest.raises(cllm.GenerationError):
            await engine.generate("x")
        engine.decoder.poison = lambda run: -3
        with pytest.raises(cllm.EngineFailedError):
            await engine.generate("x")
        assert engine.health().status == "failed"


async def test_a_small_capacity_preempts_and_a_small_queue_refuses(anyio_backend: str) -> None:
    async with FakeEngine(n_ctx=32, n_seq_max=2, n_batch=4, prefix_cache=False) as engine:
        prompts = [letter * 12 for letter in "abcd"]
        with submitted_together(engine, len(prompts)):
            completions = await engine.generate_all(prompts)
        assert [c.text for c in completions] == prompts
        assert engine.statistics().n_preemptions > 0
    busy = FakeEngine(stream_buffer=1, n_seq_max=1, max_queue=0)
    async with busy as engine, engine.stream("first") as stream:
        await stream.__anext__()  # and no more: it cannot end
        with pytest.raises(cllm.QueueFullError):
            await engine.generate("second")


async def test_a_long_decode_ends_when_its_request_is_cancelled(anyio_backend: str) -> None:
    """Ten minutes of latency; the test would time out if the abort did not end it."""
    async with FakeEngine(latency_s=600.0) as engine:
        stream = engine.stream("x" * MIN_ROWS)
        await stream.__aenter__()
        while not running_batch(engine):
            await anyio.lowlevel.checkpoint()
        await stream.cancel()
        engine.decoder.latency_s = 0.0
        assert (await engine.generate("next")).text == "next"


async def test_a_decode_of_few_rows_is_not_ended_for_who_is_cancelled(anyio_backend: str) -> None:
    async with FakeEngine(latency_s=600.0) as engine:
        stream = engine.stream("x" * (MIN_ROWS - 1))
        await stream.__aenter__()
        while not running_batch(engine):
            await anyio.lowlevel.checkpoint()
        await stream.cancel()
        assert not engine.decoder._aborted.is_set()
        assert running_batch(engine)


async def test_closing_ends_a_long_decode(anyio_backend: str) -> None:
    async with FakeEngine(latency_s=600.0) as engine:
        stream = engine.stream("x" * 64)
        await stream.__aenter__()
        while not running_batch(engine):
            await anyio.lowlevel.checkpoint()
    assert our_threads() == []


def test_it_needs_no_library() -> None:
    source = """
import asyncio
from cllm.testing import FakeEngine
async def main():
    async with FakeEngine({"a": "b"}) as engine:
        print((await engine.generate("a")).text)
asyncio.run(main())
print(open("/proc/self/maps").read().count("libllama"))
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", source]
    environment = {**os.environ, "CLLM_LIBRARY": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "b\n0\n"), done.stderr
