"""Replicas: sends each request to one of several servers of a model.  Event loop only."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import anyio
import httpx

from cllm.checks import check_float
from cllm.client.refusals import PASSING, QUEUE_FULL, ServerError, refusal_of
from cllm.errors import CllmError, ClosedError, InvalidArgumentError, InvalidRequestError
from cllm.routing.prefix_table import Key, PrefixTable

CONNECT_S, WRITE_S = 5.0, 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
MAX_PATIENCE_S = 1e9
AVOIDED_S, LONGEST_AVOIDED_S = 2.0, 60.0  # for which a server that failed is asked after the others
# TCP detects a machine that is gone after 30 s, however long a server computes without sending.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Replicas:
    """Addresses of the servers, and a pool of connections to them.

    The server that has received the longest prefix of a prompt is asked first.  It is passed over if it has
    over 8 open requests of this client more than another server.

    Parameters
    ----------
    urls : sequence of str
        Addresses of servers, or of one load balancer.
    patience_s : float
        Seconds of retries if servers cannot be reached or answer 502, 503 or 504; then an error is raised.
        A server that was reached has no time limit.
    """

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], *, patience_s: float
    ) -> None:
        self._urls = list(dict.fromkeys(map(_checked, urls)))
        if not self._urls:
            raise InvalidArgumentError("base_url", urls, "the address of a server")
        self._patience_s = check_float("patience_s", patience_s, 0.0, MAX_PATIENCE_S)
        self._table = PrefixTable()
        self._n_open = dict.fromkeys(self._urls, 0)
        self._is_closed = False
        self._avoided: dict[str, float] = {}  # until when
        self._avoided_s: dict[str, float] = {}  # how long, since the last success
        self._http = httpx.AsyncClient(
            # A proxy that compresses events delays them; and the events are read undecoded.
            headers={**headers, "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=CONNECT_S, write=WRITE_S),
            transport=httpx.AsyncHTTPTransport(
                # Certificates are loaded only for https: loading is slow.
                verify=any(httpx.URL(url).scheme == "https" for url in self._urls),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                socket_options=_socket_options(),
            ),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        self._is_closed = True
        await self._http.aclose()

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        keys: Sequence[Key] = (),
        but: str | None = None,
        is_begun: bool = False,
        is_large: bool = False,
    ) -> tuple[str, httpx.Response]:
        """POST to the servers in turn until one returns 200; return its URL and the response.

        Pass both to `close` after reading.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of the session, or of the prefixes of the prompt, the shortest first.
        but : str, optional
            URL of a server that has just failed: it is asked last.
        is_begun : bool
            True if the request continues an answer: it then waits up to `patience_s` for a full queue.
        is_large : bool
            True if the body can be large: it is encoded in a worker thread.

        Raises
        ------
        RequestError
            A server rejected the request; `QueueFullError`: a queue is full, and no other server accepted it.
        ServerError, ClosedError
            No server accepted it within `patience_s`, one answered with an error, or the client is closed.
        """
        until = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        content = await anyio.to_thread.run_sync(_encoded, body) if is_large else _encoded(body)
        if but is not None:
            self._avoid(but)
        while True:
            failure: CllmError | None = None
            is_full = False
            for url in self._in_turn(keys):
                if self._is_closed:
                    raise ClosedError("the client was closed")
                try:
                    response = await self._ask(url, path, content, headers)
                except httpx.RequestError as error:
                    self._avoid(url)
                    told = f"{url} does not answer: {error!r}"
                    failure = failure or ServerError(told)
                    continue
                if response.status_code == httpx.codes.OK:
                    self._avoided_s.pop(url, None)
                    self._table.record(keys, url)
                    return url, response
                refusal = await _refusal(response)
                if response.status_code not in PASSING:
                    raise refusal
                if response.status_code == QUEUE_FULL:
                    failure, is_full = refusal, True
                else:
                    self._avoid(url)
                    failure = failure or refusal
            assert failure is not None
            if (is_full and not is_begun) or time.monotonic() + pause_s > until:
                raise failure
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask(
        self, url: str, path: str, content: bytes, headers: Mapping[str, str] | None
    ) -> httpx.Response:
        """Return the response of one server.  The request counts as open; after status 200 until `close`."""
        request = self._http.build_request(
            "POST",
            url + path,
            content=content,
            headers={"content-type": "application/json", **(headers or {})},
        )
        request.stream = _Whole(content)
        self._n_open[url] += 1  # already now: a server sends nothing before its first token
        is_open = False
        try:
            response = await self._http.send(request, stream=True)
            is_open = response.status_code == httpx.codes.OK
            return response
        finally:
            self._n_open[url] -= not is_open

    async def close(self, url: str, response: httpx.Response) -> None:
        """Release the connection of an answer."""
        self._n_open[url] -= 1
        with anyio.CancelScope(shield=True):
            await response.aclose()

    def _in_turn(self, keys: Sequence[Key]) -> Iterator[str]:
        """Return each server once: the best prefix first, servers that failed recently last."""
        if len(self._urls) == 1:
            return iter(self._urls)
        now = time.monotonic()
        avoided = {url for url in self._urls if self._avoided.get(url, 0.0) > now}
        usable = {url: n for url, n in self._n_open.items() if url not in avoided}
        first = self._table.choose(keys, usable or self._n_open)
        return iter(
            sorted(self._urls, key=lambda url: (url != first, url in avoided, self._n_open[url]))
        )

    def _avoid(self, url: str) -> None:
        """Ask a server last for 2 s, twice as long after each further failure in a row, at most 60 s.

        Failures while it is avoided do not count: many requests fail at the moment in which it ends.
        """
        now = time.monotonic()
        if self._avoided.get(url, 0.0) > now:
            return
        seconds = min(2 * self._avoided_s.get(url, AVOIDED_S / 2), LONGEST_AVOIDED_S)
        self._avoided_s[url] = seconds
        self._avoided[url] = now + seconds


class _Whole(httpx.AsyncByteStream):
    """Body of a request, in one piece.

    The body of httpx is a generator, and trio warns if a lost connection leaves a generator unfinished.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the content once."""
        return _Once(self._content)


class _Once(AsyncIterator[bytes]):
    def __init__(self, content: bytes) -> None:
        self._left = [content]

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON in UTF-8.

    Raises
    ------
    InvalidRequestError
        JSON cannot represent a value, or a text has a lone surrogate.
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError("the request", str(error), "values that JSON has") from None


async def _refusal(response: httpx.Response) -> CllmError:
    try:
        body = await response.aread()
    except httpx.RequestError:
        body = b""
    finally:
        with anyio.CancelScope(shield=True):
            await response.aclose()
    return refusal_of(response.status_code, response.headers, body)


def _checked(url: str) -> str:
    limit = "an address as http://host:port"
    if not isinstance(url, str):
        raise InvalidArgumentError("base_url", url, limit)
    try:
        parsed = httpx.URL(url)
        is_named = bool(parsed.host)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidArgumentError("base_url", url, f"{limit} ({error})") from None
    is_port = parsed.port is None or 0 < parsed.port <= 65535
    is_more = bool(parsed.query or parsed.fragment)
    if parsed.scheme not in ("http", "https") or not is_named or is_more or not is_port:
        raise InvalidArgumentError("base_url", url, limit)
    return url.rstrip("/")


def _socket_options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEP_ALIVE:
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    return options
