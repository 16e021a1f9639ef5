"""One pointer from libllama: used by one thread, freed exactly once, never after a fork.

Free it with `with` or `close()`.  A handle that is collected while it is open is freed with a
`ResourceWarning`.  A handle keeps its parent alive, and a parent with open children refuses to close.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import TracebackType
from typing import Any, Self

from cllm.errors import ClosedError, InUseError, WrongProcessError, WrongThreadError
from cllm.system import call_in_forks

# Grows in every forked child: a handle made before the fork is then recognised.
_fork_generation = 0


def _on_fork() -> None:
    global _fork_generation
    _fork_generation += 1


call_in_forks(_on_fork)


def fork_generation() -> int:
    """Return the number of forks between the first process and this one; it changes in every forked child."""
    return _fork_generation


class NativeHandle:
    """Pointer from libllama that belongs to one thread of one process.

    Use raises `ClosedError` after `close`, and `WrongThreadError` or `WrongProcessError` elsewhere.

    Parameters
    ----------
    pointer : ctypes pointer
        Not NULL; the handle owns it from now on.
    free : callable
        Takes the pointer; called exactly once.
    parent : NativeHandle, optional
        Must outlive this handle; `parent.close()` raises while this handle is open.
    """

    def __init__(
        self, pointer: Any, free: Callable[[Any], None], parent: NativeHandle | None = None
    ) -> None:
        self._raw = pointer
        self._free = free
        self._parent = parent
        self._owner = get_ident()
        self._generation = _fork_generation
        self._children: weakref.WeakSet[NativeHandle | _User] = weakref.WeakSet()
        if parent is not None:
            parent._children.add(self)
        # The arguments must not mention `self`, or it would never be collected; the parent is
        # there so that it cannot be collected (and freed) before its child.
        self._finalizer = weakref.finalize(
            self, _free_leaked, pointer, free, type(self).__name__, parent, _fork_generation
        )
        # At exit only the main thread's handles are freed: another owner may be inside a call
        # (the engine joins its thread first and lets it free what it owns).
        self._finalizer.atexit = get_ident() == main_thread().ident

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Run the rest of a constructor, and close the handle if it raises: the caller has no object to close."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _kept_open(self) -> Iterator[None]:
        """Reject `close` inside the block, also in another thread."""
        user = _User()
        self._children.add(user)
        try:
            yield
        finally:
            self._children.discard(user)

    @property
    def closed(self) -> bool:
        """True if the pointer has been freed."""
        return not self._finalizer.alive

    @property
    def _pointer(self) -> Any:
        """The raw pointer.  Every call into libllama goes through here (or `_shared_pointer`)."""
        if self._owner != get_ident():
            raise WrongThreadError(
                f"{type(self).__name__} belongs to thread {self._owner}, and may not be called from "
                f"thread {get_ident()}"
            )
        return self._shared_pointer

    @property
    def _shared_pointer(self) -> Any:
        """The raw pointer for the few calls that llama.cpp documents as thread-safe."""
        if not self._finalizer.alive:
            raise ClosedError(f"{type(self).__name__} is closed")
        if self._generation != _fork_generation:
            raise WrongProcessError(
                f"{type(self).__name__} was made before a fork; libllama cannot be used in the "
                "child, start it with the spawn method instead"
            )
        return self._raw

    def close(self) -> None:
        """Free the pointer.  Closing twice is allowed.

        Raises
        ------
        InUseError
            A child handle is still open.
        WrongThreadError, WrongProcessError
            The caller is not the owner; nothing is freed.
        """
        if self.closed:
            return
        pointer = self._pointer
        open_children = [child for child in self._children if not child.closed]
        if open_children:
            raise InUseError(
                f"{self!r} cannot be closed before {len(open_children)} objects of it, "
                f"such as {open_children[0]!r}"
            )
        self._finalizer.detach()
        self._free(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'closed' if self.closed else 'open'}>"


class _User:
    """A call that uses a handle; it counts as an open child."""

    closed = False


def _free_leaked(
    pointer: Any,
    free: Callable[[Any], None],
    name: str,
    _parent: NativeHandle | None,
    generation: int,
) -> None:
    if generation != _fork_generation:
        return
    # Free first: with warnings as errors the next line raises.
    free(pointer)
    warnings.warn(f"unclosed {name}", ResourceWarning, stacklevel=2)
