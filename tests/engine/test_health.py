"""What `health` says of an engine, from its start to its end."""

from __future__ import annotations

import anyio
import pytest

from cllm import ClosedError, Engine, EngineStatus, Health
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio


async def test_health_follows_the_life_of_the_engine(anyio_backend: str) -> None:
    engine = Engine(n_ctx=256, n_seq_max=1, **QUIET)
    assert engine.health().status is EngineStatus.STARTING
    with pytest.raises(ClosedError):
        engine.stream("1+1=")
    async with engine:
        assert engine.health().status is EngineStatus.READY
        assert engine.statistics().n_kv_cells == 256
    assert engine.health().status is EngineStatus.CLOSED
    for use in (engine.audit, lambda: engine.tokenize("x"), lambda: engine.generate("x")):
        with pytest.raises(ClosedError):
            await use()
    with pytest.raises(ClosedError):
        await engine.__aenter__()
    await engine.aclose()


async def health_of(engine: Engine, status: EngineStatus) -> Health:
    with anyio.fail_after(30):
        while (health := engine.health()).status is not status:
            await anyio.sleep(0)
    return health


@pytest.mark.full
async def test_health_says_stalled_while_a_tick_takes_too_long_and_ready_after_it(
    anyio_backend: str,
) -> None:
    async with Engine(
        n_ctx=8192, n_seq_max=1, n_batch=8192, kv_unified=True, stall_timeout_s=0.001, **QUIET
    ) as engine:
        async with engine.stream([65] * 8000, max_tokens=1, temperature=0) as stream:
            health = await health_of(engine, EngineStatus.STALLED)
            assert health.heartbeat_age_s > 0.001
            assert "in one tick" in health.reason
            await stream.completion()
        await health_of(engine, EngineStatus.READY)
