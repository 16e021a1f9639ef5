"""WorkerThread: calls that may need a large stack or a long time, off the event loop.

Some vocabularies recurse once per character of a run, which overflows a usual stack after a few
hundred characters, and some take seconds for a long text.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio

from cllm.engine.thread.mailbox import Outbox
from cllm.errors import ClosedError

T = TypeVar("T")

STACK_BYTES = 256 << 20  # address space only: unused parts take no memory


class PendingCall(Generic[T]):
    """The answer to one call, on its way to the task that waits for it.  Event loop only."""

    def __init__(self) -> None:
        self._arrived = anyio.Event()
        self.is_wanted = True
        self._result: T | None = None
        self._error: Exception | None = None

    def set(self, result: T | None, error: Exception | None = None) -> None:
        """Set the result or the error, and wake the task in `wait`."""
        self._result, self._error = result, error
        self._arrived.set()

    async def wait(self) -> T:
        """Return the result, or raise the error."""
        await self._arrived.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set to a T together with the event


def start_thread(
    run: Callable[[], object], name: str, stack_bytes: int = STACK_BYTES
) -> threading.Thread:
    """Start a daemon thread with a stack of `stack_bytes` bytes."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    # The stack size is a setting of the process: restore it for all other threads.
    previous = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(previous)
    return thread


class WorkerThread:
    """Runs calls one after another and answers on the event loop it was made in."""

    def __init__(self, name: str) -> None:
        self._outbox: Outbox[tuple[PendingCall[Any], Any, Exception | None]] = Outbox(_deliver)
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], PendingCall[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._is_ending = False
        self._thread = start_thread(self._run, name)

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call` on the thread, or raise its error.

        If the caller is cancelled, a call that has not begun is skipped.

        Raises
        ------
        ClosedError
            The thread is ending.
        """
        reply: PendingCall[T] = PendingCall()
        self._queue.put((call, reply))
        if self._is_ending:  # checked after the put: any call put before `end` is answered
            raise ClosedError("the engine is closed")
        try:
            return await reply.wait()
        finally:
            reply.is_wanted = False  # if the caller was cancelled, the call need not begin

    def prepare(self, call: Callable[[], object]) -> None:
        """Run `call` on the thread; its result and its error are dropped, because a later call repeats it."""
        self._queue.put((call, PendingCall()))

    def end(self) -> None:
        """End the thread after the calls that are queued, and wait for it.  Any other thread."""
        self._is_ending = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, reply = item
            result, error = None, None
            try:
                result = call() if reply.is_wanted else None
            except Exception as caught:
                error = caught
            except BaseException as caught:  # a panic of a Rust library, a SystemExit
                error = RuntimeError(f"{type(caught).__name__}: {caught}")
            self._outbox.post((reply, result, error))
            del item, call, reply, result, error  # a waiting thread must not keep them alive


class WorkerThreads:
    """The worker threads of one engine.

    Their calls may use a vocabulary, so the owner ends the threads before it frees the vocabulary.
    """

    def __init__(self) -> None:
        self._workers: list[WorkerThread] = []
        self._endings: list[Callable[[], None]] = []
        self._has_ended = False

    def start(self, name: str) -> WorkerThread:
        """Start a worker thread and return it.  Event loop only.

        Raises
        ------
        ClosedError
            `end` was called.
        """
        worker = WorkerThread(name)
        self._workers.append(worker)
        if self._has_ended:  # checked after the append: `end` may have missed this worker
            worker.end()
            raise ClosedError("the engine is closed")
        return worker

    def end_first(self, ending: Callable[[], None]) -> None:
        """Register a function that `end` calls first, to stop a child process for which a call may wait."""
        self._endings.append(ending)
        if self._has_ended:  # checked after the append: `end` may have missed this function
            ending()

    def end(self) -> None:
        """End all threads after their queued calls, and wait for them.  Any other thread."""
        self._has_ended = True
        for ending in list(self._endings):
            ending()
        for worker in list(self._workers):
            worker.end()


def _deliver(answer: tuple[PendingCall[Any], Any, Exception | None]) -> None:
    reply, result, error = answer
    reply.set(result, error)
