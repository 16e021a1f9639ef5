"""setup.py builds the library with its own interpreter, tools/setup.sh an environment, and make shows its help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build_with(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py beside this build_llama.sh."""
    shutil.copy(ROOT / "setup.py", folder)
    builder = folder / "build_llama.sh"
    builder.write_text(f"#!/bin/sh\n{script}\n")
    builder.chmod(0o755)
    return subprocess.run(
        [sys.executable, "setup.py", "build_py"],
        cwd=folder, capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def test_the_library_is_built_with_the_interpreter_that_builds_the_wheel(tmp_path: Path) -> None:
    done = build_with('echo "$PYTHON $*"', tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{sys.executable} --portable --verbose --prefix " in done.stdout


def test_more_options_of_the_build_come_from_a_variable(tmp_path: Path) -> None:
    done = build_with('printf "<%s>" "$@"', tmp_path, CLLM_BUILD_OPTIONS="--vulkan --jobs '1'")
    assert done.returncode == 0, done.stderr
    assert "<--vulkan><--jobs><1>" in done.stdout


def test_a_build_that_fails_ends_with_one_line_that_says_why(tmp_path: Path) -> None:
    done = build_with(
        "printf '[1/2] \\377 compiles\\n'; echo 'build_llama.sh: missing: c++' >&2; exit 1",
        tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "cllm: libllama was not built: missing: c++"
    assert "Traceback" not in done.stderr


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_an_environment_that_was_left_without_pip_is_completed(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", tmp_path / "tools")
    for name in ("pyproject.toml", "setup.py"):
        (tmp_path / name).touch()
    write_program(tmp_path / "build_llama.sh", "exit 0")
    write_program(tmp_path / "python", '[ "$1 $2" != "-m venv" ] || touch "$3/pip"')
    write_program(tmp_path / ".venv" / "bin" / "python", f'[ -e "{tmp_path}/.venv/pip" ]')
    environment = {**os.environ, "PYTHON": str(tmp_path / "python"), "CXX": "sh"}
    environment.pop("VENV", None)
    command = [str(tmp_path / "tools" / "setup.sh"), "server"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / ".installed-server").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_help_of_make_runs_nothing() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
