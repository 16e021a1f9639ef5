"""Map the error response of a server to the error that an engine raises.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from cllm.errors import (
    CllmError,
    DeadlineError,
    GenerationError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    as_told,
)

QUEUE_FULL, UNAVAILABLE = 429, 503
# After these statuses another server, or the same one a little later, may serve the request.
PASSING = frozenset((QUEUE_FULL, 502, UNAVAILABLE, 504))
NUMBERS = {"n_prompt": "n_prompt_tokens", "n_ctx": "n_ctx"}  # `PromptTooLongError` from a response
RETRY_AFTER_MAX_S = 60.0
FAILED, TIMEOUT, TOO_LONG = "generation_failed", "timeout", "context_length_exceeded"


# What reading an answer raises if it has another form than cllm's.
UNLIKE_CLLM = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class ServerError(CllmError):
    """A server did not answer, or answered with an error that is no `RequestError`, such as status 401 or 500.

    Attributes
    ----------
    status : int or None
        HTTP status of the response; None: there was none, or it failed after status 200.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> CllmError:
    """Return the error for a response whose status is not 200."""
    problem = _problem_in(body)
    message = str(problem.get("message") or f"the server answers with status {status}")
    field = problem.get("param")
    if status == QUEUE_FULL:
        return as_told(QueueFullError, message, retry_after_s=_seconds(headers), n_waiting=0)
    if problem.get("code") == TIMEOUT:
        return as_told(DeadlineError, message)
    if problem.get("code") == FAILED:
        return as_told(GenerationError, message)
    if problem.get("code") == TOO_LONG:
        numbers = {name: problem.get(key, 0) for name, key in NUMBERS.items()}
        return as_told(PromptTooLongError, message, **numbers)
    if 400 <= status < 500 and isinstance(field, str):
        return as_told(InvalidRequestError, message, field=field, value=None, limit=message)
    return ServerError(message, status)


def failure_of(event: Mapping[str, Any]) -> ServerError | None:
    """Return the error in an event, or None.  Its status is 503 if the server is unavailable, else None."""
    if (problem := event.get("error")) is None:
        return None
    if not isinstance(problem, Mapping):  # as Ollama and some proxies have it
        return ServerError(str(problem or "the server has failed"))
    status = UNAVAILABLE if problem.get("code") == "unavailable" else None
    return ServerError(str(problem.get("message") or "the server has failed"), status)


def unlike_cllm(server: str | None, error: Exception) -> ServerError:
    """Return the error for an answer that is not cllm's, with what reading it raised."""
    return ServerError(f"{server} does not answer like cllm: {error!r}")


def _problem_in(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # a proxy's page
        return {}
    problem = value.get("error") if isinstance(value, dict) else None
    return problem if isinstance(problem, dict) else {}


def _seconds(headers: Mapping[str, str]) -> float:
    """Return how long to wait, at most `RETRY_AFTER_MAX_S`: a proxy may demand a day."""
    try:
        seconds = float(headers.get("retry-after", "1"))
    except ValueError:  # a date
        return 1.0
    return min(max(0.0, seconds), RETRY_AFTER_MAX_S) if isfinite(seconds) else 1.0
