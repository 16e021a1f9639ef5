"""JSON bodies from strangers: bounded in depth, finite in numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cllm.server.problems import Problem

MAX_CONTAINERS = 1 << 14
LARGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")  # numbers that may be beyond a float
MAX_BRACKETS = 1 << 18  # of which some may be text


class SafeRequest(Request):
    """A request whose JSON is parsed with limits."""

    async def json(self) -> Any:
        """The body.

        Raises
        ------
        Problem
            400: not JSON, nested too deep, with too many parts, NaN or infinity.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            _check_size(body)
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise Problem(400, f"the body is not JSON: {error}") from None
            if LARGE.search(body) and not _is_finite(self._json):
                raise Problem(400, "the body is not JSON: a number is too large")
        return self._json


def _check_size(body: bytes) -> None:
    """Refuse what would take long to make, and to look at: the event loop does both."""
    n_containers = _n_containers(body)
    if MAX_CONTAINERS < n_containers <= MAX_BRACKETS:
        # Perhaps they are in strings: of what is between quotation marks, every second is none.
        outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        n_containers = _n_containers(b"".join(outside))
    if n_containers > MAX_CONTAINERS:
        limit = f"the body has more than {MAX_CONTAINERS} arrays and objects"
        raise Problem(400, limit, param=_field_beyond(body))


def _field_beyond(body: bytes) -> str | None:
    """The field in which the body has too many parts; None if that is not to be seen."""
    brackets = re.finditer(rb"[\[{]", body)
    end = next(islice(brackets, MAX_CONTAINERS, None)).start()
    try:
        begun = from_json(body[:end], allow_partial=True)
    except ValueError:
        return None
    return next(reversed(begun), None) if isinstance(begun, dict) else None


def _is_finite(value: object) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def _n_containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


class SafeRoute(APIRoute):
    """A route that reads its body with `SafeRequest`, whatever content type it is said to have."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            # curl says that it is a form unless told otherwise, and every server takes that.
            headers.append((b"content-type", b"application/json"))
            safe = SafeRequest({**request.scope, "headers": headers}, request.receive)
            # Read here: FastAPI calls whatever is raised while it reads an error of parsing.
            try:
                if await safe.body():
                    await safe.json()
            except ClientDisconnect:
                raise Problem(400, "the client left before its body was complete") from None
            return await handler(safe)

        return handle
