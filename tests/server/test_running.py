"""The requests behind one HTTP request, as the operator is told of them."""

from __future__ import annotations

import re
import time

import pytest

from cllm import SamplingParams, TokenDelta
from cllm.server.answers.running import Observation, run_streams
from cllm.server.operation.metrics import Metrics
from cllm.server.operation.tracing import Tracing
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio


class ClientGoneError(Exception):
    """The client has left."""


async def test_a_clock_that_is_set_back_changes_no_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, hours = Metrics(), iter(range(10, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(hours) * 3600 * 10**9)

    async def leave(_: int, delta: TokenDelta) -> None:
        raise ClientGoneError(delta.text)

    async with FakeEngine({"1+1=": "an answer"}) as engine:
        observed = Observation(metrics, Tracing(), {}, "generate", "fake", SamplingParams())
        started = time.monotonic()
        with pytest.raises(ClientGoneError):
            await run_streams([engine.stream("1+1=")], observed, leave)
        elapsed = time.monotonic() - started
    (total,) = re.findall(rb"cllm_request_duration_seconds_sum (\S+)", metrics.text())
    assert 0 <= float(total) <= elapsed
