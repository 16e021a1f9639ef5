"""JSON bodies from strangers: bounded in depth, finite in numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from cllm.server.http.problems import Problem

MAX_CONTAINERS = 1 << 14
TENANT_HEADER = "x-tenant"
LARGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")  # numbers that may be beyond a float
MAX_BRACKETS = 1 << 18  # of which some may be text


async def json_of(request: Request) -> Any:
    """The body, whatever content type it is said to have.

    Raises
    ------
    Problem
        400: missing, not JSON, nested too deep, with too many parts, NaN or infinity.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise Problem(400, "the client left before its body was complete") from None
    if not body:
        raise Problem(400, "the body is missing")
    return parsed(body)


def parsed(body: bytes) -> Any:
    """Return the value of a body.

    Raises
    ------
    Problem
        400: not JSON, nested too deep, with too many parts, NaN or infinity.
    """
    _check_size(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    if LARGE.search(body) and not _is_finite(value):
        raise Problem(400, "the body is not JSON: a number is too large")
    return value


def _check_size(body: bytes) -> None:
    """Reject bodies that would take long to parse on the event loop."""
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
    """Route that reads its body within limits.

    FastAPI describes it, and does not call it: what that takes, a token's time, is for parameters
    that these routes do not have.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        endpoint, model = self.endpoint, get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()
        body_type: type[BaseModel] = model

        async def handle(request: Request) -> Response:
            value = await json_of(request)
            tenant = request.headers.get(TENANT_HEADER)
            if (
                tenant is not None
                and "tenant" in body_type.model_fields
                and isinstance(value, dict)
            ):
                value["tenant"] = tenant  # by a proxy that knows its clients
            try:
                body = body_type.model_validate(value)
            except ValidationError as error:
                wrong = error.errors(include_url=False)
                raise RequestValidationError(
                    [{**each, "loc": ("body", *each["loc"])} for each in wrong]
                ) from None
            answer = await endpoint(body, request)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return handle
