"""Answers that take a while: their requests are given up when the client leaves.

Starlette runs an endpoint to its end whether anybody waits or not.  A `Reply` is produced while a
second task listens for the client's departure, in the queue, in the prefill and while streaming.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cllm.server.problems import problem_of

DONE = "[DONE]"


class Writer:
    """Where an answer goes: one JSON object, or server-sent events.

    Attributes
    ----------
    is_streaming : bool
        Whether the first event has been sent: a status can be chosen no more.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.is_streaming = False

    async def json(self, value: object) -> None:
        """The whole answer."""
        await JSONResponse(value)(self._scope, self._receive, self._send)

    async def event(self, value: Mapping[str, Any] | str) -> None:
        """One event."""
        if not self.is_streaming:
            self.is_streaming = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # proxies must not collect events
            ]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send(start)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        await self._body(f"data: {text}\n\n".encode(), more=True)

    async def end(self) -> None:
        """No more events."""
        await self.event(DONE)
        await self._body(b"", more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        # Waits for a client that does not read, which pauses its own sequence and no other.
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class Reply(Response):
    """An answer that `produce` writes.

    Parameters
    ----------
    produce : callable
        Called with a `Writer`.  What it raises before the first event becomes an error response.
    """

    def __init__(self, produce: Callable[[Writer], Awaitable[None]]) -> None:
        self._produce = produce
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        writer = Writer(scope, receive, send)
        failure: Exception | None = None

        async def leave_with_the_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave_with_the_client)
            try:
                await self._produce(writer)
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is None:
            return
        if not writer.is_streaming:
            raise failure
        await writer.event(problem_of(failure).body)
        await writer.end()
