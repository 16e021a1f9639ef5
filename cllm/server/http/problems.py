"""Errors in the form of OpenAI's and Anthropic's API: `{"type": "error", "error": {"message", "type", …}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm import (
    CllmError,
    ClosedError,
    DeadlineError,
    EmbeddingError,
    EngineFailedError,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from cllm.errors import TooMuchTextError

logger: logging.Logger = logging.getLogger("cllm.server")


class Error(BaseModel):
    """Error of a request."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong")
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: Error


# For the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "Something is wrong with the request"},
    503: {"model": ErrorBody, "description": "Starting, shutting down, or failed: try again later"},
}
RETRY_AFTER_S = 1
ANTHROPIC_PATH = "/v1/messages"
TOO_LONG = "context_length_exceeded"  # as OpenAI calls it
PLACES = ("body", "path", "query")  # FastAPI's names for the place of a field
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# As Anthropic's API names them.  A stream has no status: its clients try again after some of these.
ANTHROPIC_KINDS = {
    **KINDS,
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class Problem(Exception):
    """Error that becomes an HTTP response.

    Attributes
    ----------
    status : int
    param : str or None
        Name of the wrong field.
    code : str or None
    headers : mapping
        Further headers of the response.
    details : mapping
        Further fields of the error object; they replace `type` and others of the same name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.details: dict[str, object] = dict(details or {})
        self.status = status
        self.param = param
        self.code = code
        self.headers: dict[str, str] = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        """JSON object of the response."""
        return self._body(KINDS)

    @property
    def anthropic_body(self) -> dict[str, object]:
        """JSON object of the response of Anthropic's API."""
        return self._body(ANTHROPIC_KINDS)

    def _body(self, kinds: Mapping[int, str]) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "type": "error",  # for Anthropic's clients
            "error": {
                "message": str(self),
                "type": kinds.get(self.status, kind),
                "param": self.param,
                "code": self.code,
                **self.details,
            },
        }

    def response_to(self, scope: Scope) -> JSONResponse:
        """Return the response with the body, the status and the headers.

        Clients of Ollama, whose paths begin with `/api/`, take the field `error` for a text.
        """
        path = route_path(scope)
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        if path.startswith("/api/"):
            body = {"error": str(self)}
        return JSONResponse(body, self.status, headers=self.headers)


def invalid(param: str, message: str) -> Problem:
    """Return the answer (400) to a request with a wrong field; the text is `param: message`."""
    return Problem(400, f"{param}: {message}", param=param)


def too_many(
    reason: str, *, retry_after_s: float = RETRY_AFTER_S, code: str = "queue_full"
) -> Problem:
    """Return the answer (429) to a request that finds a full queue, or that exceeds a limit."""
    retry = {"Retry-After": f"{math.ceil(retry_after_s)}"}
    return Problem(429, reason, code=code, headers=retry)


def unavailable(reason: str) -> Problem:
    """Return the answer (503) to a request that cannot be served now; a client may try again after 1 s."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    return Problem(503, reason, code="unavailable", headers=retry)


def shutting_down() -> Problem:
    """Return the answer to requests that a shutdown rejects or cuts off."""
    return unavailable("the server is shutting down")


def too_long(error: PromptTooLongError, param: str = "prompt") -> Problem:
    """Return the answer (400) to a prompt that exceeds the context; see `overflow`."""
    numbers = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    return overflow(str(error), param, **numbers)


def overflow(reason: str, param: str | None, *, status: int = 400, **details: object) -> Problem:
    """Return the answer to a request that exceeds the context; clients then compact their history.

    Clients of OpenAI, Anthropic and llama.cpp recognize it by the code, the type, or the text: `reason` must
    contain "prompt is too long", and the code is added to it.
    """
    return Problem(
        status,
        f"{reason} ({TOO_LONG})",
        param=param,
        code=TOO_LONG,
        headers={"Connection": "close"} if status == 413 else None,
        details={"type": "exceed_context_size_error", **details},
    )


def too_many_messages(n: int, limit: int, param: str) -> Problem:
    """Return the answer to a chat of more messages than the server takes."""
    reason = f"{param}: prompt is too long: {n} messages > {limit} maximum, see --max-messages"
    return overflow(reason, param)


def problem_of(error: BaseException, name_of: Callable[[str], str] = str) -> Problem:
    """Return the answer to an exception: never a 5xx for wrong input of a client.

    Parameters
    ----------
    name_of : callable
        Returns the client's name of a field of the engine.
    """
    if isinstance(error, InvalidRequestError) and (name := name_of(error.field)) != error.field:
        error = type(error)(name, getattr(error, "value", None), error.limit)
    match error:
        case Problem():
            return error
        case PromptTooLongError():
            return too_long(error)
        case TooMuchTextError():
            return overflow(f"prompt is too long: {error}", error.field)
        case InvalidRequestError() | InvalidArgumentError():
            return Problem(400, str(error), param=error.field)
        case QueueFullError(retry_after_s=seconds):
            return too_many(str(error), retry_after_s=seconds)
        case DeadlineError():
            # Clients of OpenAI and Anthropic would compute it twice more.
            return Problem(408, str(error), code="timeout", headers={"x-should-retry": "false"})
        case ClosedError() | EngineFailedError():
            return unavailable(str(error))
        case EmbeddingError() if error.__cause__ is None:  # cancelled at the end of a drain
            return shutting_down()
        case GenerationError() | EmbeddingError():
            cause = error.__cause__
            # The request cannot be fulfilled: its constraint (a plain `CllmError`), or a ban of all tokens.
            is_of_constraint = type(cause) is CllmError and isinstance(error, GenerationError)
            if is_of_constraint or isinstance(cause, ValueError):
                return Problem(400, str(cause), code="generation_failed")
            return Problem(500, str(error), code="generation_failed")
        case HTTPException():
            headers = error.headers
            return Problem(error.status_code, str(error.detail), headers=headers)
        case RequestValidationError():
            return _of_validation(error)
        case RequestError() if type(error) is RequestError:  # nothing is wrong with the request
            return unavailable(str(error))
        case CllmError():
            return Problem(500, str(error))
    return Problem(500, "internal error")


def _of_validation(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if place and place[0] in PLACES:
        del place[0]
    # pydantic adds the name of a union's member to the place: the field is the first part.
    param = place[0] if place else None
    place = [part[:80] for part in place]  # a name may have come from the client
    message = str(first["msg"])
    return Problem(400, f"{'.'.join(place)}: {message}" if place else message, param=param)


async def answer_problem(request: Request, error: Exception) -> JSONResponse:
    """Return the error response for an exception: the exception handler of the application."""
    return problem_of(error).response_to(request.scope)


class FaultsAnswered:
    """ASGI middleware: answers an exception that no handler knows with status 500, and logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            request_id = scope.get("state", {}).get("request_id", "")
            logger.error("request %s failed", request_id, exc_info=error)
            await problem_of(error).response_to(scope)(scope, receive, send)


def route_path(scope: Scope) -> str:
    """Return the path of a request within this application, without the path where that is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
