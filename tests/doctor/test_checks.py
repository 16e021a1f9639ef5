"""Checks that find what is wrong, and say it on one line, without dying of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import EngineConfig
from cllm.bindings import Context, Model, library
from cllm.bindings._llama_h import LLAMA_CPP_COMMIT, LLAMA_CPP_VERSION
from cllm.doctor import Check, Finding, Status, examine
from cllm.doctor.installation import (
    check_amx,
    check_build,
    check_cpu,
    check_memory,
    check_version,
    installation_checks,
    memory_check,
)
from cllm.doctor.model_checks import model_checks
from cllm.doctor.preflight import preflight_check
from cllm.doctor.processors import check_processors, processors_check
from cllm.doctor.template_check import check_chat_template
from cllm.engine.core.thread_tuner import ProcessorLoad
from cllm.errors import AbiMismatchError, LibraryNotFoundError, NoKVSlotError
from cllm.processors import Processors, usable_processors
from tools import make_model

RECORD: dict[str, Any] = {
    "commit": "0c1e57098", "compiler": "c++ 12", "cpu": "A CPU (x86_64)", "amx": "absent",
    "portable": False, "sanitize": False, "backends": ["cpu"], "built_at": "2026-11-20",
    "flags": ["-DCMAKE_BUILD_TYPE=Release"],
}  # fmt: skip


def by_name(findings: Iterator[Finding] | Iterator[Check]) -> dict[str, Check]:
    """The checks among these findings."""
    return {check.name: check for check in findings if isinstance(check, Check)}


# --- The installation ------------------------------------------------------------------------
def test_the_installed_library_passes_with_its_path_and_commit() -> None:
    checks = by_name(installation_checks())
    assert Status.FAILED not in {check.status for check in checks.values()}
    assert checks["library"].text == str(library().path)
    assert str(library().record["commit"]) in checks["declarations"].text
    assert all("\n" not in check.text for check in checks.values())


@pytest.mark.parametrize(
    ("commit", "version", "status", "told"),
    [
        (LLAMA_CPP_COMMIT, "0.5.0-dev", Status.OK, "which the tests run with"),
        ("abc", "999.6.0-dev", Status.WARNING, "llama.cpp abc (999.6.0-dev), newer than tested"),
        ("abc", "0.1.0", Status.WARNING, "older than tested"),
        ("abc", LLAMA_CPP_VERSION + "-dev", Status.WARNING, "another than tested"),
    ],
)
def test_another_llama_cpp_than_the_tested_one_is_named(
    commit: str, version: str, status: Status, told: str
) -> None:
    check = check_version({"commit": commit}, version)
    assert check.status is status
    assert told in check.text


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (LibraryNotFoundError("no libllama found"), "library"),
        (OSError("undefined symbol: llama_decode"), "library"),
        (AbiMismatchError("another llama.h"), "declarations"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_without_a_usable_library_that_is_the_only_finding(
    error: Exception, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr("cllm.doctor.installation.library", broken)
    found = list(examine(EngineConfig().model_path, n_threads=1))
    assert found == [Check(name, Status.FAILED, str(error))]


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({}, Status.OK, "Release, native, backends cpu, c++ 12"),
        ({"portable": True}, Status.OK, "portable"),
        ({"sanitize": True}, Status.WARNING, "sanitizers"),
        ({"flags": ["-DCMAKE_BUILD_TYPE=Debug"]}, Status.WARNING, "without optimization"),
        ({"flags": []}, Status.OK, "unknown"),
    ],
    ids=str,
)
def test_a_build_that_is_slow_by_nature_is_a_warning(
    change: dict[str, Any], status: Status, word: str
) -> None:
    check = check_build(RECORD | change)
    assert check.status is status
    assert word in check.text


def test_a_native_build_for_another_cpu_is_a_warning() -> None:
    features = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | "
    native = "libggml-cpu.so"
    expected = Check("CPU", Status.OK, "A CPU: SSE3 AVX2")
    assert check_cpu(RECORD, "A CPU", features, native) == expected
    assert check_cpu(RECORD, "B CPU", features, native).status is Status.WARNING
    assert check_cpu(RECORD, "", "", native).status is Status.OK


def test_the_variant_of_a_portable_library_is_named() -> None:
    check = check_cpu(RECORD | {"portable": True}, "B CPU", "", "libggml-cpu-haswell.so")
    assert check.status is Status.OK
    assert "the variant haswell of a portable library" in check.text


@pytest.mark.parametrize(
    ("amx", "flags", "status"),
    [
        ("absent", [], Status.OK),
        ("disabled", [], Status.OK),
        ("works", [], Status.OK),
        ("faults", ["-DCMAKE_C_FLAGS= -mno-amx-tile"], Status.OK),
        ("faults", [], Status.FAILED),
    ],
)
def test_matrix_tiles_that_fault_must_have_been_left_out(
    amx: str, flags: list[str], status: Status
) -> None:
    assert check_amx({"amx": amx, "flags": flags}).status is status


def test_weights_beyond_the_free_memory_are_a_warning() -> None:
    assert check_memory(2 << 30, 1 << 30, "8 MiB").status is Status.WARNING
    assert check_memory(1 << 30, 2 << 30, "8 MiB").status is Status.OK
    assert check_memory(1 << 30, None, "all").status is Status.OK
    assert "weights" in memory_check(1 << 20).text


# --- The model -------------------------------------------------------------------------------
def test_the_embedded_model_passes_every_check(model: Model) -> None:
    checks = by_name(model_checks(model, n_threads=1))
    assert {check.status for check in checks.values()} == {Status.OK}
    assert [*checks] == [
        "model",
        "vocabulary",
        "chat template",
        "prefixes",
        "decode",
        "seq_rm",
        "KV cells",
    ]
    assert "<|im_end|>" in checks["vocabulary"].text
    assert "seq_pos_max 15, seq_rm returned True" in checks["seq_rm"].text
    assert "256 of 256 used; 128 freed" in checks["KV cells"].text


SAID = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THINKS = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if not enable_thinking %}<think>\n\n</think>\n"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "status", "found"),
    [
        (None, Status.WARNING, "none: chats need one"),
        ("{{ messages[", Status.WARNING, "chats fail: "),
        (SAID, Status.OK, "takes system messages, results of calls; told in words: tools, calls"),
        (THINKS, Status.OK, "thinking (can be switched)"),
    ],
)
def test_the_template_tells_what_of_a_conversation_it_takes(
    template: str | None,
    status: Status,
    found: str,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Model, "chat_template", lambda _, name=None: template if name is None else None
    )
    check = check_chat_template(model)
    assert check.status is status
    assert found in check.text
    assert "\n" not in check.text


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-recurrent", "tiny-hybrid"])
def test_models_that_remember_otherwise_pass_too(name: str) -> None:
    with Model(make_model.ensure(name, "F16")) as model:
        checks = by_name(model_checks(model, n_threads=1))
    assert {check.status for check in checks.values()} == {Status.OK}


def test_an_seq_rm_that_removes_nothing_fails(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Context.seq_rm, []

    def only_once(context: Context, seq_id: int) -> bool:
        calls.append(seq_id)
        return len(calls) > 1 or real(context, seq_id)

    monkeypatch.setattr(Context, "seq_rm", only_once)
    check = by_name(model_checks(model, n_threads=1))["seq_rm"]
    assert check == Check("seq_rm", Status.FAILED, "returned True, then seq_pos_max is 15")


def test_cells_that_cannot_be_used_again_fail(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise NoKVSlotError("llama_decode", 1, "no room in the KV cache")

    monkeypatch.setattr("cllm.doctor.model_checks._is_full", lambda context: True)
    real = Context.decode
    monkeypatch.setattr(
        Context,
        "decode",
        lambda context, batch: full() if batch.runs[0].seq_id == 2 else real(context, batch),
    )
    check = by_name(model_checks(model, n_threads=1))["KV cells"]
    assert check.status is Status.FAILED
    assert "128 cells" in check.text


# --- The preflight ---------------------------------------------------------------------------
def test_a_model_that_ends_its_process_ends_a_child_and_is_reported(deadly_model: Path) -> None:
    check = preflight_check(deadly_model)
    assert (check.name, check.status) == ("preflight", Status.FAILED)
    assert check.text.startswith(
        f"cannot load {str(deadly_model)!r}: the process that tried it ended with SIGABRT: "
    )
    assert "GGML_ASSERT" in check.text
    assert by_name(examine(deadly_model, n_threads=1))["preflight"] == check


def test_a_model_that_is_none_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    check = preflight_check(missing)
    assert check.status is Status.FAILED
    assert check.text == f"cannot load {str(missing)!r}: No such file or directory"
    encoder = preflight_check(make_model.ensure("tiny-encoder", "F16"))
    assert encoder.status is Status.FAILED
    assert "cannot generate text" in encoder.text


# --- Processors ------------------------------------------------------------------------------
TWO = Processors(n_allowed=2, n_cores=2, quota=None)


def test_a_quota_is_told_and_more_threads_than_it_allows_are_a_warning() -> None:
    of_64 = Processors(n_allowed=64, n_cores=32, quota=2.5)
    check = check_processors(None, of_64, 2)
    assert check.text.startswith("64 on 32 cores, of which a quota of the cgroup allows 2.5")
    assert check.status is Status.OK
    assert check_processors(None, of_64, 3).status is Status.WARNING


def test_other_programs_that_compute_are_a_warning() -> None:
    busy = check_processors(ProcessorLoad(waiting=0.0, others=0.9, idle=1.0, own=0.1), TWO, 2)
    assert busy.status is Status.WARNING
    assert "other programs use 0.9" in busy.text
    assert "fewer threads" in busy.text
    assert "fewer threads" not in check_processors(ProcessorLoad(0.0, 0.9, 1.0, 0.1), TWO, 1).text


@pytest.mark.parametrize("load", [None, ProcessorLoad(waiting=0.0, others=0.1, idle=1.9, own=0.0)])
def test_a_quiet_machine_and_one_that_reports_nothing_are_no_warning(
    load: ProcessorLoad | None,
) -> None:
    assert check_processors(load, TWO, 2).status is Status.OK


def test_the_processors_of_this_machine_are_looked_at() -> None:
    assert processors_check(1).text.startswith(f"{usable_processors().n_allowed}")
