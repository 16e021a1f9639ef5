"""OpenAI's endpoints: completions, chat completions, models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import Engine, ModelInfo, SamplingParams, TokenStream
from cllm.server.answers.answer import answer
from cllm.server.answers.chat_call import (
    ChatCall,
    answer_chat,
    chat_call_of,
    chat_options,
    client_tools_of,
    hinted,
    input_tokens_of,
    rendered,
)
from cllm.server.answers.client_tools import messages_of
from cllm.server.answers.formats import ChatCompletionForm, CompletionForm
from cllm.server.bodies.fields import CONSTRAINTS, MAX_SEED
from cllm.server.bodies.schemas import (
    ChatBody,
    ChatFields,
    CompletionBody,
    CompletionFields,
    constraint_of,
    sampling_of,
)
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import Problem, invalid, problem_of
from cllm.server.routes.generate import check_length, check_logprobs
from cllm.server.routes.loras import loras_of
from cllm.server.state import ServerState, log_request, request_id_of, state_of

router: APIRouter = APIRouter(prefix="/v1", route_class=SafeRoute, tags=["OpenAI"])

Prompt = str | Sequence[int]
# OpenAI's default for completions; a chat without a limit runs until the model ends it.
COMPLETION_MAX_TOKENS = 16


@router.get("/models", summary="The model, and its LoRA adapters")
async def models(request: Request) -> dict[str, Any]:
    """Return the served model and its LoRA adapters, as a list of models."""
    state = state_of(request)
    info = state.serving.model
    model = listed(
        state.model_name,
        state.started_at,
        max_model_len=info.n_ctx,
        architecture=architecture_of(info),
        meta={
            "n_params": info.n_params,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "size_bytes": info.size_bytes,
        },
    )
    adapters = [
        listed(lora.name, state.started_at, parent=state.model_name, max_model_len=info.n_ctx)
        for lora in info.loras
    ]
    return model_list([model, *adapters])


def listed(name: str, started_at: int, **more: Any) -> dict[str, Any]:
    """Return a model in a list, with the fields of OpenAI's API and of Anthropic's."""
    created_at = datetime.fromtimestamp(started_at, UTC).isoformat(timespec="seconds")
    return {
        "id": name,
        "object": "model",
        "created": started_at,
        "owned_by": "cllm",
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": created_at.replace("+00:00", "Z"),
        **more,
    }


def model_list(data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of `/v1/models`, as OpenAI's API and Anthropic's have it."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
    return {"object": "list", "data": data, **ends}


def architecture_of(info: ModelInfo) -> dict[str, Any]:
    """Return what a model takes and gives, as llama-server's `/v1/models` does."""
    return {"input_modalities": [*info.modalities], "output_modalities": ["text"]}


@router.get("/models/{model:path}", summary="The model, by its name")
async def model(model: str, request: Request) -> dict[str, Any]:
    """Return the served model or one of its LoRA adapters, by name; status 404 for another name."""
    served: dict[str, dict[str, Any]] = {m["id"]: m for m in (await models(request))["data"]}
    if model not in served:
        known = ", ".join(map(repr, served))
        raise Problem(404, f"there is no model {model[:80]!r}, only {known}", param="model")
    return served[model]


@router.post("/completions", summary="Complete prompts")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Complete each prompt `n` times, as OpenAI does; each prompt is computed once."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    n = _n(body, state)
    prompts = _prompts(body, n, state)
    # Without output, `echo` returns the prompts, scored with `logprobs`; otherwise their prefixes are cached.
    limits = (body.max_completion_tokens, body.max_tokens)
    is_prompt_only = next((limit for limit in limits if limit is not None), None) == 0
    more = {"max_tokens": 1} if is_prompt_only else {}
    params, names = _params(body, state, default_max_tokens=COMPLETION_MAX_TOKENS, **more)
    lora = loras_of(engine, body.lora, body.model)
    if body.echo and params.logprobs is not None:
        if body.stream:
            raise invalid("echo", "with logprobs is for answers that are not streamed")
        params = replace(params, prompt_logprobs=params.logprobs)

    def streams(engine_id: str) -> list[TokenStream]:
        streams: list[TokenStream] = []
        for number, prompt in enumerate(prompts):
            first = engine.stream(
                prompt,
                params,
                lora=lora,
                parse_special=body.parse_special,
                **body.turn,
                request_id=f"{engine_id}/{number}-0" if number else engine_id,
            )
            streams += [first, *(first.again(i, f"{engine_id}/{number}-{i}") for i in range(1, n))]
        return streams

    log_request(state, request_id, body.prompt)
    echoes = [await _echo(engine, prompt) if body.echo else "" for prompt in prompts]
    all_echoes = [echo for echo in echoes for _ in range(n)]
    form = CompletionForm(
        request_id,
        state.served,
        all_echoes,
        n_choices=n,
        wants_usage=_wants_usage(body),
        is_prompt_only=is_prompt_only,
    )
    observation = state.observation(request, "text_completion", params)
    is_streamed = bool(body.stream)
    problem = partial(problem_of, name_of=lambda name: names.get(name, name))
    return answer(
        state, form, streams, observation, request_id, is_streamed=is_streamed, problem=problem
    )


