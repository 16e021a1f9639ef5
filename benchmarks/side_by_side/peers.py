"""The available peers: the programs that `tools/setup_peers.sh` has built, and why others are missing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.side_by_side.records import (
    ALONE,
    BARE_SERVER,
    BATCHED_BENCH,
    CLLM,
    CLLM_PROCESS,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    PYTHON_SERVER,
    XLLAMACPP,
)

ROOT = Path(__file__).parents[2]
ADVICE = "run tools/setup_peers.sh"
NOT_INSTALLED = f"not installed: {ADVICE}"
IMPORT_S = 60.0


@dataclass(frozen=True)
class Peers:
    """Programs that can be measured here.

    Attributes
    ----------
    tools : Path or None
        Directory of llama.cpp's own programs, built as cllm's library is, but from unchanged source.
    python : Path or None
        Interpreter of the peers in Python.
    missing : mapping
        Reason why a peer cannot be measured, by peer; "" if it can.
    """

    tools: Path | None
    python: Path | None
    missing: Mapping[str, str]

    @property
    def example_server(self) -> Path | None:
        """Path of the example server of llama-cpp-python; None without an interpreter."""
        return self.python and self.python.parents[1] / "server.py"


def find(environ: Mapping[str, str] = os.environ) -> Peers:
    """Look for all peers; `CLLM_PEERS` names a virtual environment other than .venv-peers."""
    venv = ROOT / environ.get("CLLM_PEERS", ".venv-peers")
    python, tools = venv / "bin" / "python", venv / "llama.cpp" / "bin"
    found = Peers(
        tools if (tools / BATCHED_BENCH).is_file() else None,
        python if python.exists() else None,
        {},
    )
    missing = {
        CLLM: "",
        CLLM_PROCESS: "",
        CLLM_SERVE: "",
        CLLM_SERVE_THREAD: "",
        ALONE: "",
        BARE_SERVER: "",
        BATCHED_BENCH: _why_not_built(found, BATCHED_BENCH),
        LLAMA_SERVER: _why_not_built(found, LLAMA_SERVER),
        LLAMA_CPP_PYTHON: _why_not_run(found, "-c", "import llama_cpp"),
        PYTHON_SERVER: _why_not_served(found),
        XLLAMACPP: _why_not_run(found, "-c", "import xllamacpp"),
    }
    return dataclasses.replace(found, missing=missing)


def _why_not_built(found: Peers, program: str) -> str:
    is_there = found.tools is not None and (found.tools / program).is_file()
    return "" if is_there else f"not built: {ADVICE}"


def _why_not_served(found: Peers) -> str:
    server = found.example_server
    if server is None or not server.is_file():
        return NOT_INSTALLED
    return _why_not_run(found, str(server), "--help")


def _why_not_run(found: Peers, *arguments: str) -> str:
    if found.tools is None or found.python is None:
        return NOT_INSTALLED
    done = subprocess.run(
        [str(found.python), *arguments],
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
        check=False,
    )
    if done.returncode == 0:
        return ""
    last = done.stderr.strip().rpartition("\n")[2]
    return f"{last or f'exit status {done.returncode}'}: {ADVICE}"
