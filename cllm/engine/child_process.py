"""Run a module of cllm in a process of its own, so that a crash ends that process alone.

Start each child with `child_command`, `child_environment` and `OWN_GROUP`.  The separate process group
keeps a terminal's Ctrl-C away from the child.  Never start a child in a new session.  Linux schedules each
session as a group of its own (`kernel.sched_autogroup_enabled`).  One busy program in another session
then takes most of a processor from the child (measured: 2 tokens/s instead of 37).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from cllm.errors import ClosedError
from cllm.system import SIGKILL, disable_core_files

START_S = 60.0
MAX_READ = 1 << 16
# Settings of `subprocess.Popen` that keep a terminal's Ctrl-C away from a child.
OWN_GROUP: dict[str, Any] = {"process_group": 0}
if hasattr(subprocess, "CREATE_NEW_PROCESS_GROUP"):  # Windows
    OWN_GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
POLL_S = 0.005  # Windows cannot wait for a pipe and a deadline at once
_alarm: threading.Timer | None = None


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; the module imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment in which a child imports the same modules as this process."""
    path = [*filter(None, sys.path), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def end_after(seconds: int) -> None:
    """End this process after `seconds`, also while a native call runs; 0 cancels the limit.

    A later call replaces the limit.  Systems without SIGALRM use a thread, which a native call that holds the GIL
    delays.
    """
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)
        return
    global _alarm
    if _alarm is not None:
        _alarm.cancel()
    _alarm = threading.Timer(seconds, os._exit, (1,)) if seconds else None
    if _alarm is not None:
        _alarm.daemon = True
        _alarm.start()


def is_readable(stream: IO[bytes], limit_s: float) -> bool:
    """Return True as soon as a pipe has data or has ended; False after `limit_s` seconds."""
    if os.name == "posix":
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * limit_s)))
    import _winapi
    import msvcrt

    handle = msvcrt.get_osfhandle(stream.fileno())  # type: ignore[attr-defined, unused-ignore]
    deadline = time.monotonic() + limit_s
    with suppress(BrokenPipeError):  # it has ended
        while not _winapi.PeekNamedPipe(handle)[0]:  # type: ignore[attr-defined, unused-ignore]
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    return True


def answers_of_this_process() -> TextIO:
    """Return a text stream on standard output, and disable core files.

    From then on, output of libraries to standard output goes to standard error.
    """
    disable_core_files()
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return answers


def answer_requests(
    answers: TextIO,
    ready: Mapping[str, Any],
    answer: Callable[..., Mapping[str, Any]],
    *,
    alarm_s: int,
) -> None:
    """Write `ready`, then answer each JSON line of standard input until standard input ends.

    Parameters
    ----------
    answer : callable
        Called with the fields of a request as keyword arguments; returns the fields of the answer.
    alarm_s : int
        Time limit of one answer in seconds; then this process ends.  An orphan in an endless call would
        never see that its input has ended.
    """
    reply = ready
    while True:
        end_after(0)
        print(json.dumps(reply), file=answers, flush=True)  # to the parent process
        request = sys.stdin.buffer.readline()
        if not request:
            return
        end_after(alarm_s)
        reply = answer(**json.loads(request))


class TooSlowError(Exception):
    """The process has not answered in time."""


class EndedError(Exception):
    """The process has ended instead of answering."""


