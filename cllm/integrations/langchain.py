"""An engine as LangChain's chat model, and as its embeddings.  Extra `langchain`.

    async with Engine("model.gguf") as engine:
        agent = prompt | CllmChat(engine=engine, temperature=0).bind_tools([search])
        await agent.ainvoke(…)

The async methods run in the engine's event loop.  Call the synchronous methods in worker threads.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from cllm import Completion, Embedder, Engine, TokenDelta, Usage
from cllm.errors import extra
from cllm.integrations.caller import Caller, in_time, name_in, whole_arguments

with extra("langchain"):
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.embeddings import Embeddings
    from langchain_core.exceptions import OutputParserException
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        InvalidToolCall,
        ToolCall,
        convert_to_openai_messages,
    )
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.messages.tool import tool_call_chunk
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import (
        Runnable,
        RunnableGenerator,
        RunnableMap,
        RunnablePassthrough,
    )
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator


class CllmChat(BaseChatModel):
    """A chat model that is an `Engine` of this process.

    Parameters
    ----------
    engine : Engine
        An entered engine.  The model does not close it.
    **options
        Options of `Engine.chat`: sampling, `reasoning_effort`, `lora`, `priority`, `timeout`, …  Options of
        a call (`bind`, `ainvoke`) have precedence.

    A call that was cut off is in `invalid_tool_calls`; in a stream its `args` begin with "cut off: ".
    """

    model_config: ConfigDict = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine = Field(exclude=True)
    options: dict[str, Any] = Field(default_factory=dict)
    _caller: Caller = PrivateAttr(default_factory=Caller)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        others = {name: value for name, value in values.items() if name not in cls.model_fields}
        return {**own, "options": {**own.get("options", {}), **others}}

    @property
    def _llm_type(self) -> str:
        return "cllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.engine.model.name, **self.options}

    # --- Answers -----------------------------------------------------------------------------
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._caller.remember()
        completion = await self.engine.chat(_chat_of(messages), **self._given(stop, kwargs))
        message = self._message_of(in_time(completion))
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        self._caller.remember()
        given = self._given(stop, kwargs)
        async with self.engine.stream_chat(_chat_of(messages), **given) as stream:
            async for delta in stream:
                generation = _generation_of(delta)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(delta.text, chunk=generation)
                yield generation
            completion = await stream.completion()
        yield self._last_of(in_time(completion))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._caller.run(partial(self._agenerate, messages, stop, None, **kwargs), "ainvoke")

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        given = self._given(stop, kwargs)
        make = partial(self.engine.stream_chat, _chat_of(messages), **given)
        with self._caller.stream(make, "astream") as stream:
            for delta in stream:
                generation = _generation_of(delta)
                if run_manager is not None:
                    run_manager.on_llm_new_token(delta.text, chunk=generation)
                yield generation
            completion = stream.completion()
        yield self._last_of(in_time(completion))

    def _given(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {**self.options, **kwargs}
        given.pop("ls_structured_output_format", None)  # for LangSmith
        return given if stop is None else {**given, "stop": stop}

    def _last_of(self, completion: Completion) -> ChatGenerationChunk:
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                tool_call_chunks=_chunks_of(completion),
                usage_metadata=_usage_of(completion.usage),
                response_metadata=self._metadata_of(completion),
                chunk_position="last",
            )
        )

    def _message_of(self, completion: Completion) -> AIMessage:
        calls: list[ToolCall] = []
        invalid: list[InvalidToolCall] = []
        for call in completion.tool_calls:
            if (arguments := whole_arguments(call.arguments)) is not None:
                calls.append(ToolCall(name=call.name, args=arguments, id=call.id))
                continue
            cut = InvalidToolCall(
                type="invalid_tool_call",
                name=call.name,
                args=call.arguments,
                id=call.id,
                error="the output was cut off",
            )
            invalid.append(cut)
        return AIMessage(
            content=completion.text,
            tool_calls=calls,
            invalid_tool_calls=invalid,
            additional_kwargs=_thought(completion.reasoning),
            usage_metadata=_usage_of(completion.usage),
            response_metadata=self._metadata_of(completion),
        )

    def _metadata_of(self, completion: Completion) -> dict[str, Any]:
        return {
            "model_name": self.engine.model.name,
            "model_provider": "cllm",
            "finish_reason": str(completion.finish_reason),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text.  Call it in a worker thread; an event loop is a `RuntimeError`."""
        call = partial(self.engine.tokenize, text, add_special=False)
        return list(self._caller.run(call, "Engine.tokenize"))

    # --- Tools and schemas -------------------------------------------------------------------
    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools; `tool_choice` True or "any" demands a call, a name demands that tool.

        With `strict`, the arguments of all calls fit the schemas of their tools.
        """
        choice = name_in(tool_choice)
        choices: dict[object, str] = {None: "auto", False: "auto", True: "required"}
        choices |= {"any": "required"}
        return self.bind(
            tools=[_tool_of(tool, strict) for tool in tools],
            tool_choice=choices.get(choice, choice),
            **kwargs,
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers fit a schema: objects of a pydantic class, or parsed JSON.

        With `include_raw`, an answer is a mapping of `raw`, `parsed` and `parsing_error`.  `method` and
        `strict` are ignored.  An answer that is no whole JSON is an `OutputParserException`.
        """
        kwargs.pop("method", None)
        kwargs.pop("strict", None)
        model = self.bind(json_schema=convert_to_json_schema(schema), **kwargs)
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            parser = PydanticOutputParser(pydantic_object=schema)
        parser = RunnableGenerator(_whole, _whole_async) | parser
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [unparsed], exception_key="parsing_error"
        )


