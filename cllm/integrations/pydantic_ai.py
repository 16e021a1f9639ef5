"""An engine as pydantic-ai's model.  Extra `pydantic-ai`.

>>> async with Engine("model.gguf") as engine:
...     agent = Agent(CllmModel(engine), tools=[search], output_type=Answer)
...     await agent.run(…)
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from cllm import Audio, Completion, Engine, Image, TokenStream, Usage
from cllm.errors import InvalidRequestError, extra
from cllm.integrations.caller import in_time

with extra("pydantic-ai"):
    from pydantic_ai import RunContext
    from pydantic_ai.messages import (
        BinaryContent,
        CachePoint,
        FinishReason,
        ModelMessage,
        ModelRequest,
        ModelResponse,
        ModelResponsePart,
        ModelResponseStreamEvent,
        RetryPromptPart,
        SystemPromptPart,
        TextPart,
        ThinkingPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
    from pydantic_ai.profiles import ModelProfileSpec
    from pydantic_ai.settings import ModelSettingName, ModelSettings, ThinkingLevel
    from pydantic_ai.tools import ToolDefinition
    from pydantic_ai.usage import RequestUsage

FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop", "length": "length", "deadline": "error", "tool_calls": "tool_call",
    "cancelled": "error", "error": "error",
}  # fmt: skip
# Settings of pydantic-ai, and the options of `Engine.chat` that they set.
SETTINGS = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "seed": "seed", "presence_penalty": "presence_penalty", "logit_bias": "logit_bias",
    "frequency_penalty": "frequency_penalty", "stop_sequences": "stop",
    "parallel_tool_calls": "parallel_tool_calls",
}  # fmt: skip
PROFILE: ModelProfileSpec = {
    "supports_tools": True,
    "supports_json_schema_output": True,
    "supports_json_object_output": True,
    "supports_thinking": True,
    # The output is constrained to the schema, so this mode works with any model.
    "default_structured_output_mode": "native",
}


class CllmModel(Model):
    """A model that is an `Engine` of this process.

    Parameters
    ----------
    engine : Engine
        An entered engine.  The model does not close it.
    settings : ModelSettings, optional
        Default settings; the settings of a run have precedence.
    **options
        Options of `Engine.chat` that pydantic-ai has no setting for: `lora`, `priority`, `reasoning_effort`, …
    """

    unsupported_settings: ClassVar[frozenset[ModelSettingName]] = frozenset(
        ("extra_body", "extra_headers", "max_retries", "service_tier")
    )

    def __init__(
        self, engine: Engine, *, settings: ModelSettings | None = None, **options: Any
    ) -> None:
        self._engine = engine
        self._options = options
        super().__init__(settings=settings, profile=PROFILE)

    @property
    def model_name(self) -> str:
        """Name of the engine's model; "cllm" if it has none."""
        return self._engine.model.name or "cllm"

    @property
    def system(self) -> str:
        """Name of the provider."""
        return "cllm"

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        """Return a whole answer.

        Raises
        ------
        CllmError
            As `Engine.chat`; a `DeadlineError` after the `timeout`.
        TypeError
            A message has other parts than text, images and audio.
        """
        chat, options, _ = await self._call(messages, model_settings, model_request_parameters)
        completion = in_time(await self._engine.chat(chat, **options))
        return ModelResponse(
            parts=_parts_of(completion),
            usage=_usage_of(completion.usage),
            model_name=self.model_name,
            provider_name=self.system,
            finish_reason=FINISH_REASONS[completion.finish_reason],
        )

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        """Yield a streamed answer, and close its stream after the block.  Raises the errors of `request`."""
        chat, options, parameters = await self._call(
            messages, model_settings, model_request_parameters
        )
        async with self._engine.stream_chat(chat, **options) as stream:
            yield CllmStreamedResponse(parameters, stream, self.model_name)

    async def _call(
        self,
        messages: list[ModelMessage],
        settings: ModelSettings | None,
        parameters: ModelRequestParameters,
    ) -> tuple[list[dict[str, Any]], dict[str, Any], ModelRequestParameters]:
        """Return the chat and the options for `Engine.chat`, and the prepared request parameters."""
        settings, parameters = self.prepare_request(settings, parameters)
        options = dict(self._options)
        for name, value in (settings or {}).items():
            if name in SETTINGS and value is not None:
                options[SETTINGS[name]] = value
        if "logit_bias" in options:
            options["logit_bias"] = dict(map(_bias, options["logit_bias"].items()))
        timeout = (settings or {}).get("timeout")
        if timeout is not None and not hasattr(timeout, "connect"):  # of HTTP connections
            options["timeout"] = timeout
        options |= await self._effort(parameters.thinking)
        choice = (settings or {}).get("tool_choice")
        functions, outputs = parameters.declared_function_tools, parameters.output_tools
        names = getattr(choice, "function_tools", choice)  # of a `ToolOrOutput`
        if choice in ("none", []):
            functions = []
        elif isinstance(names, list):
            functions = [tool for tool in functions if tool.name in names]
        if isinstance(choice, list) and choice:
            outputs = [tool for tool in outputs if tool.name in choice]
        is_demanded = choice == "required" or (isinstance(choice, list) and bool(choice))
        tools = [*functions, *outputs]
        if tools:
            is_free = parameters.allow_text_output and not is_demanded
            options["tools"] = [_tool_of(tool) for tool in tools]
            options["tool_choice"] = "auto" if is_free else "required"
        if parameters.output_mode == "native" and parameters.output_object is not None:
            options["json_schema"] = parameters.output_object.json_schema
        chat = [said for message in messages for said in _said_in(message)]
        if instructions := self._get_instruction_parts(messages, parameters):
            text = "\n\n".join(part.content for part in instructions)
            chat = _with_system(chat, text)
        return chat, options, parameters

    async def _effort(self, thinking: ThinkingLevel | None) -> dict[str, str]:
        """Return the option of `Engine.chat` for the setting `thinking`, if the chat template uses it."""
        abilities = None if thinking is None else await self._engine.template_abilities()
        if abilities is None or not (abilities.thinking_switch or abilities.reasoning_effort):
            return {}
        default = self._options.get("reasoning_effort", "medium")
        levels: dict[ThinkingLevel | None, str] = {False: "none", True: default}
        return {"reasoning_effort": levels.get(thinking) or str(thinking)}


