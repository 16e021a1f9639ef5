"""The suite runs in the background, too, where Ctrl-C is ignored from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Replaces itself by a command that ignores SIGINT, as a shell without job control does for `&`.
IN_THE_BACKGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], "
    "sys.argv[1:])"
)


@pytest.mark.full
def test_what_ends_by_ctrl_c_ends_where_sigint_is_ignored() -> None:
    name = "tests/cli/test_generate.py::test_ctrl_c_ends_it_with_130[prompts0]"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", name]
    command = [sys.executable, "-c", IN_THE_BACKGROUND, *pytest]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
