"""LangChain, LlamaIndex, pydantic-ai and llm, as they are, with an engine of their own process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

for module in ("langchain_core", "llama_index.core", "llm", "pydantic_ai"):
    pytest.importorskip(
        module, reason="the libraries are in an environment of their own: make test-clients"
    )

import llm
import pydantic_ai
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import AudioBlock, ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llm.plugins import pm
from pydantic import BaseModel
from pydantic_ai import BinaryContent, CachePoint, ToolOrOutput

from cllm import Audio, DeadlineError, Engine, InvalidRequestError
from cllm.integrations import llm_plugin
from cllm.integrations.langchain import CllmChat, CllmEmbeddings
from cllm.integrations.llama_index import CllmEmbedding, CllmLLM
from cllm.integrations.pydantic_ai import CllmModel
from cllm.testing import FakeAnswer, FakeEngine
from tests.clients.agents.mcp_server import PIXEL

SAID = "It is 20 C in Paris."
CALL = FakeAnswer(reasoning="I look.", tool_calls=[("get_weather", {"city": "Paris"})])


class City(BaseModel):
    """A city."""

    name: str


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"20 C, {city}"


def answer(prompt: str) -> str | FakeAnswer:
    """What a model would say that can do everything."""
    engine_prompts.append(prompt)
    if "20 C, Paris" in prompt:
        return SAID
    tools = prompt.partition("\n")[0] if prompt.startswith("tools: ") else ""
    for name in ("City", "final_result"):
        if f'"name": "{name}"' in tools:
            return FakeAnswer(tool_calls=[(name, {"name": "Paris"})])
    last = prompt.rsplit("user:", 1)[-1]
    if "half a call" in last:
        return '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "x" * 400
    if "picture" in last:
        return "Seen" if "<image>" in last else FakeAnswer(tool_calls=[("picture", {})])
    if "weather" in last:
        return CALL
    if "<image>and<audio>" in prompt or "and<image><audio>" in prompt:  # `llm` puts the text first
        return "Both"
    return '{"name": "Paris"}' if "JSON" in prompt else "Hello there"


engine_prompts: list[str] = []

Checks = Callable[[FakeEngine], Any]


def with_engine(check: Checks, **options: Any) -> None:
    async def run() -> None:
        async with FakeEngine(answer, **options) as engine:
            await check(engine)
            assert await engine.audit() == []

    asyncio.run(run())


# --- LangChain -------------------------------------------------------------------------------
def test_langchain_answers_streams_and_counts() -> None:
    async def check(engine: FakeEngine) -> None:
        model = CllmChat(engine=engine, temperature=0, max_tokens=50)
        told = await model.ainvoke("Hi")
        assert told.content == "Hello there"
        assert told.usage_metadata["output_tokens"] == len("Hello there") + 1
        assert told.response_metadata["finish_reason"] == "stop"
        chunks = [chunk async for chunk in model.astream("Hi")]
        assert len(chunks) > 5
        assert sum(chunks[1:], chunks[0]).content == "Hello there"
        assert (await model.bind(max_tokens=5).ainvoke("Hi")).content == "Hello"
        assert (await model.bind(stop=["o"]).ainvoke("Hi")).content == "Hell"
        chain = ChatPromptTemplate.from_template("Say {what}") | model | StrOutputParser()
        assert await chain.abatch([{"what": "a"}, {"what": "b"}]) == ["Hello there"] * 2
        with pytest.raises(InvalidRequestError, match="temperature"):
            await model.ainvoke("Hi", temperature=-1)

    with_engine(check)


def test_langchain_calls_tools_and_keeps_to_schemas() -> None:
    async def check(engine: FakeEngine) -> None:
        model = CllmChat(engine=engine)
        with_tools = model.bind_tools([tool(get_weather)], tool_choice="any")
        question = HumanMessage("What is the weather in Paris?")
        told = await with_tools.ainvoke([question])
        assert [(call["name"], call["args"]) for call in told.tool_calls] == [
            ("get_weather", {"city": "Paris"})
        ]
        assert told.additional_kwargs["reasoning_content"] == "I look."
        chunks = [chunk async for chunk in with_tools.astream([question])]
        assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == {"city": "Paris"}
        result = await tool(get_weather).ainvoke(told.tool_calls[0])
        assert (await with_tools.ainvoke([question, told, result])).content == SAID
        structured = model.with_structured_output(City)
        assert await structured.ainvoke("JSON") == City(name="Paris")
        raw = await model.with_structured_output(City, include_raw=True).ainvoke("JSON")
        assert (raw["parsed"], raw["parsing_error"]) == (City(name="Paris"), None)
        wrong = await model.with_structured_output(City, include_raw=True).ainvoke("Hi")
        assert wrong["parsed"] is None
        assert wrong["parsing_error"] is not None

    with_engine(check)


def test_langchain_serves_worker_threads_and_says_what_to_await_elsewhere() -> None:
    async def check(engine: FakeEngine) -> None:
        model, vectors = CllmChat(engine=engine), CllmEmbeddings(engine, query_prefix="query: ")

        def work() -> tuple[str, list[str], int]:
            chunks = [str(chunk.content) for chunk in model.stream("Hi")]
            return str(model.invoke("Hi").content), chunks, len(vectors.embed_documents(["a", "b"]))

        whole, chunks, n_vectors = await anyio.to_thread.run_sync(work)
        assert (whole, "".join(chunks), n_vectors) == ("Hello there", "Hello there", 2)
        assert len(chunks) > 5
        with pytest.raises(RuntimeError, match="use ainvoke there"):
            model.invoke("Hi")
        plain = await CllmEmbeddings(engine).aembed_query("query: bees")
        assert await vectors.aembed_query("bees") == plain

    with_engine(check)


# --- LlamaIndex ------------------------------------------------------------------------------
# LlamaIndex asks every attribute of its agent whether it is a step, pydantic's deprecated ones too.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
def test_llama_index_answers_streams_and_calls_tools() -> None:
    async def check(engine: FakeEngine) -> None:
        model = CllmLLM(engine, temperature=0)
        assert (await model.achat([ChatMessage("Hi")])).message.content == "Hello there"
        responses = [r async for r in await model.astream_chat([ChatMessage("Hi")])]
        assert "".join(r.delta for r in responses) == responses[-1].message.content == "Hello there"
        assert (await model.acomplete("Hi")).text == "Hello there"
        texts = [r.text async for r in await model.astream_complete("Hi")]
        assert texts[-1] == "Hello there"
        weather = FunctionTool.from_defaults(get_weather)
        told = await model.achat_with_tools([weather], "What is the weather in Paris?")
        (call,) = model.get_tool_calls_from_response(told)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})
        # LlamaIndex rejects more than 1,024 characters, a limit of OpenAI.
        long = FunctionTool.from_defaults(get_weather, description="x" * 2000)
        told = await model.achat_with_tools([long], "What is the weather in Paris?")
        assert model.get_tool_calls_from_response(told)
        with pytest.raises(ValueError, match="calls no tool"):
            model.get_tool_calls_from_response(await model.achat([ChatMessage("Hi")]))
        for streaming in (True, False):
            agent = FunctionAgent(tools=[weather], llm=model, streaming=streaming)
            assert str(await agent.run("What is the weather in Paris?")) == SAID
        structured = await model.as_structured_llm(City).achat([ChatMessage("Hi")])
        assert structured.raw == City(name="Paris")
        plain = await anyio.to_thread.run_sync(lambda: model.complete("Hi").text)
        streamed = await anyio.to_thread.run_sync(
            lambda: [r.delta for r in model.stream_complete("Hi")]
        )
        assert plain == "".join(streamed) == "Hello there"

    with_engine(check, n_ctx=8192)


PNG = base64.b64decode(PIXEL)
WAV = Audio(np.zeros(800, np.float32)).file()


def test_llama_index_and_pydantic_ai_give_images_and_audio() -> None:
    async def check(engine: FakeEngine) -> None:
        blocks = [ImageBlock(image=PNG), TextBlock(text="and"), AudioBlock(audio=WAV)]
        model = CllmLLM(engine, temperature=0)
        assert (await model.achat([ChatMessage(blocks=blocks)])).message.content == "Both"
        parts = [
            BinaryContent(PNG, media_type="image/png"), "and",
            BinaryContent(WAV, media_type="audio/wav"),
        ]  # fmt: skip
        assert (await pydantic_ai.Agent(CllmModel(engine)).run(parts)).output == "Both"
        document = BinaryContent(b"%PDF", media_type="application/pdf")
        with pytest.raises(
            TypeError, match="images and audio as BinaryContent, but no application/pdf"
        ):
            await pydantic_ai.Agent(CllmModel(engine)).run(["a", document])

    with_engine(check)


def test_llama_index_finds_what_a_question_is_about() -> None:
    async def check(engine: FakeEngine) -> None:
        model, vectors = CllmLLM(engine), CllmEmbedding(engine)
        documents = [Document(text="Bees make honey."), Document(text="Rain falls in Bergen.")]
        index = await anyio.to_thread.run_sync(
            lambda: VectorStoreIndex.from_documents(documents, embed_model=vectors)
        )
        (found,) = await index.as_retriever(similarity_top_k=1).aretrieve("What do bees make?")
        assert found.text == "Bees make honey."
        asked = await index.as_query_engine(llm=model).aquery("What do bees make?")
        assert str(asked) == "Hello there"

    with_engine(check, n_ctx=8192)


# --- pydantic-ai -----------------------------------------------------------------------------
def test_pydantic_ai_runs_agents() -> None:
    async def check(engine: FakeEngine) -> None:
        model = CllmModel(
            engine, settings={"temperature": 0.0, "stop_sequences": ["~"]}, priority=1
        )
        agent = pydantic_ai.Agent(model, instructions="Be brief.")
        agent.tool_plain(get_weather)
        assert (await agent.run("Hi")).output == "Hello there"
        told = await agent.run("What is the weather in Paris?")
        assert told.output == SAID
        kinds = [type(part).__name__ for message in told.all_messages() for part in message.parts]
        assert kinds == [
            "UserPromptPart", "ThinkingPart", "ToolCallPart", "ToolReturnPart", "TextPart"
        ]  # fmt: skip
        assert told.usage.requests == 2
        assert told.usage.output_tokens > len(SAID)
        async with agent.run_stream("What is the weather in Paris?") as stream:
            assert [text async for text in stream.stream_text()][-1] == SAID
        again = await agent.run("And now?", message_history=told.all_messages())
        assert again.output == SAID
        for output_type in (City, pydantic_ai.ToolOutput(City), pydantic_ai.PromptedOutput(City)):
            structured = pydantic_ai.Agent(model, output_type=output_type)
            assert (await structured.run("JSON")).output == City(name="Paris")

    with_engine(check)


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
def test_no_library_runs_a_call_that_was_cut_off() -> None:
    ran = list[str]()

    def get_weather(city: str = "everywhere") -> str:
        """The weather"""
        ran.append(city)
        return "20 C, Paris"

    async def check(engine: FakeEngine) -> None:
        chat = CllmChat(engine=engine, max_tokens=380).bind_tools([tool(get_weather)])
        whole = await chat.ainvoke("half a call")
        streamed = [chunk async for chunk in chat.astream("half a call")]
        total = streamed[0]
        for chunk in streamed[1:]:
            total = total + chunk  # type: ignore[assignment]
        assert whole.tool_calls == total.tool_calls == []  # type: ignore[attr-defined]
        assert len(whole.invalid_tool_calls) == 1
        (cut,) = total.invalid_tool_calls  # type: ignore[attr-defined]
        assert cut["name"] == "get_weather"
        model = CllmLLM(engine, max_tokens=380)
        for streaming in (False, True):
            agent = FunctionAgent(
                tools=[FunctionTool.from_defaults(get_weather)], llm=model, streaming=streaming
            )
            await agent.run("half a call")
        assert ran == []

    with_engine(check)


def test_langchain_takes_no_half_of_an_object_for_a_whole_one() -> None:
    async def check(engine: FakeEngine) -> None:
        for schema in (City, City.model_json_schema()):
            model = CllmChat(engine=engine, max_tokens=12).with_structured_output(schema)
            with pytest.raises(OutputParserException, match="no whole JSON"):
                await model.ainvoke("JSON")
            with pytest.raises(OutputParserException, match="no whole JSON"):
                async for _ in model.astream("JSON"):
                    pass
            whole = CllmChat(engine=engine).with_structured_output(schema)
            seen = [chunk async for chunk in whole.astream("JSON")]
            assert seen[-1] in (City(name="Paris"), {"name": "Paris"})
        raw = CllmChat(engine=engine, max_tokens=12).with_structured_output(City, include_raw=True)
        told = await raw.ainvoke("JSON")
        assert told["parsed"] is None
        assert isinstance(told["parsing_error"], OutputParserException)

    with_engine(check)


def test_no_library_takes_an_answer_whose_time_was_over_for_a_whole_one() -> None:
    async def check(engine: FakeEngine) -> None:
        options: dict[str, Any] = {"timeout": 0.0}
        chat, llama = CllmChat(engine=engine, **options), CllmLLM(engine, **options)
        agent = pydantic_ai.Agent(CllmModel(engine, settings={"timeout": 0.0}))

        async def stream(responses: Any) -> None:
            async for _ in responses:
                pass

        calls: list[Callable[[], Any]] = [
            lambda: chat.ainvoke("Hi"), lambda: stream(chat.astream("Hi")),
            lambda: llama.achat([ChatMessage("Hi")]), lambda: llama.acomplete("Hi"),
            lambda: agent.run("Hi"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(DeadlineError):
                await call()
        for begin in (llama.astream_chat([ChatMessage("Hi")]), llama.astream_complete("Hi")):
            with pytest.raises(DeadlineError):
                await stream(await begin)

    with_engine(check)


def test_llama_index_counts_each_request_and_its_tokens_once() -> None:
    async def check(engine: FakeEngine) -> None:
        counter = TokenCountingHandler(tokenizer=list)
        model = CllmLLM(engine, temperature=0)
        model.callback_manager = CallbackManager([counter])
        n_output = len("Hello there") + 1
        calls: list[Callable[[], Any]] = [
            lambda: model.achat([ChatMessage("Hi")]), lambda: model.acomplete("Hi"),
            lambda: anyio.to_thread.run_sync(model.chat, [ChatMessage("Hi")]),
            lambda: anyio.to_thread.run_sync(model.complete, "Hi"),
        ]  # fmt: skip
        for n, call in enumerate(calls, 1):
            response = await call()
            assert response.raw["usage"]["completion_tokens"] == n_output
            assert response.raw["finish_reason"] == "stop"
            assert len(counter.llm_token_counts) == n
            assert counter.completion_llm_token_count == n * n_output
        for begin in (model.astream_chat([ChatMessage("Hi")]), model.astream_complete("Hi")):
            last = [response async for response in await begin][-1]
            assert last.raw["completion"].text == "Hello there"

    with_engine(check)


def test_llama_index_lets_its_caller_choose_the_tool() -> None:
    async def check(engine: FakeEngine) -> None:
        weather = FunctionTool.from_defaults(get_weather)
        chosen = list[object]()
        chat = engine.chat

        async def noting(*given: Any, **options: Any) -> Any:
            chosen.append(options.get("tool_choice"))
            return await chat(*given, **options)

        engine.chat = noting  # type: ignore[method-assign]
        model = CllmLLM(engine, temperature=0)
        named = {"type": "function", "function": {"name": "get_weather"}}
        for options in (
            {}, {"tool_required": True}, {"tool_choice": "none"}, {"tool_choice": named},
        ):  # fmt: skip
            await model.achat_with_tools([weather], "What is the weather in Paris?", **options)
        model = CllmLLM(engine, temperature=0, tool_choice="none")
        for options in ({}, {"tool_required": True}):
            await model.achat_with_tools([weather], "What is the weather in Paris?", **options)
        assert chosen == ["auto", "required", "none", "get_weather", "none", "required"]

    with_engine(check, n_ctx=8192)


def test_pydantic_ai_thinks_cancels_and_shows_tools_as_it_is_told() -> None:
    async def check(engine: FakeEngine) -> None:
        given = list[dict[str, Any]]()
        chat = engine.chat

        async def noting(messages: Any, **options: Any) -> Any:
            given.append(options)
            return await chat(messages, **{**options, "reasoning_effort": None})

        abilities = SimpleNamespace(thinking_switch=True, reasoning_effort=False)

        async def template_abilities() -> Any:
            return abilities

        engine.chat, engine.template_abilities = noting, template_abilities  # type: ignore[method-assign]
        model = CllmModel(engine)
        for thinks, thinking, effort in (
            (True, "low", "low"), (True, False, "none"), (True, True, "medium"), (False, "low", None),
        ):  # fmt: skip
            abilities.thinking_switch = thinks
            await pydantic_ai.Agent(model, model_settings={"thinking": thinking}).run("Hi")
            assert given[-1].get("reasoning_effort") == effort
        tools = [
            pydantic_ai.Tool(get_weather, defer_loading=True),
            pydantic_ai.Tool(get_weather, name="other"),
        ]
        await pydantic_ai.Agent(model, tools=tools).run("Hi")
        names = [each["function"]["name"] for each in given[-1]["tools"]]
        assert "get_weather" not in names
        assert "other" in names
        engine.decoder.latency_s = 0.01
        async with pydantic_ai.Agent(model).run_stream("Hi") as result:
            async for _ in result.stream_text(debounce_by=None):
                await result.cancel()
                break
        assert result.response.state == "interrupted"
        settings: Any = {"timeout": object()}
        with pytest.raises(InvalidRequestError, match="timeout"):
            await pydantic_ai.Agent(model, model_settings=settings).run("Hi")

    with_engine(check, n_ctx=8192)


def test_a_thought_is_in_the_prompt_of_the_next_turn_of_langchain() -> None:
    async def check(engine: FakeEngine) -> None:
        tools = [tool(get_weather)]
        for options in ({}, {"output_version": "v1"}):
            chat = CllmChat(engine=engine, **options).bind_tools(tools)
            called = await chat.ainvoke("What is the weather in Paris?")
            result = ToolMessage("20 C, Paris", tool_call_id=called.tool_calls[0]["id"])
            again = await chat.ainvoke(
                [HumanMessage("What is the weather in Paris?"), called, result]
            )
            completion = await engine.chat(
                [{"role": "user", "content": "What is the weather in Paris?"}],
                tools=[convert_to_openai_tool(tools[0])],
            )
            same = await engine.chat(
                [
                    {"role": "user", "content": "What is the weather in Paris?"},
                    completion.as_message(),
                    {
                        "role": "tool",
                        "tool_call_id": completion.tool_calls[0].id,
                        "content": "20 C, Paris",
                    },
                ],
                tools=[convert_to_openai_tool(tools[0])],
            )
            assert again.usage_metadata is not None
            assert again.usage_metadata["input_tokens"] == same.usage.n_prompt
        n_tokens = await anyio.to_thread.run_sync(CllmChat(engine=engine).get_num_tokens, "abc")
        assert n_tokens == 3

    with_engine(check)


@pytest.mark.parametrize("strict", [None, False, True])
def test_tools_of_langchain_may_be_strict(strict: bool | None) -> None:
    async def check(engine: FakeEngine) -> None:
        tools = [tool(get_weather), convert_to_openai_tool(City)]
        bound = CllmChat(engine=engine).bind_tools(tools, strict=strict)
        given: Any = bound.kwargs["tools"]  # type: ignore[attr-defined]
        assert [each["function"].get("strict") for each in given] == [strict] * 2
        called = await bound.ainvoke("What is the weather in Paris?")
        assert len(called.tool_calls) == 1

    with_engine(check)


def test_llama_index_streams_structured_answers() -> None:
    async def check(engine: FakeEngine) -> None:
        stream = await CllmLLM(engine).astream_structured_predict(City, PromptTemplate("JSON"))
        assert [city async for city in stream][-1] == City(name="Paris")

    with_engine(check)


def test_pydantic_ai_keeps_to_the_settings_of_a_run() -> None:
    async def check(engine: FakeEngine) -> None:
        agent = pydantic_ai.Agent(CllmModel(engine))

        @agent.tool_plain
        def picture() -> BinaryContent:
            """A picture"""
            return BinaryContent(PNG, media_type="image/png")

        assert (await agent.run("picture")).output == "Seen"
        assert (await agent.run(["Hi", CachePoint()])).output == "Hello there"
        engine_prompts.clear()
        await agent.run("Hi", model_settings={"tool_choice": "none"})
        assert "picture" not in engine_prompts[-1]
        for choice, has in (
            ("auto", True),
            (ToolOrOutput(function_tools=["picture"]), True),
            (ToolOrOutput(function_tools=["another"]), False),
        ):
            await agent.run("Hi", model_settings={"tool_choice": choice})
            assert ("picture" in engine_prompts[-1]) is has
        structured = pydantic_ai.Agent(CllmModel(engine), output_type=pydantic_ai.ToolOutput(City))
        structured.tool_plain(get_weather)
        told = await structured.run("JSON", model_settings={"tool_choice": "none"})
        assert told.output == City(name="Paris")
        assert "get_weather" not in engine_prompts[-1]
        named = await structured.run("JSON", model_settings={"tool_choice": ["final_result"]})
        assert named.output == City(name="Paris")
        assert "get_weather" not in engine_prompts[-1]
        with pytest.raises(DeadlineError):
            await agent.run("Hi", model_settings={"timeout": 0.0})
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            await agent.run("Hi", model_settings={"logit_bias": {"a": 1}})

    with_engine(check)


# --- llm -------------------------------------------------------------------------------------
@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin, whose engines are fakes."""

    def make(*_: Any, pooling: str | None = None, **__: Any) -> Engine:
        return FakeEngine(answer, pooling=pooling)

    monkeypatch.setattr(llm_plugin, "Engine", make)
    monkeypatch.setattr(llm_plugin, "cached_models", list)
    if not pm.has_plugin("cllm"):
        pm.register(llm_plugin, "cllm")
    yield
    llm_plugin.ENGINES.close()