@dataclass
class CllmStreamedResponse(StreamedResponse):
    """Response that is read from a `TokenStream`; `name` is the model's name, `at` the time of its begin."""

    stream: TokenStream
    name: str
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def _get_event_iterator(self) -> AsyncIterator[ModelResponseStreamEvent]:
        parts = self._parts_manager
        async for delta in self.stream:
            if delta.reasoning:
                for event in parts.handle_thinking_delta(
                    vendor_part_id="thought", content=delta.reasoning
                ):
                    yield event
            if delta.text:
                for event in parts.handle_text_delta(vendor_part_id="text", content=delta.text):
                    yield event
            for call in delta.tool_calls:
                for event in parts.handle_tool_call_delta_events(
                    vendor_part_id=call.index,
                    tool_name=call.name,
                    args=call.arguments,
                    tool_call_id=call.id,
                ):
                    yield event
        completion = in_time(await self.stream.completion())
        self._usage = _usage_of(completion.usage)
        self.finish_reason = FINISH_REASONS[completion.finish_reason]

    async def close_stream(self) -> None:
        """Cancel the request; the events end."""
        await self.stream.cancel()

    @property
    def model_name(self) -> str:
        """See `CllmModel`."""
        return self.name

    @property
    def provider_name(self) -> str:
        """See `CllmModel.system`."""
        return "cllm"

    @property
    def provider_url(self) -> None:
        """Return None: the model is in this process."""
        return None

    @property
    def timestamp(self) -> datetime:
        """Time at which the response began."""
        return self.at


