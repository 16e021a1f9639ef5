"""HTTP/1.1 as uvicorn speaks it, with a limit on how long the headers of a request may take."""

from __future__ import annotations

import asyncio
import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cllm.server.problems import Problem


def protocol_with(header_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's protocol class, for clients that send their headers within so many seconds."""

    class PunctualProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._await_headers()
            else:
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What h11 does not like: too long a header is one thing, nonsense another."""
            status = getattr(sys.exception(), "error_status_hint", 400)
            message = "the headers are too large" if status == 431 else "this is not HTTP"
            self._refuse(Problem(status, message))

        def _await_headers(self) -> None:
            if self._header_timer is None:
                loop = asyncio.get_running_loop()
                self._header_timer = loop.call_later(header_timeout_s, self._on_late)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _on_late(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                late = f"the headers took more than {header_timeout_s:g} s"
                self._refuse(Problem(408, late))

        def _refuse(self, problem: Problem) -> None:
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
