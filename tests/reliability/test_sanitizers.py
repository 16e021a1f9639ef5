"""Every kind of report is read, and none is taken for harmless that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tests.reliability import sanitized
from tests.reliability.memory_faults import ADDRESS, FAULTS, LEAK, UNDEFINED
from tests.reliability.record import ROOT
from tests.reliability.sanitized import (
    Expected,
    NotBuiltError,
    Report,
    parse,
    read,
    said_of_faults,
    sort_out,
    unseen_faults,
)
from tests.reliability.sanitizers import (
    EXPECTED,
    TESTS,
    Outcome,
    Suite,
    describe,
    run,
    suite_of,
)

COMMAND = "/usr/bin/python -P -m cllm.engine.llama.trial_child llama.cpp model.gguf "
OVERFLOW = dedent("""\
    =================================================================
    ==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6020000072d8 at pc 0x7f bp 0x7f
    READ of size 1 at 0x6020000072d8 thread T0
        #0 __interceptor_memcpy ../sanitizer_common_interceptors.inc:827 (libasan.so+0xb89cf)
        #1 llama_batch_allocr::init(llama_batch const&) /home/llama.cpp-0c1e/src/llama-batch.cpp:44 (libllama.so+0x1317)
        #2 ffi_call <null> (libffi.so.8+0x6b0c)

    0x6020000072d8 is located 0 bytes to the right of 8-byte region [0x6020000072d0,0x6020000072d8)
    SUMMARY: AddressSanitizer: heap-buffer-overflow ../inc:827 in __interceptor_memcpy
    ==7==ABORTING
    """)
OUT_OF_MEMORY = dedent("""\
    ==8==ERROR: AddressSanitizer: allocator is out of memory trying to allocate 0xc00000 bytes
    ==8==FATAL: AddressSanitizer: internal allocator is out of memory trying to allocate 0x10 bytes
    """)
CHECK_FAILED = "==9==AddressSanitizer: CHECK failed: asan_thread.cpp:1 ((x)) != (0) (0x0, 0x0)\n"
LOST = dedent("""\

    =================================================================
    ==5==ERROR: LeakSanitizer: detected memory leaks

    Direct leak of 77 byte(s) in 1 object(s) allocated from:
        #0 operator new(unsigned long) ../asan_new_delete.cpp:95 (libasan.so+0xb89cf)
        #1 llama_sampler_init /home/llama.cpp-0c1e/src/llama-sampler.cpp:410 (libllama.so+0x1389)
        #2 <null> <null> (libffi.so.8+0x6f79)

    Indirect leak of 24 byte(s) in 1 object(s) allocated from:
        #0 __interceptor_malloc ../asan_malloc_linux.cpp:69 (libasan.so+0xb89cf)
        #1 PyFloat_FromDouble Objects/floatobject.c:149 (libpython3.11.so.1.0+0x176c89)

    SUMMARY: AddressSanitizer: 101 byte(s) leaked in 2 allocation(s).
    """)
LOST_IN_RUNTIME = dedent("""\
    ==5==ERROR: LeakSanitizer: detected memory leaks

    Direct leak of 33 byte(s) in 1 object(s) allocated from:
        #0 operator new(unsigned long) ../asan_new_delete.cpp:95 (libasan.so+0xb89cf)
        #1 <null> <null> (libstdc++.so.6+0x1389)

    SUMMARY: AddressSanitizer: 33 byte(s) leaked in 1 allocation(s).
    """)
UNDEFINED_TWICE = dedent("""\
    /home/llama.cpp-0c1e/ggml/src/ggml.c:30:36: runtime error: signed integer overflow: 1 + 2147483647 cannot be represented in type 'int'
        #0 ggml_nelements /home/llama.cpp-0c1e/ggml/src/ggml.c:30 (libggml-base.so+0x1369)
    quants.c:7:1: runtime error: load of misaligned address 0x7f for type 'int', which requires 4 byte alignment
    """)


def brief(reports: list[Report]) -> list[tuple[str, str, str, bool]]:
    return [(r.sanitizer, r.kind, r.place, r.is_native) for r in reports]


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("", []),
        (OVERFLOW, [(
            ADDRESS, "heap-buffer-overflow",
            "llama_batch_allocr::init(llama_batch const&) src/llama-batch.cpp:44", True,
        )]),
        (OUT_OF_MEMORY, [
            (ADDRESS, "allocator is out of memory", "?", False),
            (ADDRESS, "internal allocator is out of memory", "?", False),
        ]),
        (CHECK_FAILED, [(ADDRESS, "CHECK failed", "?", False)]),
        (LOST, [
            (LEAK, "leak", "llama_sampler_init src/llama-sampler.cpp:410", True),
            (LEAK, "leak", "PyFloat_FromDouble Objects/floatobject.c:149", False),
        ]),
        (LOST_IN_RUNTIME, [(LEAK, "leak", "libstdc++.so.6", True)]),
        (UNDEFINED_TWICE, [
            (UNDEFINED, "signed integer overflow", "ggml_nelements ggml/src/ggml.c:30", True),
            (UNDEFINED, "load of misaligned address", "quants.c", False),
        ]),
        ("Segmentation fault\n", [(ADDRESS, "unreadable: Segmentation fault", "?", False)]),
    ],
    ids=[
        "nothing", "overflow", "out of memory", "check", "leak", "leak in a runtime", "undefined",
        "something else",
    ],
)  # fmt: skip
def test_each_kind_of_report_is_read(text: str, reports: list[tuple[str, str, str, bool]]) -> None:
    assert brief(parse(text, COMMAND)) == reports


def test_a_report_has_the_command_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text(f"7 {COMMAND}\n8 /usr/bin/python -c pass\n")
    (tmp_path / "asan.7").write_text(OVERFLOW)
    (tmp_path / "ubsan.11").write_text(UNDEFINED_TWICE)
    assert {r.command for r in read(tmp_path)} == {COMMAND, ""}
    assert len(read(tmp_path)) == 3
    assert sanitized.n_processes(tmp_path) == 2


def test_only_pythons_own_leaks_are_nobodys_fault() -> None:
    findings = sort_out(parse(OVERFLOW + LOST + UNDEFINED_TWICE, ""))
    assert [r.n_bytes for r in findings.foreign] == [24]
    assert [r.sanitizer for r in findings.wrong] == [UNDEFINED, UNDEFINED, ADDRESS, LEAK]
    assert len(describe(findings.wrong)) == 4


def test_what_is_expected_of_one_process_is_not_of_another() -> None:
    expected = Expected(("heap-buffer-overflow",), "cllm.engine.llama.trial_child", "")
    assert sort_out(parse(OVERFLOW, COMMAND), [expected]).expected == {expected: 1}
    for other in (
        "",
        "/usr/bin/python -m pytest ",
        COMMAND.replace("trial_child", "trial_children"),
    ):
        assert len(sort_out(parse(OVERFLOW, other), [expected]).wrong) == 1
    assert len(sort_out(parse(LOST, COMMAND), [expected]).wrong) == 1


def test_only_processes_that_may_die_are_expected_to() -> None:
    children = {"cllm.engine.llama.trial_child", "cllm.engine.chat.template_child"}
    assert {one.module for one in EXPECTED} == {*children, ""}
    assert all(one.reason for one in EXPECTED)


def test_what_is_run_is_there() -> None:
    assert all((ROOT / name).is_dir() for name in TESTS)


JUNIT = """\
<testsuites><testsuite errors="1" failures="2" skipped="1" tests="9">
<testcase classname="tests.a" name="test_b"><skipped message="llama.cpp's clone"/></testcase>
</testsuite></testsuites>"""


def test_pytest_that_ends_badly_has_a_failure() -> None:
    excused = [("tests.a::test_b", "llama.cpp's clone")]
    assert suite_of(JUNIT, 1, 2.0) == Suite(9, 3, excused, 2.0)
    assert suite_of('<testsuites><testsuite tests="9"/></testsuites>', 0, 2.0).passed
    assert not suite_of('<testsuites><testsuite tests="0"/></testsuites>', 0, 2.0).passed
    for dead in (None, '<testsuites><testsuite tests="9"/></testsuites>', "<testsuites/>"):
        assert suite_of(dead, -6, 2.0).n_failed == 1


def reports_of_faults() -> list[Report]:
    """As they come from the processes that make them."""
    return [
        Report(
            sanitizer, kind, f"{fault.function} src/file.cpp:1",
            f"python -m tests.reliability.memory_faults {name} ", is_native=True,
        )
        for name, fault in FAULTS.items()
        for sanitizer, kind in fault.reports
    ]  # fmt: skip


def test_a_fault_is_seen_when_all_is_said_of_it() -> None:
    seen = reports_of_faults()
    assert unseen_faults(seen) == []
    assert said_of_faults([]) == f"{len(seen)} of {len(seen)}"
    assert {report.sanitizer for report in seen} == {ADDRESS, UNDEFINED, LEAK}
    for n, report in enumerate(seen):
        missing = [f"{report.command.split()[-1]}: {report.sanitizer}"]
        for other in (
            [],
            [replace(report, kind="SEGV")],
            [replace(report, place="main main.c:1")],
            [replace(report, is_native=False)],
            [replace(report, command="")],
        ):
            assert unseen_faults([*seen[:n], *other, *seen[n + 1 :]]) == missing
    assert said_of_faults(missing) == f"{len(seen) - 1} of {len(seen)}"


def test_a_run_that_would_see_nothing_does_not_hold() -> None:
    good, bad, none = (Suite(10, 0, [], 1.0), Suite(10, 1, [], 1.0), Suite(0, 0, [], 1.0))
    clean, wrong = sort_out([]), sort_out(reports_of_faults())
    holding = Outcome(good, 1, [], clean)
    assert holding.holds
    for outcome in (
        *(replace(holding, watched=suite) for suite in (bad, none)),
        replace(holding, unseen_faults=["lose: LeakSanitizer"]),
        replace(holding, findings=wrong),
    ):
        assert not outcome.holds


# Every one of these passes: what they do wrong is in a child that nobody looks at, or comes to light
# after the last test.
PASSING = """\
import os, subprocess, sys
from tests.reliability.memory_faults import index_past_the_end, lose

def test_a_leak():
    lose()

def test_a_child():
    command = [sys.executable, "-m", "tests.reliability.memory_faults", "use_after_free"]
    subprocess.run(command, check=False, capture_output=True)

def test_a_forked_child():
    if (pid := os.fork()) == 0:
        index_past_the_end()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not (sanitized.INSTALLED / "lib").exists(), reason=sanitized.HOW_TO_BUILD)
def test_reports_count_though_every_test_passes(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "test_passing.py").write_text(PASSING)
    outcome = run([str(tmp_path / "test_passing.py")], tmp_path / "reports")
    assert (outcome.watched.n_tests, outcome.watched.passed) == (3, True)
    assert outcome.unseen_faults == []
    assert not outcome.holds
    seen = {(r.sanitizer, r.place.split(" ")[0]) for r in outcome.findings.wrong}
    assert seen >= {
        (LEAK, "llama_sampler_init_dist"),
        (ADDRESS, "llama_sampler_name"),
        (UNDEFINED, "ggml_blck_size"),
        (ADDRESS, "ggml_blck_size"),
    }


def test_without_the_library_it_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitized, "INSTALLED", tmp_path)
    with pytest.raises(NotBuiltError, match="--sanitize"):
        sanitized.environment(tmp_path)
