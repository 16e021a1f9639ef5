"""Answers that take a while: their requests are given up when the client leaves.

Starlette runs an endpoint to its end whether anybody waits or not.  A `Reply` is produced while a
second task listens for the client's departure, in the queue, in the prefill and while streaming.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import anyio
import anyio.to_thread
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.problems import problem_of

DONE = "[DONE]"
# How deep an answer is taken apart: choices, their log probabilities, the tokens of those.
DEPTH = 5
N_AT_ONCE = 64


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

    async def json(self, make: Callable[[], Mapping[str, Any]], *, is_long: bool = False) -> None:
        """The whole answer; one that may be megabytes is made in a thread."""
        await self.whole(
            await anyio.to_thread.run_sync(_encoded, make) if is_long else _encoded(make)
        )

    async def whole(self, content: bytes) -> None:
        """The whole answer, which is JSON."""
        response = Response(content, media_type="application/json")
        await response(self._scope, self._receive, self._send)

    async def event(self, value: Mapping[str, Any] | str, name: str | None = None) -> None:
        """One event; with a name where a client wants one."""
        if not self.is_streaming:
            self.is_streaming = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # proxies must not collect events
            ]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send(start)
        data = value.encode() if isinstance(value, str) else _dumped(value)
        head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
        await self._body(head + data + b"\n\n", more=True)

    async def end(self) -> None:
        """No more events, as OpenAI's chats say it."""
        await self.event(DONE)
        await self.close()

    async def close(self) -> None:
        """No more events."""
        await self._body(b"", more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        # Waits for a client that does not read, which pauses its own sequence and no other.
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _encoded(make: Callable[[], Mapping[str, Any]]) -> bytes:
    return b"".join(_parts(make(), DEPTH))


def _parts(value: object, depth: int) -> Iterator[bytes]:
    """JSON in pieces: the encoder keeps the GIL, and with it every stream, until it is done."""
    if depth and isinstance(value, Mapping) and value:
        for index, (name, inner) in enumerate(value.items()):
            yield (b"," if index else b"{") + _dumped(name) + b":"
            yield from _parts(inner, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list | tuple) and value:
        if len(value) > N_AT_ONCE:  # many tokens, not a few choices
            yield from list_parts(value)
            return
        for index, inner in enumerate(value):
            yield b"," if index else b"["
            yield from _parts(inner, depth - 1)
        yield b"]"
    else:
        yield _dumped(value)


def list_parts(items: Iterable[object]) -> Iterator[bytes]:
    """A JSON array in pieces: some items are held and encoded at once, never all of them."""
    left, before = iter(items), b"["
    while some := list(islice(left, N_AT_ONCE)):
        yield before + _dumped(some)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def _dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, half of a pair of surrogates
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


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
        if failure is not None:
            await _tell(failure, writer)


async def _tell(failure: Exception, writer: Writer) -> None:
    """The end of an answer that has failed: a status, while it can still be chosen."""
    if not writer.is_streaming:
        raise failure
    await writer.event(problem_of(failure).body)
    await writer.end()
