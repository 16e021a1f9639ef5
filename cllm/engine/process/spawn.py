"""Spawn: the interpreter of an engine's process, which imports what it needs while its settings are not known yet.

Most of the time to a first answer of a small model is imports, here and there: `spawning_ahead` lets both
go on at once.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from cllm.engine.child_process import child_command, child_environment
from cllm.engine.process.batch_record import memory_file


class Spawned:
    """An interpreter that waits for its settings on its standard input; at the end of that it ends.

    Attributes
    ----------
    process : subprocess.Popen
    socket : socket.socket
        Ours of the pair; not blocking.
    batch_file : file
        Of its `BatchRecord`; to be closed by who has mapped it.
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
                    process_group=0,
                )
            on_error.pop_all()
        self.socket.setblocking(False)

    @property
    def is_usable(self) -> bool:
        """Return True if the process lives and belongs to this process."""
        return self._parent == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End it, and wait for that, if it is this process's."""
        if self._parent == os.getpid():
            self.process.kill()
            self.process.wait()
        for file in (self.process.stdin, self.process.stderr, self.socket, self.batch_file):
            if file is not None:
                file.close()


_ahead: list[Spawned] = []


@contextmanager
def spawning_ahead() -> Iterator[None]:
    """Spawn now the process that the next engine takes; one that is not taken ends with the block."""
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
