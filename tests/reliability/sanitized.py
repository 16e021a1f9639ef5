"""The library with sanitizers: its place, the environment of its processes, and the reports.

Every process of a run, children of tests included, writes its reports into one directory.  Exit codes are
ignored, since tests of crashes expect special ones.  A run is good if all reports are expected, and the
faults made on purpose were reported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reliability.memory_faults import ADDRESS, FAULTS, LEAK, UNDEFINED
from tests.reliability.record import ROOT

INSTALLED = ROOT / "build" / "sanitized"
PROBE = ROOT / "tools" / "sanitizers" / "probe.c"
HOW_TO_BUILD = "build it, 15 minutes: ./build_llama.sh --sanitize --prefix build/sanitized"
NATIVE = ("libllama.", "libggml")
# A leak with one of these in its stack is ours.  The runtimes of C++ and OpenMP are compiled without frame
# pointers, so their stacks may not show that libllama or ggml called them.
OURS = (*NATIVE, "libstdc++.", "libgomp.")
# Function, file and module of each frame, in every kind of report.
FRAME = "stack_trace_format='    #%n %f %S %M'"

_ERROR = re.compile(r"^==\d+==(?:[A-Z]+: ?)?(?:Address|Leak)Sanitizer: (.*)$", re.M)
_LEAK = re.compile(r"^(?:Direct|Indirect) leak of (\d+) byte", re.M)
_UNDEFINED = re.compile(r"^(\S+):\d+:\d+: runtime error: (.*)$", re.M)
_FRAME = re.compile(r"^ +#\d+ (?P<where>.*) \((?P<module>[^()]+)\+0x[0-9a-f]+\)$", re.M)
_SUMMARY = re.compile(r"^SUMMARY: AddressSanitizer: (\S+)", re.M)
_DETAILS = re.compile(r" on (?:unknown )?address| trying to allocate| 0x| \(|:")


class NotBuiltError(Exception):
    """Error for a missing library with sanitizers; the message says how to build it."""


@dataclass(frozen=True, slots=True)
class Report:
    """One report of a sanitizer, or all that one process has leaked in one place.

    Attributes
    ----------
    sanitizer, kind : str
        "AddressSanitizer", "heap-buffer-overflow".
    place : str
        The innermost frame in libllama or ggml, otherwise the innermost one that has a name.
    command : str
        Command line of the process; "" if it was forked without a new program.
    n_bytes : int
        Size of a leak; 0 for other reports.
    """

    sanitizer: str
    kind: str
    place: str
    command: str
    is_native: bool
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """Reports that do no harm: their kinds, the module that the process runs, and why.

    An empty module is a process that was forked without a new program.
    """

    kinds: tuple[str, ...]
    module: str
    reason: str

    def covers(self, report: Report) -> bool:
        """Return True if a report has an expected kind and comes from the expected module."""
        is_there = f" -m {self.module} " in report.command if self.module else not report.command
        return report.kind in self.kinds and is_there


# --- Running ------------------------------------------------------------------------------------
def runtime() -> Path:
    """Return the path of AddressSanitizer's runtime, which must be loaded before all other libraries.

    Raises
    ------
    NotBuiltError
        There is no library with sanitizers, or the compiler has no libasan.so.
    """
    if not (INSTALLED / "lib" / "libllama.so").is_file():
        raise NotBuiltError(f"no library with sanitizers; {HOW_TO_BUILD}")
    found = _output([_compiler(), "-print-file-name=libasan.so"])
    if not Path(found).is_absolute():
        raise NotBuiltError(f"{_compiler()} has no libasan.so")
    return Path(found)


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a process that writes its reports into this directory."""
    probe = directory / "probe.so"
    preload = runtime()
    if not probe.exists():
        flags = ["-g", "-O0", "-shared", "-fPIC", "-fsanitize=address,undefined"]
        subprocess.run([_compiler(), *flags, str(PROBE), "-o", str(probe)], check=True, cwd=ROOT)
    # Memory errors end the process, leaks do not: a leak of Python would change the exit code of a child.
    asan = (
        f"log_path={directory}/asan:detect_leaks=1:exitcode=0:abort_on_error=1:disable_coredump=1"
    )
    return {
        **os.environ,
        "CLLM_LIBRARY": str(INSTALLED / "lib"),
        "CLLM_SANITIZER_REPORTS": str(directory),
        "LD_PRELOAD": f"{preload}:{probe}",
        "ASAN_OPTIONS": f"{asan}:{FRAME}",
        # At its first report UndefinedBehaviorSanitizer sets AddressSanitizer's path, not its own: see probe.c.
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={directory}/asan:{FRAME}",
        "PYTHONMALLOC": "malloc",  # so that Python's small blocks are watched, too
    }


