"""Caller: an engine's methods for threads that have no event loop."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

from cllm import Completion, DeadlineError, TokenDelta, TokenStream
from cllm.engine.loop.loop_thread import interruptible
from cllm.errors import WrongProcessError

R = TypeVar("R")


class SyncStream:
    """A `TokenStream` for a thread that has no event loop."""

    def __init__(self, stream: TokenStream, caller: Caller) -> None:
        self._stream = stream
        self._caller = caller

    def __iter__(self) -> Iterator[TokenDelta]:
        while (delta := self._caller.run(lambda: anext(self._stream, None))) is not None:
            yield delta

    def completion(self) -> Completion:
        """See `TokenStream`."""
        return self._caller.run(self._stream.completion)


class Caller:
    """Caller of an engine from threads without an event loop.

    It remembers the event loop of the engine: the one that is running when the caller is made or first used.
    Libraries have each method twice, async and synchronous.  The synchronous methods work in worker threads.
    In the thread of the event loop they would wait forever, so `run` raises an error there.

    Parameters
    ----------
    token : EventLoopToken, optional
        Token of the engine's event loop; None: the running one.
    """

    def __init__(self, token: EventLoopToken | None = None) -> None:
        self._token = token
        self._pid = os.getpid()
        self.remember()

    def remember(self) -> None:
        """Remember the running event loop as the engine's, unless one is remembered or none is running."""
        if self._token is None and _is_in_event_loop():
            self._token, self._pid = current_token(), os.getpid()

    def run(self, call: Callable[[], Awaitable[R]], instead: str = "the async method") -> R:
        """Run a call in the engine's event loop, and wait for its result.  Any thread without an event loop.

        A wait that is interrupted (Ctrl-C) cancels the call.

        Parameters
        ----------
        instead : str
            Name of the async method that does the same, for the error.

        Raises
        ------
        RuntimeError
            An event loop runs in this thread, or the engine's event loop is not known yet.
        WrongProcessError
            This is a forked child: the event loop runs in the parent only.
        """
        if _is_in_event_loop():
            raise RuntimeError(
                f"an event loop runs in this thread: use {instead} there, or call this in another thread"
            )
        if self._token is None:
            raise RuntimeError(f"the engine's event loop is not known yet: await {instead} first")
        if not self._is_own:
            raise WrongProcessError("an engine of the parent process cannot be used after a fork")
        run, leave = interruptible(call)
        try:
            return from_thread.run(run, token=self._token)
        except BaseException:
            loop: Any = self._token.native_token
            schedule = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
            with suppress(RuntimeError):  # it has ended
                schedule(leave)
            raise

    @property
    def _is_own(self) -> bool:
        """False in a forked child, where the event loop does not run."""
        return self._pid == os.getpid()

    @contextmanager
    def stream(
        self, make: Callable[[], TokenStream], instead: str = "the async method"
    ) -> Iterator[SyncStream]:
        """Yield a stream that is opened in the engine's event loop, and close it after the block; see `run`."""

        async def enter() -> TokenStream:
            return await make().__aenter__()

        stream = self.run(enter, instead)
        try:
            yield SyncStream(stream, self)
        finally:
            # Without the event loop, at the end of the program and after a fork, nothing can be closed.
            if not sys.is_finalizing() and self._is_own:
                self.run(lambda: stream.__aexit__(None, None, None))


def _is_in_event_loop() -> bool:
    try:
        anyio.get_current_task()
    except RuntimeError:  # sniffio's variable is copied to worker threads, and names a loop there
        return False
    return True


def name_in(choice: object) -> object:
    """Return the tool that a `tool_choice` of OpenAI's format names, and any other choice as it is."""
    if not isinstance(choice, dict):
        return choice
    function = choice.get("function", choice)
    return function.get("name", function.get("type"))


def in_time(completion: Completion) -> Completion:
    """Return a completion; raise `DeadlineError` if its time was over: an output that looks whole is wrong."""
    if completion.finish_reason == "deadline":
        raise DeadlineError("the timeout of the request is over")
    return completion


def whole_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a tool call; None if their JSON was cut off: no program may run half a call."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None
