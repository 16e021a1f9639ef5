"""AnswerStream: the output of one request to a server; after a failure another server continues it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import anyio
import httpx

from cllm.client.events import (
    DONE,
    Account,
    EventReader,
    account_of,
    completion_of,
    delta_of,
    object_of,
)
from cllm.client.refusals import UNAVAILABLE, UNLIKE_CLLM, ServerError, failure_of, unlike_cllm
from cllm.client.replicas import Replicas
from cllm.engine.completion_builder import CompletionBuilder
from cllm.engine.output import Completion, FinishReason, TokenDelta
from cllm.errors import CllmError, ClosedError, GenerationError
from cllm.routing.prefix_table import Key

PATH = "/generate"
# A request that crashes each of its servers fails after so many moves to another one.
MAX_MOVES = 8
GRACE_S = 1.0  # seconds after the deadline in which a server may report it
END_S = 1.0  # seconds to read the rest of a complete response, so that its connection can be reused


class _CutOffError(Exception):
    """An answer ended early."""


class AnswerStream:
    """Output of one request to a server: an async iterator of `TokenDelta`.  One task reads it; any task may cancel it.

    Use it with `async with`: entering submits the request, and leaving early cancels it.  With `async for`
    alone, the first step submits it, and an early end needs `cancel`.

    If the server ends or the connection is lost, the next server that answers continues the request.  It
    gets the tokens received so far: no token comes twice, and none is missing.  A timeout around one step
    closes the connection too, and the next step continues.

    Attributes
    ----------
    request_id : str
    n_moves : int
        Number of times, at most 8, that it continued after a server failed or a connection was lost.
    """

    # `complete` returns the prompt and its keys, in a worker thread, before the request is submitted.
    def __init__(
        self,
        replicas: Replicas,
        body: Mapping[str, Any],
        *,
        request_id: str,
        generated: Sequence[int],
        timeout: float | None,
        keys: Sequence[Key],
        complete: Callable[[], tuple[dict[str, Any], Sequence[Key]]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.n_moves: int = 0
        self._replicas = replicas
        self._body = {**body, "stream": True, "return_prompt_token_ids": True}
        self._generated = list(generated)
        self._timeout = timeout
        self._keys = keys
        self._complete = complete
        self._is_large = complete is not None
        self._answer = CompletionBuilder()
        self._submitted: float | None = None
        self._is_begun = False  # a server has served it
        self._server: str | None = None
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._reader = EventReader()
        self._events: deque[bytes] = deque()
        self._completion: Completion | None = None
        self._failure: GenerationError | None = None
        self._last: TokenDelta | None = None  # if its step was cancelled after it arrived
        self._is_late = False  # its deadline passed while no server was reachable
        self._is_cancelled = False
        self._reading = anyio.ResourceGuard("reading")
        self._opening: anyio.CancelScope | None = None  # of a request that waits for its response

    async def __aenter__(self) -> Self:
        """Submit the request; raise `RequestError`, `ServerError` or `ClosedError` if no server accepts it."""
        with self._reading:
            await self._open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the request if it has not ended."""
        await self.cancel()

    def __aiter__(self) -> Self:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> TokenDelta:
        """Return the next delta.

        Raises
        ------
        GenerationError
            The request failed after a server accepted it; see `__cause__`, and `completion` for the output.
        RequestError, ServerError, ClosedError
            As for `__aenter__`, if no server has accepted the request yet.
        ClosedError
            The stream was cancelled before its end.
        anyio.BusyResourceError
            Another task is reading.
        """
        with self._reading:
            return await self._step()

    async def _step(self) -> TokenDelta:
        if self._last is not None:
            last, self._last = self._last, None
            return last
        while self._completion is None:
            try:
                await self._open()
            except CllmError as error:
                if not self._is_begun:
                    raise
                if self._completion is None:
                    await self._fail(error)
            if self._completion is not None:
                break  # another task has cancelled it
            if self._is_late:
                return await self._end(TokenDelta("", (), FinishReason.DEADLINE), Account())
            try:
                event = await self._next_event()
                failure = None if event is None else failure_of(event)
                delta = None if event is None or failure is not None else delta_of(event)
                is_last = delta is not None and delta.finish_reason is not None
                account = account_of(event) if event is not None and is_last else Account()
            except (httpx.TransportError, _CutOffError) as error:
                if self._completion is None:
                    await self._move(error)
                continue
            except UNLIKE_CLLM as error:
                if self._completion is None:
                    await self._fail(unlike_cllm(self._server, error))
                continue
            if event is None or self._completion is not None:
                continue  # its time is over, or another task has cancelled it
            if failure is not None:
                if failure.status != UNAVAILABLE:
                    await self._fail(failure)
                await self._move(failure)
                continue
            assert delta is not None
            if delta.finish_reason is FinishReason.ERROR:
                # The next event has the error.  The text of this delta was held back until now, and would
                # come again from another server.
                continue
            if delta.finish_reason is FinishReason.CANCELLED:
                # The server cancels because it ends.  The last text was held back until now: the next
                # server sends it.
                await self._move(_CutOffError("the server cancelled the request"))
                continue
            if delta.finish_reason is None:
                self._answer.add(delta, time.monotonic())
                return delta
            return await self._end(delta, account)
        await self._close()
        if self._failure is not None:
            raise self._failure
        if self._is_cancelled:
            raise ClosedError("the stream was closed before its end")
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Read to the end and return the whole output.

        Raises
        ------
        RequestError, ServerError, ClosedError
            As for `__anext__`; a failed request raises its `GenerationError` at each call.
        """
        while self._completion is None or self._last is not None:
            await anext(self)
        if self._failure is not None:
            raise self._failure
        assert self._completion is not None
        return self._completion

    async def cancel(self) -> None:
        """Cancel the request: the completion has the output so far.  A task that reads it ends."""
        if self._completion is None:
            self._is_cancelled = True
            self._conclude(TokenDelta("", (), FinishReason.CANCELLED), Account())
        if self._opening is not None:
            self._opening.cancel()
        try:
            with self._reading:
                await self._close()
        except anyio.BusyResourceError:
            await self._release()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended."""
        await self.cancel()

    # --- To the servers ----------------------------------------------------------------------
    async def _open(self) -> None:
        """Request the rest of the answer, unless a response is open.  Sets `_is_late` after the deadline."""
        if self._response is not None or self._completion is not None or self._is_late:
            return
        now = time.monotonic()
        is_first = self._submitted is None
        if self._submitted is None:
            self._submitted = now
        if self._complete is not None:
            told, self._keys = await anyio.to_thread.run_sync(
                self._complete, abandon_on_cancel=True
            )
            self._body |= told
            self._complete = None
        body = {**self._body, "generated": [*self._generated, *self._answer.token_ids]}
        if self._timeout is not None:
            left_s = self._timeout - (now - self._submitted)
            if left_s <= 0.0 and not is_first:
                self._is_late = True
                return
            body["timeout"] = left_s
        # A server enforces the deadline itself; this limit is needed if no server answers.
        with anyio.move_on_after(self._left_s()) as self._opening:
            self._server, self._response = await self._replicas.post(
                PATH,
                body,
                {"x-request-id": self.request_id},
                keys=self._keys,
                but=self._server,
                is_begun=self._is_begun,
                is_large=self._is_large,
            )
        if self._completion is not None:  # another task has cancelled it
            return
        if self._response is None:
            assert self._opening.cancelled_caught
            self._is_late = True
            return
        self._is_begun = True
        self._chunks = self._response.aiter_raw()
        self._reader = EventReader()
        self._events.clear()

    async def _next_event(self) -> dict[str, Any] | None:
        """Return the next event; None after the deadline if the server is silent."""
        chunks = self._chunks
        assert chunks is not None
        with anyio.move_on_after(self._left_s()) as scope:
            while not self._events:
                try:
                    self._events += self._reader.feed(await anext(chunks))
                except StopAsyncIteration:
                    raise _CutOffError("the answer ended early") from None
                except anyio.get_cancelled_exc_class():
                    await self._close()
                    self._server = None  # it has not failed
                    raise
        if scope.cancelled_caught:
            self._is_late = True
            return None
        if (data := self._events.popleft()) == DONE:
            raise _CutOffError("the answer ended without its last event")
        return object_of(data)

    def _left_s(self) -> float | None:
        """Return the seconds left, with a margin in which the server can report the deadline; None: no deadline."""
        if self._timeout is None or self._submitted is None:
            return None
        left_s = self._timeout - (time.monotonic() - self._submitted)
        return max(0.0, left_s) + GRACE_S

    async def _move(self, error: Exception) -> None:
        """Prepare to continue on another server after the connection was lost."""
        await self._close()
        if self.n_moves >= MAX_MOVES:
            await self._fail(ServerError(f"cut off {MAX_MOVES + 1} times, at last: {error!r}"))
        self.n_moves += 1

    async def _fail(self, failure: Exception) -> NoReturn:
        """End the stream with an error that carries the partial output."""
        self._conclude(TokenDelta("", (), FinishReason.ERROR), Account())
        await self._close()
        self._failure = GenerationError.of(self.request_id, failure)
        self._failure.completion = self._completion
        raise self._failure

    # --- The end -----------------------------------------------------------------------------
    async def _end(self, last: TokenDelta, account: Account) -> TokenDelta:
        self._answer.add(last, time.monotonic())
        self._conclude(last, account)
        try:
            with anyio.move_on_after(END_S):
                try:
                    while self._chunks is not None:
                        await anext(self._chunks)
                except (StopAsyncIteration, httpx.TransportError):
                    pass
        except anyio.get_cancelled_exc_class():
            self._last = last  # for the next step
            raise
        finally:
            await self._close()
        return last

    def _conclude(self, last: TokenDelta, account: Account) -> None:
        now = time.monotonic()
        self._completion = completion_of(
            self._answer,
            self.request_id,
            last,
            account,
            submitted_at=now if self._submitted is None else self._submitted,
            ended_at=now,
            n_moves=self.n_moves,
        )

    async def _close(self) -> None:
        chunks, self._chunks = self._chunks, None
        try:
            if isinstance(chunks, AsyncGenerator):  # or trio warns that it was not closed
                with anyio.CancelScope(shield=True):
                    await chunks.aclose()
        finally:
            await self._release()

    async def _release(self) -> None:
        """Release the connection, also while another task reads: its read fails."""
        response, self._response = self._response, None
        if response is not None:
            assert self._server is not None
            await self._replicas.close(self._server, response)
