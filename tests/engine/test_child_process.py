"""A helper is the Python that runs here, with what could be imported here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import cllm
from cllm.engine.child_process import (
    EndedError,
    JsonChild,
    child_command,
    child_environment,
    how_ended,
)
from cllm.engine.process.spawn import Spawned
from cllm.errors import ClosedError

TEMPLATE_CHILD = "cllm.engine.chat.template_child"
TEMPLATE = {"source": "{{ x }}", "variables": {"x": "1"}, "now": "2026-01-02T03:04:05"}


@pytest.fixture
def child() -> Iterator[JsonChild]:
    child = JsonChild(TEMPLATE_CHILD, str(512 << 20))
    yield child
    child.close()


def check_group(pid: int) -> None:
    """A process has the session of this one and a process group of its own."""
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid


def test_the_engine_s_process_shares_the_scheduling_group_and_not_the_signals() -> None:
    spawned = Spawned()
    try:
        check_group(spawned.process.pid)
    finally:
        spawned.close()


def test_a_child_that_answers_shares_the_scheduling_group_and_not_the_signals(
    child: JsonChild,
) -> None:
    child.ask(TEMPLATE, 60.0)
    assert child._process is not None
    check_group(child._process.pid)


def test_no_module_starts_a_process_in_a_session_of_its_own() -> None:
    """Linux schedules a session as one: a busy program would take its compute threads' time."""
    package = Path(cllm.__file__).parent
    for file in package.rglob("*.py"):
        text = file.read_text()
        assert "start_new_session" not in text, file
        assert "setsid" not in text, file


def test_ending_a_child_fails_the_request_that_runs_and_the_next_gets_another_process(
    child: JsonChild,
) -> None:
    child.ask(TEMPLATE, 60.0)
    assert child._process is not None
    first = child._process.pid
    raised: list[BaseException] = []

    def ask() -> None:
        endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        try:
            child.ask(TEMPLATE | {"source": endless}, 60.0)
        except (EndedError, ClosedError) as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not child._asking.locked():
        assert asking.is_alive()
    child.end()
    asking.join()
    assert isinstance(raised[0], EndedError)
    child.ask(TEMPLATE, 60.0)
    assert child._process.pid != first


def test_a_helper_imports_what_this_process_would_and_nothing_from_the_working_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError")
    done = subprocess.run(
        child_command("cllm.engine.preflight_child"),
        cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    # It has come as far as its missing argument.
    assert done.stderr.splitlines()[-1] == "IndexError: list index out of range"


def test_a_helper_gets_its_arguments_as_they_are() -> None:
    command = child_command("cllm.engine.preflight_child", "a b", "--c")
    assert command[0] == sys.executable
    assert command[-2:] == ["a b", "--c"]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "status 0"), (3, "status 3"), (-6, "SIGABRT"), (-40, "signal 40"),
        (-9, "SIGKILL (the kernel sends it when memory runs out)"),
    ],
)  # fmt: skip
def test_the_end_of_a_process_has_a_name(code: int, how: str) -> None:
    assert how_ended(code) == how