class JsonChild:
    """Child process that answers each line of JSON with a line of JSON; the first request starts it.

    The process writes one line when it is ready.  A field `error` in that line says why it cannot serve.
    Any thread may call the methods; requests of several threads wait for each other.

    Parameters
    ----------
    module, *arguments : str
        Name of the module, and its command-line arguments.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = child_command(module, *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        self._n_endings = 0
        self._is_closed = False

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a request; start the process if none runs.

        Parameters
        ----------
        limit_s : float
            Seconds for the answer; the start of the process has a limit of its own (`START_S`).

        Raises
        ------
        TooSlowError, EndedError
            The process did not answer in time, or ended.  The next request starts another process.
        ClosedError
            `stop` or `close` was called.
        OSError
            No process can be started, or it does not get ready.
        """
        n_endings = self._n_endings
        with self._asking:
            return self._ask(request, limit_s, n_endings)

    def interrupt(self) -> None:
        """End the process and return at once; a running `ask` raises `EndedError`."""
        self._n_endings += 1
        if (process := self._process) is not None:
            process.kill()  # the thread in `ask` then reads the end of the output

    def end(self) -> None:
        """End the process and wait for its end; a running `ask` raises `EndedError`."""
        self.interrupt()
        with self._asking:
            self._end()

    def stop(self) -> None:
        """End the process for good and return at once; a running `ask` raises `ClosedError`."""
        self._is_closed = True
        self.interrupt()

    def close(self) -> None:
        """Stop, and wait for the end of the process.  Closing twice is allowed."""
        self.stop()
        self.end()

    def _ask(self, request: Mapping[str, Any], limit_s: float, n_endings: int) -> dict[str, Any]:
        answer: dict[str, Any] | None = None
        try:
            process = self._started(n_endings)
            assert process.stdin is not None
            # The process may have ended: `_read_line` raises `EndedError`.
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            answer = _read_line(process, limit_s)
            return answer
        except (EndedError, OSError):
            if self._is_closed:
                raise ClosedError("the engine is closed") from None
            raise
        finally:
            if answer is None:  # a late answer would be taken for that of the next request
                self._end()

    def _started(self, n_endings: int) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise ClosedError("the engine is closed")
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed between two requests
        if self._process is None:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                **OWN_GROUP,
            )
            self._process = process
            self._finalizer = weakref.finalize(self, _end_leaked, process, os.getpid())
            if self._n_endings != n_endings:  # `end` was called before the process existed
                raise EndedError
            try:
                self._wait_until_ready(process)
            except OSError:
                if self._n_endings != n_endings:
                    raise EndedError from None
                raise
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        try:
            reason = _read_line(process, START_S).get("error")
        except TooSlowError:
            reason = f"it is not ready within {START_S:g} s"
        except EndedError:
            reason = "it ended"
        if reason:
            raise OSError(f"{self._command[3]} does not start: {reason}")

    def _end(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            self._finalizer.detach()
            _end(process)


def _end_leaked(process: subprocess.Popen[bytes], pid: int) -> None:
    """End the process of a `JsonChild` that was collected, or is still open at exit.

    A forked child of this process does nothing: the process belongs to its parent.
    """
    if pid == os.getpid():
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes the pipes, and waits for the killed process


def _read_line(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
    """Return the object in the next line of JSON.

    Raises
    ------
    TooSlowError, EndedError
        No whole line came within `limit_s` seconds, or the output has ended.
    """
    assert process.stdout is not None
    data = b""
    for more in read_until(process.stdout, time.monotonic() + limit_s):
        data += more
        if data.endswith(b"\n"):
            line: dict[str, Any] = json.loads(data)
            return line
    raise EndedError


def read_until(stream: IO[bytes], deadline: float) -> Iterator[bytes]:
    """Yield the output of a process until its end.

    Parameters
    ----------
    deadline : float
        Time by `time.monotonic`, in seconds.

    Raises
    ------
    TooSlowError
        The output has not ended at the deadline.
    """
    # The deadline is checked before each read: a process may write for ever.
    while (left_s := deadline - time.monotonic()) > 0 and is_readable(stream, left_s):
        if not (data := os.read(stream.fileno(), MAX_READ)):
            return
        yield data
    raise TooSlowError


def how_ended(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit status.

    Parameters
    ----------
    code : int
        `returncode` of `subprocess.Popen`: negative for a signal.
    """
    if code >= 0:
        return f"status {code}"
    if code == -SIGKILL:
        return "SIGKILL (the kernel sends it when memory runs out)"
    try:
        return signal.Signals(-code).name
    except ValueError:  # most real-time signals
        return f"signal {-code}"
