"""OpenAI's `/v1/responses`, without state: what a client wants to go on with, it sends again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cllm import Completion, FinishReason, SamplingOptions, TokenDelta
from cllm.server.body import SafeRoute
from cllm.server.chat_call import ChatCall, answer_chat, as_delta, tools_of
from cllm.server.event_blocks import CALL, REASONING, Block, Blocks, Step
from cllm.server.fields import Flag, Integer, Number, Text
from cllm.server.loras import loras_of
from cllm.server.problems import Problem, invalid
from cllm.server.schemas import Body, constraint_of, sampling_of
from cllm.server.state import log_request, request_id_of, state_of

router = APIRouter(prefix="/v1", route_class=SafeRoute, tags=["OpenAI"])

Event = tuple[str, dict[str, Any]]
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    harmless: ClassVar = frozenset(
        ["store", "include", "metadata", "user", "service_tier", "safety_identifier",
         "prompt_cache_key", "prompt_cache_retention", "client_metadata", "max_tool_calls",
         "context_management", "prompt_cache_options", "moderation"]
    )  # fmt: skip
    neutral: ClassVar = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "truncation": (None, "disabled", "auto"),
        "top_logprobs": (None, 0),
        "prompt": (None,),
    }

    model: Text | None = None
    input: Text | list[dict[str, Any]] = Field(examples=["1+1="])
    instructions: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: Flag | None = False
    stream_options: dict[str, Any] | None = None


@router.post("/responses", summary="Answer, as a list of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """OpenAI's responses: text, reasoning and calls of functions as items."""
    state, request_id = state_of(request), request_id_of(request)
    log_request(state, request_id, body.input)
    engine = state.serving
    call = replace(
        chat_call_of(body, engine.sampling_defaults),
        scheduling={"lora": loras_of(engine, None, body.model)},
    )
    form = ResponseForm(request_id, state.model_name, body)
    observation = state.observation(request, "chat", call.params)
    return answer_chat(state, call, form, observation, request_id, is_streamed=bool(body.stream))


@router.post("/responses/input_tokens", summary="How many tokens an input has")
async def input_tokens(body: ResponsesBody, request: Request) -> dict[str, Any]:
    """The tokens of the prompt that an input becomes."""
    engine = state_of(request).serving
    call = chat_call_of(body, engine.sampling_defaults)
    rendered = await engine.render_chat(call.messages, **call.options)
    return {"object": "response.input_tokens", "input_tokens": len(rendered.token_ids)}