@pytest.mark.usefixtures("plugin")
def test_llm_prompts_converses_and_calls_tools() -> None:
    model = llm.get_model("cllm")
    told = model.prompt("Hi", temperature=0, max_tokens=50)
    assert len(list(told)) > 5
    assert told.text() == "Hello there"
    assert told.usage().output == len("Hello there") + 1
    assert told.response_json == {"finish_reason": "stop"}
    cut = model.prompt("half a call", tools=[get_weather], max_tokens=380)
    assert cut.text().startswith('{"city": "xxx')
    assert cut.tool_calls() == []
    assert cut.response_json == {"finish_reason": "length"}
    assert model.prompt("JSON", schema=City).text() == '{"name": "Paris"}'
    chain = model.chain("What is the weather in Paris?", tools=[get_weather])
    assert chain.text() == SAID
    conversation = model.conversation()
    assert conversation.prompt("Hi", system="Be brief.").text() == "Hello there"
    assert conversation.prompt("Hi again").text() == "Hello there"
    attachments = [llm.Attachment(content=PNG), llm.Attachment(content=WAV)]
    assert model.prompt("and", attachments=attachments).text() == "Both"


@pytest.mark.usefixtures("plugin")
def test_llm_in_an_event_loop_and_its_vectors() -> None:
    async def ask() -> tuple[str, str, str]:
        model = llm.get_async_model("cllm")
        chain = model.chain("What is the weather in Paris?", tools=[get_weather])
        attachments = [llm.Attachment(content=PNG), llm.Attachment(content=WAV)]
        both = model.prompt("and", attachments=attachments)
        return await model.prompt("Hi").text(), await chain.text(), await both.text()

    assert asyncio.run(ask()) == ("Hello there", SAID, "Both")
    vectors = list(llm.get_embedding_model("cllm").embed_multi(["a", "b", "a"]))
    assert vectors[0] == vectors[2] != vectors[1]


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(("own", "used"), [(True, [None]), (False, [None, "mean"])])
def test_llm_pools_vectors_as_the_file_says_and_otherwise_takes_the_mean(
    own: bool, used: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    poolings: list[str | None] = []
    engines: list[Engine] = []
    start = llm_plugin.Engines._start

    def started(self: Any, model: str | None, options: Any) -> Any:
        poolings.append(options.get("pooling"))
        engine, caller = start(self, model, options)
        if not own and not options.get("pooling"):
            dispatcher = engine._parts.dispatcher
            monkeypatch.setattr(dispatcher, "model", replace(engine.model, embedding=None))
        engines.append(engine)
        return engine, caller

    monkeypatch.setattr(llm_plugin.Engines, "_start", started)
    assert len(list(llm.get_embedding_model("cllm").embed_multi(["a", "b"]))) == 2
    assert poolings == used
    # Two at once would not have the memory that an automatic context takes.
    assert [each.health().status == "closed" for each in engines] == [True] * (len(used) - 1) + [
        False
    ]
