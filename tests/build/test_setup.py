"""setup.py builds the library with its own interpreter, and an error is its last line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
