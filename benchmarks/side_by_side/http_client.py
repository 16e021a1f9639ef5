"""HTTP client that uses little CPU time, because it shares two cores with the server.

Events are not parsed, but counted by a key that each of them has once.  Generated text cannot look like this
key, because quotes within a JSON string are escaped.  Pings and the last line, `[DONE]`, have no keys.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
TIMEOUT_S = 600.0
EVENT = b'"choices"'
ERROR = b'"error"'
END_OF_HEAD = b"\r\n\r\n"
END = b"0\r\n\r\n"
N_TAIL = 4096  # bytes that hold the last event, with its usage
N_FAILURE = 300  # bytes of a failure that are kept
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
FINISH_REASON = re.compile(rb'"finish_reason":\s*"(\w+)"')

LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
LAST_CHUNK = b"\r\n0\r\n\r\n"

Clock = Callable[[], float]


@dataclass
class Answer:
    """One streamed answer; times are seconds of the client's clock.

    Attributes
    ----------
    arrivals : list of float
        Times at which data with events arrived.
    n_events : int
        Number of events with tokens.  Each peer sends one more event at the end, which is not counted.
    n_tokens : int or None
        Number of tokens that the server reports; None if it reports none.
    failure : str
        Reason of a failure or an early end; "" without one.
    received : bytearray or None
        The body as received, for `text`; None if it is not kept.
    n_bytes : int or None
        Length of the body, if the head of the answer has it.
    """

    status: int = 0
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    n_events: int = 0
    n_tokens: int | None = None
    finish_reason: str = ""
    failure: str = ""
    received: bytearray | None = None
    n_bytes: int | None = None

    def text(self) -> str:
        """Text of the chat in the bytes received."""
        events = unchunked(bytes(self.received or b"")).split(b"\n")
        chunks = [json.loads(line[6:]) for line in events if line.startswith(b"data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def is_complete(self) -> bool:
        """True if the answer came to its end."""
        return bool(self.finish_reason) and not self.failure

    @property
    def ttft_s(self) -> float:
        """Seconds until the first event."""
        return self.arrivals[0] - self.sent_at

    @property
    def took_s(self) -> float:
        """Seconds until the last byte."""
        return self.ended_at - self.sent_at

    def gaps_s(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Return the gaps between arrivals that overlap a period, in seconds."""
        return [b - a for a, b in pairwise(self.arrivals) if b > since and a < until]


def unchunked(body: bytes) -> bytes:
    """Return the contents of the chunks of a body."""
    content, left = b"", body
    while left:
        size, _, left = left.partition(b"\r\n")
        n = int(size, 16)
        content, left = content + left[:n], left[n + 2 :]
    return content


async def read_answer(reader: asyncio.StreamReader, answer: Answer, clock: Clock) -> None:
    """Read the body of an answer whose status is 200, as it comes.

    Raises
    ------
    EOFError
        The connection was closed before its end.
    """
    tail, n_new = b"", 0
    while not tail.endswith(END) and (data := await reader.read(1 << 16)):
        if n_events := (tail[1 - len(EVENT) :] + data).count(EVENT):
            n_new = n_events
            answer.arrivals.append(clock())
            answer.n_events += n_events
        tail = (tail + data)[-N_TAIL:]
        if answer.received is not None:
            answer.received += data
    if ERROR in tail:
        line = tail[tail.index(ERROR) :].partition(b"\n")[0]
        answer.failure = line[:N_FAILURE].decode("utf-8", "replace")
    elif not tail.endswith(END):
        raise EOFError("the connection was closed within an answer")
    elif not (reason := FINISH_REASON.search(tail)):
        answer.failure = "ended without a reason"
    else:
        answer.finish_reason = reason[1].decode()
        answer.n_tokens = int(usage[1]) if (usage := USAGE.search(tail)) else None
        answer.n_events -= 1
        if n_new == 1 and len(answer.arrivals) > 1:
            answer.arrivals.pop()


ReadBody = Callable[[asyncio.StreamReader, Answer], Awaitable[None]]


class Connection:
    """One connection, kept alive from request to request.

    A server may close a connection that is idle, or after a number of requests.  If the next request then fails
    before the first byte of an answer, it is sent again on a new connection.  Its time begins with that.

    Parameters
    ----------
    headers : str
        Further lines of the head of each request, each with its CRLF.
    """

    def __init__(
        self,
        port: int,
        *,
        clock: Clock = time.perf_counter,
        timeout_s: float = TIMEOUT_S,
        headers: str = "",
    ) -> None:
        self._port = port
        self._headers = headers
        self._clock = clock
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Connect, unless the connection is open."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)

    async def stream(
        self, body: Mapping[str, Any], answer: Answer | None = None, *, path: str = PATH
    ) -> Answer:
        """Send a request, and read the streamed answer to its end.

        Parameters
        ----------
        answer : Answer, optional
            Filled as it arrives, for observers.
        """

        async def read(reader: asyncio.StreamReader, answer: Answer) -> None:
            await read_answer(reader, answer, self._clock)

        return await self._ask(body, Answer() if answer is None else answer, path, read)

    async def _ask(
        self, body: Mapping[str, Any], answer: Answer, path: str, read: ReadBody
    ) -> Answer:
        """Send a request; if the status is 200, let `read` read the body of the answer."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n{self._headers}\r\n"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                reader = await self._send(head.encode() + data, answer)
                if answer.status == 200:
                    await read(reader, answer)
                else:
                    content = (await reader.read(N_FAILURE)).decode("utf-8", "replace")
                    answer.failure = f"status {answer.status}: {content}"
        except (OSError, EOFError) as error:
            answer.failure = answer.failure or repr(error)
        finally:
            answer.ended_at = self._clock()
            if not answer.is_complete:
                self.close()
        return answer

    async def fetch(self, body: Mapping[str, Any], *, path: str) -> Answer:
        """Send a request, and read an answer that is not streamed."""

        async def read(reader: asyncio.StreamReader, answer: Answer) -> None:
            if answer.n_bytes is not None:
                answer.received = bytearray(await reader.readexactly(answer.n_bytes))
            else:
                answer.received = bytearray(unchunked(await reader.readuntil(LAST_CHUNK)))
            answer.finish_reason = "whole"

        return await self._ask(body, Answer(), path, read)

    async def _send(self, request: bytes, answer: Answer) -> asyncio.StreamReader:
        """Send a request, and read the head of its answer."""
        while True:
            is_used = self._streams is not None
            await self.open()
            assert self._streams is not None
            reader, writer = self._streams
            answer.sent_at = self._clock()
            writer.write(request)
            try:
                head = await reader.readuntil(END_OF_HEAD)
            except ConnectionError:
                if not is_used:
                    raise
            except asyncio.IncompleteReadError as error:
                if not is_used or error.partial:
                    raise
            else:
                answer.status = int(head[9:12])
                answer.n_bytes = int(size[1]) if (size := LENGTH.search(head)) else None
                return reader
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
