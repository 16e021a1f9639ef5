"""A server for real clients: a scripted engine behind a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest
import uvicorn

from cllm import Engine
from cllm.server import create_app
from cllm.testing import FakeAnswer, FakeEngine

WEATHER = FakeAnswer(
    reasoning="I need the weather.", tool_calls=[("get_weather", {"city": "Paris"})]
)
FINAL = FakeAnswer(tool_calls=[("final_result", {"city": "Paris", "degrees": 20})])


def answer(prompt: str) -> FakeAnswer | str:
    """Return the scripted answer: a count of images or recordings, a call of a weather or "final_result" tool, a result, JSON, or a greeting."""
    *_, last = (line for line in prompt.splitlines() if line.startswith(("user: ", "tool: ")))
    if "<image>" in prompt:
        return f"I see {prompt.count('<image>')}."
    if "<audio>" in prompt:
        return f"I hear {prompt.count('<audio>')}."
    if "final_result" in prompt:
        return FINAL
    if last.startswith("tool: "):
        return f"It is {last.removeprefix('tool: ')} in Paris."
    if "weather" in last and "get_weather" in prompt:
        return WEATHER
    if "JSON" in last:
        return '{"city": "Paris", "degrees": 20}'
    return FakeAnswer("Hello!", reasoning="A greeting.")


@contextmanager
def served(make: Callable[[], Engine]) -> Iterator[str]:
    """The address of a server behind a real socket."""
    listening = socket.create_server(("127.0.0.1", 0))
    port, ready, server = listening.getsockname()[1], threading.Event(), None

    async def serve() -> None:
        nonlocal server
        async with make() as engine:
            config = uvicorn.Config(create_app(engine), log_level="warning", lifespan="on")
            server = uvicorn.Server(config)
            ready.set()
            await server.serve([listening])

    thread = threading.Thread(target=anyio.run, args=(serve,))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        assert server is not None
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """The address of a server that ends with the tests."""
    with served(lambda: FakeEngine(answer, n_ctx=16384)) as url:
        yield url
