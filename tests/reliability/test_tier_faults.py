"""The proof of the tiers, at the first calls; and that its faults are faults."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from cllm.engine.state_file import DamagedFileError, read_state_file, write_state_file
from tests.reliability.file_faults import FileFault, FileFaults, fails
from tests.reliability.tier_faults import TIERS, try_tier

FULL = fails(errno.ENOSPC)


@pytest.mark.full
@pytest.mark.one_loop
@pytest.mark.anyio
@pytest.mark.parametrize("tier", TIERS)
async def test_no_fault_of_a_tier_changes_an_answer(tier: str, anyio_backend: str) -> None:
    found = await try_tier(tier, 1, [errno.ENOSPC])
    assert [line for tried in found for line in tried.wrong] == []
    assert all(tried.n_met for tried in found)
    assert sum(tried.n_met for tried in found) >= 0.9 * sum(tried.n_tried for tried in found)


@pytest.mark.parametrize("function", ["mkstemp", "fdopen", "write", "fsync", "replace"])
def test_a_call_that_fails_does_so_once_and_for_files_of_the_directory_alone(
    function: str, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    with FileFaults(inside) as faults:
        faults.arm(FileFault(function, 1, "full", FULL))
        write_state_file(outside / "file", {}, b"data")
        assert faults.n_met == 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write_state_file(inside / "file", {}, b"data")
        assert (faults.n_met, list(inside.iterdir())) == (1, [])
        write_state_file(inside / "file", {}, b"data")
    assert read_state_file(inside / "file") == ({}, b"data")
    with tempfile.NamedTemporaryFile(dir=inside):  # everything is as it was
        pass


def test_a_read_that_falls_short_is_found_out(tmp_path: Path) -> None:
    write_state_file(tmp_path / "file", {}, b"data")
    with FileFaults(tmp_path) as faults:
        faults.arm(FileFault("read", 1, "half", lambda real: real()[:5]))
        with pytest.raises(DamagedFileError):
            read_state_file(tmp_path / "file")
