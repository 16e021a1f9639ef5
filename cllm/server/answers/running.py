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
    CllmError,
    Completion,
    DeadlineError,
    FinishReason,
    GenerationError,
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
SETTLE_S = 5.0  # seconds in which the engine ends a request after its cancellation

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

    def cut_off(self, status: int, code: str | None) -> None:
        """Record the error that ended a stream after its head."""
        self.metrics.cut_off(status)
        if self.access is not None:
            self.access.error = code or str(status)

    @contextmanager
    def of(self, watch: Watch, started: Started) -> Iterator[None]:
        """Record the metrics of a stream, and its span, which is the block."""
        with self.tracing.request(
            watch.stream.request_id,
            self.headers,
            operation=self.operation,
            model=self.model,
            params=self.params,
            started_ns=started.unix_ns,
        ) as trace:
            try:
                yield
            finally:
                if (completion := watch.completion) is not None:
                    self.metrics.finished(completion)
                    if trace is not None:
                        trace.finished(completion)
                else:
                    self.metrics.given_up(time.monotonic() - started.monotonic_s)


@dataclass(slots=True)
class Watch:
    """Account of one stream.

    Attributes
    ----------
    stream : TokenStream
        It has been submitted.
    n_output : int
        Tokens of the deltas so far.
    completion : Completion or None
        None until the stream has ended; for ever if its client has left, or it failed.
    partial : Completion or None
        What there was of a stream that failed, or whose client has left.
    """

    stream: TokenStream
    n_output: int = 0
    completion: Completion | None = None
    partial: Completion | None = None

    async def settle(self) -> None:
        """Wait for the partial completion of a closed stream that has not ended."""
        if self.completion is not None:
            return
        try:
            self.partial = await self.stream.completion()
        except GenerationError as error:
            self.partial = error.completion
        except CllmError:
            pass

    def count(self, access: Access) -> None:
        """Count the tokens of the stream; none if it left the queue."""
        if self.completion is not None:
            access.finished(self.completion)
        elif self.partial is None:
            access.given_up(self.stream.n_prompt, self.n_output)
        elif self.partial.timings.prefill_s > 0.0:
            access.finished(self.partial)


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

    async def read(index: int, watch: Watch) -> Completion:
        with observation.of(watch, started):
            on_each = on_delta and partial(on_delta, index)
            watch.completion = await _read(observation.metrics, on_each, watch)
            return watch.completion

    watches: list[Watch] = []
    try:
        async with AsyncExitStack() as opened:
            for stream in streams:
                await opened.enter_async_context(stream)
                watches.append(Watch(stream))
            if on_admitted is not None:
                await on_admitted()
            if len(watches) == 1:  # needs no task of its own
                return [await read(0, watches[0])]
            return await _all_of([partial(read, i, each) for i, each in enumerate(watches)])
    finally:
        with anyio.move_on_after(SETTLE_S, shield=True):
            for watch in watches:
                await watch.settle()
        if (access := observation.access) is not None:
            for watch in watches:
                watch.count(access)


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
    metrics: Metrics,
    on_delta: Callable[[TokenDelta], Awaitable[None]] | None,
    watch: Watch,
) -> Completion:
    last: float | None = None
    async for delta in watch.stream:
        now = time.perf_counter()
        if last is not None and delta.token_ids:
            metrics.gap(now - last)
        last = now
        watch.n_output += len(delta.token_ids)
        if on_delta is not None:
            await on_delta(delta)
            if time.perf_counter() - now > SLOW_WRITE_S:
                last = None  # the next gap would include the time that the client needed
    return await watch.stream.completion()


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
