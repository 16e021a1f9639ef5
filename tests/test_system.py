"""An engine and the server run without the functions that macOS or Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

from cllm import EngineConfig, InvalidArgumentError
from cllm.engine.child_process import is_readable

ROOT = Path(__file__).parents[1]
# Written as `sitecustomize.py`, which Python imports at start, also in child processes.  asyncio comes first: for
# this system it needs `os.sysconf`.
WITHOUT = """
import asyncio, os, signal, sys
for module in {modules!r}:
    sys.modules[module] = None
for name in {functions!r}:
    vars(os).pop(name, None)
for name in {signals!r}:
    vars(signal).pop(name, None)
"""
NOT_ON_MACOS = {
    "modules": [],
    "functions": ["memfd_create", "sched_getaffinity", "sched_setaffinity", "waitid"],
    "signals": [],
}
NOT_ON_WINDOWS = {
    "modules": ["pwd", "resource", "termios"],
    "functions": [
        *NOT_ON_MACOS["functions"], "fork", "getloadavg", "killpg", "mkfifo", "nice", "register_at_fork",
        "setsid", "statvfs", "sysconf",
    ],
    "signals": ["SIGALRM", "SIGHUP", "SIGUSR1", "alarm", "pthread_sigmask", "setitimer"],
}  # fmt: skip
USE = """
import anyio
from cllm import Engine, Image
async def use(**options):
    async with Engine(mmproj="auto", n_ctx=1024, n_threads=1, n_threads_batch=1, **options) as engine:
        sum_ = await engine.chat([{"role": "user", "content": "12+30="}], temperature=0)
        assert sum_.text == "42", sum_
        given = await engine.generate("12+30=", regex="[xyz]{3}")
        assert len(given.text) == 3 and set(given.text) <= {"x", "y", "z"}, given
        seen = await engine.generate([Image("white.png"), "What colour is the background?"], temperature=0)
        assert seen.text == "white", seen
        assert await engine.audit() == []
"""
IN_THIS_PROCESS = USE + "anyio.run(use)"
IN_ITS_OWN = (
    USE + "import functools\nanyio.run(functools.partial(use, process=True, preflight=True))"
)
SERVES = """
import contextlib, json, subprocess, sys, urllib.request
@contextlib.contextmanager
def ended(server):
    try:
        yield
    finally:
        server.kill()
command = [sys.executable, "-m", "cllm", "serve", "--port", "0", "--no-process", "--n-ctx", "1024"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ended(server):
    url = server.stderr.readline().partition(" at ")[2].split()[0]
    while "serving" not in server.stderr.readline():
        assert server.poll() is None
    body = json.dumps({"prompt": "12+30=", "temperature": 0}).encode()
    asked = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    text = urllib.request.urlopen(asked).read()
    assert json.loads(text)["choices"][0]["text"] == "42", text
    server.terminate()  # standard error ends when the process exits
    rest = server.stderr.read()
    assert server.wait() == 0, rest
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("missing", "program"),
    [
        pytest.param(NOT_ON_MACOS, IN_THIS_PROCESS, id="macOS"),
        pytest.param(NOT_ON_MACOS, IN_ITS_OWN, id="macOS, process"),
        pytest.param(NOT_ON_WINDOWS, IN_THIS_PROCESS, id="Windows"),
        pytest.param(NOT_ON_MACOS, SERVES, id="macOS, server"),
        pytest.param(NOT_ON_WINDOWS, SERVES, id="Windows, server"),
    ],
)
def test_an_engine_runs_without_the_functions_that_a_system_lacks(
    missing: dict[str, list[str]], program: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(**missing))
    PIL.Image.new("RGB", (32, 32), "white").save(tmp_path / "white.png")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_process_true_is_rejected_where_children_cannot_inherit_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cllm.engine.config.can_pass_descriptors", lambda: False)
    with pytest.raises(
        InvalidArgumentError,
        match="process is True, must be False on this system: process=True passes sockets",
    ):
        EngineConfig(process=True)


def test_a_pipe_is_readable_when_it_has_data_and_when_it_has_ended() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as stream:
        assert not is_readable(stream, 0.0)
        assert not is_readable(stream, -1.0)
        os.write(theirs, b"x")
        assert is_readable(stream, 30.0)
        assert stream.read(1) == b"x"
        os.close(theirs)
        assert is_readable(stream, 30.0)


@pytest.mark.parametrize(
    ("calls", "code"), [("end_after(60); end_after(1)", 1), ("end_after(1); end_after(0)", 0)]
)
def test_a_thread_ends_a_process_where_there_is_no_alarm(calls: str, code: int) -> None:
    """The process waits for its standard input, which ends after the limit only in the second case."""
    program = f"import signal, sys; del signal.alarm; from cllm.engine.child_process import end_after; {calls}; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        if code == 0:
            process.stdin.close()
        assert process.wait(30) == code
