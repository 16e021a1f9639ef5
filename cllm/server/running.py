"""Run the requests behind one HTTP request, side by side, and tell the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import anyio

from cllm import Completion, TokenDelta, TokenStream
from cllm.server.metrics import Metrics

logger = logging.getLogger("cllm.server")

# Called with the index of the stream and what it brought.
OnDelta = Callable[[int, TokenDelta], Awaitable[None]]


async def run_streams(
    streams: Sequence[TokenStream], metrics: Metrics, on_delta: OnDelta | None = None
) -> list[Completion]:
    """Read all streams to their ends, in step; the completions in their order.

    All are submitted before the first is read, so that a refusal comes before any answer.  The
    first failure cancels the others and is raised as it is.
    """
    completions: dict[int, Completion] = {}
    failure: Exception | None = None

    async def read(index: int, stream: TokenStream) -> None:
        nonlocal failure
        try:
            completions[index] = await _read(stream, metrics, on_delta and partial(on_delta, index))
        except Exception as error:
            failure = failure or error
            tasks.cancel_scope.cancel()

    async with AsyncExitStack() as opened:
        for stream in streams:
            await opened.enter_async_context(stream)
        async with anyio.create_task_group() as tasks:
            for index, stream in enumerate(streams):
                tasks.start_soon(read, index, stream)
    if failure is not None:
        raise failure
    return [completions[index] for index in range(len(streams))]


async def _read(
    stream: TokenStream,
    metrics: Metrics,
    on_delta: Callable[[TokenDelta], Awaitable[None]] | None,
) -> Completion:
    last: float | None = None
    async for delta in stream:
        now = time.perf_counter()
        if last is not None and delta.token_ids:
            metrics.gap(now - last)
        last = now
        if on_delta is not None:
            await on_delta(delta)
    completion = await stream.completion()
    metrics.finished(completion)
    return completion
