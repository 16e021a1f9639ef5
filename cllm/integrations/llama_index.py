"""An engine as LlamaIndex' LLM, and as its embedding model.  Extra `llama-index`.

    async with Engine("model.gguf", pooling="mean") as engine:
        Settings.llm, Settings.embed_model = CllmLLM(engine), CllmEmbedding(engine)
        await index.as_query_engine().aquery(…)

The async methods run in the engine's event loop.  Call the synchronous methods in worker threads: in an event
loop they raise `RuntimeError`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from io import IOBase
from typing import Any

from cllm import Audio, Completion, Embedder, Engine, Image, TokenStream
from cllm.errors import extra
from cllm.integrations.caller import Caller, in_time, name_in, whole_arguments

with extra("llama-index"):
    from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
    from llama_index.core.base.llms.types import (
        AudioBlock,
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        ContentBlock,
        ImageBlock,
        LLMMetadata,
        MessageRole,
        TextBlock,
        ThinkingBlock,
        ToolCallBlock,
    )
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools.types import BaseTool

ROLES = {"chatbot": "assistant", "model": "assistant", "function": "tool"}


class CllmLLM(FunctionCallingLLM):
    """A language model that is an `Engine` of this process.

    Parameters
    ----------
    engine : Engine
        An entered engine.  The model does not close it.
    **options
        Options of `Engine.chat`: sampling, `reasoning_effort`, `lora`, `priority`, `timeout`, …  Options of
        a call have precedence.
    """

    options: dict[str, Any] = Field(default_factory=dict)
    _engine: Engine = PrivateAttr()
    _caller: Caller = PrivateAttr(default_factory=Caller)

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(options=options)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """Return the name for LlamaIndex."""
        return "cllm"

    @property
    def metadata(self) -> LLMMetadata:
        """Return the limits by which LlamaIndex cuts prompts."""
        model = self._engine.model
        return LLMMetadata(
            context_window=model.n_ctx,
            num_output=self.options.get("max_tokens") or 256,
            is_chat_model=model.chat_template is not None,
            is_function_calling_model=model.chat_template is not None,
            model_name=model.name or "cllm",
        )

    # --- Chats -------------------------------------------------------------------------------
    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a chat; `raw` has its `usage`, `finish_reason` and `completion`."""
        return await self._achat(messages, kwargs)

    async def _achat(self, messages: Sequence[ChatMessage], given: dict[str, Any]) -> ChatResponse:
        self._caller.remember()
        completion = await self._engine.chat(_chat_of(messages), **{**self.options, **given})
        return _response_of(completion)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Return a generator of responses: each has the answer so far, and the new text in `delta`."""
        self._caller.remember()
        stream = self._engine.stream_chat(_chat_of(messages), **{**self.options, **kwargs})

        async def responses() -> ChatResponseAsyncGen:
            text, thought = "", ""
            async with stream:
                async for delta in stream:
                    text, thought = text + delta.text, thought + delta.reasoning
                    message = _assistant(text, thought, [])
                    yield ChatResponse(message=message, delta=delta.text)
                completion = await stream.completion()
            yield _response_of(completion, delta="")

        return responses()

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a chat, as `achat` does.  Call it in a worker thread."""
        return self._caller.run(partial(self._achat, messages, kwargs), "achat")

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Return a generator of responses to a chat, as `astream_chat` does.  Read it in a worker thread."""
        make = partial(self._engine.stream_chat, _chat_of(messages), **{**self.options, **kwargs})

        def responses() -> ChatResponseGen:
            text, thought = "", ""
            with self._caller.stream(make, "astream_chat") as stream:
                for delta in stream:
                    text, thought = text + delta.text, thought + delta.reasoning
                    yield ChatResponse(message=_assistant(text, thought, []), delta=delta.text)
                completion = stream.completion()
            yield _response_of(completion, delta="")

        return responses()

    # --- Completions -------------------------------------------------------------------------
    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Return the answer to a prompt; if `formatted`, or without a chat template, its continuation."""
        return await self._acomplete(prompt, formatted, kwargs)

    async def _acomplete(
        self, prompt: str, formatted: bool, given: dict[str, Any]
    ) -> CompletionResponse:
        self._caller.remember()
        async with self._streaming(prompt, formatted, given)() as stream:
            completion = in_time(await stream.completion())
        return CompletionResponse(text=completion.text, raw=_raw_of(completion))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Return a generator of the responses of `acomplete`; each has the whole text so far."""
        self._caller.remember()
        stream = self._streaming(prompt, formatted, kwargs)()

        async def responses() -> CompletionResponseAsyncGen:
            text = ""
            async with stream:
                async for delta in stream:
                    text += delta.text
                    yield CompletionResponse(text=text, delta=delta.text)
                completion = in_time(await stream.completion())
            yield CompletionResponse(text=text, delta="", raw=_raw_of(completion))

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the answer to a prompt, as `acomplete` does.  Call it in a worker thread."""
        return self._caller.run(partial(self._acomplete, prompt, formatted, kwargs), "acomplete")

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Return a generator of responses, as `astream_complete` does.  Read it in a worker thread."""
        make = self._streaming(prompt, formatted, kwargs)

        def responses() -> CompletionResponseGen:
            text = ""
            with self._caller.stream(make, "astream_complete") as stream:
                for delta in stream:
                    text += delta.text
                    yield CompletionResponse(text=text, delta=delta.text)
                completion = in_time(stream.completion())
            yield CompletionResponse(text=text, delta="", raw=_raw_of(completion))

        return responses()

    def _streaming(
        self, prompt: str, formatted: bool, given: dict[str, Any]
    ) -> Callable[[], TokenStream]:
        """Return a function that opens the stream of a completion."""
        options = {**self.options, **given}
        if formatted or not self.metadata.is_chat_model:
            return partial(self._engine.stream, prompt, **options)
        return partial(self._engine.stream_chat, [{"role": "user", "content": prompt}], **options)

    # --- Tools -------------------------------------------------------------------------------
    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            if isinstance(user_msg, str):
                user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
            messages.append(user_msg)
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else None)
        if tools:
            kwargs["tools"] = [
                tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools
            ]
            kwargs["tool_choice"] = name_in(choice or self.options.get("tool_choice") or "auto")
            kwargs["parallel_tool_calls"] = allow_parallel_tool_calls
        return {"messages": messages, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of an answer, which has none that was cut off.

        Raises
        ------
        ValueError
            The answer has no tool call, and `error_on_no_tool_call` is True.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not calls:
            raise ValueError("the answer calls no tool")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=arguments
            )
            for call in calls
            if (arguments := _arguments(call)) is not None
        ]


class CllmEmbedding(BaseEmbedding):
    """An embedding model that is an `Engine` or an `Embedder` of this process.

    Parameters
    ----------
    engine : Engine or Embedder
        An entered engine or embedder.
    query_prefix, document_prefix : str
        Text to put before each question, and before each document.
    **options
        Options of `Engine.embed`: `normalize`, `dimensions`, `truncate`, `priority`, `timeout`.
    """

    _engine: Engine | Embedder = PrivateAttr()
    _prefixes: tuple[str, str] = PrivateAttr()
    _options: dict[str, Any] = PrivateAttr()
    _caller: Caller = PrivateAttr(default_factory=Caller)

    def __init__(
        self,
        engine: Engine | Embedder,
        *,
        query_prefix: str = "",
        document_prefix: str = "",
        **options: Any,
    ) -> None:
        super().__init__(model_name=engine.model.name or "cllm", embed_batch_size=256)
        self._engine = engine
        self._prefixes = query_prefix, document_prefix
        self._options = options

    @classmethod
    def class_name(cls) -> str:
        """Return the name for LlamaIndex."""
        return "CllmEmbedding"

    async def _embed(self, texts: list[str]) -> list[Embedding]:
        self._caller.remember()
        vectors: list[Embedding] = (await self._engine.embed(texts, **self._options)).tolist()
        return vectors

    async def _aget_query_embedding(self, query: str) -> Embedding:
        (vector,) = await self._embed([self._prefixes[0] + query])
        return vector

    async def _aget_text_embedding(self, text: str) -> Embedding:
        (vector,) = await self._aget_text_embeddings([text])
        return vector

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await self._embed([self._prefixes[1] + text for text in texts])

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._caller.run(partial(self._aget_query_embedding, query), "aget_query_embedding")

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._caller.run(partial(self._aget_text_embedding, text), "aget_text_embedding")

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self._caller.run(
            partial(self._aget_text_embeddings, texts), "aget_text_embedding_batch"
        )


def _chat_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_said(message) for message in messages]


def _said(message: ChatMessage) -> dict[str, Any]:
    """Return a message in OpenAI's format."""
    role = ROLES.get(message.role.value, message.role.value)
    said: dict[str, Any] = {"role": role, "content": message.content or ""}
    parts = list[dict[str, Any]]()
    calls, thoughts = list[dict[str, Any]](), list[str]()
    for block in message.blocks:
        match block:
            case TextBlock(text=text):
                parts.append({"type": "text", "text": text})
            case ImageBlock():
                source = block.path or _bytes_of(block, block.image)
                parts.append({"type": "image", "image": Image(source)})
            case AudioBlock():
                source = block.path or _bytes_of(block, block.audio)
                parts.append({"type": "audio", "audio": Audio(source)})
            case ThinkingBlock(content=thought):
                thoughts.append(thought or "")
            case ToolCallBlock():
                calls.append(_written(block))
            case _:
                kind = type(block).__name__
                has = "text, images, audio, thoughts and tool calls"
                raise TypeError(f"a message may have {has}, but no {kind}")
    if any(part["type"] != "text" for part in parts):
        said["content"] = parts
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if role == "tool":
        said["tool_call_id"] = message.additional_kwargs.get("tool_call_id", "")
    return said


