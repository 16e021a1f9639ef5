"""Try a model in a process of its own first: a damaged file, or a wrong build, ends that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cllm.doctor.findings import Check, Status


def preflight_check(path: Path) -> Check:
    """Load the model in a child process and decode a few tokens there."""
    done = subprocess.run(
        [sys.executable, "-m", "cllm.doctor.preflight_helper", os.fspath(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return Check("preflight", Status.OK, "a child process loaded the model and decoded with it")
    last_words = _last_line(done.stdout) or _last_line(done.stderr) or "it said nothing"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Check("preflight", Status.FAILED, f"{name} ends a process with it: {last_words}")
    return Check("preflight", Status.FAILED, last_words)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
