"""HTTP/1.1 as uvicorn speaks it, with a limit on the time that clients take to send and to read."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cllm.server.problems import Problem


def protocol_with(
    *,
    header_timeout_s: float,
    write_timeout_s: float,
    on_refused: Callable[[int], None] = lambda _: None,
) -> type[H11Protocol]:
    """Uvicorn's protocol class, for clients that send and read within so many seconds.

    Parameters
    ----------
    on_refused : callable
        Called with the status of an answer that no application has given.
    """

    class PunctualProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Writing pauses as soon as the system takes no more: from then on time runs.
            transport.set_write_buffer_limits(high=0)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            is_answered = self.cycle is not None and self.cycle.response_complete
            if self.conn.their_state is h11.IDLE or (
                is_answered and self.conn.their_state is h11.SEND_BODY
            ):
                self._await_headers()  # of the next request, after what is left of this one
            else:
                self._stop_header_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def resume_writing(self) -> None:
            self._stop_write_timer()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_write_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What h11 does not like: too long a header is one thing, nonsense another."""
            # Its hint may be 501, but what a client sends is never the server's fault.
            is_too_large = getattr(sys.exception(), "error_status_hint", 400) == 431
            message = "the headers are too large" if is_too_large else "this is not HTTP"
            self._refuse(Problem(431 if is_too_large else 400, message))

        def _await_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(header_timeout_s, self._on_late)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _on_late(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                late = f"the headers took more than {header_timeout_s:g} s"
                self._refuse(Problem(408, late))

        def _await_reader(self) -> None:
            self._stop_write_timer()
            n_unsent = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(write_timeout_s, self._on_unread, n_unsent)

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
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()  # an answer has been given, or begun
                return
            on_refused(problem.status)
            body = json.dumps(problem.body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=problem.status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.transport.close()

    return PunctualProtocol
