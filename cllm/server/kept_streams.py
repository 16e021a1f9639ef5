"""Answers that outlive their connection: a client that lost it takes them up again where it was.

The answer is produced by a task of the server's own and kept for a while, event by event, each with a
number (`id:` of server-sent events).  The connection copies what there is.  When it is gone the model goes on
until so much is waiting that its stream pauses; who asks for the rest in time, with the key that began it,
gets it, and who copied it before gets no more.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cllm.server.problems import Problem

MAX_WAITING = 256  # messages that nobody has taken: then the answer waits, and its stream pauses
MAX_KEPT_BYTES = 4 << 20  # of one answer, what was taken included
MAX_KEPT = 1024  # answers

Produce = Callable[[Send], Awaitable[None]]


class KeptAnswer:
    """One answer, its messages as ASGI has them, and who takes them.

    Attributes
    ----------
    request_id : str
    is_done : bool
        All of it has been produced.
    """

    def __init__(self, request_id: str, key: str, window_s: float) -> None:
        self.request_id = request_id
        self._key = key
        self._window_s = window_s
        self._start: Message | None = None
        self._bodies: deque[tuple[int, Message]] = deque()
        self._n_bytes = 0
        self._n_bodies = 0  # so far, and so the number of the last
        self._n_taken = 0
        self._has_changed = anyio.Event()
        self._reader: anyio.CancelScope | None = None
        self._scope = anyio.CancelScope()
        self._failure: Exception | None = None
        self._is_given_up = False
        self.is_done = False

    # --- Who produces it ---------------------------------------------------------------------
    async def run(self, produce: Produce, stopping: anyio.Event) -> None:
        """Produce all of it, and keep it as long as somebody may ask for it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, stopping, tasks.cancel_scope)
            tasks.start_soon(self._wake_when, stopping)
            try:
                with self._scope:
                    await produce(self._put)
            except Exception as error:
                self._failure = error
            finally:  # whoever ends it
                self.is_done = True
                self._wake()

    async def _put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            while self._n_bodies - self._n_taken >= MAX_WAITING:
                await self._wait()
            self._n_bodies += 1
            self._bodies.append((self._n_bodies, message))
            self._n_bytes += len(message.get("body", b""))
            while self._n_bytes > MAX_KEPT_BYTES and self._bodies[0][0] <= self._n_taken:
                self._n_bytes -= len(self._bodies.popleft()[1].get("body", b""))
        self._wake()

    async def _watch(self, stopping: anyio.Event, scope: anyio.CancelScope) -> None:
        """End it when nobody has taken it for so long; what was sent may not have arrived."""
        while not self._is_given_up:
            if self._reader is not None:
                await self._wait()
                continue
            with anyio.move_on_after(self._window_s) as waited:
                while not (self._reader or self._is_given_up or stopping.is_set()):
                    await self._wait()
            if waited.cancelled_caught or (stopping.is_set() and self._reader is None):
                break
        self._scope.cancel()
        scope.cancel()

    async def _wake_when(self, stopping: anyio.Event) -> None:
        await stopping.wait()
        self._wake()

    # --- Who takes it ------------------------------------------------------------------------
    def check(self, key: str, after: int) -> None:
        """Whether this client may have what comes after an event.

        Raises
        ------
        Problem
        """
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise gone(self.request_id)
        if after > self._n_bodies:
            limit = f"Last-Event-ID is {after}, must be at most {self._n_bodies}"
            raise Problem(400, limit, param="Last-Event-ID")
        if self._bodies and after + 1 < self._bodies[0][0]:
            raise Problem(410, f"event {after + 1} of {self.request_id} is not kept any more")

    async def copy(self, send: Send, receive: Receive, after: int = 0) -> None:
        """Send it from an event on, until the client leaves, another takes over, or all is sent.

        Raises
        ------
        Exception
            What has kept it from beginning.
        """
        if self._reader is not None:
            self._reader.cancel()
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            self._reader = scope = tasks.cancel_scope
            self._wake()
            tasks.start_soon(_leave, receive, scope)
            try:
                await self._send_from(send, after)
            except Exception as error:
                failure = error
            finally:
                scope.cancel()
                if self._reader is scope:
                    self._reader = None
                    self._wake()
        if failure is not None:
            raise failure

    async def _send_from(self, send: Send, after: int) -> None:
        while self._start is None:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        await send(self._start)
        self._n_taken = max(self._n_taken, after)
        while True:
            n_new = min(self._n_bodies - after, len(self._bodies))
            waiting = [self._bodies[i] for i in range(-n_new, 0)]
            for number, message in waiting:
                await send(message)
                await anyio.lowlevel.checkpoint()  # that a client has left is heard between two
                after = number
                self._n_taken = max(self._n_taken, number)
                self._wake()
                if not message.get("more_body", False):
                    return
            if not waiting:
                if self.is_done:
                    return
                await self._wait()

    # --- Both --------------------------------------------------------------------------------
    def _wake(self) -> None:
        """Let everybody look again."""
        changed, self._has_changed = self._has_changed, anyio.Event()
        changed.set()

    async def _wait(self) -> None:
        """Until something has changed since whoever calls this looked."""
        await self._has_changed.wait()

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._is_given_up = True
        self._wake()


class KeptAnswers:
    """Those of one server that somebody may ask for.

    Parameters
    ----------
    window_s : float
        How long after their connection is gone; 0: none is kept.

    Attributes
    ----------
    tasks : TaskGroup or None
        Where they are produced; None: nobody runs the server's tasks, and none is kept.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._answers: dict[str, KeptAnswer] = {}
        self.tasks: TaskGroup | None = None

    def begin(self, scope: Scope, produce: Produce, stopping: anyio.Event) -> KeptAnswer | None:
        """Keep the answer to a request, if it has an id that no other has."""
        if not self._window_s or self.tasks is None or scope["method"] != "POST":
            return None
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id")
        is_wanted = headers.get("x-cllm-resume") != "no"  # `cllm.client` goes on by itself
        if not request_id or not is_wanted or len(self._answers) >= MAX_KEPT:
            return None
        earlier = self._answers.get(request_id)
        if earlier is not None and not earlier.is_done:
            return None
        kept = KeptAnswer(request_id, key_of(headers), self._window_s)
        self._answers[request_id] = kept
        self.tasks.start_soon(self._run, kept, produce, stopping)
        return kept

    async def _run(self, kept: KeptAnswer, produce: Produce, stopping: anyio.Event) -> None:
        try:
            await kept.run(produce, stopping)
        finally:
            if self._answers.get(kept.request_id) is kept:
                del self._answers[kept.request_id]

    def get(self, request_id: str, headers: Headers, after: int = 0) -> KeptAnswer:
        """The answer to a request, for a client with the key that began it.

        Raises
        ------
        Problem
        """
        if (kept := self._answers.get(request_id)) is None:
            raise gone(request_id)
        kept.check(key_of(headers), after)
        return kept


def key_of(headers: Headers) -> str:
    """What a client shows of who it is."""
    return headers.get("authorization") or headers.get("x-api-key") or ""


def gone(request_id: str) -> Problem:
    """For a key that has not begun it too: whose answers there are is nobody's business."""
    return Problem(404, f"no answer to a request {request_id!r} is kept", param="request_id")


async def _leave(receive: Receive, scope: anyio.CancelScope) -> None:
    """With the client."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
