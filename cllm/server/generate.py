"""`POST /generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import Completion, Engine, PromptTooLongError, SamplingParams, TokenDelta, TokenLogprob
from cllm.server.body import SafeRoute
from cllm.server.loras import loras_of
from cllm.server.problems import Problem, invalid
from cllm.server.replies import Reply, Writer
from cllm.server.running import run_streams
from cllm.server.schemas import GenerateBody, sampling_of
from cllm.server.state import ServerState, log_request, request_id_of, state_of

router = APIRouter(route_class=SafeRoute)


@router.post("/generate", tags=["cllm"], summary="Generate text")
async def generate(body: GenerateBody, request: Request) -> Response:
    """The output of one request, whole or as server-sent events."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    params = sampling_of(body, engine.sampling_defaults, allow_grammar=state.config.allow_grammar)
    check_logprobs(state, params)
    check_length(engine, body.prompt)
    check_length(engine, body.generated)
    if body.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is for answers that are not streamed")
    log_request(state, request_id, body.prompt)
    observation = state.observation(request, "text_completion", params)

    async def produce(writer: Writer) -> None:
        async def on_delta(_: int, delta: TokenDelta) -> None:
            await writer.event(_event_of(delta))

        with state.unique(request_id) as engine_id:
            stream = engine.stream(
                body.prompt,
                params,
                priority=body.priority,
                timeout=body.timeout,
                request_id=engine_id,
                generated=body.generated,
                lora=loras_of(engine, body.lora, body.model),
            )
            on_each = on_delta if body.stream else None
            (completion,) = await run_streams([stream], observation, on_each)
        if body.stream:
            await writer.end()
        else:
            is_long = bool(completion.logprobs or completion.prompt_logprobs)
            await writer.json(lambda: _completion_of(request_id, completion), is_long=is_long)

    return Reply(produce)


def check_length(engine: Engine, prompt: str | Sequence[int]) -> None:
    """Refuse token ids that cannot fit before each of them is looked at."""
    if not isinstance(prompt, str) and len(prompt) > engine.model.n_ctx:
        raise PromptTooLongError(len(prompt), engine.model.n_ctx)


def check_logprobs(state: ServerState, params: SamplingParams) -> None:
    """Refuse more alternatives than this server gives."""
    for name in ("logprobs", "prompt_logprobs"):
        n_top = getattr(params, name)
        if n_top is not None and n_top > state.config.max_logprobs:
            limit = f"{name} is {n_top}, must be at most {state.config.max_logprobs}"
            raise Problem(400, limit, param=name)


def _event_of(delta: TokenDelta) -> dict[str, Any]:
    event: dict[str, Any] = {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "finish_reason": delta.finish_reason,
    }
    if delta.stop_reason is not None:
        event["stop_reason"] = delta.stop_reason
    if delta.logprobs is not None:
        event["logprobs"] = [logprob_of(logprob) for logprob in delta.logprobs]
    return event


def _completion_of(request_id: str, completion: Completion) -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    answer: dict[str, Any] = {
        "id": request_id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": usage.n_prompt,
            "cached_tokens": usage.n_cached,
            "completion_tokens": usage.n_output,
        },
        "timings": {
            "queued_ms": _ms(timings.queued_s),
            "prefill_ms": _ms(timings.prefill_s),
            "decode_ms": _ms(timings.decode_s),
            "ttft_ms": _ms(timings.ttft_s),
            "total_ms": _ms(timings.total_s),
            "itl_p50_ms": _ms(timings.itl_p50_s),
            "itl_max_ms": _ms(timings.itl_max_s),
            "n_preemptions": timings.n_preemptions,
        },
    }
    if completion.logprobs is not None:
        answer["logprobs"] = [logprob_of(logprob) for logprob in completion.logprobs]
    if completion.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [p and logprob_of(p) for p in completion.prompt_logprobs]
    return answer


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def logprob_of(logprob: TokenLogprob) -> dict[str, Any]:
    """One token with its alternatives; -inf is not JSON and stands as -9999, as OpenAI has it."""
    return {
        "token_id": logprob.token_id,
        "text": logprob.text,
        "bytes": list(logprob.bytes),
        "logprob": max(logprob.logprob, -9999.0),
        "top": [logprob_of(other) for other in logprob.top],
    }
