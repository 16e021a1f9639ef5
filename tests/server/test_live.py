"""`/live`: what the page is told of the engine, how often, and what it costs those who do not look."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from cllm.server.operation.latest_frame import PERIOD_S, LatestFrame
from cllm.server.routes.live_feed import IDLE_PERIOD_S, period_s
from tests.server.conftest import Server

ENDLESS = {"prompt": "count:1..199", "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def watching(server: Server) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The frames that a page gets."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
        client.stream("GET", "/live") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        yield (json.loads(line[6:]) async for line in lines if line.startswith("data: "))


@pytest.mark.anyio
async def test_a_frame_has_slots_cells_ticks_and_latencies_as_they_are(server: Server) -> None:
    async with anyio.create_task_group() as tasks, watching(server) as frames:

        async def ask() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                await client.post("/generate", json=ENDLESS)

        tasks.start_soon(ask)
        numbers: list[int] = []
        async for frame in frames:
            numbers.append(frame["number"])
            held = {seq_id for *_, holders in frame["extents"] for seq_id in holders}
            busy = {s["seq_id"] for s in frame["slots"] if s["n_computed"]}
            assert held == busy
            decoding = [s for s in frame["slots"] if s["state"] == "decode"]
            if decoding and len(frame["ticks"]) > 1 and len(numbers) > 2:
                break
        (slot,) = decoding
        assert slot["request_id"]
        n_decode, n_prompt, n_drafts, *seconds, started = frame["ticks"][-1]
        assert (n_decode, n_prompt, n_drafts) == (1, 0, 0)
        assert 0 <= frame["now"] - started < 10
        assert all(0 <= second < 10 for second in seconds)
        ends = [end for _, end, _, holders in frame["extents"] if slot["seq_id"] in holders]
        assert max(ends) == slot["n_computed"]
        assert numbers == sorted(set(numbers))
        assert frame["model"] == "cllm-tiny"
        tasks.cancel_scope.cancel()


class CountedFrames:
    """A LatestFrame on a clock of its own, and the number of frames that it made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.n_made = 0
        self.latest = LatestFrame(clock=lambda: self.now_s)

    async def _make(self) -> dict[str, Any]:
        self.n_made += 1
        await anyio.lowlevel.checkpoint()
        return {"n_waiting": self.n_made}

    async def get(self) -> dict[str, Any]:
        return await self.latest.get(self._make)


@pytest.mark.anyio
async def test_readers_at_the_same_time_share_one_frame() -> None:
    frames, read = CountedFrames(), list[dict[str, Any]]()

    async def reader() -> None:
        read.append(await frames.get())

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(reader)
    assert frames.n_made == 1
    assert read == [{"number": 1, "n_waiting": 1}] * 5


@pytest.mark.anyio
async def test_a_frame_is_made_anew_after_half_a_period_and_only_for_a_reader() -> None:
    frames = CountedFrames()
    await frames.get()
    frames.now_s = PERIOD_S / 2 - 0.001
    assert (await frames.get())["number"] == 1
    frames.now_s = PERIOD_S / 2
    assert (await frames.get())["number"] == 2
    frames.now_s = 100 * PERIOD_S  # no reader came for a long time
    assert (await frames.get())["number"] == 3


@pytest.mark.anyio
async def test_a_new_reader_has_the_ticks_of_earlier_frames_too() -> None:
    frames = CountedFrames()

    async def make() -> dict[str, Any]:
        frames.n_made += 1
        return {"ticks": [frames.n_made]}

    for _ in range(3):
        frame = await frames.latest.get(make)
        frames.now_s += PERIOD_S
    assert frame["ticks"] == [3]
    assert frames.latest.with_history(frame)["ticks"] == [1, 2, 3]
    assert frames.latest.with_history({"status": "starting"}) == {"status": "starting"}


@pytest.mark.anyio
async def test_a_frame_that_cannot_be_made_is_made_for_the_next_reader() -> None:
    frames = CountedFrames()

    async def fail() -> dict[str, Any]:
        raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError):
        await frames.latest.get(fail)
    assert (await frames.get())["n_waiting"] == 1


@pytest.mark.anyio
async def test_several_pages_get_the_frames_of_one_row(server: Server) -> None:
    async with watching(server) as first, watching(server) as second:
        seen: dict[int, dict[str, Any]] = {}
        for _ in range(2):  # the first frame that each gets has earlier ticks, too
            for frames in (first, second):
                await anext(frames)
        for frames in (first, second) * 3:
            frame = await anext(frames)
            assert seen.setdefault(frame["number"], frame) == frame


def test_an_idle_engine_is_asked_less_often() -> None:
    assert period_s({"ticks": [], "n_waiting": 0}) == IDLE_PERIOD_S
    assert period_s({"ticks": [[1, 0, 0, 0.0, 0.0, 0.0]], "n_waiting": 0}) == PERIOD_S
    assert period_s({"ticks": [], "n_waiting": 1}) == PERIOD_S
    assert period_s({"status": "starting"}) == IDLE_PERIOD_S
