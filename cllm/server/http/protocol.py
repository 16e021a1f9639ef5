"""HTTP/1.1 protocol of uvicorn, with limits on the size of headers and on the time of clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cllm.server.http.connections import Connections
from cllm.server.http.problems import Problem

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ANY_NUMBER = Connections(sys.maxsize)
LINGER_S = 2.0  # seconds that a client may still send after the answer that ends its connection
PERIOD_S = 0.1  # between two looks at what a client of TLS has received


class LingeringTransport:
    """Transport whose `close` lets a sending client receive the answer first.

    A connection that is closed with unread bytes is reset, and the client loses the answer.

    Parameters
    ----------
    is_sending : callable
        Returns True if the client may still be sending its request.
    """

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self.is_lingering: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See `asyncio.Transport`; data after `close` is dropped."""
        if not self.is_lingering:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self.is_lingering or self._transport.is_closing()

    def end(self) -> None:
        """Close an idle connection: at once, also with TLS, if the client has everything."""
        if self._is_tls and n_unsent(self._transport) == 0:
            self._transport.abort()
        else:
            self.close()

    def _end_tls(self) -> None:
        """Close the connection once the client has everything; asyncio waits 30 s for its own end of TLS."""
        n_bytes = n_unsent(self._transport)
        if n_bytes:
            asyncio.get_running_loop().call_later(PERIOD_S, self._end_tls)
        elif n_bytes is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection: at once, or within `LINGER_S` if the client may still be sending."""
        if self.is_closing():
            return
        if not self._is_sending():
            self._transport.close()
            if self._is_tls:
                asyncio.get_running_loop().call_later(PERIOD_S, self._end_tls)
            return
        self.is_lingering = True
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)
        with contextlib.suppress(OSError):  # it is reset already
            if self._transport.can_write_eof():  # TLS cannot
                self._transport.write_eof()
            self._transport.resume_reading()


def n_unsent(transport: asyncio.WriteTransport) -> int | None:
    """Return the number of bytes that the peer has not acknowledged; None if it is unknown, or the socket is closed.

    What an event loop holds back of TLS is not known.  But it holds nothing back unless the kernel's buffer is full.
    """
    wire = transport.get_extra_info("socket")
    if wire is None or fcntl is None or wire.fileno() < 0:
        return None
    try:
        (n_bytes,) = struct.unpack("i", fcntl.ioctl(wire.fileno(), termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return None
    return int(n_bytes) + transport.get_write_buffer_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits of all connections.

    Attributes
    ----------
    max_header_bytes : int
        Bytes of a request line, headers and trailers together; also bytes received without completing any.
    header_timeout_s, write_timeout_s : float
        Seconds for a client to send its headers; seconds without progress in reading its answer.
    on_refused : callable
        Called with the HTTP status of each error response that the protocol sends itself.
    connections : Connections
        Connections of the server.
    """

    max_header_bytes: int
    header_timeout_s: float
    write_timeout_s: float
    on_refused: Callable[[int], None] = lambda _: None
    connections: Connections = ANY_NUMBER


class PunctualProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with the limits of `limits`."""

    limits: ClassVar[WireLimits]
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _n_header_bytes = 0  # of this request
    _n_pending = 0  # bytes received since a head, a part of a body or a request was complete
    _data = b""  # what is being parsed
    _is_in_body = _is_refused = False
    _refusal: Problem | None = None  # error to send after the answer that is still running

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self._may_send))  # type: ignore[arg-type]
        # Writing pauses as soon as the socket takes no more: the write timeout starts then.  With a limit of 0,
        # a TLS connection would pause at its first write and never resume.
        transport.set_write_buffer_limits(high=1, low=0)
        if self.limits.connections.add(self):
            self._await_headers()
        else:
            self._refuse(Problem(503, "too many connections"))

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        self._n_pending += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._n_pending > self.limits.max_header_bytes:
            self._refuse(_too_large(self.limits.max_header_bytes))
        elif self.cycle is None or self.cycle.response_complete:
            self._await_headers()  # of the next request
        else:
            self._stop_header_timer()
            self.limits.connections.set_idle(self, False)

    def on_message_begin(self) -> None:
        """Begin a request; reject one that is sent before the answer to the previous one (pipelining)."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise Problem(400, "a request must wait for the answer to the one before it")
        self._n_header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)  # ": " and CRLF
        if not self._is_in_body:  # trailers are no headers
            super().on_header(name, value)

    def _count(self, n_bytes: int) -> None:
        self._n_header_bytes += n_bytes
        if self._n_header_bytes > self.limits.max_header_bytes:
            raise _too_large(self.limits.max_header_bytes)

    def on_headers_complete(self) -> None:
        _check_framing(self.headers, self.parser)
        if not self.parser.should_upgrade():  # an upgrade is parsed again without its header
            super().on_headers_complete()
            self._n_pending, self._is_in_body = 0, True

    def on_body(self, body: bytes) -> None:
        self._n_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._n_pending, self._is_in_body = 0, False
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        self.limits.connections.discard(self)
        super().connection_lost(exc)

    def close_idle(self) -> None:
        """See `Closable`."""
        self._stop_header_timer()
        self.transport.end()  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        """Close the connection, after an answer that is still running."""
        if self.cycle is None or self.cycle.response_complete:
            self.close_idle()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request for an upgrade, such as h2c (HTTP/2), again as HTTP/1.1 without that header.

        The parser stops at an upgrade: it takes the body for data of the other protocol.
        """
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        rest = self._data[upgrade.args[0] :]
        fields = [(n, v) for n, v in self.headers if n != b"upgrade"]
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in fields]
        self.parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self.limits.connections.set_idle(self, True)  # a client may keep it open

    def send_400_response(self, msg: str) -> None:
        """Reject input that the parser, or one of its callbacks, rejects."""
        error = sys.exception()
        problem = None if error is None else error.__context__
        if "Content-Length overflow" in str(error):
            problem = Problem(413, "the body has more bytes than can be counted")
        if not isinstance(problem, Problem):
            problem = Problem(400, "this is not HTTP")
        self._refuse(problem)

    def _may_send(self) -> bool:
        return self._is_in_body or self._is_refused

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self.limits.connections.set_idle(self, True)
            self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._on_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            late = f"the headers took more than {self.limits.header_timeout_s:g} s"
            self._refuse(Problem(408, late))

    def _await_reader(self) -> None:
        self._stop_write_timer()
        n_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self.limits.write_timeout_s, self._on_unread, n_unsent
        )

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_unread(self, n_unsent: int) -> None:
        """Cut off a client that has read nothing; `close` would wait for it for ever."""
        if self.transport.get_write_buffer_size() < n_unsent:
            self._await_reader()
        else:
            self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Send an error response and close the connection, after an answer that is still running."""
        cycle = self.cycle
        is_due = cycle is not None and not cycle.response_complete
        if is_due and not self._is_in_body:
            self._refusal = problem
        elif self._is_in_body and cycle.response_started:
            self.transport.close()
        elif not self.transport.is_closing():
            self._is_refused = True
            self.limits.on_refused(problem.status)
            self.transport.write(_on_wire(problem))
            self.transport.close()


def protocol_with(limits: WireLimits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol class with these limits."""
    return type("PunctualProtocol", (PunctualProtocol,), {"limits": limits})


def _check_framing(
    headers: Sequence[tuple[bytes, bytes]], parser: httptools.HttpRequestParser
) -> None:
    """Reject framing that the parser accepts but other servers may read differently.

    Raises
    ------
    Problem
        400: not exactly one host, a transfer encoding other than `chunked`, or the method CONNECT.
    """
    names = [name for name, _ in headers]
    if names.count(b"host") != 1 and (parser.get_http_version() == "1.1" or b"host" in names):
        raise Problem(400, "there must be one host")
    if any(n == b"transfer-encoding" and v.lower() != b"chunked" for n, v in headers):
        raise Problem(400, "transfer-encoding must be chunked")
    if parser.get_method() == b"CONNECT":
        raise Problem(400, "this server is no proxy")


def _too_large(max_header_bytes: int) -> Problem:
    return Problem(431, f"the headers have more than {max_header_bytes} bytes")


def _on_wire(problem: Problem) -> bytes:
    body = json.dumps(problem.body).encode()
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
    return b"%b%b%d\r\n\r\n%b" % (STATUS_LINE[problem.status], head, len(body), body)
