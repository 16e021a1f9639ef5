"""Peers: found where they were made, and missing for a reason."""

from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path

import pytest

from benchmarks.side_by_side import peers, servers, single
from benchmarks.side_by_side.records import (
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
from benchmarks.side_by_side.workload import Setup, prompt_of

SETUP = Setup(model=Path("model.gguf"), n_threads=2, n_ctx=512, n_seq_max=1)
# In place of the peers' interpreter: one package is there, and the other is not.
INTERPRETER = """#!/bin/sh
case "$*" in
  *xllamacpp_loop.py*) echo "a line of its own"; echo 12.5 ;;
  *xllamacpp*) echo "a traceback" >&2; echo "ImportError: wrong glibc" >&2; exit 1 ;;
  *llama_cpp_python_loop.py*) echo "$2" >"$0.given"; echo "$LLAMA_CPP_LIB_PATH" >"$0.library"; echo 7 ;;
esac
"""


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that cllm loads its library from, without programs yet."""
    directory = tmp_path / "native" / "0123"
    monkeypatch.setattr(
        "benchmarks.side_by_side.peers.find_library",
        lambda: (directory / "lib" / "libllama.so", {}),
    )
    return directory


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    program(tmp_path / "venv" / "bin" / "python", INTERPRETER)
    program(tmp_path / "venv" / "server.py")
    return tmp_path / "venv"


@pytest.fixture
def found(build: Path, venv: Path) -> peers.Peers:
    """All but xllamacpp."""
    for name in (BATCHED_BENCH, LLAMA_SERVER):
        program(build / "bin" / name)
    return peers.find({"CLLM_PEERS": str(venv)})


def test_what_is_there_has_no_reason_to_be_missing(
    found: peers.Peers, build: Path, venv: Path
) -> None:
    assert (found.tools, found.python) == (build / "bin", venv / "bin" / "python")
    assert [name for name, why in found.missing.items() if why] == [XLLAMACPP]
    assert set(found.missing) == {
        CLLM, CLLM_PROCESS, CLLM_SERVE, CLLM_SERVE_THREAD, BATCHED_BENCH, LLAMA_SERVER, PYTHON_SERVER,
        LLAMA_CPP_PYTHON, XLLAMACPP,
    }  # fmt: skip


def test_the_reason_is_what_the_import_said(found: peers.Peers) -> None:
    assert found.missing[XLLAMACPP] == "ImportError: wrong glibc: run tools/setup_peers.sh"


def test_packages_without_their_example_server_are_not_one(found: peers.Peers, venv: Path) -> None:
    assert found.example_server
    found.example_server.unlink()

    missing = peers.find({"CLLM_PEERS": str(venv)}).missing

    assert missing[PYTHON_SERVER] == "not installed: run tools/setup_peers.sh"
    assert missing[LLAMA_CPP_PYTHON] == ""


def test_without_anything_only_cllm_is_there(build: Path, tmp_path: Path) -> None:
    nothing = peers.find({"CLLM_PEERS": str(tmp_path / "none")})

    assert (nothing.tools, nothing.python, nothing.example_server) == (None, None, None)
    assert {name for name, why in nothing.missing.items() if not why} == {
        CLLM,
        CLLM_PROCESS,
        CLLM_SERVE,
        CLLM_SERVE_THREAD,
    }


def test_the_programs_of_the_same_build_are_taken(build: Path) -> None:
    library = build / "lib" / "libllama.so"
    program(build.with_name("4567-tools") / "bin" / BATCHED_BENCH)
    assert peers.tools_beside(library) is None

    program(build.with_name("0123-tools") / "bin" / BATCHED_BENCH)
    assert peers.tools_beside(library) == build.with_name("0123-tools") / "bin"

    program(build / "bin" / BATCHED_BENCH)
    assert peers.tools_beside(library) == build / "bin"


def test_a_peer_gets_the_settings_and_the_library_of_cllm(found: peers.Peers, build: Path) -> None:
    assert found.python
    assert single.llama_cpp_python_rate(found, SETUP, n_prompt=3, n_output=5) == 7.0

    given = json.loads(Path(f"{found.python}.given").read_text())
    assert given == {
        "model": "model.gguf", "n_threads": 2, "n_ctx": 512, "n_seq_max": 1, "n_batch": 512,
        "n_ubatch": 512, "prompt": prompt_of("0", 3), "n_output": 5,
    }  # fmt: skip
    assert Path(f"{found.python}.library").read_text().strip() == str(build / "lib")


def test_a_peer_may_print_before_its_figure(found: peers.Peers) -> None:
    assert single.xllamacpp_rate(found, SETUP, n_prompt=3, n_output=5) == 12.5


def test_a_server_is_started_with_what_was_found(
    found: peers.Peers, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native = servers.llama_server(SETUP, 1, found)
    example = servers.python_server(SETUP, 1, found)

    assert (native.missing, native.command[0]) == ("", str(build / "bin" / LLAMA_SERVER))
    assert (example.missing, example.command[0]) == ("", str(found.python))
    assert dict(example.environment) == {"LLAMA_CPP_LIB_PATH": str(build / "lib")}


def test_a_server_that_is_missing_says_why(build: Path, tmp_path: Path) -> None:
    nothing = peers.find({"CLLM_PEERS": str(tmp_path / "none")})

    assert "setup_peers.sh" in servers.llama_server(SETUP, 1, nothing).missing
    assert "setup_peers.sh" in servers.python_server(SETUP, 1, nothing).missing
