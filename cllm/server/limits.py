"""What a client may send, how fast, and to whom: around the application, before it sees anything."""

from __future__ import annotations

import hmac
import re
import secrets

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.server.config import ServerConfig
from cllm.server.problems import Problem

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1", "[::1]"))
STATIC_URL = "/static"
# Documentation is no secret, and a browser cannot send a key with its first request.
OPEN_PATHS = frozenset(("/health", "/docs", "/openapi.json"))
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HEADER = "x-request-id"


class Limits:
    """ASGI middleware: request ids, Host check, API key, body size and time.

    Parameters
    ----------
    app : ASGIApp
    config : ServerConfig
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._hosts = LOOPBACK if config.host in LOOPBACK else None
        self._key = None if config.api_key is None else config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        send = _with_header(send, HEADER, request_id)
        try:
            self._check(scope, headers)
        except Problem as problem:
            await problem.response(scope, receive, send)
        else:
            await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._hosts is not None:
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name.lower() not in self._hosts:
                raise Problem(400, f"host: {host[:80]!r} is not a loopback host", param="host")
        if self._key is not None and not is_open(scope["path"]):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # Bytes: `compare_digest` refuses text that is not ASCII.
            is_right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self._key)
            if scheme.lower() != "bearer" or not is_right:
                headers_out = {"WWW-Authenticate": "Bearer"}
                raise Problem(401, "the API key is missing or wrong", headers=headers_out)
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise Problem(400, f"content-encoding: {encoding[:40]!r} is not taken")
        n_bytes = sum(len(name) + len(value) + 4 for name, value in headers.raw)  # ": " and CRLF
        if n_bytes + len(scope["path"]) > self._config.max_header_bytes:
            limit = f"the headers have more than {self._config.max_header_bytes} bytes"
            raise Problem(431, limit, headers={"Connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> Problem:
        # The rest of the body is still under way: this connection is of no more use.
        limit = f"the body has more than {self._config.max_body_bytes} bytes"
        return Problem(413, limit, headers={"Connection": "close"})

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which gives up on a body that is too large, or too slow."""
        n_bytes, is_complete = 0, False
        deadline = anyio.current_time() + self._config.body_timeout_s

        async def bounded() -> Message:
            nonlocal n_bytes, is_complete
            if is_complete:  # from here on it waits for the client to leave
                return await receive()
            message: Message | None = None
            with anyio.move_on_at(deadline):
                message = await receive()
            if message is None:
                limit = f"the body took more than {self._config.body_timeout_s:g} s"
                raise Problem(408, limit, headers={"Connection": "close"})
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._config.max_body_bytes:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            return message

        return bounded


def is_open(path: str) -> bool:
    """Whether a path is answered without the API key."""
    return path in OPEN_PATHS or path.startswith(STATIC_URL + "/")


def _with_header(send: Send, name: str, value: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return sending
