"""The proof of suspended generations, at some of the tokens."""

from __future__ import annotations

import subprocess

import pytest

from tests.reliability.suspensions import COMMAND


@pytest.mark.full
def test_generations_go_on_in_another_process_after_the_first_was_killed() -> None:
    done = subprocess.run(
        [*COMMAND, "--each", "5"], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " 0 went on differently, 0 discrepancies" in done.stdout
