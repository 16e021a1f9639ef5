"""The last crash is remembered, and `cllm doctor` shows it on one line."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cllm.doctor.findings import Status
from cllm.doctor.last_crash import last_crash_check
from cllm.engine.process.crash_report import CrashReport, crash_file, last_crash, save_crash


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of what this machine remembers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def report(cause: str) -> CrashReport:
    return replace(CrashReport.of(Path("/models/a.gguf"), cause, 3), at="2026-01-31T10:00:00Z")


def test_the_last_of_two_is_remembered_and_shown() -> None:
    assert last_crash() is None
    assert list(last_crash_check()) == []
    save_crash(report("SIGKILL"))
    save_crash(report("SIGABRT: llama.cpp:1: GGML_ASSERT(a != b) failed\nmain() at 0x1"))
    (check,) = last_crash_check()
    assert check.status is Status.WARNING
    assert "/models/a.gguf with 3 requests: SIGABRT: llama.cpp:1: GGML_ASSERT(a != b)" in check.text
    assert "\n" not in check.text
    assert str(crash_file()) in check.text


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"at": 1}', "null"])
def test_a_file_that_says_nothing_is_none(state: Path, content: str) -> None:
    save_crash(report("SIGSEGV"))
    crash_file().write_text(content)
    assert last_crash() is None
    assert list(last_crash_check()) == []


def test_a_full_disk_keeps_the_last_crash_and_leaves_no_file(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_crash(report("SIGKILL"))
    write = Path.write_text

    def write_a_part(self: Path, text: str) -> int:
        write(self, text[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_a_part)
        save_crash(report("SIGSEGV"))
    assert last_crash() == report("SIGKILL")
    assert [*crash_file().parent.iterdir()] == [crash_file()]


def test_where_nothing_can_be_written_nothing_is_remembered(state: Path) -> None:
    (state / "cllm").write_text("a file")
    save_crash(report("SIGSEGV"))
    assert last_crash() is None


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_a_usable_name_the_directory_is_in_the_home_directory(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert crash_file() == tmp_path / ".local" / "state" / "cllm" / "last_crash.json"
