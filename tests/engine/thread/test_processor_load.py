"""ProcessorReader derives waiting, foreign and idle time from what `/proc` reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cllm.engine.thread import processor_load
from cllm.engine.thread.processor_load import ProcessorReader

PARENT = 77
HZ = os.sysconf("SC_CLK_TCK")


class Proc:
    """Fake `/proc` with two processors; a test sets their times in seconds."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self.now = 100.0
        self.own_s = 0.0
        self.n_processors = 2
        monkeypatch.setattr(processor_load, "PROC", root)
        self.on_sleep: Callable[[], None] = lambda: None
        clocks = {
            "monotonic": lambda: self.now,
            "process_time": lambda: self.own_s,
            "sleep": lambda seconds: self.on_sleep(),
        }
        monkeypatch.setattr(processor_load, "time", SimpleNamespace(**clocks))
        affinity = lambda pid: set(range(self.n_processors))  # noqa: E731
        monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)

    def write(
        self, *, idle_s: float, stolen_s: float = 0.0, parent_s: float = 0.0, n_running: int = 1
    ) -> None:
        """Set how long both processors were idle, and stolen, together."""

        def line(name: str, idle: float, stolen: float) -> str:
            ticks = [9, 9, 9, round(idle * HZ), 0, 0, 0, round(stolen * HZ), 0, 0]
            return f"{name} {' '.join(map(str, ticks))}\n"

        half = idle_s / 2, stolen_s / 2
        lines = [line("cpu", 10 * idle_s, 0), line("cpu0", *half), line("cpu1", *half)]
        # A processor that this process may not use.
        lines.append(line("cpu2", 50 * idle_s, 0))
        self._file("stat").write_text("".join(lines) + f"ctxt 5\nprocs_running {n_running}\n")
        fields = ["S", *["0"] * 10, str(round(parent_s * HZ)), "0", "0"]
        self._file(f"{PARENT}/stat").write_text(f"{PARENT} (a) b) {' '.join(fields)}\n")

    def thread(self, tid: int, waited_s: float) -> None:
        """Set how long a thread has waited."""
        self._file(f"self/task/{tid}/schedstat").write_text(f"5 {round(waited_s * 1e9)} 3\n")

    def _file(self, name: str) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    return Proc(tmp_path, monkeypatch)


@pytest.fixture
def python_thread() -> Iterator[int]:
    """The system's id of another thread of Python's."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    is_over.set()
    thread.join()


def test_what_no_relative_used_was_used_by_other_programs(proc: Proc) -> None:
    proc.write(idle_s=10.0, stolen_s=1.0, parent_s=3.0)
    proc.thread(threading.get_native_id(), 0.0)
    reader = ProcessorReader((PARENT,))
    proc.now += 2.0
    proc.own_s += 1.4
    # Of four seconds on two processors: 0.4 idle, 0.2 stolen, 1.4 own, 0.6 the parent's.
    proc.write(idle_s=10.4, stolen_s=1.2, parent_s=3.6)
    load = reader.read()
    assert load is not None
    assert load.idle == pytest.approx(0.2, abs=0.02)
    assert load.others == pytest.approx(0.7, abs=0.02)
    assert load.own == pytest.approx(1.0, abs=0.02)


def test_compute_threads_wait_and_other_threads_of_python_do_not_count(
    proc: Proc, python_thread: int
) -> None:
    worker, late = 900_001, 900_002
    own = threading.get_native_id()
    proc.write(idle_s=10.0)
    for tid in (own, worker, python_thread):
        proc.thread(tid, 5.0)
    reader = ProcessorReader()
    proc.now += 2.0
    proc.thread(own, 5.2)
    proc.thread(worker, 5.6)
    proc.thread(late, 0.1)
    proc.thread(python_thread, 7.0)
    load = reader.read()
    assert load is not None
    assert load.waiting == pytest.approx(0.45)


def test_each_load_is_since_the_last_reading(proc: Proc) -> None:
    own = threading.get_native_id()
    proc.write(idle_s=0.0)
    proc.thread(own, 0.0)
    reader = ProcessorReader()
    waiting = []
    for waited_s in (1.0, 1.0, 1.5):
        proc.now += 1.0
        proc.thread(own, waited_s)
        load = reader.read()
        assert load is not None
        waiting.append(load.waiting)
    assert waiting == pytest.approx([1.0, 0.0, 0.5])


def test_a_system_without_these_files_reports_no_load(proc: Proc) -> None:
    assert ProcessorReader().read() is None
    proc.write(idle_s=0.0)
    reader = ProcessorReader()  # no thread says how long it has waited
    proc.now += 1.0
    assert reader.read() is None


def test_a_parent_that_has_ended_leaves_no_load(proc: Proc) -> None:
    proc.write(idle_s=0.0)
    proc.thread(threading.get_native_id(), 0.0)
    reader = ProcessorReader((PARENT + 1,))
    proc.now += 1.0
    assert reader.read() is None


def test_a_window_that_is_too_short_counts_with_the_next(proc: Proc) -> None:
    own = threading.get_native_id()
    proc.write(idle_s=0.0)
    proc.thread(own, 0.0)
    reader = ProcessorReader()
    proc.now += 0.05
    proc.thread(own, 0.05)
    assert reader.read() is None
    proc.now += 0.15
    load = reader.read()
    assert load is not None
    assert load.waiting == pytest.approx(0.25)


def test_another_set_of_processors_leaves_no_load(proc: Proc) -> None:
    proc.write(idle_s=0.0)
    proc.thread(threading.get_native_id(), 0.0)
    reader = ProcessorReader()
    for n_processors in (1, 2):
        proc.now += 1.0
        proc.n_processors = n_processors
        assert reader.read() is None
    proc.now += 1.0
    assert reader.read() is not None


def test_a_processor_that_is_not_listed_leaves_no_load(proc: Proc) -> None:
    proc.n_processors = 4
    proc.write(idle_s=0.0)
    proc.thread(threading.get_native_id(), 0.0)
    reader = ProcessorReader()
    proc.now += 1.0
    assert reader.read() is None


@pytest.mark.parametrize(
    ("n_running", "n_runnable"),
    [((1,), 0), ((4,), 3), ((4, 3, 2, 2, 1), 0), ((2, 4, 4, 3, 5), 1), ((2, 3, 3, 3, 3, 1), 1)],
)
def test_threads_that_run_only_for_a_moment_are_not_counted(
    proc: Proc, n_running: tuple[int, ...], n_runnable: int
) -> None:
    proc.write(idle_s=0.0, n_running=n_running[0])
    proc.thread(threading.get_native_id(), 0.0)
    reader = ProcessorReader()
    later = iter(n_running[1:])
    proc.on_sleep = lambda: proc.write(idle_s=0.0, n_running=next(later, n_running[-1]))
    assert reader.count_runnable() == n_runnable


def test_no_threads_are_counted_where_the_system_does_not_report_them(proc: Proc) -> None:
    assert ProcessorReader().count_runnable() == 0


def test_this_machine_reports_a_load_or_none() -> None:
    reader = ProcessorReader((os.getppid(),))
    reader._last = reader._last and reader._last._replace(at=reader._last.at - 1.0)
    load = reader.read()
    if load is None:
        pytest.skip("this system does not report how long threads wait")
    assert load.waiting >= 0.0
    assert load.others >= 0.0
    assert load.idle >= 0.0
