"""`/v1/streams/{request_id}`: an answer whose connection was lost."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cllm.server.kept_streams import KeptAnswer
from cllm.server.problems import invalid
from cllm.server.state import state_of

router = APIRouter(tags=["cllm"], prefix="/v1/streams")


class PickedUp(Response):
    """The rest of an answer."""

    def __init__(self, kept: KeptAnswer, after: int) -> None:
        self._kept = kept
        self._after = after
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self._kept.copy(send, receive, self._after)


@router.get("/{request_id}", summary="Take up a lost answer")
async def pick_up(request_id: str, request: Request) -> Response:
    """The events after `Last-Event-ID`, of a request that had this `X-Request-ID`.

    Only with `--resume-window`, within that time, and with the key that began it.  Whoever read it
    before gets no more.
    """
    after = _last_event_id(request.headers)
    return PickedUp(state_of(request).kept.get(request_id, request.headers, after), after)


@router.delete("/{request_id}", summary="Give up a lost answer")
async def give_up(request_id: str, request: Request) -> dict[str, str]:
    """Nobody will ask for it: its request is cancelled."""
    state_of(request).kept.get(request_id, request.headers).give_up()
    return {"id": request_id, "status": "given up"}


def _last_event_id(headers: Headers) -> int:
    given = headers.get("last-event-id", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= 9):
        raise invalid("Last-Event-ID", "must be the number of an event")
    return int(given)
