"""The supervisor by itself, with workers that only live and die."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.server.supervisor import MAX_RESTARTS, Supervisor, listen

SETTINGS = b'{"answer": 42}\n'


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


@pytest.fixture
def births(tmp_path: Path) -> Path:
    """A file that gets a line from every worker."""
    return tmp_path / "births"


def worker(births: Path, code: str, prepare: str = "") -> list[str]:
    """The command of a worker: it signs the book, reads its settings, and does this."""
    prelude = (
        "import os, signal, socket, sys, time\n"
        f"births = open({str(births)!r}, 'a+'); births.write('born\\n'); births.flush()\n"
        "births.seek(0); n_births = len(births.readlines())\n"
        "settings = sys.stdin.readline()\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])\n"
    )
    return [sys.executable, "-c", prelude.replace("settings =", prepare + "settings =") + code]


def n_births(births: Path) -> int:
    return len(births.read_text().splitlines())


def test_a_crash_loop_ends_with_a_clear_message_and_exit_code_1(
    listener: socket.socket, births: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = worker(births, "os.kill(os.getpid(), signal.SIGSEGV)")
    with caplog.at_level(logging.ERROR):
        assert Supervisor(command, SETTINGS, listener).run() == 1
    assert n_births(births) == MAX_RESTARTS + 1
    assert "killed 4 times within 60 s, last by SIGSEGV: giving up" in caplog.messages[-1]
    assert caplog.messages[0] == "the worker was killed by SIGSEGV; starting another"


def test_deaths_that_are_far_apart_are_forgiven(listener: socket.socket, births: Path) -> None:
    command = worker(births, "n_births == 9 and sys.exit(0); os.kill(os.getpid(), 9)")
    deaths = iter(range(0, 1000, 25))  # three a minute, and never more
    assert Supervisor(command, SETTINGS, listener, clock=lambda: next(deaths)).run() == 0
    assert n_births(births) == 9


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_worker_that_exits_by_itself_is_not_started_again(
    listener: socket.socket, births: Path, code: int
) -> None:
    assert Supervisor(worker(births, f"sys.exit({code})"), SETTINGS, listener).run() == code
    assert n_births(births) == 1


def test_a_worker_that_reads_no_settings_tells_why_by_its_exit_code(
    listener: socket.socket,
) -> None:
    command = [sys.executable, "-c", "import os; os.close(0); os._exit(5)"]
    assert Supervisor(command, b"x" * (1 << 20), listener).run() == 5


def test_every_worker_gets_the_settings_and_the_same_listening_socket(
    listener: socket.socket, births: Path
) -> None:
    check = (
        f"assert settings == {SETTINGS.decode()!r}\n"
        f"with socket.socket(fileno={listener.fileno()}) as inherited:\n"
        f"    assert inherited.getsockname() == {listener.getsockname()!r}\n"
        "    inherited.detach()\n"
        "n_births == 3 and sys.exit(0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert Supervisor(worker(births, check), SETTINGS, listener).run() == 0
    assert n_births(births) == 3


def test_the_signal_handlers_are_as_before_afterwards(
    listener: socket.socket, births: Path
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    Supervisor(worker(births, "pass"), SETTINGS, listener).run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_between_two_workers_starts_no_other(
    listener: socket.socket, births: Path
) -> None:
    def clock() -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return time.monotonic()

    command = worker(births, "n_births == 2 and sys.exit(7); os.kill(os.getpid(), signal.SIGKILL)")
    assert Supervisor(command, SETTINGS, listener, clock=clock).run() == 0
    assert n_births(births) == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_while_a_worker_is_started_reaches_it(
    listener: socket.socket, births: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """It may come to any thread, and then the main thread's mask does not put it off."""

    def take_it() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    def interrupt() -> None:
        thread = threading.Thread(target=take_it)
        thread.start()
        thread.join()

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            if before:
                interrupt()
            super().__init__(*args, **options)
            if not before:
                interrupt()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    stop = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    command = worker(births, "time.sleep(60); sys.exit(7)", prepare=stop)
    assert Supervisor(command, SETTINGS, listener).run() == 0


def test_a_worker_that_is_killed_while_it_shuts_down_is_not_replaced_but_told(
    listener: socket.socket, births: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = worker(births, "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    assert Supervisor(command, SETTINGS, listener).run() == 1  # by SIGTERM, which it did not heed
    assert n_births(births) == 1
    assert caplog.messages == ["the worker was killed by SIGTERM while it was shutting down"]
