"""Which code for CPUs a library brings, and when it is looked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.bindings import _library, _media_library, library
from cllm.bindings._declarations import Declarations
from cllm.bindings._layout import KNOWN_LIBRARIES
from cllm.bindings._library import Library
from cllm.bindings._llama_h import C_PREFIX, DECLARATIONS, PARAMETERS
from cllm.bindings._media_library import media_library
from cllm.bindings._mtmd_h import DECLARATIONS as MEDIA_DECLARATIONS
from cllm.doctor.findings import Status
from cllm.doctor.installation import check_gpus
from cllm.errors import AbiMismatchError, LibraryError


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


def test_the_file_of_a_backend_that_cannot_be_loaded_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = library()
    monkeypatch.setattr(loaded, "path", tmp_path / "libllama.so")
    monkeypatch.setitem(_library.GPU_BACKENDS, "cpu", b"CPU")  # a registered one
    for name in ("libggml-hip.so", "libggml-cpu.so"):
        (tmp_path / name).write_bytes(b"no library")
    ((path, reason),) = loaded.unloaded_backends()
    assert path == tmp_path / "libggml-hip.so"
    assert "libggml-hip.so" in reason
    told = check_gpus([], [(path, reason)])
    assert told.status is Status.OK
    assert told.text.endswith(f"; libggml-hip.so is not loaded: {reason}")


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


# --- Which library -------------------------------------------------------------------------------
def loading(library: Path) -> str:
    """Load a library in a child process; the last line of what it says."""
    done = subprocess.run(
        [sys.executable, "-c", "from cllm.bindings import library; print(library().path)"],
        env=os.environ | {"CLLM_LIBRARY": str(library)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The library in use, in a directory of its own with its build's record."""
    installed = library().path.parent.parent
    shutil.copytree(installed, tmp_path / "copy", ignore=shutil.ignore_patterns("bin", "include"))
    return tmp_path / "copy"


def test_a_copy_of_a_build_is_loaded_with_its_records(copied: Path) -> None:
    assert loading(copied) == str(library_in(copied))


def library_in(folder: Path) -> Path:
    return folder / "lib" / library().path.name


def test_a_build_that_was_compared_with_other_declarations_says_how_to_compare_it_again(
    copied: Path,
) -> None:
    shutil.rmtree(copied / "layouts")
    told = loading(copied)
    assert "AbiMismatchError" in told
    assert "was not compared with the declarations of this cllm: run ./build_llama.sh again" in told


def test_a_library_without_a_record_is_rejected_with_the_names_of_those_that_are_known(
    copied: Path,
) -> None:
    shutil.rmtree(copied / "layouts")
    (copied / "build.json").unlink()
    told = loading(copied)
    assert f"{library_in(copied)} is not a library that cllm knows (node-llama-cpp" in told
    assert "build it with ./build_llama.sh" in told


def test_a_record_without_a_field_that_is_set_is_rejected_by_its_name(copied: Path) -> None:
    (file,) = (copied / "layouts").glob(f"{DECLARATIONS.digest}.json")
    record = json.loads(file.read_text())
    del record["structs"]["llama_model_params"]["offsets"]["no_alloc"]
    file.unlink()
    file.write_text(json.dumps(record))
    assert loading(copied).endswith("llama_model_params has no no_alloc")


def test_the_known_libraries_were_compared_with_these_declarations() -> None:
    known = json.loads(KNOWN_LIBRARIES.read_text())
    digests = [DECLARATIONS.digest, MEDIA_DECLARATIONS.digest]
    assert known["declarations"] == digests, "run python -m tools.known_libraries"
    assert len({each["sha256"] for each in known["libraries"]}) == len(known["libraries"]) >= 4
    for each in known["libraries"]:
        Declarations(*DECLARATIONS.text, C_PREFIX, parameters=PARAMETERS).lay_out(each["structs"])


@pytest.mark.parametrize("name", ["llama_model_quantize", "llama_max_parallel_sequences"])
def test_a_function_that_a_library_may_lack_is_missed_when_it_is_called(name: str) -> None:
    lacking: Any = Library.__new__(Library)
    lacking.path = Path("other.so")
    lacking._lacks(name)
    if name == "llama_max_parallel_sequences":
        assert lacking.llama_max_parallel_sequences() == library().llama_max_parallel_sequences()
    else:
        with pytest.raises(LibraryError, match=r"other\.so has no function llama_model_quantize"):
            lacking.llama_model_quantize(b"a", b"b", None)
    with pytest.raises(AbiMismatchError, match=r"other\.so has no function llama_decode"):
        lacking._lacks("llama_decode")


def test_a_library_without_libmtmd_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(path=library().path.with_name("libggml-base.so"), record={})
    left_out = SimpleNamespace(path=library().path, record={"media": False})
    monkeypatch.setattr(_media_library, "_media_library", None)
    for each in (other, left_out):
        monkeypatch.setattr(_library, "library", lambda each=each: each)
        with pytest.raises(LibraryError, match=r"has no libmtmd, which images need: run ./build"):
            media_library()
