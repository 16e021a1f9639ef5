"""What a real vocabulary, real text and a real template do: SmolLM2-135M-Instruct.

`make test-real` fetches the model; without it these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import jsonschema
import pytest

from cllm import Engine, FinishReason, ModelLoadError
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.output import TokenLogprob
from tests.conftest import QUIET
from tools.real_model import MODEL

pytestmark = [
    pytest.mark.real,
    pytest.mark.anyio,
    pytest.mark.skipif(not MODEL.is_file(), reason="not in the cache: make test-real fetches it"),
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "n_days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "n_days"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def real() -> AsyncIterator[Engine]:
    async with Engine(MODEL, n_ctx=4096, n_seq_max=8, **QUIET) as engine:
        yield engine


async def test_a_chat_is_answered_in_words_and_ends_by_itself(real: Engine) -> None:
    ask = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    completion = await real.chat(ask, temperature=0, max_tokens=60)
    assert "Paris" in completion.text
    assert completion.finish_reason is FinishReason.STOP
    assert completion.reasoning == ""
    assert completion.tool_calls == ()
    abilities = await real.template_abilities()
    assert abilities is not None
    assert abilities.system
    assert not abilities.tools


async def test_streaming_gives_what_is_given_at_once(real: Engine) -> None:
    whole = await real.chat(ASK, tools=[TOOL], temperature=0, max_tokens=60)
    async with real.stream_chat(ASK, tools=[TOOL], temperature=0, max_tokens=60) as stream:
        assert "".join([delta.text async for delta in stream]) == whole.text


async def test_a_call_that_is_asked_for_is_right(real: Engine) -> None:
    for choice in ("required", "get_weather"):
        completion = await real.chat(
            ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0,
            max_tokens=120,
        )  # fmt: skip
        (call,) = completion.tool_calls
        assert completion.finish_reason is FinishReason.TOOL_CALLS
        assert completion.text == ""
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, TOOL["function"]["parameters"])
        assert arguments["city"] == "Paris"
        assert arguments["n_days"] == 3


async def test_a_result_is_answered_in_words(real: Engine) -> None:
    completion = await real.chat(
        ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0,
        max_tokens=120,
    )  # fmt: skip
    (call,) = completion.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    turns: list[dict[str, Any]] = [
        *ASK,
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"},
    ]  # fmt: skip
    answer = await real.chat(turns, tools=[TOOL], tool_choice="none", temperature=0, max_tokens=60)
    assert answer.text
    assert answer.usage.n_cached > 0


async def test_outputs_of_a_schema_are_whole_within_200_tokens(real: Engine) -> None:
    asks = ["Describe a student.", "Describe a nurse.", "Invent a person.", "Who is Bob?"]
    for seed, ask in enumerate(asks):
        completion = await real.chat(
            [{"role": "user", "content": f"{ask} Answer in JSON."}],
            json_schema=PERSON, max_tokens=200, seed=seed,
        )  # fmt: skip
        assert completion.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(completion.text), PERSON)


async def test_the_turns_of_a_chat_compute_what_is_new_alone(real: Engine) -> None:
    turns = [{"role": "user", "content": "Tell me a fact about the sea."}]
    for _ in range(3):
        completion = await real.chat(turns, temperature=0, max_tokens=30)
        turns += [
            {"role": "assistant", "content": completion.text},
            {"role": "user", "content": "Tell me another one."},
        ]
        n_before = completion.usage.n_prompt
        again = await real.chat(turns, temperature=0, max_tokens=1)
        # The answer's tokens are in the cache too; only where it was cut may a token be another one.
        assert again.usage.n_cached >= n_before


async def test_a_cancelled_chat_leaves_nothing(real: Engine) -> None:
    async with real.stream_chat(ASK, temperature=0) as stream:
        async for _ in stream:
            await stream.cancel()
    assert (await stream.completion()).finish_reason is FinishReason.CANCELLED
    assert await real.audit() == []
    assert real.statistics().n_running == 0


async def test_a_schema_begins_after_a_thought_that_has_a_budget() -> None:
    async with Engine(MODEL, n_ctx=2048, n_seq_max=4, chat_template=CHATML, **QUIET) as engine:
        abilities = await engine.template_abilities()
        assert abilities is not None
        assert abilities.thinking
        completion = await engine.chat(
            [{"role": "user", "content": "Describe a person in JSON."}],
            json_schema=PERSON, reasoning_budget=24, temperature=0, max_tokens=250,
        )  # fmt: skip
        assert completion.reasoning
        assert completion.usage.n_reasoning <= 24 + 8  # and the marker's own tokens
        jsonschema.validate(json.loads(completion.text), PERSON)


async def test_a_draft_model_with_other_tokens_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="cannot draft: it has 260 tokens, not 49152"):
        async with Engine(MODEL, speculation=EMBEDDED_MODEL, n_ctx=512, n_seq_max=1, **QUIET):
            pass


@pytest.mark.usefixtures("free_rows")
async def test_text_that_is_copied_is_the_same_in_fewer_ticks_with_speculation() -> None:
    text = "The harbour master counts seven red boats, four blue ones, and a grey one at 6:45. "
    chat = [{"role": "user", "content": f"Repeat this word for word: {2 * text}"}]
    n_ticks, answers = [], []
    for speculation in (None, "ngram"):
        exact: dict[str, Any] = {"deterministic": True, "n_ctx": 2048, "n_seq_max": 2}
        async with Engine(MODEL, speculation=speculation, **exact, **QUIET) as engine:
            answers.append(await engine.chat(chat, temperature=0, max_tokens=100, logprobs=1))
            n_ticks.append(engine.statistics().n_ticks)
    assert answers[1].token_ids == answers[0].token_ids
    assert answers[1].logprobs == answers[0].logprobs
    # How often it copies the text before it ends is another thing on another CPU.
    assert answers[1].usage.n_accepted > 0.3 * answers[1].usage.n_output
    assert n_ticks[1] < 0.8 * n_ticks[0]


async def test_what_ran_before_changes_no_chat_where_each_sequence_has_its_own_cells() -> None:
    """In one buffer for all, most of these would differ: cells lie in another order."""
    options: dict[str, Any] = {"n_ctx": 4 * 2048, "n_seq_max": 4, "kv_unified": False, **QUIET}
    chats = [
        [{"role": "system", "content": manner}, {"role": "user", "content": question}]
        for manner, question in (
            ("You are a friendly guide.", "What is the capital of France?"),
            ("Answer as a sailor would.", "Write a sentence about the sea. " * 12),
        )
    ]

    async def ask(engine: Engine, chat: list[dict[str, str]]) -> tuple[TokenLogprob, ...]:
        answer = await engine.chat(
            chat, temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1
        )
        assert answer.logprobs is not None
        return answer.logprobs

    fresh = []
    for chat in chats:
        async with Engine(MODEL, **options) as engine:
            fresh.append(await ask(engine, chat))
    async with Engine(MODEL, **options) as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(40):
                other = partial(
                    engine.generate, "Once upon a time " * (1 + i % 4), seed=i, max_tokens=3 + i % 6
                )
                tasks.start_soon(other)
        assert [await ask(engine, chat) for chat in chats] == fresh
