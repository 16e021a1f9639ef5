"""One line in the log for each request: what was asked, and what it took."""

from __future__ import annotations

import json
import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.server.http.limits import is_open
from cllm.server.http.problems import route_path
from cllm.server.operation.usage import Access, milliseconds

logger: logging.Logger = logging.getLogger("cllm.access")

N_PATH_MAX = 200  # characters of a path that are logged
PLAIN = re.compile(r"[\w./:@+-]*", re.ASCII)
WATCHED = ("/metrics", "/live")  # asked for again and again, as probes are


def _shown(value: object) -> object:
    """Return a value as the line shows it: text that could look like another field is quoted."""
    is_plain = not isinstance(value, str) or PLAIN.fullmatch(value)
    return value if is_plain else json.dumps(value)


class AccessLog:
    """ASGI middleware: logs each request at its end, at the level info; probes and files at debug.

    The record has the fields of the line as `fields`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at, access = time.monotonic(), Access()
        state = scope.setdefault("state", {})
        state["access"] = access  # also where nothing is logged: keys count its tokens
        path = route_path(scope)
        is_quiet = path in WATCHED or is_open(path)
        level = logging.DEBUG if is_quiet else logging.INFO
        if not logger.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        status, is_complete = 0, False

        async def noting(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:  # answered further out
            status = status or 500
            raise
        finally:
            fields = {
                "request_id": state.get("request_id", ""),
                "method": scope["method"],
                "path": path[:N_PATH_MAX],
                "status": status,
                **access.fields,
                "total_ms": milliseconds(time.monotonic() - started_at),
                "is_complete": is_complete,  # False: the client left
            }
            line = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
            logger.log(level, "%s", line, extra={"fields": fields})