# --- From pydantic-ai's messages ---------------------------------------------------------------
def _said_in(message: ModelMessage) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's format that a message of pydantic-ai stands for."""
    if isinstance(message, ModelResponse):
        yield _answer_of(message)
        return
    assert isinstance(message, ModelRequest)
    for part in message.parts:
        match part:
            case SystemPromptPart(content=text):
                yield {"role": "system", "content": text}
            case UserPromptPart(content=content):
                yield {"role": "user", "content": _content_of(content)}
            case ToolReturnPart():
                text, files = part.model_response_str_and_user_content()
                yield _result(part.tool_call_id, _content_of([text, *files]))
            case RetryPromptPart(tool_name=None):
                yield {"role": "user", "content": part.model_response()}
            case RetryPromptPart():
                yield _result(part.tool_call_id, part.model_response())
            case _:
                kind = type(part).__name__
                raise TypeError(f"a request may have prompts and results of tools, but no {kind}")


def _answer_of(message: ModelResponse) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for part in message.parts:
        match part:
            case TextPart(content=text):
                texts.append(text)
            case ThinkingPart(content=thought):
                thoughts.append(thought)
            case ToolCallPart():
                function = {"name": part.tool_name, "arguments": part.args_as_json_str()}
                calls.append({"id": part.tool_call_id, "type": "function", "function": function})
    answer: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        answer["reasoning_content"] = "\n\n".join(thoughts)
    return {**answer, "tool_calls": calls} if calls else answer


def _content_of(content: object) -> str | list[dict[str, Any]]:
    """Return a user's message as a text, or as parts if it has images or audio."""
    if isinstance(content, str):
        return content
    assert isinstance(content, list | tuple)
    parts = [_part_of(item) for item in content if not isinstance(item, CachePoint)]
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def _part_of(item: object) -> dict[str, Any]:
    if isinstance(item, BinaryContent):
        if item.is_image:
            return {"type": "image", "image": Image(item.data)}
        if item.is_audio:
            return {"type": "audio", "audio": Audio(item.data)}
    text = getattr(item, "content", item)
    if not isinstance(text, str):
        kind = item.media_type if isinstance(item, BinaryContent) else type(item).__name__
        has = "text, and images and audio as BinaryContent"
        raise TypeError(f"a user's message may have {has}, but no {kind}")
    return {"type": "text", "text": text}


def _result(call_id: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _bias(given: tuple[object, Any]) -> tuple[int, float]:
    try:
        return int(str(given[0])), float(given[1])
    except (TypeError, ValueError):
        limit = "token ids with numbers"
        raise InvalidRequestError("logit_bias", {given[0]: given[1]}, limit) from None


def _with_system(chat: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the chat with a text after its system prompts."""
    n = next((i for i, said in enumerate(chat) if said["role"] != "system"), len(chat))
    return [*chat[:n], {"role": "system", "content": text}, *chat[n:]]


def _tool_of(tool: ToolDefinition) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters_json_schema,
    }
    return {"type": "function", "function": function}


# --- To pydantic-ai's messages -----------------------------------------------------------------
def _parts_of(completion: Completion) -> list[ModelResponsePart]:
    parts: list[ModelResponsePart] = []
    if completion.reasoning:
        parts.append(ThinkingPart(completion.reasoning))
    if completion.text:
        parts.append(TextPart(completion.text))
    parts += [
        ToolCallPart(call.name, call.arguments or json.dumps({}), tool_call_id=call.id)
        for call in completion.tool_calls
    ]
    return parts


def _usage_of(usage: Usage) -> RequestUsage:
    return RequestUsage(
        input_tokens=usage.n_prompt,
        output_tokens=usage.n_output,
        cache_read_tokens=usage.n_cached,
    )
