"""Anthropic's `/v1/messages` and `count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cllm import Completion, Engine, FinishReason, SamplingParams, TokenDelta
from cllm.engine import media_parts
from cllm.engine.chat.readable import words_of
from cllm.server.answers.answer import AnswerForm
from cllm.server.answers.chat_call import ChatCall, answer_chat, arguments_of, hinted, rendered
from cllm.server.answers.client_tools import ClientTools
from cllm.server.answers.event_blocks import CALL, REASONING, Block, Blocks, Step
from cllm.server.bodies.fields import Flag, Integer, Number, Objects, Text, Texts
from cllm.server.bodies.schemas import Body, Queued, constraint_of, sampling_of
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import Problem, invalid
from cllm.server.routes.loras import loras_of
from cllm.server.state import log_request, request_id_of, state_of

router: APIRouter = APIRouter(prefix="/v1", route_class=SafeRoute, tags=["Anthropic"])

Event = tuple[str, dict[str, Any]]
# The part of the system prompt that begins with this differs in each request.  It is left out,
# so that prompts share a cached prefix.
BILLING = "x-anthropic-billing-header"
SIGNATURE = "cllm"
# The client's names of the engine's fields, for errors.
NAMES = {
    "stop": "stop_sequences", "reasoning_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort", ".tool_call_id": ".tool_use_id",
    ".parameters": ".input_schema",
}  # fmt: skip
THINKING = ("enabled", "adaptive", "disabled")
# Types of a user's blocks that become content of the message.
USER_BLOCKS = ("text", "image", "document", "search_result")


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        ["metadata", "service_tier", "container", "context_management",
         "cache_control", "mcp_servers", "betas", "inference_geo", "speed", "diagnostics",
         "max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k",
         "compaction", "billing_policy", "user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token"]
    )  # fmt: skip

    model: Text | None = None
    messages: Objects = Field(
        examples=[[{"role": "user", "content": "1+1="}]], json_schema_extra={"minItems": 1}
    )
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = Field(
        None, description="As `output_config.format`, of older clients"
    )
    thread: dict[str, Any] | Flag | None = None


class MessagesBody(Queued, CountBody):
    """`POST /v1/messages`."""

    max_tokens: Integer
    stop_sequences: Texts | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    stream: Flag | None = False


@router.post("/messages", summary="Answer, as a list of blocks")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a chat as Anthropic's Messages API does: with blocks of text, thinking and tool uses."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    log_request(state, request_id, body.messages)
    given = {"top_p": body.top_p, "top_k": body.top_k, "temperature": body.temperature}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # 0 puts the prompt into the cache.
    changes |= {"max_tokens": body.max_tokens or 1, "stop": body.stop_sequences or ()}
    if (form := (body.output_config or {}).get("format")) is not None:
        constraint = constraint_of(form, "output_config.format")
    else:
        constraint = constraint_of(body.output_format, "output_format")
    names = {**NAMES, **constraint.names}
    params = sampling_of(
        body,
        engine.sampling_defaults,
        lambda name: names.get(name, name),
        **changes,
        **constraint.changes,
    )
    call = await chat_call_of(engine, body, params)
    call = await replace(call, names={**call.names, **constraint.names}).with_images(state.fetcher)
    message = MessageForm(request_id, state.model_name, is_prompt_only=body.max_tokens == 0)
    observation = state.observation(request, "chat", call.params)
    return answer_chat(state, call, message, observation, request_id, is_streamed=bool(body.stream))


@router.post("/messages/count_tokens", summary="How many tokens messages have")
async def count_tokens(body: CountBody, request: Request) -> Response:
    """Return the number of tokens of the prompt that the messages become."""
    state = state_of(request)
    call = await chat_call_of(state.serving, body, sampling_of(body, {}))
    return await rendered(state, call, lambda prompt: {"input_tokens": len(prompt.token_ids)})


async def chat_call_of(engine: Engine, body: CountBody, params: SamplingParams) -> ChatCall:
    """Return the chat of a body.

    Raises
    ------
    Problem
        Names the message and the field.
    """
    if body.thread:  # after this error, the SDK's tool_runner continues without a thread
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        limit = "thread: is not supported; send the messages instead"
        raise Problem(400, limit, param="thread", details={"details": details})
    tools = ClientTools()
    tools.add_anthropic(body.tools or ())
    chat, fields = list[dict[str, Any]](), list[str]()
    effort, names = (body.output_config or {}).get("effort"), NAMES
    users = [i for i, message in enumerate(body.messages) if message.get("role") == "user"]
    for i, message in enumerate(body.messages):
        is_system = message.get("role") == "system"
        for field, said in _instructed(i, message, tools) if is_system else _said(i, message):
            is_over = is_system and message.get("clear_at") == "next_user_message"
            if not (is_over and users and i < users[-1]):
                chat.append(said)
                fields.append(field)
        config = message.get("output_config") if is_system else None
        if isinstance(config, Mapping) and isinstance(config.get("effort"), str):
            place = f"messages[{i}].output_config.effort"
            effort, names = config["effort"], {**NAMES, "reasoning_effort": place}
    if not chat:
        raise invalid("messages", "must have at least one message")
    if system := _system(body.system):
        chat, fields = [{"role": "system", "content": system}, *chat], ["system", *fields]
    last = chat[-1]
    choice = body.tool_choice or {}
    options: dict[str, Any] = {
        "tools": tools.offered,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
        # A last message of the assistant is the beginning of its answer.
        "continue_final_message": body.messages[-1].get("role") == "assistant"
        and last["role"] == "assistant"
        and bool(last["content"])
        and "tool_calls" not in last,
    }
    if body.thinking is not None:
        if (kind := body.thinking.get("type")) not in THINKING:
            raise invalid(
                "thinking.type", f"is {str(kind)[:40]!r}, must be one of {', '.join(THINKING)}"
            )
        thinks = kind != "disabled"
        options["chat_template_kwargs"] = {"enable_thinking": thinks}
        abilities = await engine.template_abilities()
        budget = body.thinking.get("budget_tokens")
        if isinstance(budget, int) and abilities is not None and abilities.thinking:
            options["reasoning_budget"] = budget
    if isinstance(effort, str):
        options["reasoning_effort"] = effort
    options = await hinted(engine, options)
    turn = body.turn if isinstance(body, MessagesBody) else {}
    scheduling = {**turn, "lora": loras_of(engine, None, body.model)}
    return ChatCall(chat, options, params, scheduling, fields=fields, names=names, tools=tools)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(f"system[{i}]", part) for i, part in enumerate(system)]
    return "\n\n".join(text for text in texts if not text.startswith(BILLING))


def _choice(choice: Mapping[str, Any]) -> str:
    kind = choice.get("type", "auto")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return str(choice["name"])
    words = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in words:
        raise invalid("tool_choice.type", "must be auto, any, none, or tool with a name")
    return words[kind]


def _instructed(
    i: int, message: Mapping[str, Any], tools: ClientTools
) -> list[tuple[str, dict[str, Any]]]:
    """Return the text of a system message as a field of the body and a message, in a list; change `tools`.

    Without text, the list is empty.  Words replace unknown blocks: a client cannot change its history.
    """
    field, content = f"messages[{i}]", message.get("content")
    texts = [content] if isinstance(content, str) else []
    if not isinstance(content, str | list | None):
        raise invalid(f"{field}.content", "must be text, or a list of blocks")
    for k, block in enumerate(content if isinstance(content, list) else ()):
        name = f"{field}.content[{k}]"
        match block.get("type") if isinstance(block, Mapping) else None:
            case "text":
                texts.append(_text(name, block))
            case "tool_addition" | "tool_removal":
                tools.change(name, block)
            case _:
                texts.append(words_of(block))
    text = "\n".join(filter(None, texts))
    return [(field, {"role": "system", "content": text})] if text else []


def _said(i: int, message: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return one message as fields of the body and messages of a chat: results of tools become messages of their own."""
    field, role, content = f"messages[{i}]", message.get("role"), message.get("content")
    if isinstance(content, str):
        return [(field, {"role": role, "content": content})]
    if not isinstance(content, list):
        raise invalid(f"{field}.content", "must be text, or a list of blocks")
    results: list[tuple[str, dict[str, Any]]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for k, block in enumerate(content):
        name = f"{field}.content[{k}]"
        match block.get("type") if isinstance(block, Mapping) else None:
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input", {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                called = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append((name, {**called, "content": _result(block)}))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass  # it is encrypted: only Anthropic's servers can read it
            case kind if role == "assistant" or kind in (*USER_BLOCKS, *media_parts.TYPES):
                if kind == "text":
                    _text(name, block)
                parts.append(block)
            case kind:
                known = f"{', '.join(USER_BLOCKS)}, tool_use, tool_result or thinking"
                raise invalid(f"{name}.type", f"is {str(kind)[:40]!r}, must be {known}")
    is_text = parts or (role == "assistant" and not calls)
    said: dict[str, Any] = {"role": role, "content": _joined(parts) if is_text else None}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    is_message = parts or calls or thoughts or not results
    return [*results, (field, said)] if is_message else results


def _joined(parts: list[Any]) -> Any:
    """Return parts joined if all are text, otherwise unchanged."""
    is_text = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
    return "\n".join(part["text"] for part in parts) if is_text else parts


def _text(field: str, block: object) -> str:
    text = block.get("text") if isinstance(block, Mapping) else None
    if not isinstance(text, str):
        raise invalid(f"{field}.text", "must be text")
    return text


def _result(block: Mapping[str, Any]) -> Any:
    """Return the content of a tool's result, after `Error:` for an error; it may have parts without text."""
    content = block.get("content")
    content = "" if content is None else content
    if block.get("is_error") is not True:
        return content
    return f"Error: {content}" if isinstance(content, str) else ["Error:", content]


class MessageForm(AnswerForm):
    """The Messages API's message, and the events that build it."""

    prompt_field = "messages"
    reads_deltas = True  # they have the order of texts and calls

    def __init__(self, request_id: str, model: str, *, is_prompt_only: bool = False) -> None:
        self.is_prompt_only = is_prompt_only
        self._head = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks = Blocks()

    def ping(self) -> Event:
        """See `AnswerForm`."""
        return _event("ping")

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        for step in self._blocks.steps(delta):
            yield from _step_events(step)

    def begin(self, n_prompt: int) -> Iterator[Event]:
        """See `AnswerForm`; some clients read the size of the prompt here only."""
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_prompt),
        }
        yield _event("message_start", message={**self._head, **nothing})

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        for step in self._blocks.end():
            yield from _step_events(step)
        yield _event("message_delta", delta=_stop(done[0]), usage=_usage_of(done[0]))
        yield _event("message_stop")

    def failed(self, problem: Problem) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield _event("error", error=problem.anthropic_body["error"])

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        (completion,) = done
        content = [_block(block) for block in self._blocks.done]
        usage = _usage_of(completion)
        return {**self._head, "content": content, **_stop(completion), "usage": usage}


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _step_events(step: Step) -> Iterator[Event]:
    index, kind = step.block.index, step.block.kind
    if step.what == "begin":
        begun = Block(kind, index, "", step.block.id, step.block.name)
        yield _event("content_block_start", index=index, content_block=_block(begun))
    elif step.what == "end":
        if kind == REASONING:
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", index=index, delta=signature)
        yield _event("content_block_stop", index=index)
    else:
        delta = {
            CALL: {"type": "input_json_delta", "partial_json": step.text},
            REASONING: {"type": "thinking_delta", "thinking": step.text},
        }.get(kind, {"type": "text_delta", "text": step.text})
        yield _event("content_block_delta", index=index, delta=delta)


def _block(block: Block) -> dict[str, Any]:
    if block.kind == REASONING:
        # Clients take a thought without a signature for a thought of another model.
        signature = SIGNATURE if block.text else ""
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind != CALL:
        return {"type": "text", "text": block.text}
    used = arguments_of(block.text)
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": used}


def _stop(completion: Completion) -> dict[str, Any]:
    sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
    match completion.finish_reason:
        case FinishReason.TOOL_CALLS:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        case FinishReason.STOP if sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        case FinishReason.STOP:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        case FinishReason.DEADLINE:
            details = {"stop_details": {"type": "deadline"}}
            return {"stop_reason": "max_tokens", "stop_sequence": None, **details}
        case FinishReason.LENGTH if sequence == "context":
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": "max_tokens", "stop_sequence": None}


def _usage_of(completion: Completion) -> dict[str, int]:
    usage = completion.usage
    return _usage(usage.n_prompt, usage.n_cached, usage.n_output)


def _usage(n_prompt: int, n_cached: int = 0, n_output: int = 0) -> dict[str, int]:
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": n_output,
    }
