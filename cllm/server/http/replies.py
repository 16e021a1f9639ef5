"""Responses that take long: their requests are cancelled when the client disconnects.

Starlette runs an endpoint to its end even if its client has disconnected.  A `Reply` therefore listens for
the disconnect in a second task, while its request is queued, computed and streamed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import anyio
import anyio.to_thread
import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cllm.server.http.problems import Problem, problem_of

Event = tuple[str | None, Mapping[str, Any] | str]  # name of a server-sent event or None, and data
EVENTS_TYPE = b"text/event-stream; charset=utf-8"
LINES_TYPE = b"application/x-ndjson"
DONE = "[DONE]"
PING = b": ping\n\n"
# Key of a scope: the `send` outside the application's middleware.  The middleware looks only at the first and the last
# message of an answer, and would delay each part between them.
DIRECT_SEND = "cllm.send"
# Levels of an answer that are encoded in pieces: choices, their log probabilities, their tokens.
DEPTH = 5
N_AT_ONCE = 64  # items of a list that are encoded in one call
# U+2028, U+2029 and U+0085 end a line for `httpx.Response.iter_lines`, which splits a stream for Ollama's client and
# others.  In JSON they can only be in texts, and be escaped there.
LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\u2028\u2029\x85")


class Writer:
    """Destination of an answer: one JSON object, or a stream of them.

    Parameters
    ----------
    has_lines : bool
        True if a stream is lines of JSON, and not server-sent events.

    Attributes
    ----------
    is_streaming : bool
        True once the head of a stream has been sent, with status 200.
    has_left : bool
        True once a write has failed because the client has disconnected.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, has_lines: bool = False
    ) -> None:
        self._has_lines = has_lines
        self._scope = scope
        self._receive = receive
        self._send_message = send
        self._send_part: Send = scope.get(DIRECT_SEND, send)
        self.is_streaming: bool = False
        self.has_left: bool = False
        self._begun = anyio.Event()
        self._is_over = False
        self._sent_at = 0.0
        self._sending = anyio.Lock(fast_acquire=True)

    async def json(self, make: Callable[[], object], *, is_long: bool = False) -> None:
        """Send the value that `make` returns as JSON; if it is long, it is made and encoded in a thread."""
        await self.whole(
            await anyio.to_thread.run_sync(_encoded, make) if is_long else _encoded(make)
        )

    async def whole(self, content: bytes, media_type: str = "application/json") -> None:
        """Send the whole answer, `content`: encoded JSON, or of another media type."""
        response = Response(content, media_type=media_type)
        await response(self._scope, self._receive, self._send)

    async def begin(self) -> None:
        """Send the head of a stream, unless it has been sent."""
        if not self.is_streaming:
            self.is_streaming = True
            headers = [
                (b"content-type", LINES_TYPE if self._has_lines else EVENTS_TYPE),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # proxies must not collect events
            ]
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send(start)
            self._sent_at = time.monotonic()
            self._begun.set()

    async def ping(self, interval_s: float, make: Callable[[], Event | None]) -> None:
        """Send a keep-alive after each `interval_s` seconds without output, from the head to the end.

        `make` returns an event without effect; if it returns None, a comment is sent.
        """
        await self._begun.wait()
        while not self._is_over:
            left = self._sent_at + interval_s - time.monotonic()
            if left > 0:
                await anyio.sleep(left)
                continue
            event = make()
            await self._body(PING if event is None else self._framed(event[1], event[0]))

    async def events(self, events: Iterable[Event]) -> None:
        """Send events in one part, because each part wakes the client; lines of JSON have no names."""
        if data := self._joined(events):
            if not self.is_streaming:
                await self.begin()
            await self._body(data)

    def _joined(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._framed(value, name) for name, value in events])

    def _framed(self, value: Mapping[str, Any] | str, name: str | None) -> bytes:
        data = value.encode() if isinstance(value, str) else _in_one_line(_dumped(value))
        if self._has_lines:
            return data + b"\n"
        head = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
        return head + data + b"\n\n"

    async def fail(self, problem: Problem) -> None:
        """Send an error as the last event of the stream, and end it."""
        if self._has_lines:
            await self.end([(None, {"error": str(problem)})])
        else:
            await self.end([(None, problem.body), (None, DONE)])

    async def end(self, events: Iterable[Event]) -> None:
        """Send the last events in one part, and end the stream."""
        await self.begin()
        await self._body(self._joined(events), more=False)

    async def _send(self, message: Message) -> None:
        send = self._send_part if message.get("more_body") else self._send_message
        try:
            await send(message)
        except OSError:
            self.has_left = True
            raise

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        async with self._sending:
            if self._is_over:  # a keep-alive has waited for the end
                return
            self._is_over = not more
            self._sent_at = time.monotonic()
            # This waits while the client does not read, which pauses only its own sequence.
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _encoded(make: Callable[[], object]) -> bytes:
    return b"".join(_parts(make(), DEPTH))


def _parts(value: object, depth: int) -> Iterator[bytes]:
    """Yield a value as JSON in pieces: the encoder holds the GIL, and all streams wait until it returns."""
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
    """Yield a JSON array in pieces, so that a few items at a time are encoded."""
    left, before = iter(items), b"["
    while some := list(islice(left, N_AT_ONCE)):
        yield before + _dumped(some)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


def _in_one_line(data: bytes) -> bytes:
    """Return JSON with each of `LINE_ENDS` escaped."""
    if data.isascii():
        return data
    for end, escaped in LINE_ENDS:
        data = data.replace(end, escaped)
    return data


def _dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, half of a pair of surrogates
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class Reply(Response):
    """Response that `produce` writes; it is cancelled when the client disconnects.

    Parameters
    ----------
    produce : callable
        Called with a `Writer`.  Its error becomes an error response, or an event of a stream that has begun.
    ping_interval_s : float
        Seconds without output after which a stream sends a keep-alive; 0: never.
    ping : callable
        See `Writer.ping`.
    has_lines : bool
        See `Writer`.
    """

    def __init__(
        self,
        produce: Callable[[Writer], Awaitable[None]],
        ping_interval_s: float = 0.0,
        ping: Callable[[], Event | None] = lambda: None,
        *,
        has_lines: bool = False,
    ) -> None:
        self._has_lines = has_lines
        self._produce = produce
        self._ping_interval_s = ping_interval_s
        self._ping = ping
        self.background: None = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        writer = Writer(scope, receive, send, has_lines=self._has_lines)
        failure: Exception | None = None

        async def leave_with_the_client() -> None:
            nonlocal failure
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            except Problem as problem:  # the rest of the body is late, or too long
                failure = problem
            tasks.cancel_scope.cancel()

        async def ping() -> None:
            try:
                await writer.ping(self._ping_interval_s, self._ping)
            except OSError:
                tasks.cancel_scope.cancel()

        async def produce() -> None:
            nonlocal failure
            try:
                await self._produce(writer)
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave_with_the_client)
            if self._ping_interval_s:
                tasks.start_soon(ping)
            # In a task of its own: a token resumes only its coroutines, and not those of all middleware.
            tasks.start_soon(produce)
        if failure is not None and not writer.has_left:
            await _tell(failure, writer)


async def _tell(failure: Exception, writer: Writer) -> None:
    """Send the error of a stream as its last event; raise it if the stream has not begun."""
    if not writer.is_streaming:
        raise failure
    await writer.fail(problem_of(failure))
