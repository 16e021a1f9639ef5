"""LoopThread: an event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from cllm.errors import ClosedError

T = TypeVar("T")


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

    def wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function in the loop and return its result; cancel it if the wait is interrupted.

        Raises
        ------
        ClosedError
            The loop has ended, the program is ending, or this is the loop's thread.
        """
        if sys.is_finalizing():  # the thread does not run any more, and no wait would end
            raise ClosedError("the program is ending")
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

        # An interrupt may come at any moment, also before there is a future to cancel.
        try:
            try:
                future = self._portal.start_task_soon(call)
            except RuntimeError as error:
                raise ClosedError(f"the event loop cannot be called: {error}") from None
            return future.result()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._call_soon(leave)
            raise

    def stop(self) -> None:
        """Let the loop end, without waiting for it.  Any thread, also that of the loop."""
        if self.is_own:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._call_soon(self._stopping.set)

    def end(self) -> None:
        """Let the loop end, and wait until its thread has ended."""
        self.stop()
        self._thread.join()
