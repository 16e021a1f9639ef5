"""What was spawned ahead is taken by the next engine with a process, or ends."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from cllm import Engine
from cllm.engine.process import spawn
from cllm.engine.process.engine_process import EngineProcess
from tests.conftest import QUIET


def only() -> spawn.Spawned:
    """The one that waits."""
    (ahead,) = spawn._ahead
    return ahead


@pytest.mark.anyio
async def test_the_next_engine_takes_it() -> None:
    with spawn.spawning_ahead():
        pid = only().process.pid
        async with Engine(process=True, n_ctx=128, **QUIET) as engine:
            host = engine._parts.thread
            assert isinstance(host, EngineProcess)
            assert host.pid == pid
            assert (await engine.generate("x", max_tokens=2)).usage.n_output
        assert spawn._ahead == []


def test_it_ends_without_a_word_with_who_spawned_it() -> None:
    with spawn.spawning_ahead():
        ahead = only()
        assert ahead.is_usable
        assert ahead.process.stdin is not None
        ahead.process.stdin.close()  # as the system does
        assert ahead.process.stderr is not None
        assert ahead.process.stderr.read() == b""
        assert ahead.process.wait() == 0


def test_one_that_nobody_took_has_ended_afterwards() -> None:
    with suppress(KeyError), spawn.spawning_ahead():
        ahead = only()
        raise KeyError
    assert ahead.process.returncode == -signal.SIGKILL
    assert spawn._ahead == []


def test_one_that_has_died_is_replaced() -> None:
    with spawn.spawning_ahead():
        ahead = only()
        ahead.process.send_signal(signal.SIGKILL)
        ahead.process.wait()
        taken = spawn.spawned()
        assert taken is not ahead
        taken.close()
    assert taken.process.returncode == -signal.SIGKILL
