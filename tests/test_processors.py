"""How many threads compute follows from what a process may use: cores, affinity, quotas of cgroups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cllm import processors
from cllm.checks import MAX_THREADS
from cllm.processors import Processors, cgroup_directories, usable_processors

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these processors, two to a core, and files of cgroups."""
    monkeypatch.setattr(processors, "CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(processors, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(processors, "TOPOLOGY", tmp_path / "cpu")

    def make(n_processors: int, own: str = "", **files: str) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n_processors)))
        for n in range(n_processors):
            topology = tmp_path / f"cpu/cpu{n}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{n // 2 * 2}-{n // 2 * 2 + 1}\n")
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def test_without_a_quota_each_core_has_a_thread(machine: Machine) -> None:
    machine(8)
    assert usable_processors() == Processors(8, 4, None)
    assert usable_processors().n_threads == 4


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "300000 100000\n"}),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000\n"}),
        ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
                                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}),
        ("4:cpu,cpuacct:/host\n", {"cpu/cpu.cfs_quota_us": "200000\n",
                                   "cpu/cpu.cfs_period_us": "100000\n"}),
    ],
)  # fmt: skip
def test_the_least_quota_of_all_cgroups_counts(
    own: str, files: dict[str, str], machine: Machine
) -> None:
    machine(64, own, **files)
    assert usable_processors() == Processors(64, 32, 2.0)
    assert usable_processors().n_threads == 2


@pytest.mark.parametrize(
    ("quota", "n_threads"), [(0.1, 1), (1.5, 1), (1.0, 1), (3.9, 3), (64.0, 4), (None, 4)]
)
def test_threads_do_not_exceed_the_quota(quota: float | None, n_threads: int) -> None:
    assert Processors(8, 4, quota).n_threads == n_threads


def test_no_more_threads_than_llama_cpp_takes() -> None:
    assert Processors(2048, 1024, None).n_threads == MAX_THREADS


@pytest.mark.parametrize("text", ["", "x", "max 100000", "100000", "100000 0", "1 2 3"])
def test_what_cannot_be_read_is_no_quota(text: str, machine: Machine) -> None:
    machine(4, "0::/\n", **{"cpu.max": text})
    assert usable_processors().quota is None


def test_without_files_of_cgroups_there_are_none(machine: Machine) -> None:
    machine(4)
    assert list(cgroup_directories("cpu")) == []
