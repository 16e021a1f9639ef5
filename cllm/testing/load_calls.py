"""One request of a load: the behavior of its caller, and its record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import anyio

from cllm import (
    CllmError,
    Completion,
    Engine,
    FinishReason,
    SamplingOptions,
    SamplingParams,
    TokenDelta,
    TokenStream,
)
from cllm.engine.loop.request_call import Prompt, new_request_id
from cllm.testing.records import PromptKey, Records, RequestRecord

Between = Callable[[TokenStream, int], Awaitable[None]]


async def _go_on(_stream: TokenStream, _n_read: int) -> None:
    """Do nothing between two deltas."""


def _nothing() -> None:
    """Do nothing at the end."""


@dataclass(slots=True, eq=False)
class Call:
    """A request to be made, and how its caller behaves.

    Attributes
    ----------
    due_s : float or None
        Time of `anyio.current_time` at which to make the request; None: at once.
    is_cancelled_entering : bool
        True if its task is cancelled when it enters the stream.
    between : callable
        Awaited with the stream and the number of deltas so far: after entering, and after each delta.
    on_end : callable
        Called when the request has ended, also after an error.
    """

    engine: Engine
    prompt: Prompt
    key: PromptKey
    params: SamplingParams
    priority: int
    timeout: float | None
    due_s: float | None = None
    is_cancelled_entering: bool = False
    between: Between = _go_on
    on_end: Callable[[], None] = _nothing


def make_calls(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | None,
    sampling: SamplingOptions,
    priority: int = 0,
    timeout: float | None = None,
) -> list[Call]:
    """Return a call for each prompt; wrong arguments raise the errors of `sequential`."""
    if isinstance(prompts, str):
        raise TypeError("prompts is one text, must be a sequence of prompts")
    if unknown := sorted(set(sampling) - {field.name for field in fields(SamplingParams)}):
        raise TypeError(f"unknown option {unknown[0]!r}")
    if params is None:
        params = SamplingParams(**sampling)
    elif sampling:
        raise TypeError("params cannot be combined with single sampling fields")
    return [Call(engine, p, _key_of(p), params, priority, timeout) for p in prompts]


def _key_of(prompt: object) -> PromptKey:
    """Return the key of a prompt in the records, also of a wrong one: that is the call's own failure."""
    if isinstance(prompt, str):
        return prompt
    try:
        return cast(PromptKey, tuple(cast(Iterable[Any], prompt)))
    except TypeError:
        return repr(prompt)


async def run_at_once(calls: Sequence[Call]) -> Records:
    """Make all calls at the times they are due, read all streams to their ends, and return the records."""
    records: dict[int, RequestRecord] = {}

    async def run_one(index: int) -> None:
        if (due_s := calls[index].due_s) is not None:
            await anyio.sleep_until(due_s)
        records[index] = await run(calls[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(run_one, index)
    return Records([records[index] for index in range(len(calls))])


async def run(call: Call) -> RequestRecord:
    """Make a request, read it to its end, and return its record; a `CllmError` is recorded, not raised."""
    # The time counts from the moment the call was due, even if a busy event loop made it later.
    seen = _Seen(anyio.current_time() if call.due_s is None else call.due_s)
    request_id = new_request_id()
    try:
        await _read(call, request_id, seen)
    except CllmError as raised:
        seen.error = raised
        seen.completion = getattr(raised, "completion", None)
    finally:
        call.on_end()
    return _record(call, request_id, seen)


@dataclass(slots=True)
class _Seen:
    """Results that the caller of a request received, as in `RequestRecord`."""

    started_s: float
    first_token_s: float | None = None
    deltas: list[TokenDelta] = field(default_factory=list)
    is_submitted: bool = False
    is_left_entering: bool = False
    completion: Completion | None = None
    error: CllmError | None = None


async def _read(call: Call, request_id: str, seen: _Seen) -> None:
    stream = call.engine.stream(
        call.prompt,
        call.params,
        priority=call.priority,
        timeout=call.timeout,
        request_id=request_id,
    )
    with anyio.CancelScope() as scope:
        if call.is_cancelled_entering:
            scope.cancel()
        async with stream:
            seen.is_submitted = True
            await call.between(stream, 0)
            async for delta in stream:
                if seen.first_token_s is None and delta.token_ids:
                    seen.first_token_s = anyio.current_time()
                seen.deltas.append(delta)
                await call.between(stream, len(seen.deltas))
    seen.is_left_entering = scope.cancelled_caught
    if seen.is_submitted:
        seen.completion = await stream.completion()


def _record(call: Call, request_id: str, seen: _Seen) -> RequestRecord:
    completion = seen.completion
    reason = None if completion is None else completion.finish_reason
    stop_reason = None if completion is None else completion.stop_reason
    if completion is None and seen.is_submitted:
        reason = FinishReason.ERROR
    elif seen.error is None and seen.is_left_entering:
        # Cancelled before it was submitted; or it ended by itself, but its caller got no delta.
        reason, stop_reason = FinishReason.CANCELLED, None
    return RequestRecord(
        prompt=call.key,
        request_id=request_id,
        token_ids=tuple(token for delta in seen.deltas for token in delta.token_ids),
        text="".join(delta.text for delta in seen.deltas),
        max_tokens=call.params.max_tokens,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=seen.error,
        usage=None if completion is None else completion.usage,
        timings=None if completion is None else completion.timings,
        started_s=seen.started_s,
        first_token_s=seen.first_token_s,
        finished_s=anyio.current_time(),
        n_deltas=len(seen.deltas),
    )
