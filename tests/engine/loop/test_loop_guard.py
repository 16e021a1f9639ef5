"""What wakes a task of the event loop of an engine."""

from __future__ import annotations

import anyio
import pytest

from cllm.engine.loop.loop_guard import LoopGuard


@pytest.mark.anyio
async def test_a_cancelled_wait_is_cancelled_though_the_event_comes_in_the_same_cycle() -> None:
    waiter = LoopGuard().waiter()

    async def wake() -> None:
        waiter.set()

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(wake)  # before the cancellation is delivered
            scope.cancel()
            await waiter.wait()
    assert scope.cancelled_caught
