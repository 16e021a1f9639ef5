"""LoopThread: an event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from cllm.errors import ClosedError, WrongProcessError

T = TypeVar("T")


def interruptible(
    function: Callable[[], Awaitable[T]],
) -> tuple[Callable[[], Coroutine[Any, Any, T]], Callable[[], None]]:
    """Return a call of a function, and a function that cancels this call, at any moment; both for the event loop."""
    scopes: list[anyio.CancelScope] = []
    is_left = False

    async def call() -> T:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            if not is_left:
                return await function()
        raise ClosedError("the call was interrupted")

    def leave() -> None:
        nonlocal is_left
        is_left = True
        for scope in scopes:
            scope.cancel()

    return call, leave


class LoopThread:
    """A running event loop of asyncio, in a thread that does not keep the program from ending.

    Raises
    ------
    OSError
        The system has no file descriptors or threads left.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        started: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop, anyio.Event]] = Future()

        async def serve() -> None:
            stopping = anyio.Event()
            async with BlockingPortal() as portal:
                started.set_result((portal, asyncio.get_running_loop(), stopping))
                await stopping.wait()

        def run() -> None:
            try:
                anyio.run(serve)
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

        self._thread = threading.Thread(target=run, name="cllm-sync", daemon=True)
        self._thread.start()
        self._portal, loop, self._stopping = started.result()
        self._call_soon = loop.call_soon_threadsafe

    @property
    def is_own(self) -> bool:
        """False in a forked child, which has no such thread."""
        return self._pid == os.getpid()

    def _check_own(self) -> None:
        if not self.is_own:
            raise WrongProcessError("an engine of the parent process cannot be used after a fork")

    @property
    def is_current(self) -> bool:
        """True in the loop's own thread."""
        return threading.current_thread() is self._thread

    def wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function in the loop and return its result; cancel it if the wait is interrupted.

        Raises
        ------
        ClosedError
            The loop has ended, the program is ending, or this is the loop's thread.
        WrongProcessError
            This is a forked child.
        """
        if sys.is_finalizing():  # the thread does not run any more, and no wait would end
            raise ClosedError("the program is ending")
        self._check_own()
        call, leave = interruptible(function)
        # An interrupt may come at any moment, also before there is a future to cancel.
        try:
            return self.begin(call).result()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._call_soon(leave)
            raise

    def begin(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Call a function in the loop, and return its future; see `wait` for the errors."""
        self._check_own()
        try:
            return self._portal.start_task_soon(function)
        except RuntimeError as error:
            raise ClosedError(f"the event loop cannot be called: {error}") from None

    def stop(self) -> None:
        """Let the loop end, without waiting for it.  Any thread, also that of the loop."""
        if self.is_own:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._call_soon(self._stopping.set)

    def end(self) -> None:
        """Let the loop end, and wait until its thread has ended."""
        self.stop()
        self._thread.join()
