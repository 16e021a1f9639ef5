"""One line in the log for each request: what was asked, and what it took."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm import Completion
from cllm.server.http.limits import is_open
from cllm.server.http.problems import route_path

logger: logging.Logger = logging.getLogger("cllm.access")

WATCHED = ("/metrics", "/live")  # asked for again and again, as probes are


@dataclass(slots=True)
class Access:
    """Numbers of one HTTP request: sums of all its outputs.

    Attributes
    ----------
    model : str
        Name of the model; empty for a request that generates nothing.
    queued_s : float
        Longest time from submission to admission in seconds.
    first_s : float or None
        Shortest time from submission to a first token in seconds; None without a token.
    """

    model: str = ""
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    queued_s: float = 0.0
    first_s: float | None = None

    def finished(self, completion: Completion) -> None:
        """Add an output."""
        usage, timings = completion.usage, completion.timings
        self.n_prompt += usage.n_prompt
        self.n_cached += usage.n_cached
        self.n_output += usage.n_output
        self.queued_s = max(self.queued_s, timings.queued_s)
        if timings.ttft_s is not None:
            self.first_s = min(timings.ttft_s, self.first_s or timings.ttft_s)

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the log's line; empty for a request that generated nothing."""
        if not self.model:
            return {}
        first = {} if self.first_s is None else {"first_ms": _ms(self.first_s)}
        return {
            "model": self.model,
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "output_tokens": self.n_output,
            "queued_ms": _ms(self.queued_s),
            **first,
        }


class AccessLog:
    """ASGI middleware: logs each request at its end, at the level info; probes and files at debug.

    The record has the fields of the line as `fields`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = route_path(scope) if scope["type"] == "http" else ""
        is_quiet = path in WATCHED or is_open(path)
        level = logging.DEBUG if is_quiet else logging.INFO
        if scope["type"] != "http" or not logger.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        started_at, access = time.monotonic(), Access()
        state = scope.setdefault("state", {})
        state["access"] = access
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
        finally:
            fields = {
                "request_id": state.get("request_id", ""),
                "method": scope["method"],
                "path": path,
                "status": status,
                **access.fields,
                "total_ms": _ms(time.monotonic() - started_at),
                "is_complete": is_complete,  # False: the client left
            }
            line = " ".join(f"{name}={value}" for name, value in fields.items())
            logger.log(level, "%s", line, extra={"fields": fields})


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