def show_faults(directory: Path) -> list[Report]:
    """Make all faults on purpose, each in a child process, and return their reports."""
    for name in FAULTS:
        command = [sys.executable, "-m", "tests.reliability.memory_faults", name]
        subprocess.run(
            command, cwd=ROOT, env=environment(directory), check=False, capture_output=True
        )
    return read(directory)


def unseen_faults(reports: Sequence[Report]) -> list[str]:
    """Return the missing reports of faults made on purpose: "lose: LeakSanitizer"."""
    seen = {
        (r.command.split()[-1], r.sanitizer, r.kind, r.place.split(" ")[0].split("(")[0])
        for r in reports
        if r.is_native and r.command
    }
    return [
        f"{name}: {sanitizer}"
        for name, fault in FAULTS.items()
        for sanitizer, kind in fault.reports
        if (name, sanitizer, kind, fault.function) not in seen
    ]


def said_of_faults(unseen: Sequence[str]) -> str:
    """Return the number of reports of the faults made on purpose, and of those expected: "5 of 5"."""
    n_reports = sum(len(fault.reports) for fault in FAULTS.values())
    return f"{n_reports - len(unseen)} of {n_reports}"


def n_processes(directory: Path) -> int:
    """Return the number of programs that were started in a run."""
    return len(_commands(directory))


def _commands(directory: Path) -> dict[str, str]:
    """The command of each process id."""
    file = directory / "processes"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- Reading ------------------------------------------------------------------------------------
def read(directory: Path) -> list[Report]:
    """Return all reports of a run, those of Python's own leaks included."""
    commands = _commands(directory)
    found: list[Report] = []
    for path in sorted(directory.glob("*san.*")):
        command = commands.get(path.suffix[1:], "")
        found += parse(path.read_text(errors="replace"), command)
    return found


def parse(text: str, command: str) -> list[Report]:
    """Return the reports in the output of one process; an unreadable output is one report, too."""
    found: list[Report] = []
    for match, block in _blocks(_UNDEFINED, text):
        # The kind of a report is the text before the values and types.
        kind = re.split(r": | 0x| of type | for |, which", match[2])[0]
        found.append(_report(UNDEFINED, kind, block, command, otherwise=match[1]))
    for error, block in _blocks(_ERROR, text):
        if error[1] != "detected memory leaks":
            summary = _SUMMARY.search(block)
            kind = summary[1] if summary else _DETAILS.split(error[1])[0]
            found.append(_report(ADDRESS, kind, block, command))
            continue
        for leak, lost in _blocks(_LEAK, block):
            stack = lost.split("\n\n")[0]
            found.append(_report(LEAK, "leak", stack, command, n_bytes=int(leak[1])))
    if text.strip() and not found:
        found.append(_report(ADDRESS, f"unreadable: {text.strip()[:80]}", text, command))
    return found


def _blocks(head: re.Pattern[str], text: str) -> list[tuple[re.Match[str], str]]:
    """Return every match, and the text from it to the next one."""
    heads = list(head.finditer(text))
    ends = [match.start() for match in heads[1:]] + [len(text)]
    return [(match, text[match.start() : end]) for match, end in zip(heads, ends, strict=False)]


def _report(
    sanitizer: str, kind: str, block: str, command: str, *, otherwise: str = "?", n_bytes: int = 0
) -> Report:
    frames = [(frame["where"], frame["module"]) for frame in _FRAME.finditer(block)]
    native = [where for where, module in frames if module.startswith(NATIVE)]
    is_native = any(module.startswith(OURS) for _, module in frames)
    named = [where for where, module in frames if "<null>" not in where and "asan" not in module]
    place = [*native, *named, *(module for _, module in frames[1:]), otherwise][0]
    return Report(sanitizer, kind, _short(place), command, is_native, n_bytes)


def _short(place: str) -> str:
    """Return a place without the directories above those of llama.cpp or the project."""
    return re.sub(r"\S*/llama\.cpp-[^/]+/", "", place).replace(f"{ROOT}/", "")


@dataclass(frozen=True)
class Findings:
    """The reports of a run, in three parts.

    Attributes
    ----------
    wrong : list of Report
        Reports that no expectation covers.
    expected : mapping
        Number of reports that each expectation covers.
    foreign : list of Report
        Leaks without a module of `OURS` in their stacks.  Python, its extensions, and other programs, such
        as a compiler in a test, do not free everything at their exit.
    """

    wrong: list[Report]
    expected: Mapping[Expected, int]
    foreign: list[Report]


def sort_out(reports: Sequence[Report], expectations: Sequence[Expected] = ()) -> Findings:
    """Divide reports into wrong, expected and foreign ones."""
    counts = dict.fromkeys(expectations, 0)
    wrong, foreign = [], []
    for report in reports:
        covering = next((one for one in expectations if one.covers(report)), None)
        if covering is not None:
            counts[covering] += 1
        elif report.sanitizer == LEAK and not report.is_native:
            foreign.append(report)
        else:
            wrong.append(report)
    return Findings(wrong, counts, foreign)
