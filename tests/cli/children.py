"""`cllm` in this process, or in a child process: with pipes, or on a terminal of its own.

Run as a program, this module takes the terminal of its standard input and then runs `cllm`.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import termios
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from cllm.cli import app

ROOT = Path(__file__).parents[2]
CLLM = [sys.executable, "-W", "error", "-m", "tests.cli.children"]

CTRL_C, CTRL_D, BACKSPACE = "\x03", "\x04", "\x7f"

# Options for an answer that does not end by itself soon.
ENDLESS = ("--temperature", "0", "--ignore-eos", "--n-ctx", "16384")


def run_cllm(
    *arguments: str | bytes, input: str | bytes = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `cllm` to its end in this process, since a new process spends most of its time on imports.

    `serve` cannot run here, apart from its --help: it changes signal handlers and logging.
    """
    assert arguments[:1] != ("serve",) or "--help" in arguments
    given = input.encode() if isinstance(input, str) else input
    with ExitStack() as restored:
        patch = restored.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["cllm", *map(os.fsdecode, arguments)])
        patch.chdir(ROOT)
        files = [restored.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        for fd, file in enumerate(files):
            name = ("stdin", "stdout", "stderr")[fd]
            if fd:
                getattr(sys, name).flush()
            kept = os.dup(fd)
            restored.callback(os.close, kept)
            restored.callback(os.dup2, kept, fd)
            os.dup2(file.fileno(), fd)
            stream = os.fdopen(fd, "w" if fd else "r", closefd=False)
            restored.callback(stream.close)
            patch.setattr(sys, name, stream)
        code = app.run()
        sys.stdout.flush()
        sys.stderr.flush()
        for file in files:
            file.seek(0)
        said = [file.read().decode() for file in files[1:]]
    return subprocess.CompletedProcess(arguments, code, *said)


def run_cllm_apart(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `cllm` to its end in a new process: some libraries read the environment when imported."""
    return subprocess.run(
        [*CLLM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


def start_cllm(*arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start `cllm` in a new process; `streams` are those of `subprocess.Popen`: by default no input, and pipes."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*CLLM, *arguments], cwd=ROOT, bufsize=0, **{**pipes, **streams})


class Terminal:
    """A terminal, and `cllm` on it; killed at the end of its `with` if it has not ended."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 500))  # no line is broken in two
        self.child = start_cllm(
            *arguments,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "dumb", **(environment or {})},
        )  # fmt: skip
        os.close(slave)
        self._bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)

    def until(self, text: str) -> str:
        """Read until the text appears, and return everything up to its end."""
        wanted = text.encode()
        while wanted not in self._bytes:
            if not (chunk := self._read()):
                raise AssertionError(f"{text!r} did not appear after {self._bytes!r}")
            self._bytes += chunk
        before, found, self._bytes = self._bytes.partition(wanted)
        return (before + found).decode()

    def rest(self) -> str:
        """Return the output up to the end of the child."""
        while chunk := self._read():
            self._bytes += chunk
        return self._bytes.decode()

    def send(self, text: str) -> None:
        """Type a text on the terminal."""
        os.write(self._master, text.encode())

    def exit_code(self) -> int:
        """Wait until the child has ended."""
        self.rest()
        return self.child.wait()

    def _read(self) -> bytes:
        try:
            return os.read(self._master, 1 << 16)
        except OSError:  # the child has ended
            return b""


def main() -> int:
    """Run the command line on the terminal that it was started on."""
    import fcntl

    from cllm.cli.app import run

    if os.isatty(0) and os.getsid(0) == os.getpid():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # without it Ctrl-C would not send SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
