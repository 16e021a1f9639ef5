"""The clients that people have talk to a server unchanged: calls, reasoning, streams, parsed outputs."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

for module in ("agents", "anthropic", "langchain_openai", "litellm", "openai", "pydantic_ai"):
    pytest.importorskip(
        module, reason="the clients are in an environment of their own: make test-clients"
    )

import agents
import anthropic
import litellm
import openai
from agents.models.openai_responses import OpenAIResponsesModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as ResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from cllm import Audio
from tests.clients.agents.mcp_server import PIXEL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
ASK: Any = {"role": "user", "content": "What is the weather in Paris?"}
SAID = "It is 20 C in Paris."


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")


def test_openai_chat_loops_over_a_tool(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="m", messages=[ASK], tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.model_extra == {"reasoning_content": "I need the weather."}
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "20 C"}
    turns: Any = [ASK, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model="m", messages=turns, tools=[TOOL])
    assert second.choices[0].message.content == SAID
    turns[1]["content"] = None
    again = client.chat.completions.create(model="m", messages=turns, tools=[TOOL])
    assert again.choices[0].message.content == SAID


def test_openai_streams_calls_and_reasoning(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=[ASK], tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_openai_parses_a_chat(client: openai.OpenAI) -> None:
    ask: Any = {"role": "user", "content": "Answer in JSON."}
    parsed = client.chat.completions.parse(model="m", messages=[ask], response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Paris", degrees=20)


def test_openai_responses_loop_over_a_tool(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "strict": False, **FUNCTION}
    first = client.responses.create(model="m", input="What is the weather?", tools=[function])
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    turns: Any = [
        {"role": "user", "content": "What is the weather?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "20 C"},
    ]
    second = client.responses.create(model="m", input=turns, tools=[function])
    assert second.output_text == SAID
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_openai_streams_responses(client: openai.OpenAI) -> None:
    function: Any = {"type": "function", "strict": False, **FUNCTION}
    with client.responses.stream(
        model="m", input="What is the weather?", tools=[function]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    with client.responses.stream(model="m", input="Hello") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == "Hello!"


def test_openai_parses_a_response(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="m", input="Answer in JSON.", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Paris", degrees=20)


def test_anthropic_loops_over_a_tool(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="none")
    given: Any = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
    first = client.messages.create(model="m", max_tokens=500, messages=[ASK], tools=[given])
    assert first.stop_reason == "tool_use"
    thought, use = first.content
    assert thought.type == "thinking"
    assert use.type == "tool_use"
    assert use.input == {"city": "Paris"}
    content: Any = [block.model_dump() for block in first.content]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "20 C"}
    turns: Any = [
        ASK,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(model="m", max_tokens=500, messages=turns, tools=[given])
    (text,) = second.content
    assert text.type == "text"
    assert text.text == SAID
    assert client.messages.count_tokens(model="m", messages=turns, tools=[given]).input_tokens > 50


def test_anthropic_streams_thinking_text_and_uses_of_tools(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="none")
    given: Any = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
    ways: Any = {
        "model": "m",
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with client.messages.stream(messages=[ASK], tools=[given], **ways) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "message_stop"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "tool_use"]
    hello: Any = {"role": "user", "content": "Hello"}
    with client.messages.stream(messages=[hello], **ways) as stream:
        assert "".join(stream.text_stream) == "Hello!"


def test_openai_agents_run_with_their_default_model(base_url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "20 C" if city == "Paris" else "?"

    model = OpenAIResponsesModel(model="m", openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[get_weather])
    result = agents.Runner.run_sync(agent, "What is the weather in Paris?")
    assert result.final_output == SAID


def model_of(kind: str, base_url: str) -> Any:
    """A model of pydantic-ai."""
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    model: Any = {
        "chat": lambda: OpenAIChatModel("m", provider=provider),
        "responses": lambda: ResponsesModel("m", provider=provider),
        "anthropic": lambda: AnthropicModel(
            "m",
            provider=AnthropicProvider(
                anthropic_client=anthropic.AsyncAnthropic(base_url=base_url, api_key="none")
            ),
        ),
    }[kind]()
    return model


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
def test_pydantic_ai_gives_its_default_output(kind: str, base_url: str) -> None:
    agent = Agent(model_of(kind, base_url), output_type=Weather)
    # Not `run_sync`: it takes the loop that openai-agents left behind in this thread.
    answer = asyncio.run(agent.run("What is the weather?"))
    assert answer.output == Weather(city="Paris", degrees=20)


def test_langchain_binds_tools(base_url: str) -> None:
    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "20 C"

    chat = ChatOpenAI(model="m", base_url=f"{base_url}/v1", api_key="none")  # type: ignore[arg-type]
    bound = chat.bind_tools([get_weather])
    ask = HumanMessage("What is the weather in Paris?")
    first: Any = bound.invoke([ask])
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    second = bound.invoke([ask, first, ToolMessage("20 C", tool_call_id=call["id"])])
    assert second.content == SAID


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_gives_calls(stream: bool, base_url: str) -> None:
    ways: dict[str, Any] = {"model": "openai/m", "api_base": f"{base_url}/v1", "api_key": "none"}
    answer: Any = litellm.completion(messages=[ASK], tools=[TOOL], stream=stream, **ways)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


# --- Images -------------------------------------------------------------------------------------
PICTURE = base64.b64decode(PIXEL)
URL = f"data:image/png;base64,{PIXEL}"


def test_openai_sends_images_in_chats_and_responses(client: openai.OpenAI) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    text: Any = {"type": "text", "text": "What is this?"}
    said: Any = {"role": "user", "content": [text, part, part]}
    chat = client.chat.completions.create(model="m", messages=[said])
    assert chat.choices[0].message.content == "I see 2."
    shown: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
    turn: Any = {"role": "user", "content": [{"type": "input_text", "text": "This?"}, shown]}
    assert client.responses.create(model="m", input=[turn]).output_text == "I see 1."
    count = client.responses.input_tokens.count(model="m", input=[turn])
    assert count.input_tokens > 5


def test_anthropic_sends_images_and_results_with_images(base_url: str) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    block: Any = {"type": "image", "source": source}
    used: Any = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    with anthropic.Anthropic(base_url=base_url, api_key="none") as client:
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Look."}, block]},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
        done = client.messages.create(model="m", max_tokens=50, messages=messages)
        assert done.content[0].type == "text"
        assert done.content[0].text == "I see 2."


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
def test_pydantic_ai_sends_binary_content(kind: str, base_url: str) -> None:
    prompt = ["What is this?", BinaryContent(data=PICTURE, media_type="image/png")]
    assert asyncio.run(Agent(model_of(kind, base_url)).run(prompt)).output == "I see 1."


def test_langchain_and_litellm_send_images(base_url: str) -> None:
    chat = ChatOpenAI(model="m", base_url=f"{base_url}/v1", api_key="none")
    parts: list[Any] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "source_type": "base64", "data": PIXEL, "mime_type": "image/png"},
    ]
    assert chat.invoke([HumanMessage(parts)]).text == "I see 1."
    url: Any = {"type": "image_url", "image_url": {"url": URL}}
    for model in ("openai/m", "anthropic/m"):
        done = litellm.completion(
            model=model,
            messages=[{"role": "user", "content": [parts[0], url]}],
            api_base=f"{base_url}/v1" if model.startswith("openai") else base_url,
            api_key="none",
            max_tokens=50,
        )
        assert done.choices[0].message.content == "I see 1."


# --- Audio --------------------------------------------------------------------------------------
WAV = Audio(np.zeros(800, np.float32)).file()
SOUND = base64.b64encode(WAV).decode()


def test_openai_sends_audio_and_asks_for_transcriptions(client: openai.OpenAI) -> None:
    part: Any = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
    assert chat.choices[0].message.content == "I hear 1."
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.audio_tokens == 5
    file = ("a.wav", WAV)
    ask = client.audio.transcriptions.create
    assert ask(file=file, model="m", language="en").text == "I hear 1."
    assert ask(file=file, model="m", response_format="text").strip() == "I hear 1."
    *_, last = ask(file=file, model="m", stream=True)
    assert (last.type, last.text) == ("transcript.text.done", "I hear 1.")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(file=file, model="m", response_format="srt")


def test_pydantic_ai_and_langchain_send_audio(base_url: str) -> None:
    prompt = ["What is this?", BinaryContent(data=WAV, media_type="audio/wav")]
    assert asyncio.run(Agent(model_of("chat", base_url)).run(prompt)).output == "I hear 1."
    chat = ChatOpenAI(model="m", base_url=f"{base_url}/v1", api_key="none")
    part: Any = {"type": "audio", "source_type": "base64", "data": SOUND, "mime_type": "audio/wav"}
    assert chat.invoke([HumanMessage([part])]).text == "I hear 1."
    done = litellm.completion(
        model="openai/m",
        messages=[{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}]}],
        api_base=f"{base_url}/v1", api_key="none",
    )  # fmt: skip
    assert done.choices[0].message.content == "I hear 1."
