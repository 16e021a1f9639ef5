"""Parsing of JSON bodies from untrusted clients, with limits on depth, containers and numbers."""

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

from cllm.server.http.problems import Problem, overflow

MAX_CONTAINERS = 1 << 14  # arrays and objects of one body
TENANT_HEADER = "x-tenant"
MAX_BRACKETS = 1 << 18  # opening brackets of one body, in its strings too
# Commas of one body, between its values and in its texts.
MAX_COMMAS = 1 << 21


async def json_of(request: Request, *, is_optional: bool = False) -> Any:
    """Return the value of the JSON body of a request; its content type is ignored.

    If the body is optional, None stands for a missing one.

    Raises
    ------
    Problem
        400: the client left early, or the body is missing or rejected by `parsed`.
    """
    try:
        # Not `request.body`, which the request would keep: a body may have 32 MiB.
        body = bytearray()
        async for part in request.stream():
            body += part
    except ClientDisconnect:
        raise Problem(400, "the client left before its body was complete") from None
    if not body and is_optional:
        return None
    if not body:
        raise Problem(400, "the body is missing")
    return parsed(body)


def parsed(body: bytes | bytearray) -> Any:
    """Return the value of a JSON body.

    Raises
    ------
    Problem
        400: the body is not JSON, is nested too deep, or has more than `MAX_CONTAINERS` arrays and objects or
        `MAX_COMMAS` commas.  Numbers must be finite.
    """
    _check_size(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    if not _is_finite(value):
        raise Problem(400, "the body is not JSON: a number is too large")
    return value


def _check_size(body: bytes | bytearray) -> None:
    """Reject bodies that would take long to parse on the event loop."""
    if body.count(b",") > MAX_COMMAS:
        raise overflow(f"the prompt is too long: more than {MAX_COMMAS} commas", None)
    n_containers = _n_containers(body)
    if MAX_CONTAINERS < n_containers <= MAX_BRACKETS:
        # Brackets in strings do not count: every second part between quotation marks is no string.
        outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        n_containers = _n_containers(b"".join(outside))
    if n_containers > MAX_CONTAINERS:
        limit = f"the body has more than {MAX_CONTAINERS} arrays and objects"
        raise Problem(400, limit, param=_field_beyond(body))


def _field_beyond(body: bytes | bytearray) -> str | None:
    """Return the top-level field in which the body probably exceeds `MAX_CONTAINERS`; None if it is unknown.

    Brackets in strings are counted too.  A body that is not an object has no fields.
    """
    brackets = re.finditer(rb"[\[{]", body)
    end = next(islice(brackets, MAX_CONTAINERS, None)).start()
    try:
        begun = from_json(body[:end], allow_partial=True)
    except ValueError:
        return None
    return next(reversed(begun), None) if isinstance(begun, dict) else None


def _is_finite(value: object) -> bool:
    left: list[Any] = [[value]]
    while left:
        one = left.pop()
        items = one.values() if isinstance(one, dict) else one
        kinds = set(map(type, items))
        if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
            return False
        if kinds & {dict, list}:
            left += [item for item in items if type(item) in (dict, list)]
    return True


def _n_containers(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


def integral(data: object) -> object:
    """Return a float without a fraction as an int: JSON has one kind of number, and 5.0 is an integer."""
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _set_turn(value: dict[str, Any], body_type: type[BaseModel], request: Request) -> None:
    """Set the tenant and the priority of a body: those of the client's key, or else the header's tenant."""
    given = integral(value.get("priority"))
    turn = turn_of(request, given if type(given) is int else None)
    for name in turn.keys() & body_type.model_fields.keys():
        value[name] = turn[name]


def turn_of(request: Request, priority: int | None = None) -> dict[str, Any]:
    """Return the tenant and the priority of a request that its key sets, or else the header's tenant.

    Parameters
    ----------
    priority : int, optional
        Priority that the request asks for; it is kept if it is less urgent than that of the key.
    """
    key = request.scope["state"].get("key")
    if key is None:  # a proxy that knows its clients sets the header
        tenant = request.headers.get(TENANT_HEADER)
        return {} if tenant is None else {"tenant": tenant}
    least = key.limits.priority
    return {"tenant": key.name, "priority": least if priority is None else max(priority, least)}


class SafeRoute(APIRoute):
    """Route whose endpoint takes the parsed body and the request; the body is read within limits.

    FastAPI documents such an endpoint but does not call it.  Resolving parameters would take as long as
    generating a token, and these routes have none to resolve.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        endpoint, model = self.endpoint, get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()
        body_type: type[BaseModel] = model

        async def handle(request: Request) -> Response:
            is_optional = getattr(body_type, "is_optional", False)
            value = await json_of(request, is_optional=is_optional)
            if value is None and is_optional:
                value = {}
            if not isinstance(value, dict):
                raise Problem(400, "the body must be a JSON object")
            _set_turn(value, body_type, request)
            try:
                body = body_type.model_validate(value)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]  # the answer states one
                first["loc"] = ("body", *first["loc"])
                raise RequestValidationError([first]) from None
            answer = await endpoint(body, request)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return handle
