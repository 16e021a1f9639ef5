"""A helper is the Python that runs here, with what could be imported here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cllm.engine.child_process import child_command, child_environment


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
