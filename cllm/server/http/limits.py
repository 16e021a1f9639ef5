"""Limits on what clients may send, how fast, and to which host, before the application sees a request."""

from __future__ import annotations

import gc
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.server.config import ServerConfig, is_loopback
from cllm.server.http.api_keys import ApiKey, KeyRing
from cllm.server.http.problems import RETRY_AFTER_S, Problem, overflow, route_path
from cllm.server.http.replies import DIRECT_SEND

SMALL_BYTES = 1 << 20  # a larger body counts towards `LARGE_BYTES`
LARGE_BYTES = 1 << 29  # of all large bodies of open requests
STATIC_URL = "/static"
PAGE_URL = "/page"
# Documentation is no secret, and a browser cannot send a key with its first request.
FILES = frozenset(("/", "/docs", "/openapi.json"))
FOLDERS = (STATIC_URL + "/", PAGE_URL + "/")
ADMIN_PATHS = frozenset(("/admin/reload", "/api/pull"))  # have a key of their own
OPEN_PATHS = frozenset(("/health", "/v1/health", "/healthz", "/readyz", "/livez"))
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HEADER, HEADER_OF_ANTHROPIC = "x-request-id", "request-id"
LOCAL_DOMAINS = (".local", ".localhost", ".internal", ".home.arpa", ".test", ".alt")


class Limits:
    """ASGI middleware: adds request ids; checks Host, Origin, API key, sizes, and the time of the body.

    Parameters
    ----------
    app : ASGIApp
    config : ServerConfig
    n_bytes_max : callable
        Returns how many bytes a body may have.
    keys : KeyRing, optional
        Keys of several clients, besides that of `config`.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        n_bytes_max: Callable[[], int],
        keys: KeyRing | None = None,
    ) -> None:
        self._keys = keys
        self._app = app
        self._n_bytes_max = n_bytes_max
        self._n_bytes_large = 0  # of large bodies whose requests are open
        self._config = config
        self._is_loopback = is_loopback(config.host)
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
        if "/messages" in scope["path"]:
            send = _with_header(send, HEADER_OF_ANTHROPIC, request_id)
        state = scope["state"]
        state["keys"] = self._keys
        with ExitStack() as admitted:
            try:
                key = self._check(scope, headers)
                if key is not None:
                    state["key"], access = key, state["access"]
                    access.key = key.name
                    if scope["method"] == "POST":  # what is only looked at is not limited
                        admitted.enter_context(key.admitted(access))
            except Problem as problem:
                await problem.response_to(scope)(scope, receive, send)
                return
            body = _Body()
            try:
                await self._app(scope, self._bounded(receive, body), send)
            finally:
                if body.n_bytes_large:
                    self._n_bytes_large -= body.n_bytes_large
                    # A rejected body stays alive in a cycle: error, traceback, frame, error.  In `cllm serve`,
                    # which has frozen all that lives long, the search for cycles takes no time.
                    if gc.get_freeze_count():
                        gc.collect()

    def _check(self, scope: Scope, headers: Headers) -> ApiKey | None:
        """Return the key of a request if it is one of `keys`; raise `Problem` if it may not be answered."""
        key = None
        host = headers.get("host", "")
        if not self._is_own(_without_port(host)):
            kind = "a loopback host" if self._is_loopback else "known to be this server's"
            message = f"host: {host[:80]!r} is not {kind}; see --allowed-host (allowed_hosts)"
            raise Problem(400, message, param="host")
        origin = headers.get("origin")
        if origin is not None and not self._is_allowed(origin, host):
            # Browsers let a page send any request; only the answer is kept from it.
            message = f"origin: {origin[:80]!r} may not use this server; see --cors-origin"
            raise Problem(403, message, param="origin")
        path = route_path(scope)
        if path in ADMIN_PATHS:
            if (admin_key := self._config.admin_key) is None:
                raise Problem(404, f"there is no --admin-key, and so no {path}")
            check_key(headers, admin_key.encode(), "admin key")
        elif self._config.needs_key and not is_open(path):
            key = None if self._keys is None else self._keys.find(_token_of(headers))
            if key is None:
                check_key(headers, self._key, "API key")
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise Problem(400, f"content-encoding: {encoding[:40]!r} is not supported")
        n_bytes = sum(len(name) + len(value) + 4 for name, value in headers.raw)  # ": " and CRLF
        if (
            n_bytes + len(scope["path"]) + len(scope["query_string"])
            > self._config.max_header_bytes
        ):
            limit = f"the headers have more than {self._config.max_header_bytes} bytes"
            raise Problem(431, limit, headers={"Connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._n_bytes_max():
            raise self._too_large()
        return key

    def _is_own(self, name: str) -> bool:
        """Return True if the host of a request is allowed: a name of this server, or one of `allowed_hosts`.

        The owner of `evil.example` can make that name resolve to this address (DNS rebinding).  A browser
        then takes a page of `evil.example` and this server for one origin.
        """
        allowed = self._config.allowed_hosts
        if name.lower() in allowed or "*" in allowed:
            return True
        if self._is_loopback:
            return is_loopback(name)
        # Without the key, a page gets only what needs no key.
        return self._config.needs_key or not is_public_name(name)

    def _is_allowed(self, origin: str, host: str) -> bool:
        allowed = self._config.cors_origins
        return origin in allowed or "*" in allowed or origin.partition("://")[2] == host

    def _too_large(self) -> Problem:
        # The client is still sending the body: the connection cannot be used for another request.
        limit = f"prompt is too long: the body has more than {self._n_bytes_max()} bytes"
        return overflow(f"{limit}, see --max-body-bytes", None, status=413)

    def _bounded(self, receive: Receive, body: _Body) -> Receive:
        """Return a `receive` that rejects a body that is too large, too slow, or one of too many large ones."""
        is_complete = False
        deadline = float("inf")

        async def bounded() -> Message:
            nonlocal is_complete, deadline
            if deadline == float("inf"):  # starts at the first read: a model may be loaded before
                deadline = anyio.current_time() + self._config.body_timeout_s
            if is_complete:  # later calls wait until the client disconnects
                return await receive()
            message: Message | None = None
            with anyio.move_on_at(deadline):
                message = await receive()
            if message is None:
                limit = f"the body took more than {self._config.body_timeout_s:g} s"
                raise Problem(408, limit, headers={"Connection": "close"})
            body.n_bytes += len(message.get("body", b""))
            if body.n_bytes > self._n_bytes_max():
                raise self._too_large()
            self._count_large(body)
            is_complete = not message.get("more_body", False)
            return message

        return bounded

    def _count_large(self, body: _Body) -> None:
        if body.n_bytes <= SMALL_BYTES:
            return
        others = self._n_bytes_large - body.n_bytes_large
        if others and others + body.n_bytes > LARGE_BYTES:
            limit = f"the large bodies of open requests have more than {LARGE_BYTES} bytes"
            headers = {"Connection": "close", "Retry-After": str(RETRY_AFTER_S)}
            raise Problem(429, limit, headers=headers)
        self._n_bytes_large, body.n_bytes_large = others + body.n_bytes, body.n_bytes


@dataclass(slots=True)
class _Body:
    """Bytes of one body so far, and how many of them are counted among those of large bodies."""

    n_bytes: int = 0
    n_bytes_large: int = 0


class HeadAsGet:
    """ASGI middleware: answers a HEAD request with the headers of the answer to GET.

    It passes its own `send` on in the scope of other requests: see `DIRECT_SEND`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            scope[DIRECT_SEND] = send
            try:
                await self._app(scope, receive, send)
            finally:
                scope.pop(DIRECT_SEND, None)  # the server's `send` may refer to the scope
            return

        is_over = False

        async def head_alone(message: Message) -> None:
            nonlocal is_over
            if is_over:
                return
            await send(message)
            if message["type"] == "http.response.start":
                # The client may send its next request now, so the answer ends for the server too.
                is_over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def until_then() -> Message:
            return {"type": "http.disconnect"} if is_over else await receive()

        await self._app({**scope, "method": "GET"}, until_then, head_alone)


