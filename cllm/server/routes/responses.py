"""OpenAI's `/v1/responses`.  Nothing is stored: a client sends the whole conversation with each request."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cllm import Completion, FinishReason, SamplingOptions, TokenDelta, TokenLogprob
from cllm.log_once import log_once
from cllm.server.answers.answer import AnswerForm
from cllm.server.answers.chat_call import ChatCall, answer_chat, hinted, input_tokens_of, rendered
from cllm.server.answers.client_tools import (
    CUSTOM,
    FUNCTION,
    ClientTool,
    ClientTools,
    object_of,
    text_input_of,
)
from cllm.server.answers.event_blocks import CALL, REASONING, TEXT, Block, Blocks, Step
from cllm.server.answers.formats import with_top
from cllm.server.bodies.fields import Flag, Integer, Number, Objects, Text, Texts
from cllm.server.bodies.schemas import Queued, constraint_of, sampling_of
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import Problem, invalid
from cllm.server.routes.loras import loras_of
from cllm.server.state import log_request, request_id_of, state_of

logger: logging.Logger = logging.getLogger("cllm.server")
router: APIRouter = APIRouter(prefix="/v1", route_class=SafeRoute, tags=["OpenAI"])

Event = tuple[str, dict[str, Any]]
# Types of items that are calls of the client's tools, with the kind of the tool.
CALLS = {
    "function_call": FUNCTION, "custom_tool_call": CUSTOM, "local_shell_call": "local_shell",
    "shell_call": "shell", "apply_patch_call": "apply_patch", "tool_search_call": "tool_search",
    "computer_call": "computer",
}  # fmt: skip
RESULTS = frozenset(
    ["function_call_output", "custom_tool_call_output", "local_shell_call_output",
     "shell_call_output", "apply_patch_call_output", "tool_search_output", "computer_call_output"]
)  # fmt: skip
# The client's names of the engine's fields, for errors.
NAMES = {
    "max_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort",
    ".tool_call_id": ".call_id",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # of `include`
UNKNOWN_ITEM = (
    "an item_reference names an item that is not stored here: the client must send it (store=False)"
)
THOUGHTS = "thoughts"  # texts of reasoning items, joined when the turn is whole
# Types of items that add no message to the chat.
DIRECTIVES = frozenset(
    ["additional_tools", "configuration_update", "compaction_trigger", "ghost_snapshot"]
)
ID_PREFIXES = {
    FUNCTION: "fc", CUSTOM: "ctc", "local_shell": "lsh", "shell": "sh", "apply_patch": "apc",
    "tool_search": "tsc",
}  # fmt: skip


class ResponsesBody(Queued):
    """`POST /v1/responses`."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        ["store", "user", "service_tier", "safety_identifier",
         "prompt_cache_key", "prompt_cache_retention", "client_metadata", "max_tool_calls",
         "context_management", "prompt_cache_options", "moderation", "access_programs",
         "background_options", "image", "personality"]
    )  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "truncation": (None, "disabled", "auto"),
        "prompt": (None,),
    }

    model: Text | None = None
    input: Text | Objects = Field(examples=["1+1="])
    instructions: Text | None = None
    tools: Objects | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: Flag | None = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    include: Texts | None = None
    top_logprobs: Integer | None = None

    @property
    def n_top(self) -> int | None:
        """Number of the most likely tokens to return with each token of the text; None: no log probabilities."""
        wanted = LOGPROBS in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None


