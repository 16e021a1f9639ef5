"""Chats of an engine: their answers in channels, whole and streamed, and the templates they go through."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from cllm import (
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidArgumentError,
    InvalidRequestError,
    SamplingParams,
    TokenDelta,
)
from cllm.bindings import Model
from cllm.engine.chat.named_formats import DEFAULT_CALLS
from cllm.engine.chat.output_format import OutputFormat
from cllm.engine.chat.output_parser import OutputParser
from cllm.engine.loop.output_channels import OutputChannels
from cllm.testing import FakeAnswer, FakeEngine
from tests.conftest import QUIET
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]
Messages = list[dict[str, Any]]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
ARGUMENTS = '{"city":"Oslo"}'
ANSWER = FakeAnswer("Let me see.", "I need it.", [("get_weather", ARGUMENTS)])
LONG = FakeAnswer(tool_calls=[("get_weather", '{"city":"' + "o" * 300 + '"}')])
ANSWERS: dict[str, str | FakeAnswer] = {"weather": ANSWER, "long": LONG, "Once": " upon a time."}
ASK: Messages = [{"role": "user", "content": "weather?"}]


async def read(engine: Engine, messages: Messages, **options: Any) -> list[TokenDelta]:
    async with engine.stream_chat(messages, **options) as stream:
        return [delta async for delta in stream]


def channels_of(deltas: list[TokenDelta]) -> tuple[str, str, list[tuple[str | None, str]]]:
    """Content, reasoning and calls of deltas."""
    calls: list[tuple[str | None, str]] = []
    for call in [call for delta in deltas for call in delta.tool_calls]:
        if call.index == len(calls):
            calls.append((call.name, ""))
        name, arguments = calls[call.index]
        calls[call.index] = (name, arguments + call.arguments)
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        calls,
    )


def channels_of_all(completion: Completion) -> tuple[str, str, list[tuple[str | None, str]]]:
    calls = [(call.name, call.arguments) for call in completion.tool_calls]
    return completion.text, completion.reasoning, list(calls)


# --- Channels --------------------------------------------------------------------------------
async def test_an_answer_is_in_three_channels_whole_and_streamed(anyio_backend: str) -> None:
    async with FakeEngine(ANSWERS) as engine:
        whole = await engine.chat(ASK, tools=[WEATHER])
        deltas = await read(engine, ASK, tools=[WEATHER])
    said = ("Let me see.", "I need it.", [("get_weather", ARGUMENTS)])
    assert channels_of_all(whole) == channels_of(deltas) == said
    assert whole.finish_reason is deltas[-1].finish_reason is FinishReason.TOOL_CALLS
    assert whole.tool_calls[0].id
    assert len("I need it.") <= whole.usage.n_reasoning <= len("<think>\nI need it.\n</think>")


async def test_every_token_is_in_one_delta_wherever_its_text_went(anyio_backend: str) -> None:
    async with FakeEngine(ANSWERS) as engine:
        whole = await engine.chat(ASK, tools=[WEATHER])
        deltas = await read(engine, ASK, tools=[WEATHER])
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    assert tokens == whole.token_ids
    assert len(tokens) == whole.usage.n_output


async def test_an_answer_is_the_message_of_the_next_turn(anyio_backend: str) -> None:
    async with FakeEngine(ANSWERS) as engine:
        whole = await engine.chat(ASK, tools=[WEATHER])
        (call,) = whole.tool_calls
        told = {"role": "tool", "tool_call_id": call.id, "content": "3 C"}
        messages = [*ASK, whole.as_message(), told]
        again = await engine.render_chat(messages, tools=[WEATHER])
        plain = await engine.chat([{"role": "user", "content": "Once"}])
    assert "<think>\nI need it.\n</think>\n\nLet me see.<tool_call>" in again.text
    assert again.text.endswith("tool: 3 C\nassistant: ")
    assert plain.as_message() == {"role": "assistant", "content": " upon a time."}


async def test_a_long_call_streams_and_a_short_one_comes_complete(anyio_backend: str) -> None:
    async with FakeEngine(ANSWERS) as engine:
        short = await read(engine, ASK, tools=[WEATHER])
        long = await read(engine, [{"role": "user", "content": "long"}], tools=[WEATHER])
    calls = [call for delta in short for call in delta.tool_calls]
    assert "".join(call.arguments for call in calls if calls) == ARGUMENTS
    with_calls = [delta for delta in long if delta.tool_calls]
    assert len([delta for delta in short if delta.tool_calls]) == 1
    assert len(with_calls) > 20


async def test_a_prompt_and_a_chat_that_offers_nothing_are_text(anyio_backend: str) -> None:
    async with FakeEngine(ANSWERS) as engine:
        completion = await engine.generate("weather")
        assert completion.text == ANSWER.written()
        assert (completion.reasoning, completion.tool_calls) == ("", ())
        chat = await engine.chat(ASK)
    assert chat.text.startswith("Let me see.\n<tool_call>")
    assert chat.reasoning == "I need it."
    assert chat.tool_calls == ()


@pytest.mark.parametrize("n_tokens", [5, 30, 45, 60, 90])
async def test_what_is_cut_off_loses_no_text_and_makes_no_half_a_call(
    n_tokens: int, anyio_backend: str
) -> None:
    async with FakeEngine(ANSWERS) as engine:
        completion = await engine.chat(ASK, tools=[WEATHER], max_tokens=n_tokens)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.tool_calls == ()
    written = ANSWER.written()[:n_tokens]
    left = written.replace("<think>", "").replace("</think>", "").replace("<tool_call>", "")
    shown = completion.reasoning + completion.text.replace("<tool_call>", "")
    assert "".join(shown.split()) in ("".join(left.split()), "".join(written.split()))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ('{"city": "' + "x" * 400 + 'STOP', "stop"),
        ('{"city": "' + "x" * 400 + "end of the answer", "stop"),
        ('{"city": "' + "x" * 400 + '"} and no end', "tool_calls"),
        ('{"city": "' + "x" * 400 + '"}', "tool_calls"),
        ('{"city": "' + "x" * 400 + '"}}', "tool_calls"),
        ('{"city": "' + "x" * 400 + '"}}\n</tool_call>', "tool_calls"),
        ('{"city": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
         + "x" * 400 + "STOP", "stop"),
    ],
    ids=["stop string", "end", "other text", "no end", "no marker", "whole", "the second of two"],
)  # fmt: skip
async def test_a_long_call_that_was_cut_off_is_no_reason_to_call_a_tool(
    written: str, reason: str, anyio_backend: str
) -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": ' + written
    async with FakeEngine({"weather": answer}) as engine:
        completion = await engine.chat(ASK, tools=[WEATHER], stop=["STOP"])
    assert completion.finish_reason == reason
    assert completion.tool_calls
    assert (completion.stop_reason == "STOP") == ("STOP" in written)


async def test_a_stream_that_is_cancelled_inside_of_a_call_says_what_there_was(
    anyio_backend: str,
) -> None:
    said = ""
    async with (
        FakeEngine(ANSWERS, latency_s=lambda _: 0.001) as engine,
        engine.stream_chat(ASK, tools=[WEATHER]) as stream,
    ):
        async for delta in stream:
            said += delta.text
            if said == "Let me":
                await stream.cancel()
        completion = await stream.completion()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert completion.text.startswith("Let me")
    assert completion.reasoning == "I need it."


async def test_chats_at_once_each_have_their_own_channels(anyio_backend: str) -> None:
    answers: dict[str, str | FakeAnswer] = {
        f"city{n:02}.": FakeAnswer(f"text{n}", f"thought{n}", [("get_weather", {"city": f"{n}"})])
        for n in range(40)
    }
    found: dict[int, Completion] = {}
    async with FakeEngine(answers, n_seq_max=16) as engine:

        async def ask(n: int) -> None:
            messages = [{"role": "user", "content": f"city{n:02}."}]
            found[n] = await engine.chat(messages, tools=[WEATHER])

        async with anyio.create_task_group() as tasks:
            for n in range(40):
                tasks.start_soon(ask, n)
    for n, completion in found.items():
        assert (completion.text, completion.reasoning) == (f"text{n}", f"thought{n}")
        assert [call.arguments for call in completion.tool_calls] == [f'{{"city": "{n}"}}']
    ids = [call.id for completion in found.values() for call in completion.tool_calls]
    assert len(set(ids)) == 40


@pytest.mark.parametrize("method", ["push", "finish"])
async def test_a_fault_of_a_parser_costs_its_own_channels_and_nothing_else(
    method: str,
    anyio_backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = getattr(OutputParser, method)

    def fails_for_cities(parser: OutputParser, *text: str) -> Any:
        if parser.knows("get_weather") and (method == "finish" or parser.n_calls):
            raise RecursionError("too deep")
        return real(parser, *text)

    monkeypatch.setattr(OutputParser, method, fails_for_cities)
    found: dict[str, Completion] = {}
    async with FakeEngine({**ANSWERS, "Once": ANSWER}) as engine:

        async def ask(name: str, **options: Any) -> None:
            found[name] = await engine.chat([{"role": "user", "content": name}], **options)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask("weather", tools=[WEATHER]))
            tasks.start_soon(lambda: ask("Once", tools=[OTHER]))
        assert engine.statistics().n_running == 0
    assert found["weather"].text == ANSWER.written()
    assert found["Once"].reasoning == "I need it."
    assert "cannot be split into channels" in caplog.text


def test_what_needs_no_parser_passes_as_the_same_object() -> None:
    output_format = OutputFormat(reasoning=("<think>", "</think>"), calls=DEFAULT_CALLS)
    channels = OutputChannels(OutputParser(output_format))
    words = ("It", " is", " mild ", "in", " Oslo", " [x]", "<", "b>", " today")
    passed = [channels.split(delta) is delta for delta in [TokenDelta(w, (1,)) for w in words]]
    assert passed == [True, True, False, False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "hammer"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": "hammer"}, "tools"),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"parallel_tool_calls": 3}, "parallel_tool_calls"),
    ],
)
async def test_what_cannot_be_asked_of_a_chat_is_named(
    options: dict[str, Any], field: str, anyio_backend: str
) -> None:
    async with FakeEngine(ANSWERS) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.chat(ASK, **options)
        assert caught.value.field == field
        assert (await engine.chat(ASK, tools=[WEATHER])).tool_calls


# --- Templates -------------------------------------------------------------------------------
async def test_an_answer_that_was_begun_goes_on(anyio_backend: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Once"}]
    async with FakeEngine(ANSWERS) as engine:
        rendered = await engine.render_chat(messages, continue_final_message=True)
        assert rendered.text == "user: weather?\nassistant: Once"
        completion = await engine.chat(messages[1:], continue_final_message=True)
    assert completion.text == " upon a time."


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{{ flavour }}"
)


@pytest.mark.parametrize("kind", ["text", "file"])
async def test_a_template_takes_the_place_of_the_models_own(
    kind: str, tmp_path: Path, anyio_backend: str
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    given = TEMPLATE if kind == "text" else path
    async with Engine(chat_template=given, n_ctx=512, **QUIET) as engine:
        rendered = await engine.render_chat(
            ASK, reasoning_effort="high", chat_template_kwargs={"flavour": "!"}
        )
        assert rendered.text == "[user]weather?(high)!"
        assert rendered.token_ids == tuple(await engine.tokenize(rendered.text))
        assert engine.model.chat_template == TEMPLATE
        abilities = await engine.template_abilities()
    assert abilities is not None
    assert abilities.reasoning_effort
    assert not abilities.tools


async def test_tools_that_the_template_leaves_out_are_told_in_words(anyio_backend: str) -> None:
    async with Engine(chat_template=TEMPLATE, n_ctx=512, **QUIET) as engine:
        rendered = await engine.render_chat(ASK, tools=[WEATHER])
    assert "get_weather" in rendered.text
    assert "weather?" in rendered.text


async def test_a_template_that_does_not_compile_is_the_error_of_the_chat_alone(
    anyio_backend: str,
) -> None:
    async with Engine(chat_template="{{ messages[", n_ctx=512, **QUIET) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.chat(ASK)
        assert caught.value.field == "chat_template"
        assert (await engine.generate("1+1=", max_tokens=1)).usage.n_output == 1


async def test_a_template_that_is_no_file_is_said_before_the_model_is_loaded(
    tmp_path: Path, anyio_backend: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        async with Engine(chat_template=tmp_path / "missing.jinja"):
            pass
    assert caught.value.field == "chat_template"
    with pytest.raises(InvalidArgumentError):
        EngineConfig(chat_template=3)  # type: ignore[arg-type]


# --- What the model's file says of sampling --------------------------------------------------
@pytest.fixture
def sampling_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model as if its file said so; no test model has such keys."""
    said = {"temp": "0.25", "top_k": "7", "min_p": "much", "penalty_last_n": "-5"}
    keys = {f"general.sampling.{key}": value for key, value in said.items()}
    real = Model.metadata_value
    monkeypatch.setattr(
        Model, "metadata_value", lambda model, key: keys.get(key) or real(model, key)
    )