class OtherPaths:
    """ASGI middleware: replaces an alias of a path of `known`; see `with_known_path`.

    Parameters
    ----------
    app : ASGIApp
    known : set of str
        Paths of the routes.
    """

    def __init__(self, app: ASGIApp, known: frozenset[str]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            scope = with_known_path(scope, self._known)
        await self._app(scope, receive, send)


def with_known_path(scope: Scope, known: frozenset[str]) -> Scope:
    """Return a scope with the known path for an alias; the same scope if the path is no alias.

    An alias of a `/v1` path lacks `/v1`, begins with several slashes, or ends with one or more.
    """
    if (path := route_path(scope)) not in known:
        plain = "/" + path.strip("/")
        for other in (plain, f"/v1{plain}"):
            is_known = other in known or other.startswith("/v1/models/")
            if other.startswith("/v1/") and is_known:
                whole = scope.get("root_path", "") + other
                return {**scope, "path": whole, "raw_path": whole.encode()}
    return scope


def _token_of(headers: Headers) -> bytes:
    """Return the key that a request sends, as the bytes that came."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = headers.get("x-api-key", "")  # what Anthropic's clients send
    # The headers are read as Latin-1, in which bytes of UTF-8 may be white space.
    return token.strip(" \t").encode("latin-1")


def check_key(headers: Headers, key: bytes | None, what: str) -> None:
    """Raise `Problem` (401) if the headers of a request do not have the key, or there is none."""
    # `compare_digest` refuses text that is not ASCII, and takes bytes.
    if key is None or not hmac.compare_digest(_token_of(headers), key):
        headers_out = {"WWW-Authenticate": "Bearer"}
        raise Problem(401, f"the {what} is missing or wrong", headers=headers_out)


def is_open(path: str) -> bool:
    """Return True if a path needs no API key."""
    return path in OPEN_PATHS or is_file(path)


def is_file(path: str) -> bool:
    """Return True if a path belongs to the page or to the documentation, which need no model."""
    return path in FILES or path.startswith(FOLDERS)


def is_public_name(name: str) -> bool:
    """Return True if a host name may be public: no address, and no name of this network only."""
    name = name.lower().rstrip(".")
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        is_own = name == socket.gethostname().lower()
        # Names without a dot cannot be registered, nor those of RFC 2606, 6761, 6762, 8375 or 9476.
        return "." in name and not is_own and not name.endswith(LOCAL_DOMAINS)
    return False


def _without_port(host: str) -> str:
    return host if host.endswith("]") else host.rsplit(":", 1)[0]


def _with_header(send: Send, name: str, value: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[name] = value
        await send(message)

    return sending
