"""A plugin of `llm`: `llm -m cllm -o model model.gguf "Hello"`.  Extra `llm`.

The model `cllm` is the embedded model, or the one that the option `model` names: a GGUF file, or
hf:USER/REPO[:QUANT].  The models that `cllm models` lists are available as `cllm/NAME`.  An engine is loaded
on first use and runs until the process ends.  All engines share one thread with an event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import llm
from anyio.lowlevel import current_token
from llm.parts import (
    AttachmentPart,
    Message,
    ReasoningPart,
    StreamEvent,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from pydantic import Field

from cllm import Audio, Completion, Engine, Image, TokenDelta, TokenStream
from cllm.engine.loop.loop_thread import LoopThread
from cllm.engine.media_limits import is_audio
from cllm.hub.cache import cached_models
from cllm.hub.names import PREFIX
from cllm.integrations.caller import Caller, whole_arguments

R = TypeVar("R")
N_TEXTS = 256  # texts that `llm` passes to one call of `embed_batch`
# Types that `llm` finds in files.
ATTACHMENTS = {
    "application/ogg",
    *(f"image/{name}" for name in ("bmp", "gif", "jpeg", "png", "webp", "x-ms-bmp")),
    *(
        f"audio/{name}"
        for name in ("aiff", "flac", "mp3", "mpeg", "ogg", "opus", "vorbis", "wav", "wave")
    ),
    *(f"audio/x-{name}" for name in ("aiff", "flac", "wav")),
}


class Engines:
    """The engines of this process, in one event loop of their own.  Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._engines: dict[tuple[object, ...], tuple[Engine, Caller]] = {}
        atexit.register(self.close)

    def get(self, model: str | None, **options: str | None) -> tuple[Engine, Caller]:
        """Return the engine of a model with these options, and its `Caller`.  The first call loads it, and blocks."""
        with self._lock:
            key = (model, *options.items())
            if key not in self._engines:
                self._engines[key] = self._start(model, options)
            return self._engines[key]

    def get_for_texts(self, model: str | None) -> tuple[Engine, Caller]:
        """Return the engine for the vectors of a model: pooled as its file says, or by the mean."""
        with self._lock:
            key = (model, "texts")
            if key not in self._engines:
                engine, caller = self._start(model, {})
                assert self._loop is not None
                if engine.model.embedding is None:  # its memory is needed for the next one
                    self._loop.wait(engine.aclose)
                    engine, caller = self._start(model, {"pooling": "mean"})
                self._engines[key] = engine, caller
            return self._engines[key]

    def _start(self, model: str | None, options: Mapping[str, Any]) -> tuple[Engine, Caller]:
        if self._loop is None:
            self._loop = LoopThread()
        engine = Engine(model, n_ctx="auto", n_seq_max=4, **options)
        self._loop.wait(engine.start)
        return engine, Caller(self._loop.wait(_token))

    async def run(self, call: Callable[[], Awaitable[R]]) -> R:
        """Run a call in the engines' event loop, and return its result in another event loop of asyncio."""
        assert self._loop is not None
        return await asyncio.wrap_future(self._loop.begin(call))

    def close(self) -> None:
        """Close all engines and end their thread; in a forked child, forget them."""
        with self._lock:
            loop, self._loop = self._loop, None
            engines = [engine for engine, _ in self._engines.values()]
            self._engines.clear()
            if loop is not None and loop.is_own:
                with ExitStack() as ending:
                    ending.callback(loop.end)
                    for engine in engines:
                        ending.callback(loop.wait, engine.aclose)


async def _token() -> Any:
    return current_token()


ENGINES = Engines()


class Options(llm.Options):
    """Options of a prompt for `-o`."""

    model: str | None = Field(None, description="A GGUF file, or hf:USER/REPO[:QUANT]")
    max_tokens: int | None = Field(None, description="Tokens of the answer, at most")
    temperature: float | None = Field(None, description="0: the likeliest token")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="Seed of the random numbers")
    reasoning_effort: str | None = Field(None, description="Effort of reasoning, none to max")


class _Common:
    """Common parts of the synchronous and the asynchronous model."""

    model_id: str
    can_stream = True
    supports_schema = True
    supports_tools = True
    attachment_types = ATTACHMENTS
    Options = Options

    def __init__(self, model_id: str = "cllm", model: str | None = None) -> None:
        self.model_id = model_id
        self._model = model

    def _engine(self, prompt: llm.Prompt) -> tuple[Engine, Caller]:
        """Return the engine of a prompt; only a conversation with attachments needs one with a projector."""
        parts = (part for message in prompt.messages for part in message.parts)
        mmproj = "auto" if any(isinstance(part, AttachmentPart) for part in parts) else None
        return ENGINES.get(getattr(prompt.options, "model", None) or self._model, mmproj=mmproj)

    @staticmethod
    def _given(prompt: llm.Prompt) -> dict[str, Any]:
        given = {k: v for k, v in prompt.options.model_dump().items() if v is not None}
        given.pop("model", None)
        if prompt.schema:
            given["json_schema"] = prompt.schema
        if prompt.tools:
            given["tools"] = [_tool_of(tool) for tool in prompt.tools]
        return given


class CllmModel(_Common, llm.Model):
    """An engine for `llm`."""

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: object
    ) -> Iterator[str | StreamEvent]:
        """Yield the reasoning, the text and the tool calls of the answer; set the usage of `response`."""
        engine, caller = self._engine(prompt)
        chat, given = _chat_of(prompt), self._given(prompt)
        with caller.stream(lambda: engine.stream_chat(chat, **given)) as answer:
            for delta in answer:
                yield from _events_of(delta)
            completion = answer.completion()
        yield from _end(completion, response)


