"""Which code for CPUs a library brings, and when it is looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cllm.bindings import library
from cllm.bindings._library import Library
from cllm.errors import LibraryError


class StandIn:
    """As much of a `Library` as its start needs; `n_devices` before and after its files are loaded."""

    path = Path("/somewhere/lib/libllama.so")
    _log_callback = _no_log = None

    def __init__(self, *n_devices: int) -> None:
        self._n_devices = iter(n_devices)
        self.looked_in: list[bytes] = []

    def llama_log_set(self, *_: Any) -> None:
        """Nobody logs."""

    def llama_backend_init(self) -> None:
        """There is nothing to do."""

    def ggml_backend_dev_count(self) -> int:
        return next(self._n_devices)

    def ggml_backend_load_all_from_path(self, directory: bytes) -> None:
        self.looked_in.append(directory)


def test_a_library_for_one_cpu_looks_for_no_files() -> None:
    native = StandIn(1, 1)
    Library.start(native)  # type: ignore[arg-type]
    assert native.looked_in == []


def test_a_portable_library_looks_beside_itself_and_nowhere_else() -> None:
    portable = StandIn(0, 1)
    Library.start(portable)  # type: ignore[arg-type]
    assert portable.looked_in == [b"/somewhere/lib"]


def test_a_library_without_code_for_this_cpu_says_so() -> None:
    with pytest.raises(LibraryError, match="no backend in /somewhere/lib runs on this machine"):
        Library.start(StandIn(0, 0))  # type: ignore[arg-type]


def test_the_file_that_computes_lies_beside_the_library() -> None:
    loaded = library()
    assert loaded.cpu_backend().name.startswith("libggml-cpu")
    assert loaded.cpu_backend().parent.resolve() == loaded.path.parent


# --- How long its threads spin ---------------------------------------------------------------
LOAD = "import os; from cllm.bindings import library; library(); print(os.environ.get({name!r}))"


def openmp_report(name: str, value: str | None = None) -> tuple[str, str]:
    """Return the OpenMP runtime's report from loading the library, and a variable afterwards."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP_", "OMP_"))}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    if value is not None:
        environment[name] = value
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(name=name)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this library does not use GNU's OpenMP runtime")
    return done.stderr, done.stdout.strip()


def test_threads_spin_briefly_and_later_programs_do_not_inherit_it() -> None:
    report, later = openmp_report("GOMP_SPINCOUNT")
    assert "GOMP_SPINCOUNT = '10000'" in report
    assert later == "None"


@pytest.mark.parametrize(
    ("name", "value", "spins"),
    [("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", "0")],
)
def test_what_the_user_has_set_stays(name: str, value: str, spins: str) -> None:
    report, later = openmp_report(name, value)
    assert f"GOMP_SPINCOUNT = '{spins}'" in report
    assert later == value
