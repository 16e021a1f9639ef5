"""Inbox and Outbox: commands to the inference thread, events to the event loop.

Neither side ever waits for the other: a command is put into a queue, and the events of a tick reach
the loop by one non-blocking call.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio.lowlevel

from cllm.engine.core.commands import AddRequest, CancelRequest, Command, Event, Read

T = TypeVar("T")


class Inbox:
    """Commands on their way to the inference thread.  `put` from any thread.

    Parameters
    ----------
    on_cancel : callable
        Called with the request id when a `CancelRequest` is put, in the thread that puts it.

    Attributes
    ----------
    on_put : callable
        Called without arguments after each command is put, in the thread that puts it.
    """

    def __init__(self, on_cancel: Callable[[str], None] = lambda request_id: None) -> None:
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._arrivals: deque[float] = deque()
        self._on_cancel = on_cancel
        self.on_put: Callable[[], None] = lambda: None

    def put(self, command: Command) -> None:
        """Put a command into the queue.  Never blocks."""
        if isinstance(command, CancelRequest):
            # Before the inference thread can handle the command.
            self._on_cancel(command.request_id)
        elif isinstance(command, AddRequest):
            self._arrivals.append(time.perf_counter())
        self._queue.put(command)
        self.on_put()

    def drain(self, *, wait: bool, until: float | None = None) -> list[Command]:
        """Remove and return all commands in the queue.  Inference thread only.

        Parameters
        ----------
        wait : bool
            Wait for at least one command.
        until : float, optional
            Time by `time.perf_counter` at which the wait ends, with an empty list; None: no limit.
        """
        commands: list[Command] = []
        if wait:
            timeout = None if until is None else max(0.0, until - time.perf_counter())
            try:
                commands.append(self._queue.get(timeout=timeout))
            except queue.Empty:
                return commands
        while not self._queue.empty():  # no other thread takes any
            commands.append(self._queue.get_nowait())
        return commands

    def drain_requests(self, n_requests: int, until: float) -> list[Command]:
        """Remove and return all commands, after a wait for `n_requests` new requests.

        The wait ends at `until` (`time.perf_counter`), and at any command other than `AddRequest` or `Read`.
        Inference thread only.
        """
        commands = self.drain(wait=False)
        n_left, n_seen = n_requests, 0
        while True:
            for command in commands[n_seen:]:
                if isinstance(command, AddRequest):
                    n_left -= 1
                elif not isinstance(command, Read):
                    return commands
            n_seen = len(commands)
            if n_left <= 0 or time.perf_counter() >= until:
                return commands
            commands += self.drain(wait=True, until=until)

    def take_arrivals(self) -> list[float]:
        """Return the arrival times (`time.perf_counter`) of new requests.  Inference thread only."""
        arrivals = []
        while self._arrivals:
            arrivals.append(self._arrivals.popleft())
        return arrivals


class EventOutbox(Protocol):
    """Destination of an inference thread's events."""

    def post(self, value: list[Event]) -> bool:
        """Post events without waiting; return False if the reader is gone."""


class Outbox(Generic[T]):
    """Queue of values to the event loop in which the outbox was made.

    `anyio.from_thread.run_sync` would wait for the loop once per tick.  The calls of asyncio and trio that
    are used here do not wait.

    Attributes
    ----------
    deliver : callable
        Called in the event loop with each value, in the order of the posts.
    """

    def __init__(self, deliver: Callable[[T], None]) -> None:
        token = anyio.lowlevel.current_token().native_token
        call_soon = getattr(token, "call_soon_threadsafe", None)  # an asyncio event loop
        self._call_soon = call_soon or token.run_sync_soon  # type: ignore[attr-defined]  # trio
        self.deliver = deliver

    def post(self, value: T) -> bool:
        """Deliver `value` soon; False if the event loop is gone.  Any thread; never blocks."""
        try:
            self._call_soon(self.deliver, value)
        except (RuntimeError, OSError):  # closed; trio.RunFinishedError is a RuntimeError too
            return False
        return True