@pytest.mark.same_process("the metadata of its model is replaced")
@pytest.mark.usefixtures("sampling_keys")
async def test_the_sampling_of_the_models_file_is_the_default(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(n_ctx=512, **QUIET) as engine:
        assert engine.sampling_defaults == {"temperature": 0.25, "top_k": 7}
        call = engine.stream("x", top_k=3)._call
        assert (call.params.temperature, call.params.top_k) == (0.25, 3)
        call = engine.stream("x", SamplingParams())._call
        assert call.params == SamplingParams()
    assert "general.sampling.min_p = much: left out" in caplog.text
    assert "general.sampling.penalty_last_n = -5: left out" in caplog.text


@pytest.mark.usefixtures("sampling_keys")
async def test_there_is_a_switch_for_it(anyio_backend: str) -> None:
    async with Engine(n_ctx=512, model_sampling=False, **QUIET) as engine:
        assert engine.sampling_defaults == {}


async def test_adaptive_p_samples_and_is_the_same_for_the_same_seed(anyio_backend: str) -> None:
    options: dict[str, Any] = {"adaptive_target": 0.1, "seed": 3, "min_p": 0.0}
    path = make_model.ensure("tiny-swa", "F16")
    async with Engine(path, n_ctx=512, **QUIET) as engine:
        first, again = [await engine.generate("hello ", max_tokens=24, **options) for _ in range(2)]
        other = await engine.generate(
            "hello ", max_tokens=24, **{**options, "adaptive_target": -1.0}
        )
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_long_answer_that_goes_on_is_not_read_again_on_the_event_loop(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    class Channels(OutputChannels):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            readers.append(threading.current_thread())
            super().__init__(*arguments, **options)

    monkeypatch.setattr("cllm.engine.loop.input_processor.OutputChannels", Channels)
    async with FakeEngine(lambda _: "a" * 1030, n_ctx=4096) as engine:
        for n_tokens in (2, 1025):
            options: dict[str, Any] = {"tools": [WEATHER], "generated": tuple(b"a" * n_tokens)}
            assert (await engine.chat(ASK, **options)).text == "a" * (1030 - n_tokens)
    assert [reader is threading.current_thread() for reader in readers] == [True, False]