class AsyncCllmModel(_Common, llm.AsyncModel):
    """An engine for the async API of `llm`, in an asyncio event loop."""

    async def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse, conversation: object
    ) -> AsyncGenerator[str | StreamEvent]:
        """Yield the reasoning, the text and the tool calls of the answer; set the usage of `response`."""
        engine, _ = await asyncio.to_thread(self._engine, prompt)
        chat, given = await asyncio.to_thread(_chat_of, prompt), self._given(prompt)

        async def begin() -> TokenStream:
            return await engine.stream_chat(chat, **given).__aenter__()

        answer = await ENGINES.run(begin)
        try:
            async for delta in _from_afar(answer):
                for event in _events_of(delta):
                    yield event
            completion = await ENGINES.run(answer.completion)
        finally:
            await ENGINES.run(lambda: answer.__aexit__(None, None, None))
        for event in _end(completion, response):
            yield event


async def _from_afar(answer: TokenStream) -> AsyncIterator[TokenDelta]:
    async def following() -> TokenDelta | None:
        async for delta in answer:
            return delta
        return None

    while (delta := await ENGINES.run(following)) is not None:
        yield delta


class CllmEmbeddings(llm.EmbeddingModel):
    """Vectors for `llm embed`."""

    supports_text = True
    batch_size = N_TEXTS

    def __init__(self, model_id: str, model: str | None) -> None:
        self.model_id = model_id
        self._model = model

    def embed_batch(self, items: Any) -> Iterator[list[float]]:
        """Yield the vector of each text."""
        engine, caller = ENGINES.get_for_texts(self._model)
        texts = list(items)
        yield from caller.run(lambda: engine.embed(texts)).tolist()


# --- Messages ----------------------------------------------------------------------------------
def _chat_of(prompt: llm.Prompt) -> list[dict[str, Any]]:
    """Return the conversation up to and with a prompt, as messages in OpenAI's format.

    Results of tools are messages, and reasoning is `reasoning_content`.  A system prompt is there where it changes.
    It reads or downloads the attachments, so asynchronous callers use a thread.
    """
    chat: list[dict[str, Any]] = []
    system: str | None = None
    for message in prompt.messages:
        if message.role == "system":
            text = _text_of(message)
            if text != system:  # each prompt of a conversation has it again
                chat.append({"role": "system", "content": text})
            system = text
            continue
        content = _content_of(message)
        results = [part for part in message.parts if isinstance(part, ToolResultPart)]
        chat += [
            {"role": "tool", "tool_call_id": part.tool_call_id or "", "content": part.output}
            for part in results
        ]
        said: dict[str, Any] = {"role": message.role, "content": content}
        if thought := "".join(p.text for p in message.parts if isinstance(p, ReasoningPart)):
            said["reasoning_content"] = thought
        if calls := [_call_of(p) for p in message.parts if isinstance(p, ToolCallPart)]:
            said["tool_calls"] = calls
        if message.role != "tool" and (content or calls):
            chat.append(said)
    return chat


def _content_of(message: Message) -> str | list[dict[str, Any]]:
    """Return the text of a message, or a list of its parts in order if it has attachments."""
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, AttachmentPart) and (given := part.attachment) is not None:
            data = given.content_bytes()
            kind, make = ("audio", Audio) if is_audio(data[:12]) else ("image", Image)
            parts.append({"type": kind, kind: make(data)})
    if any(part["type"] != "text" for part in parts):
        return parts
    return _text_of(message)


def _text_of(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _call_of(part: ToolCallPart) -> dict[str, Any]:
    function = {"name": part.name, "arguments": json.dumps(part.arguments)}
    return {"id": part.tool_call_id or "", "type": "function", "function": function}


def _tool_of(tool: llm.Tool) -> Mapping[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _events_of(delta: TokenDelta) -> Iterator[StreamEvent]:
    if delta.reasoning:
        yield StreamEvent(type="reasoning", chunk=delta.reasoning)
    if delta.text:
        yield StreamEvent(type="text", chunk=delta.text)


def _end(completion: Completion, response: Any) -> Iterator[StreamEvent]:
    """Add the tool calls, the usage and the finish reason to `response`, and yield the events of the tool calls."""
    for call in completion.tool_calls:
        if (arguments := whole_arguments(call.arguments)) is None:  # cut off
            yield StreamEvent(type="text", chunk=call.arguments)
            continue
        response.add_tool_call(
            llm.ToolCall(name=call.name, arguments=arguments, tool_call_id=call.id)
        )
        yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=call.id)
        yield StreamEvent(type="tool_call_args", chunk=call.arguments, tool_call_id=call.id)
    usage = completion.usage
    details = {"cached_tokens": usage.n_cached} if usage.n_cached else None
    response.response_json = {"finish_reason": str(completion.finish_reason)}
    response.set_usage(input=usage.n_prompt, output=usage.n_output, details=details)


# --- What llm asks a plugin --------------------------------------------------------------------
@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the embedded model, and the downloaded ones."""
    register(CllmModel(), AsyncCllmModel())
    for name, path in _downloaded():
        register(CllmModel(name, path), AsyncCllmModel(name, path))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    """Register the embedded model and the downloaded ones as embedding models."""
    register(CllmEmbeddings("cllm", None))
    for name, path in _downloaded():
        register(CllmEmbeddings(name, path))


def _downloaded() -> Iterator[tuple[str, str]]:
    """Yield the name in `llm`, and the name in cllm, of each model that `cllm models` lists."""
    for model in cached_models():
        yield f"cllm/{str(model.name).removeprefix(PREFIX)}", str(model.name)
