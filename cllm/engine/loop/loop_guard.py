"""LoopGuard: the event loop that an engine was entered in.

A task that waits in one event loop is never woken from another: a call from there would hang.
"""

from __future__ import annotations

import asyncio
from threading import get_ident
from typing import Protocol

import anyio
from anyio.lowlevel import current_token

from cllm.errors import WrongThreadError


class Waiter(Protocol):
    """Event that one task waits for, once."""

    def set(self) -> None:
        """Wake the task."""

    async def wait(self) -> None:
        """Wait until it is set."""


class FutureWaiter:
    """`Waiter` of asyncio: a future, which needs a fifth of the calls of an `anyio.Event`."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        """See `Waiter`."""
        if not self._future.done():  # its task may have been cancelled
            self._future.set_result(None)

    async def wait(self) -> None:
        """See `Waiter`."""
        await self._future


class LoopGuard:
    """Guard that remembers the event loop in which it was made."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._token = current_token()
        loop = self._token.native_token
        self._asyncio_loop = loop if isinstance(loop, asyncio.AbstractEventLoop) else None
        # `anyio.Event()` asks each time which loop is running: microseconds for every token.
        self._event_type = type(anyio.Event())

    def waiter(self) -> Waiter:
        """Return a new waiter for one task of this loop."""
        loop = self._asyncio_loop
        return self._event_type() if loop is None else FutureWaiter(loop)

    def check(self) -> None:
        """Refuse callers from another thread or another event loop.

        Raises
        ------
        WrongThreadError
        """
        self.check_thread()
        if self._asyncio_loop is not None and asyncio._get_running_loop() is self._asyncio_loop:
            return
        try:
            is_home = current_token() == self._token
        except anyio.NoEventLoopError:
            return  # no event loop runs here: the caller cannot wait, and so cannot hang
        if not is_home:
            raise WrongThreadError("the engine was entered in another event loop than this one")

    def check_thread(self) -> None:
        """Raise `WrongThreadError` in another thread; much faster than `check`, which looks at the loop too."""
        if get_ident() != self._thread:
            raise WrongThreadError(
                f"the engine belongs to the event loop of thread {self._thread}, called from "
                f"{get_ident()}: `anyio.from_thread.run` calls it from there"
            )