@router.post("/responses", summary="Answer, as a list of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer as OpenAI's Responses API does: with items of text, reasoning and tool calls."""
    state, request_id = state_of(request), request_id_of(request)
    log_request(state, request_id, body.input)
    engine = state.serving
    n_most = state.config.max_logprobs
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= n_most:
        raise invalid("top_logprobs", f"is {body.top_logprobs}, must be 0 to {n_most}")
    call = chat_call_of(body, engine.sampling_defaults)
    call = replace(
        call,
        options=await hinted(engine, call.options),
        scheduling={**body.turn, "lora": loras_of(engine, None, body.model)},
    )
    call = await call.with_images(state.fetcher)
    form = ResponseForm(request_id, state.model_name, body)
    observation = state.observation(request, "chat", call.params)
    return answer_chat(state, call, form, observation, request_id, is_streamed=bool(body.stream))


@router.post("/responses/input_tokens", summary="How many tokens an input has")
async def input_tokens(body: ResponsesBody, request: Request) -> Response:
    """Return the number of tokens of the prompt that the input becomes."""
    state = state_of(request)
    call = chat_call_of(body, state.serving.sampling_defaults)
    return await rendered(state, call, input_tokens_of, "input")


def chat_call_of(body: ResponsesBody, defaults: SamplingOptions) -> ChatCall:
    """Return the chat of a body.

    Raises
    ------
    Problem
        Names the item and the field.
    """
    tools = client_tools_of(body)
    messages, fields = _messages_of(body.input, tools)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
        fields = ["instructions", *fields]
    constraint = constraint_of((body.text or {}).get("format"), "text.format")
    names = {**NAMES, **constraint.names}
    changes = {
        name: value
        for name, value in (
            ("max_tokens", body.max_output_tokens),
            ("logprobs", body.n_top),
            ("temperature", body.temperature),
            ("top_p", body.top_p),
        )
        if value is not None
    }
    functions, choice = tools.choice(body.tool_choice)
    return ChatCall(
        messages,
        {
            "tools": functions,
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning_effort": (body.reasoning or {}).get("effort"),
        },
        sampling_of(
            body, defaults, lambda name: names.get(name, name), **changes, **constraint.changes
        ),
        fields=fields,
        names=names,
        tools=tools,
    )


def client_tools_of(body: ResponsesBody) -> ClientTools:
    """Return the tools that a body and the items of its input offer."""
    tools = ClientTools()
    tools.add(body.tools or ())
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        more = item.get("tools")
        if item.get("type") in ("additional_tools", "tool_search_output") and isinstance(
            more, list
        ):
            tools.add(more, f"input[{i}].tools")
    return tools


def _messages_of(
    given: str | Sequence[Mapping[str, Any]], tools: ClientTools
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of the items, one for a turn of the assistant, and the field that each comes from."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    messages, fields = list[dict[str, Any]](), list[str]()
    for i, item in enumerate(given):
        field = f"input[{i}]"
        _add_item(messages, field, item, tools)
        fields += [field] * (len(messages) - len(fields))
    for message in messages:
        if thoughts := message.pop(THOUGHTS, None):
            message["reasoning_content"] = "\n".join(thoughts)
    return messages, fields


def _add_item(
    messages: list[dict[str, Any]], field: str, item: Mapping[str, Any], tools: ClientTools
) -> None:
    """Add an item as a message, or to the assistant's last one; the engine checks parts that are not text."""
    kind = str(item.get("type") or "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        content = list(content) if isinstance(content, list) else content  # it may be appended to
        last = messages[-1] if messages else {}
        if role == last.get("role") == "assistant" and last["content"] is None:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        given = [item.get(name) or [] for name in ("content", "summary")]
        if not all(isinstance(parts, list) for parts in given):
            raise invalid(f"{field}.content", "must be a list of parts")
        texts = [part.get("text") for part in (*given[0], *given[1]) if isinstance(part, Mapping)]
        said = [text for text in texts if text and isinstance(text, str)]
        _assistant(messages).setdefault(THOUGHTS, []).extend(said)
    elif kind in CALLS:
        call = tools.call(_call_id(item), CALLS[kind], item)
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in RESULTS:
        content = item.get("output") if kind != "tool_search_output" else item.get("tools")
        content = item.get("status") if content is None else content
        messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": content})
    elif kind not in DIRECTIVES:  # an item that only a provider knows, such as its own tool's call
        if kind == "item_reference":
            log_once(logger, UNKNOWN_ITEM)
        turn = _assistant(messages)
        if not isinstance(turn["content"], list):
            turn["content"] = [] if turn["content"] is None else [turn["content"]]
        turn["content"].append(item)


def _call_id(item: Mapping[str, Any]) -> object:
    """Return the id of a call; some clients put it into the item's own id."""
    given = item.get("call_id")
    return item.get("id") if given is None else given


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


class ResponseForm(AnswerForm):
    """The Responses API's response object, and the events that build it."""

    prompt_field = "input"
    reads_deltas = True  # they have the order of texts and calls
    tells_overflows = True  # only this event makes Codex compact its history

    def __init__(self, request_id: str, model: str, body: ResponsesBody) -> None:
        self.request_id = request_id
        self._tools = client_tools_of(body)
        self._blocks = Blocks()
        self._logprobs: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)  # by block
        self._coming: list[TokenLogprob] = []  # tokens whose text has not come, or that have none
        self._n_events = 0
        self._has_begun = False
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
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

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield from self.begin()
        self._coming += delta.logprobs or ()
        logprobs = [*map(with_top, self._tokens_of(delta.text))] if delta.text else []
        for step in self._blocks.steps(delta):
            is_text = step.what == "grow" and step.block.kind == TEXT
            if is_text:
                self._logprobs[step.block.index] += logprobs
            yield from self._step(step, logprobs=logprobs if is_text else ())
        if delta.reasoning or delta.tool_calls:
            self._coming = []

    def _tokens_of(self, text: str) -> list[TokenLogprob]:
        """Return the tokens of a text that has come; those before it belong to markers, which have no text."""
        data = text.encode()
        begin = max(0, b"".join(each.bytes for each in self._coming).find(data))
        found: list[TokenLogprob] = []
        at = 0
        while self._coming and at < begin + len(data):
            token = self._coming.pop(0)
            at += len(token.bytes)
            if at > begin:
                found.append(token)
        return found

    def begin(self, n_prompt: int = 0) -> Iterator[Event]:
        """Yield `response.created` and `response.in_progress` at the first call, nothing later; see `AnswerForm`."""
        if not self._has_begun:
            self._has_begun = True
            begun = self._response("in_progress", [], None)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)

    def ping(self) -> Event:
        """See `AnswerForm`: Codex has a timeout between events, and ignores comments."""
        response = self._response("in_progress", [], None)
        return self._event("response.in_progress", response=response)

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        whole = self.whole(done)
        for step in self._blocks.end():
            yield from self._step(step, whole["output"][-1]["status"])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, problem: Problem) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield from self.begin()
        error = {"code": problem.code or "server_error", "message": str(problem)}
        items = [self._item(block, "incomplete") for block in self._blocks.done]
        whole = {**self._response("failed", items, None), "error": error}
        yield self._event("response.failed", response=whole)

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        (completion,) = done
        blocks = self._blocks
        is_complete = completion.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        status = "completed" if is_complete else "incomplete"
        items = [self._item(block, "completed") for block in blocks.done]
        if items and not is_complete:
            items[-1]["status"] = "incomplete"
        return self._response(status, items, completion)

    def _step(
        self, step: Step, status: str = "completed", logprobs: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Event]:
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
            if block.kind == CALL and self._tool(block).kind != FUNCTION:
                return  # the fields of its item are in the JSON, and sent when that is complete
            name = DELTA_NAMES[block.kind]
            extra: dict[str, Any] = {"logprobs": logprobs} if name == "output_text" else {}
            where = place if block.kind == CALL else part
            yield self._event(f"response.{name}.delta", **where, delta=step.text, **extra)
        else:
            if block.kind == CALL:
                yield from self._call_end(block, place)
            else:
                name = DELTA_NAMES[block.kind]
                done = _part(block.kind, block.text, self._logprobs[block.index])
                extra = {"logprobs": done["logprobs"]} if name == "output_text" else {}
                yield self._event(f"response.{name}.done", **part, text=block.text, **extra)
                yield self._event("response.content_part.done", **part, part=done)
            item = self._item(block, status)
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _call_end(self, block: Block, place: dict[str, Any]) -> Iterator[Event]:
        tool = self._tool(block)
        if tool.kind == FUNCTION:
            said = {"arguments": block.text, "name": tool.name}
            yield self._event("response.function_call_arguments.done", **place, **said)
        elif tool.kind == CUSTOM:
            text, name = text_input_of(block.text), "response.custom_tool_call_input"
            yield self._event(f"{name}.delta", **place, delta=text)
            yield self._event(f"{name}.done", **place, input=text)

    def _tool(self, block: Block) -> ClientTool:
        return self._tools.known(block.name)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._n_events = self._n_events, self._n_events + 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    def _id(self, block: Block) -> str:
        prefix = {REASONING: "rs"}.get(block.kind, "msg")
        prefix = ID_PREFIXES[self._tool(block).kind] if block.kind == CALL else prefix
        return f"{prefix}_{self.request_id}_{block.index}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.kind == CALL:
            if status == "completed" and block.text and object_of(block.text) is None:
                head["status"] = "incomplete"  # cut off by a stop string, or by the model itself
            return {**head, "call_id": block.id, **_called(self._tool(block), block.text)}
        content = [_part(block.kind, block.text, self._logprobs[block.index])]
        if block.kind == REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(
        self, status: str, items: list[dict[str, Any]], completion: Completion | None
    ) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if reason and completion and completion.finish_reason is FinishReason.DEADLINE:
            reason["cause"] = "deadline"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": items,
            "usage": None if completion is None else _usage(completion),
        }


def _called(tool: ClientTool, arguments: str) -> dict[str, Any]:
    """Return the fields of a call's item that depend on its kind."""
    space = {} if tool.namespace is None else {"namespace": tool.namespace}
    named = {"name": tool.name, **space}
    given = object_of(arguments) or {}
    match tool.kind:
        case "custom":
            return {"type": "custom_tool_call", **named, "input": text_input_of(arguments)}
        case "local_shell":
            action = {"type": "exec", "command": [], "env": {}, **given}
            return {"type": "local_shell_call", "action": action}
        case "shell":
            limits = {"timeout_ms": None, "max_output_length": None}
            return {"type": "shell_call", "action": {"commands": [], **limits, **given}}
        case "apply_patch":
            operation = {"type": "update_file", "path": "", **given}
            return {"type": "apply_patch_call", "operation": operation}
        case "tool_search":
            return {"type": "tool_search_call", "execution": "client", "arguments": given}
    return {"type": "function_call", **named, "arguments": arguments}


DELTA_NAMES = {CALL: "function_call_arguments", REASONING: "reasoning_text", "text": "output_text"}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_output,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_output,
    }