def chat_call_of(body: ResponsesBody, defaults: SamplingOptions) -> ChatCall:
    """The chat that a body asks for.

    Raises
    ------
    Problem
        Names the item and the field.
    """
    messages, fields = _messages_of(body.input)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
        fields = ["instructions", *fields]
    changes = {
        name: value
        for name, value in (
            ("max_tokens", body.max_output_tokens),
            ("temperature", body.temperature),
            ("top_p", body.top_p),
        )
        if value is not None
    }
    form = (body.text or {}).get("format")
    if isinstance(form, Mapping):
        kind = form.get("type")
        inner = {"type": kind, "json_schema": form} if kind == "json_schema" else form
        changes.update(constraint_of(inner, "text.format"))
    tools, choice = tools_of(body.tools, body.tool_choice)
    return ChatCall(
        messages,
        {
            "tools": None if tools is None else [_function(tool) for tool in tools],
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning_effort": (body.reasoning or {}).get("effort"),
        },
        sampling_of(body, defaults, **changes),
        fields=fields,
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function as chats have it; here its fields stand beside its type."""
    if "function" in tool:
        return tool
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if name in tool}}


def _messages_of(
    given: str | Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Items as messages, and where each comes from: a turn of the assistant is one message again."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    messages, fields = list[dict[str, Any]](), list[str]()
    for i, item in enumerate(given):
        field = f"input[{i}]"
        _add_item(messages, field, item)
        fields += [field] * (len(messages) - len(fields))
    for message in messages:
        if message["role"] == "assistant" and message["content"] is None:
            message["content"] = None if message.get("tool_calls") else ""
    return messages, fields


def _add_item(messages: list[dict[str, Any]], field: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            role = item.get("role")
            text = _text_of(f"{field}.content", item.get("content"))
            if role == "assistant" and _turn(messages).get("content") is None:
                _assistant(messages)["content"] = text
            else:
                messages.append({"role": role, "content": text})
        case "reasoning":
            parts = [item.get(name) or [] for name in ("content", "summary")]
            if not all(isinstance(part, list) for part in parts):
                raise invalid(f"{field}.content", "must be a list of parts")
            turn = _assistant(messages)
            said = [
                turn.get("reasoning_content"),
                _text_of(f"{field}.content", [*parts[0], *parts[1]]),
            ]
            turn["reasoning_content"] = "\n".join(filter(None, said))
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            made = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(made)
        case "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _text_of(f"{field}.output", output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        case _:
            known = "message, reasoning, function_call or function_call_output"
            raise invalid(f"{field}.type", f"is {str(kind)[:40]!r}, must be {known}")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that is being put together, or one of nobody."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    return {"content": ""}


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text_of(field: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(field, "must be text, or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = "refusal" if kind == "refusal" else "text"
        if kind not in TEXT_PARTS or not isinstance(part.get(name), str):
            raise invalid(f"{field}[{i}]", "must be a part with text; others are not there yet")
        texts.append(part[name])
    return "\n".join(texts)


class ResponseForm:
    """A `ChatForm`: the response object, and the events that build it."""

    prompt_field = "input"

    def __init__(self, request_id: str, model: str, body: ResponsesBody) -> None:
        self.request_id = request_id
        self._blocks = Blocks()
        self._n_events = 0
        self._has_begun = False
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def events(self, delta: TokenDelta) -> Iterator[Event]:
        """See `ChatForm`."""
        if not self._has_begun:
            self._has_begun = True
            begun = self._response("in_progress", [], None)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        for step in self._blocks.steps(delta):
            yield from self._step(step)

    def end(self, completion: Completion) -> Iterator[Event]:
        """See `ChatForm`."""
        whole = self.whole(completion)
        for step in self._blocks.end():
            yield from self._step(step, whole["output"][-1]["status"])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, problem: Problem) -> Iterator[Event]:
        """See `ChatForm`."""
        error = {"code": problem.code or "server_error", "message": str(problem)}
        items = [self._item(block, "incomplete") for block in self._blocks.done]
        whole = {**self._response("failed", items, None), "error": error}
        yield self._event("response.failed", response=whole)

    def whole(self, completion: Completion) -> dict[str, Any]:
        """See `ChatForm`."""
        blocks = self._blocks
        if not self._has_begun:  # not streamed
            list(blocks.steps(as_delta(completion)))
        is_complete = completion.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        status = "completed" if is_complete else "incomplete"
        items = [self._item(block, "completed") for block in blocks.done]
        if items and not is_complete:
            items[-1]["status"] = "incomplete"
        return self._response(status, items, completion)

    def _step(self, step: Step, status: str = "completed") -> Iterator[Event]:
        block = step.block
        place = {"output_index": block.index, "item_id": self._id(block)}
        part = {"content_index": 0, **place}
        if step.what == "begin":
            item = self._item(
                Block(block.kind, block.index, "", block.id, block.name), "in_progress"
            )
            item.update({} if block.kind == CALL else {"content": []})
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != CALL:
                yield self._event("response.content_part.added", **part, part=_part(block.kind, ""))
        elif step.what == "grow":
            name = DELTA_NAMES[block.kind]
            extra: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            where = place if block.kind == CALL else part
            yield self._event(f"response.{name}.delta", **where, delta=step.text, **extra)
        else:
            if block.kind == CALL:
                said = {"arguments": block.text, "name": block.name}
                yield self._event("response.function_call_arguments.done", **place, **said)
            else:
                name = DELTA_NAMES[block.kind]
                extra = {"logprobs": []} if name == "output_text" else {}
                yield self._event(f"response.{name}.done", **part, text=block.text, **extra)
                done = _part(block.kind, block.text)
                yield self._event("response.content_part.done", **part, part=done)
            item = self._item(block, status)
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._n_events = self._n_events, self._n_events + 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    def _id(self, block: Block) -> str:
        prefix = {CALL: "fc", REASONING: "rs"}.get(block.kind, "msg")
        return f"{prefix}_{self.request_id}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.kind == CALL:
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **called}
        content = [_part(block.kind, block.text)]
        if block.kind == REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(
        self, status: str, items: list[dict[str, Any]], completion: Completion | None
    ) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": items,
            "usage": None if completion is None else _usage(completion),
        }


DELTA_NAMES = {CALL: "function_call_arguments", REASONING: "reasoning_text", "text": "output_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached},
        "output_tokens": usage.n_output,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_output,
    }
