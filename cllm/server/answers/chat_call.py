"""A chat of any route, as arguments of the engine."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from cllm import (
    Engine,
    InvalidRequestError,
    RenderedPrompt,
    SamplingParams,
    TokenStream,
)
from cllm.log_once import log_once
from cllm.server.answers.answer import AnswerForm, answer
from cllm.server.answers.client_tools import ClientTools, messages_of
from cllm.server.answers.running import Observation
from cllm.server.bodies.schemas import ChatOptionFields
from cllm.server.http.fetching import ImageFetcher
from cllm.server.http.problems import Problem, problem_of
from cllm.server.http.replies import Reply, Writer
from cllm.server.state import ServerState

logger: logging.Logger = logging.getLogger("cllm.server")

# Values of `reasoning_effort`.
EFFORTS = frozenset(["none", "minimal", "low", "medium", "high", "xhigh", "max"])


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Messages, how to render them, and how to sample.

    Attributes
    ----------
    messages : list of mapping
    options : mapping
        The arguments of `Engine.stream_chat` about the chat itself.
    params : SamplingParams
    scheduling : mapping
        Other arguments of `Engine.stream_chat`: `priority`, `tenant`, `timeout`, `lora`, `generated`.
    fields : sequence of str
        Field of the body that each message comes from, for errors; empty: `messages[i]`.
    names : mapping
        The client's names of other fields, and of fields of a message (`.tool_call_id`) or a tool (`.parameters`),
        for errors.
    tools : ClientTools, optional
        The tools of `options`, which know the fields that they come from.
    """

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    params: SamplingParams
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    fields: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    tools: ClientTools | None = None

    async def with_images(self, fetcher: ImageFetcher) -> ChatCall:
        """Return the call with the images at addresses that its messages name; see `ImageFetcher`."""
        try:
            return replace(self, messages=await fetcher.with_images(self.messages))
        except InvalidRequestError as error:
            raise self.problem_of(error) from None

    def problem_of(self, error: Exception) -> Problem:
        """Return the error response for an exception, with the field names that the client knows."""
        return problem_of(error, self._name_of)

    def _name_of(self, field: str) -> str:
        """Return the client's name of a field of the engine."""
        if match := re.match(r"(messages|tools)\[(\d+)\](\.function)?", field):
            number, rest = int(match[2]), field[match.end() :]
            rest = self.names.get(rest, rest)
            if match[1] == "messages" and number < len(self.fields):
                return self.fields[number] + rest
            functions = self.options.get("tools") or ()
            if match[1] == "tools" and self.tools is not None and number < len(functions):
                place = self.tools.field_of(functions[number])
                return (place if match[3] else place.removesuffix(".function")) + rest
        return self.names.get(field, field)

    def streams(self, engine: Engine, request_id: str, n: int = 1) -> list[TokenStream]:
        """Return the streams of `n` answers, not submitted yet."""
        first = engine.stream_chat(
            self.messages,
            self.params,
            request_id=request_id,
            **self.scheduling,
            **self.options,
        )
        return [first, *(first.again(i, f"{request_id}/0-{i}") for i in range(1, n))]


def answer_chat(
    state: ServerState,
    call: ChatCall,
    form: AnswerForm,
    observation: Observation,
    request_id: str,
    *,
    is_streamed: bool,
    n: int = 1,
) -> Response:
    """Return the response with `n` answers to a chat, whole or as events; see `answer`."""
    engine = state.serving

    def open_streams(engine_id: str) -> list[TokenStream]:
        state.check_messages(len(call.messages), form.prompt_field)
        return call.streams(engine, engine_id, n)

    return answer(
        state,
        form,
        open_streams,
        observation,
        request_id,
        is_streamed=is_streamed,
        problem=call.problem_of,
    )


async def rendered(
    state: ServerState,
    call: ChatCall,
    told: Callable[[RenderedPrompt], object],
    field: str = "messages",
) -> Response:
    """Return the response with what `told` returns for the prompt of a chat, without an answer.

    The prompt waits for its turn at the tokenizer.

    Raises
    ------
    Problem
        400: the chat has too many messages, or an image that cannot be fetched; names `field`.
    """
    state.check_messages(len(call.messages), field)
    engine = state.serving
    options = await hinted(engine, call.options)
    call = await call.with_images(state.fetcher)

    async def produce(writer: Writer) -> None:
        try:
            async with state.tokenizer_turn():
                prompt = await engine.render_chat(call.messages, **options)
        except InvalidRequestError as error:
            raise call.problem_of(error) from None
        await writer.json(lambda: told(prompt))

    return Reply(produce)


def input_tokens_of(prompt: RenderedPrompt) -> dict[str, Any]:
    """Return the answer of OpenAI's routes that count the tokens of a prompt."""
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


async def hinted(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, without a `reasoning_effort` that the chat template does not support.

    A dropped effort is logged once, not rejected: clients send one by default and do not know the model.
    """
    effort = options.get("reasoning_effort")
    if not isinstance(effort, str) or effort not in EFFORTS:  # the engine rejects a wrong one
        return dict(options)
    abilities = await engine.template_abilities()
    if abilities is None or abilities.thinking_switch or abilities.reasoning_effort:
        return dict(options)
    message = "the effort %s is ignored: the chat template has nothing that it changes"
    log_once(logger, message, effort)
    return {**options, "reasoning_effort": None}


def arguments_of(text: str) -> Any:
    """Return the arguments of a call as an object.

    If they are cut off, or not an object, the object has their text as `_cut_off`.
    JSON has no infinity, which Python reads from 1e999.
    """
    try:
        arguments = json.loads(text or "{}")
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"_cut_off": text}


def client_tools_of(tools: Sequence[Mapping[str, Any]] | None) -> ClientTools:
    """Return the tools of a chat that its client runs."""
    found = ClientTools()
    found.add(tools or ())
    return found


def chat_call_of(body: ChatOptionFields, messages: Sequence[Any]) -> ChatCall:
    """Return a chat that is rendered, not answered."""
    tools = client_tools_of(body.tools)
    options = chat_options(body, tools)
    return ChatCall(messages_of(messages), options, SamplingParams(), tools=tools)


def chat_options(body: ChatOptionFields, tools: ClientTools | None = None) -> dict[str, Any]:
    """Return the options of a body for rendering a chat."""
    offered = client_tools_of(body.tools) if tools is None else tools
    functions, choice = offered.choice(body.tool_choice)
    return {
        "tools": functions,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "reasoning_effort": body.reasoning_effort,
        "reasoning_budget": body.reasoning_budget,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
