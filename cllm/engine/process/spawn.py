"""Spawn: starts the process of an engine, which imports its modules before it receives its settings.

Imports in both processes take most of the time to the first answer of a small model.  With
`spawning_ahead` both processes import at the same time.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from cllm.engine.child_process import OWN_GROUP, child_command, child_environment
from cllm.engine.process.batch_record import memory_file


class Spawned:
    """A process that waits for its settings on its standard input; it exits if that ends without settings.

    Attributes
    ----------
    process : subprocess.Popen
    socket : socket.socket
        The parent's end of the connection; non-blocking.
    batch_file : file
        File of the process's `BatchRecord`; the caller closes it after mapping it.
    """

    def __init__(self) -> None:
        self._parent = os.getpid()
        with ExitStack() as on_error:  # the system may have no room for any of these
            ours, theirs = socket.socketpair()
            self.socket: socket.socket = ours
            on_error.enter_context(self.socket)
            with theirs:
                self.batch_file: IO[bytes] = on_error.enter_context(memory_file())
                fds = theirs.fileno(), self.batch_file.fileno()
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    child_command("cllm.engine.process.child", *map(str, fds)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=child_environment(),
                    pass_fds=fds,
                    **OWN_GROUP,
                )
            on_error.pop_all()
        self.socket.setblocking(False)

    @property
    def is_usable(self) -> bool:
        """True if the process lives and is a child of this process, not of one that forked this one."""
        return self._parent == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """Kill the process and wait for its end, if it is a child of this process; close its files."""
        if self._parent == os.getpid():
            self.process.kill()
            self.process.wait()
        for file in (self.process.stdin, self.process.stderr, self.socket, self.batch_file):
            if file is not None:
                file.close()


_ahead: list[Spawned] = []


@contextmanager
def spawning_ahead() -> Iterator[None]:
    """Start the process of the next engine now; if no engine takes it, it is killed at the end of the block."""
    _ahead.append(Spawned())
    try:
        yield
    finally:
        while (spawned := _taken()) is not None:
            spawned.close()


def spawned() -> Spawned:
    """Return the process that was spawned ahead, or a new one.  Any thread."""
    while (ahead := _taken()) is not None:
        if ahead.is_usable:
            return ahead
        ahead.close()
    return Spawned()


def _taken() -> Spawned | None:
    try:
        return _ahead.pop()
    except IndexError:
        return None
