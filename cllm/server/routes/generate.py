"""`POST /generate` and `/generate/score`: cllm's own routes, whose answers have token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import (
    Completion,
    Engine,
    FinishReason,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    TokenStream,
    ToolCallDelta,
)
from cllm.server.answers.answer import AnswerForm, answer
from cllm.server.answers.chat_call import ChatCall, chat_options, hinted
from cllm.server.answers.client_tools import messages_of
from cllm.server.bodies.schemas import (
    CHAT_OPTIONS,
    GenerateBody,
    GenerateFields,
    ScoreBody,
    sampling_of,
)
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import Problem, invalid
from cllm.server.http.replies import Event, Reply, Writer
from cllm.server.operation.usage import milliseconds
from cllm.server.routes.loras import loras_of
from cllm.server.state import (
    ServerState,
    counting_if_given_up,
    log_request,
    note_tokens,
    request_id_of,
    state_of,
)

router: APIRouter = APIRouter(route_class=SafeRoute)

LOWEST = -9999.0  # in place of -inf, which JSON does not have


@router.post("/generate", tags=["cllm"], summary="Generate text, or answer a chat")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Return the output of a request, whole or as events; the last before `[DONE]` has usage and timings."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    params = sampling_of(body, engine.sampling_defaults)
    check_logprobs(state, params)
    options = await hinted(engine, chat_options(body))
    if body.messages is not None:
        body.messages = await state.fetcher.with_images(body.messages)
    open_streams = _streams_of(state, body, params, options)
    if body.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is for answers that are not streamed")
    log_request(state, request_id, body.messages or body.prompt)
    operation = "text_completion" if body.messages is None else "chat"
    observation = state.observation(request, operation, params)

    form = GenerateForm(request_id, wants_prompt=bool(body.return_prompt_token_ids))
    return answer(state, form, open_streams, observation, request_id, is_streamed=bool(body.stream))


@router.post("/generate/score", tags=["cllm"], summary="How likely a continuation is")
async def score(body: ScoreBody, request: Request) -> Response:
    """Return the log probability of each token of a continuation (-9999: -inf), and the sum (null: -inf)."""
    state = state_of(request)
    engine = state.serving
    for given in (body.prompt, body.continuation):
        check_length(engine, given)
    lora = loras_of(engine, body.lora, body.model)
    log_request(state, request_id_of(request), body.prompt)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, (body.prompt, body.continuation)):
            found = await engine.score(body.prompt, body.continuation, lora=lora, **body.turn)
        note_tokens(request, found.n_computed)
        told = {
            "token_ids": found.token_ids,
            "logprobs": [max(logprob, LOWEST) for logprob in found.logprobs],
            "total": found.total if math.isfinite(found.total) else None,
        }
        await writer.json(lambda: told)

    return Reply(produce)


class GenerateForm(AnswerForm):
    """Form of the answers of `/generate`; the last event before `[DONE]` has usage and timings too."""

    def __init__(self, request_id: str, *, wants_prompt: bool) -> None:
        self._request_id = request_id
        self._wants_prompt = wants_prompt
        self._last: dict[str, Any] = {}

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        if delta.finish_reason in (None, FinishReason.ERROR):
            yield None, _event_of(delta)
        else:
            self._last = _event_of(delta)

    def check(self, done: Sequence[Completion]) -> None:
        """Accept all completions: the finish reason in the answer states why an output ended."""

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield None, self._last | self._account(done[0])
        yield from super().end(done)

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        return {"id": self._request_id, **_answer_of(done[0]), **self._account(done[0])}

    def _account(self, completion: Completion) -> dict[str, Any]:
        prompt = {"prompt_token_ids": completion.prompt_token_ids} if self._wants_prompt else {}
        return {**_account_of(completion), **prompt}


def _streams_of(
    state: ServerState, body: GenerateFields, params: SamplingParams, options: dict[str, Any]
) -> Callable[[str], list[TokenStream]]:
    """Return a function that takes a request id and returns the stream of a body in a list, not submitted."""
    engine, prompt = state.serving, body.prompt
    check_length(engine, body.generated)
    scheduling: dict[str, Any] = {
        **body.turn,
        "generated": body.generated,
        "lora": loras_of(engine, body.lora, body.model),
    }
    if body.messages is not None:
        if prompt is not None:
            raise invalid("prompt", "must be left out beside messages")
        state.check_messages(len(body.messages))
        call = ChatCall(messages_of(body.messages), options, params, scheduling)
        return lambda engine_id: call.streams(engine, engine_id)
    if prompt is None:
        raise invalid("prompt", "is missing: a prompt or messages are required")
    for name in sorted(CHAT_OPTIONS & body.model_fields_set):
        raise invalid(name, "is for messages, not for a prompt")
    check_length(engine, prompt)
    scheduling["parse_special"] = body.parse_special
    return lambda engine_id: [engine.stream(prompt, params, request_id=engine_id, **scheduling)]


def check_length(engine: Engine, prompt: str | Sequence[int]) -> None:
    """Raise `PromptTooLongError` for more token ids than the context has, before each is checked."""
    if not isinstance(prompt, str) and len(prompt) > engine.model.n_ctx:
        raise PromptTooLongError(len(prompt), engine.model.n_ctx)


def check_logprobs(state: ServerState, params: SamplingParams) -> None:
    """Raise `Problem` (400) if `logprobs` or `prompt_logprobs` is more than `max_logprobs`."""
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
    if delta.reasoning:
        event["reasoning"] = delta.reasoning
    if delta.tool_calls:
        event["tool_calls"] = [*map(_call_delta, delta.tool_calls)]
    if delta.stop_reason is not None:
        event["stop_reason"] = delta.stop_reason
    if delta.logprobs is not None:
        event["logprobs"] = [logprob_of(logprob) for logprob in delta.logprobs]
    return event


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    told = {"index": call.index, "arguments": call.arguments}
    return told if call.name is None else {**told, "id": call.id, "name": call.name}


def _answer_of(completion: Completion) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.reasoning:
        answer["reasoning"] = completion.reasoning
    if completion.tool_calls:
        answer["tool_calls"] = [asdict(call) for call in completion.tool_calls]
    if completion.logprobs is not None:
        answer["logprobs"] = [logprob_of(logprob) for logprob in completion.logprobs]
    if completion.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [p and logprob_of(p) for p in completion.prompt_logprobs]
    return answer


def _account_of(completion: Completion) -> dict[str, Any]:
    """Return the fingerprint, the usage and the timings, in milliseconds, of a completion."""
    usage, timings = completion.usage, completion.timings
    return {
        "fingerprint": completion.fingerprint,
        "usage": {
            "prompt_tokens": usage.n_prompt,
            "cached_tokens": usage.n_cached,
            "image_tokens": usage.n_image_tokens,
            "audio_tokens": usage.n_audio_tokens,
            "completion_tokens": usage.n_output,
            "reasoning_tokens": usage.n_reasoning,
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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else milliseconds(seconds)


def logprob_of(logprob: TokenLogprob) -> dict[str, Any]:
    """Return a token with its alternatives as a JSON object; -inf becomes -9999, as with OpenAI."""
    return {
        "token_id": logprob.token_id,
        "text": logprob.text,
        "bytes": list(logprob.bytes),
        "logprob": max(logprob.logprob, LOWEST),
        "top": [logprob_of(other) for other in logprob.top],
    }
