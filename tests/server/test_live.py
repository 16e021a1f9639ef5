"""`/live`: what the page is told of the engine, how often, and what it costs those who do not look."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from cllm.server.operation.latest_frame import PERIOD_S
from cllm.server.routes.live_feed import IDLE_PERIOD_S, period_s
from tests.server.conftest import Server

ENDLESS = {"prompt": "count:1..199", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}


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
            if decoding and frame["ticks"] and len(numbers) > 2:
                break
        (slot,) = decoding
        assert slot["request_id"]
        n_decode, n_prompt, n_drafts, *seconds = frame["ticks"][-1]
        assert (n_decode, n_prompt, n_drafts) == (1, 0, 0)
        assert all(0 <= second < 10 for second in seconds)
        ends = [end for _, end, _, holders in frame["extents"] if slot["seq_id"] in holders]
        assert max(ends) == slot["n_computed"]
        assert numbers == sorted(set(numbers))
        assert frame["model"] == "cllm-tiny"
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_for_several_who_watch_the_engine_is_asked_as_often_as_for_one(
    server: Server,
) -> None:
    async with watching(server) as first, watching(server) as second, watching(server) as third:
        numbers: set[int] = set()
        for frames in (first, second, third) * 3:
            numbers.add((await anext(frames))["number"])
    assert max(numbers) - min(numbers) < 9


@pytest.mark.anyio
async def test_nobody_asks_while_nobody_watches(server: Server) -> None:
    async with watching(server) as frames:
        last = (await anext(frames))["number"]
    with server.client() as client:
        for _ in range(5):
            client.post("/generate", json={"prompt": "1+1=", "max_tokens": 2})
    async with watching(server) as frames:
        assert (await anext(frames))["number"] <= last + 2  # one may have been under way


def test_an_idle_engine_is_asked_less_often() -> None:
    assert period_s({"ticks": [], "n_waiting": 0}) == IDLE_PERIOD_S
    assert period_s({"ticks": [[1, 0, 0, 0.0, 0.0, 0.0]], "n_waiting": 0}) == PERIOD_S
    assert period_s({"ticks": [], "n_waiting": 1}) == PERIOD_S
    assert period_s({"status": "starting"}) == IDLE_PERIOD_S
