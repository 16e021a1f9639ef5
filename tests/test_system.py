"""cllm runs on a system that lacks functions of Linux: a process without them does all that users do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cllm import EngineConfig, InvalidArgumentError
from cllm.engine.child_process import is_readable

ROOT = Path(__file__).parents[1]
# As `sitecustomize`, which every process of Python imports first, and the children too.
WITHOUT = """
import os, signal, sys
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
PICTURE = "Image(np.full((32, 32, 3), 255, np.uint8))"
USE = f"""
import anyio, numpy as np
from cllm import Engine, Image
async def use(**options):
    async with Engine(mmproj="auto", n_ctx=1024, n_threads=1, n_threads_batch=1, **options) as engine:
        sum_ = await engine.chat([{{"role": "user", "content": "12+30="}}], temperature=0)
        assert sum_.text == "42", sum_
        given = await engine.generate("12+30=", regex="[xyz]{{3}}")
        assert len(given.text) == 3 and set(given.text) <= {{"x", "y", "z"}}, given
        seen = await engine.generate([{PICTURE}, "What colour is the background?"], temperature=0)
        assert seen.text == "white", seen
        assert await engine.audit() == []
"""
IN_THIS_PROCESS = USE + "anyio.run(use)"
IN_ITS_OWN = (
    USE + "import functools\nanyio.run(functools.partial(use, process=True, preflight=True))"
)
SERVES = """
import json, subprocess, sys, urllib.request
command = [sys.executable, "-m", "cllm", "serve", "--port", "0", "--no-process", "--n-ctx", "1024"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    url = server.stderr.readline().partition(" at ")[2].split()[0]
    while "serving" not in server.stderr.readline():
        assert server.poll() is None
    body = json.dumps({"prompt": "12+30=", "temperature": 0}).encode()
    asked = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    text = urllib.request.urlopen(asked).read()
    assert json.loads(text)["choices"][0]["text"] == "42", text
    server.terminate()  # the end of the standard error is that of the process
    rest = server.stderr.read()
    assert server.wait() == 0, rest
"""


@pytest.mark.parametrize(
    ("missing", "program"),
    [
        pytest.param(NOT_ON_MACOS, IN_THIS_PROCESS, id="macOS"),
        pytest.param(NOT_ON_MACOS, IN_ITS_OWN, id="macOS, process"),
        pytest.param(NOT_ON_WINDOWS, IN_THIS_PROCESS, id="Windows"),
        pytest.param(NOT_ON_WINDOWS, SERVES, id="Windows, server"),
    ],
)
def test_an_engine_runs_without_the_functions_that_a_system_lacks(
    missing: dict[str, list[str]], program: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(**missing))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_where_processes_inherit_no_descriptors_an_engine_has_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cllm.engine.config.can_pass_descriptors", lambda: False)
    with pytest.raises(InvalidArgumentError, match="process is True, must be False on this system"):
        EngineConfig(process=True)


def test_a_pipe_is_readable_when_it_has_data_and_when_it_has_ended() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as stream:
        assert not is_readable(stream, 0.0)
        os.write(theirs, b"x")
        assert is_readable(stream, 60.0)
        assert stream.read(1) == b"x"
        os.close(theirs)
        begun = time.monotonic()
        assert is_readable(stream, 60.0)
        assert time.monotonic() - begun < 60.0