@router.post("/chat/completions", summary="Answer a chat")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat as OpenAI does, with the model's own chat template."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    n_top = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if n_top is not None and not 0 <= n_top <= state.config.max_logprobs:
        raise invalid("top_logprobs", f"is {n_top}, must be 0 to {state.config.max_logprobs}")
    params, names = _params(body, state, logprobs=n_top)
    n = _n(body, state)
    tools = client_tools_of(body.tools)
    call = ChatCall(
        messages_of(body.messages),
        await hinted(engine, chat_options(body, tools)),
        params,
        {
            **body.turn,
            "lora": loras_of(engine, body.lora, body.model),
        },
        names=names,
        tools=tools,
    )
    call = await call.with_images(state.fetcher)
    log_request(state, request_id, body.messages)
    form = ChatCompletionForm(
        request_id, state.served, tools, n_choices=n, wants_usage=_wants_usage(body)
    )
    observation = state.observation(request, "chat", params)
    return answer_chat(
        state, call, form, observation, request_id, is_streamed=bool(body.stream), n=n
    )


@router.post("/chat/completions/input_tokens", summary="How many tokens a chat has")
async def chat_input_tokens(body: ChatBody, request: Request) -> Response:
    """Return the number of tokens of the prompt that the chat becomes."""
    return await rendered(state_of(request), chat_call_of(body, body.messages), input_tokens_of)


def _wants_usage(body: CompletionFields | ChatFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _params(
    body: CompletionFields | ChatFields,
    state: ServerState,
    *,
    default_max_tokens: int | None = None,
    **changes: Any,
) -> tuple[SamplingParams, Mapping[str, str]]:
    """Return the sampling parameters of a body, and the client's names of some, for errors."""
    constraint = constraint_of(body.response_format)
    for name in CONSTRAINTS if constraint.changes else ():
        if getattr(body, name, None) is not None:
            raise invalid(name, "must be left out beside response_format")
    changes.update(constraint.changes)
    if (seed := getattr(body, "seed", None)) is not None:  # OpenAI's seeds have 64 bits
        changes["seed"] = seed % (MAX_SEED + 1)
    if body.max_completion_tokens is not None:
        changes.setdefault("max_tokens", body.max_completion_tokens)
    elif "max_tokens" not in body.model_fields_set and default_max_tokens is not None:
        changes["max_tokens"] = default_max_tokens
    defaults = state.serving.sampling_defaults
    # As with OpenAI, penalties count all tokens of the output and none of the prompt.
    defaults = {"penalize_prompt": False, "repeat_last_n": -1, **defaults}
    names = dict(constraint.names)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    params = sampling_of(body, defaults, lambda name: names.get(name, name), **changes)
    check_logprobs(state, params)
    return params, names


def _n(body: CompletionFields | ChatFields, state: ServerState) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= state.config.max_n:
        raise invalid("n", f"is {n}, must be 1 to {state.config.max_n}")
    return n


def _prompts(body: CompletionFields, n: int, state: ServerState) -> list[Prompt]:
    """Return the prompts of a body as a list; raise an error for too many, or for one that is too long."""
    given: Any = body.prompt
    is_list = isinstance(given, list) and given and not isinstance(given[0], int)
    prompts: list[Prompt] = given if is_list else [given]
    if len(prompts) * n > state.config.max_prompts:
        limit = f"prompts times n must be at most {state.config.max_prompts}"
        raise invalid("prompt", limit)
    for prompt in prompts:
        check_length(state.serving, prompt)
    return prompts


async def _echo(engine: Engine, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else await engine.detokenize(prompt)
