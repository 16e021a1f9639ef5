"""How a module of ours runs in a process of its own: what ends that process ends no other.

Start it with these and in a session of its own, since Ctrl-C is for the parent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, with nothing imported from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """The environment in which it imports what this process would import."""
    path = [*filter(None, sys.path), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
