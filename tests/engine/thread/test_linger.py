"""The wait for those who come straight back ends with them, or with anything else there is to do."""

from __future__ import annotations

import time

import anyio
import pytest

from cllm import TokenStream
from cllm.engine.core.commands import AddRequest, CancelRequest, Command, Read
from cllm.engine.core.linger import Linger
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.mailbox import Inbox
from cllm.testing import FakeEngine

FAR = time.perf_counter() + 3600.0


def request(serial: int) -> AddRequest:
    return AddRequest(
        GenerationRequest(
            request_id=f"r{serial}",
            serial=serial,
            prompt_token_ids=(1,),
            params=SamplingParams(),
            priority=0,
            submitted_at=0.0,
            deadline=None,
        )
    )


def inbox_with(*commands: Command) -> Inbox:
    inbox = Inbox()
    for command in commands:
        inbox.put(command)
    return inbox


def test_the_wait_ends_when_as_many_have_come_as_were_waited_for() -> None:
    commands: list[Command] = [request(0), Read("r9", 1), request(1)]
    inbox = inbox_with(*commands)
    assert inbox.drain_requests(2, FAR) == commands
    assert len(inbox.take_arrivals()) == 2
    assert inbox.take_arrivals() == []


def test_the_wait_ends_with_a_command_that_is_no_request() -> None:
    commands: list[Command] = [request(0), CancelRequest("r9")]
    assert inbox_with(*commands).drain_requests(2, FAR) == commands


def test_the_wait_ends_in_time() -> None:
    command = request(0)
    assert inbox_with(command).drain_requests(2, time.perf_counter()) == [command]


@pytest.mark.anyio
async def test_an_engine_that_waits_goes_on_when_a_client_comes_back_or_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = []

    def an_hour(self: Linger, n_ended: int, n_running: int, next_tick_s: float) -> float:
        waits.append((n_ended, n_running))
        return 3600.0

    async def read(stream: TokenStream) -> None:
        async for _ in stream:
            pass

    answers = {"on and on": "x" * 60_000, "hi": "hi"}
    async with FakeEngine(answers, n_ctx=1 << 16, stream_buffer=100_000, latency_s=0.001) as engine:
        endless = engine.stream("on and on")
        async with endless, anyio.create_task_group() as tasks:
            await endless.__anext__()
            monkeypatch.setattr(Linger, "seconds", an_hour)
            tasks.start_soon(read, endless)
            for _ in range(3):  # each but the first ends a wait
                await engine.generate("hi", max_tokens=1)
            await endless.cancel()
    assert waits == [(1, 1)] * 3