class CllmEmbeddings(Embeddings):
    """Embeddings that are an `Engine` or an `Embedder` of this process.

    Parameters
    ----------
    engine : Engine or Embedder
        An entered engine or embedder.
    query_prefix, document_prefix : str
        Text to put before each question, and before each document.
    **options
        Options of `Engine.embed`: `normalize`, `dimensions`, `truncate`, `priority`, `timeout`.
    """

    def __init__(
        self,
        engine: Engine | Embedder,
        *,
        query_prefix: str = "",
        document_prefix: str = "",
        **options: Any,
    ) -> None:
        self._engine = engine
        self._prefixes = query_prefix, document_prefix
        self._options = options
        self._caller = Caller()

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents."""
        return await self._embed([self._prefixes[1] + text for text in texts])

    async def aembed_query(self, text: str) -> list[float]:
        """Return the vector of a question."""
        (vector,) = await self._embed([self._prefixes[0] + text])
        return vector

    async def _embed(self, texts: list[str]) -> list[list[float]]:
        self._caller.remember()
        vectors: list[list[float]] = (await self._engine.embed(texts, **self._options)).tolist()
        return vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents.  Call it in a worker thread; an event loop is a `RuntimeError`."""
        return self._caller.run(partial(self.aembed_documents, texts), "aembed_documents")

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question.  Call it in a worker thread; an event loop is a `RuntimeError`."""
        return self._caller.run(partial(self.aembed_query, text), "aembed_query")


def _tool_of(
    tool: dict[str, Any] | type | Callable[..., Any] | BaseTool, strict: bool | None
) -> dict[str, Any]:
    """Return a tool in OpenAI's format; LangChain leaves one that is a mapping as it is."""
    made = convert_to_openai_tool(tool, strict=strict)
    return made if strict is None else {**made, "function": {**made["function"], "strict": strict}}


def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Yield the chunks of an answer; raise an error at its end if it is no JSON, which LangChain would complete."""
    text = ""
    for message in messages:
        text += message.text
        yield message
    _check_whole(text)


async def _whole_async(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    text = ""
    async for message in messages:
        text += message.text
        yield message
    _check_whole(text)


def _check_whole(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        raise OutputParserException("the answer is no whole JSON", llm_output=text) from None


def _chat_of(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    return [said for message in messages for said in _said_in(message)]


def _said_in(message: BaseMessage) -> list[dict[str, Any]]:
    """Return a message in OpenAI's format, with the thought in `reasoning_content`."""
    if not isinstance(message, AIMessage):
        converted = convert_to_openai_messages([message])
        assert isinstance(converted, list)
        return converted
    content = message.content
    thought = str(message.additional_kwargs.get("reasoning_content") or "")
    if isinstance(content, list):  # of standard blocks; the calls are in `tool_calls`, too
        blocks = [block if isinstance(block, dict) else {"text": block} for block in content]
        told = [str(b.get("reasoning") or "") for b in blocks if b.get("type") == "reasoning"]
        thought = thought or "\n".join(told)
        content = "\n".join(str(block["text"]) for block in blocks if "text" in block)
    converted = convert_to_openai_messages([message.model_copy(update={"content": content})])
    assert isinstance(converted, list)
    if thought:
        converted[0]["reasoning_content"] = thought
    return converted


def _generation_of(delta: TokenDelta) -> ChatGenerationChunk:
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content=delta.text,
            additional_kwargs=_thought(delta.reasoning),
        )
    )


def _thought(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning} if reasoning else {}


def _chunks_of(completion: Completion) -> list[Any]:
    """Return the calls.  Words precede one that was cut off, or LangChain would complete its JSON."""
    chunks = list[Any]()
    for index, call in enumerate(completion.tool_calls):
        is_whole = whole_arguments(call.arguments) is not None
        args = call.arguments if is_whole else f"cut off: {call.arguments}"
        chunks.append(tool_call_chunk(name=call.name, args=args, id=call.id, index=index))
    return chunks


def _usage_of(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.n_prompt,
        output_tokens=usage.n_output,
        total_tokens=usage.n_prompt + usage.n_output,
        input_token_details={"cache_read": usage.n_cached},
        output_token_details={"reasoning": usage.n_reasoning or 0},
    )