def _bytes_of(block: ImageBlock | AudioBlock, content: object) -> bytes:
    """Return the file in a block, which keeps bytes as base64 text; one with an address has no file."""
    if isinstance(content, IOBase):
        return bytes(content.read())
    if not isinstance(content, bytes):
        raise TypeError(f"{type(block).__name__} needs a path or bytes: cllm fetches no addresses")
    return base64.b64decode(content)


def _response_of(completion: Completion, **others: str) -> ChatResponse:
    completion = in_time(completion)
    return ChatResponse(message=_message_of(completion), raw=_raw_of(completion), **others)


def _raw_of(completion: Completion) -> dict[str, Any]:
    """Return what LlamaIndex's handlers read, with the names of OpenAI's answers, and the completion."""
    usage = completion.usage
    counts = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_output,
        "total_tokens": usage.n_prompt + usage.n_output,
    }
    reason = str(completion.finish_reason)
    return {"usage": counts, "finish_reason": reason, "completion": completion}


def _message_of(completion: Completion) -> ChatMessage:
    calls = [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments)
        for call in completion.tool_calls
        if (arguments := whole_arguments(call.arguments)) is not None
    ]
    return _assistant(completion.text, completion.reasoning, calls)


def _assistant(text: str, thought: str, calls: Sequence[ToolCallBlock]) -> ChatMessage:
    blocks: list[ContentBlock] = [ThinkingBlock(content=thought)] if thought else []
    if text:
        blocks.append(TextBlock(text=text))
    # Where LlamaIndex looks for the calls of a streamed answer.
    others = {"tool_calls": [_written(call) for call in calls]} if calls else {}
    return ChatMessage(
        role=MessageRole.ASSISTANT, blocks=[*blocks, *calls], additional_kwargs=others
    )


def _arguments(call: ToolCallBlock) -> dict[str, Any] | None:
    given = call.tool_kwargs
    return given if isinstance(given, dict) else whole_arguments(given)


def _written(call: ToolCallBlock) -> dict[str, Any]:
    """Return a call in OpenAI's format."""
    given = call.tool_kwargs
    text = given if isinstance(given, str) else json.dumps(given)
    function = {"name": call.tool_name, "arguments": text}
    return {"id": call.tool_call_id or "", "type": "function", "function": function}
