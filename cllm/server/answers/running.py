"""Run the engine requests of one HTTP request concurrently, and record metrics and traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio

from cllm import (
    Completion,
    DeadlineError,
    FinishReason,
    SamplingParams,
    TokenDelta,
    TokenStream,
)
from cllm.server.operation.metrics import Metrics
from cllm.server.operation.tracing import Tracing
from cllm.server.operation.usage import Access

logger: logging.Logger = logging.getLogger("cllm.server")

# A longer write to the client keeps the next gap between deltas out of the metrics.
SLOW_WRITE_S = 0.005

# Called with the index of a stream and its next delta.
OnDelta = Callable[[int, TokenDelta], Awaitable[None]]


class Started(NamedTuple):
    """Start of a request, by two clocks: the wall clock, which traces need, may be set while it runs."""

    unix_ns: int
    monotonic_s: float


@dataclass(frozen=True)
class Observation:
    """Metrics and traces of one HTTP request."""

    metrics: Metrics
    tracing: Tracing
    headers: Mapping[str, str]
    operation: str
    model: str
    params: SamplingParams
    access: Access | None = None

    @contextmanager
    def of(self, stream: TokenStream, started: Started) -> Iterator[Watch]:
        """Yield the account of a stream, for its reader to keep; the block is the span of the stream."""
        with self.tracing.request(
            stream.request_id,
            self.headers,
            operation=self.operation,
            model=self.model,
            params=self.params,
            started_ns=started.unix_ns,
        ) as trace:
            watch = Watch()
            try:
                yield watch
            finally:
                if (completion := watch.completion) is not None:
                    self.metrics.finished(completion)
                    if self.access is not None:
                        self.access.finished(completion)
                    if trace is not None:
                        trace.finished(completion)
                else:
                    self.metrics.given_up(time.monotonic() - started.monotonic_s)
                    if self.access is not None:
                        self.access.given_up(stream.n_prompt, watch.n_output)


@dataclass(slots=True)
class Watch:
    """Account of one stream.

    Attributes
    ----------
    n_output : int
        Tokens of the deltas so far.
    completion : Completion or None
        None until the stream has ended; for ever if its client has left, or it failed.
    """

    n_output: int = 0
    completion: Completion | None = None


async def run_streams(
    streams: Sequence[TokenStream],
    observation: Observation,
    on_delta: OnDelta | None = None,
    on_admitted: Callable[[], Awaitable[None]] | None = None,
) -> list[Completion]:
    """Read all streams to their ends concurrently, and return the completions in the order of the streams.

    All streams are submitted before the first is read, so that a rejection precedes any answer.  When
    `on_admitted` is called, they are checked, tokenized and in the queue.  The first error of a stream
    cancels the others and is raised unchanged.
    """
    started = Started(time.time_ns(), time.monotonic())

    async def read(index: int, stream: TokenStream) -> Completion:
        with observation.of(stream, started) as watch:
            on_each = on_delta and partial(on_delta, index)
            watch.completion = await _read(stream, observation.metrics, on_each, watch)
            return watch.completion

    async with AsyncExitStack() as opened:
        for stream in streams:
            await opened.enter_async_context(stream)
        if on_admitted is not None:
            await on_admitted()
        if len(streams) == 1:  # needs no task of its own
            return [await read(0, streams[0])]
        return await _all_of([partial(read, i, stream) for i, stream in enumerate(streams)])


async def _all_of(calls: Sequence[Callable[[], Awaitable[Completion]]]) -> list[Completion]:
    """Return the results of calls that run side by side."""
    completions: dict[int, Completion] = {}
    failure: Exception | None = None

    async def call(index: int) -> None:
        nonlocal failure
        try:
            completions[index] = await calls[index]()
        except Exception as error:
            failure = failure or error
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(call, index)
    if failure is not None:
        raise failure
    return [completions[index] for index in range(len(calls))]


async def _read(
    stream: TokenStream,
    metrics: Metrics,
    on_delta: Callable[[TokenDelta], Awaitable[None]] | None,
    watch: Watch,
) -> Completion:
    last: float | None = None
    async for delta in stream:
        now = time.perf_counter()
        if last is not None and delta.token_ids:
            metrics.gap(now - last)
        last = now
        watch.n_output += len(delta.token_ids)
        if on_delta is not None:
            await on_delta(delta)
            if time.perf_counter() - now > SLOW_WRITE_S:
                last = None  # the next gap would include the time that the client needed
    return await stream.completion()


def check_in_time(done: Sequence[Completion]) -> None:
    """Raise an error if all outputs reached their deadline without a token.

    Raises
    ------
    DeadlineError
        All outputs are empty; a client would take them for answers.
    """
    for one in done:
        if one.finish_reason is not FinishReason.DEADLINE or one.usage.n_output:
            return
    raise DeadlineError("the deadline of the request passed before its first token")
