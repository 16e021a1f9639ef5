"""A server for real clients: a scripted engine behind a real socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import httpx
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


# --- The page in Chromium ---------------------------------------------------------------------------
N_STREAMS = 16
HERE = "http://127.0.0.1:"
EXPECTED_MS = 30_000  # for what the page shows in the end, however busy the machine is


def is_fault(said: Any) -> bool:
    """Return True if a line of the console tells of a fault; an answer of 401 or a lost connection is none."""
    return said.type == "error" and "Failed to load resource" not in said.text


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="the browser is driven from another environment: make test-clients",
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium; on Debian: apt-get install chromium")
    playwright.expect.set_options(timeout=EXPECTED_MS)
    with playwright.sync_playwright() as driver:
        # As root, Chromium needs this option.
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab whose errors, and requests to other hosts, fail the test."""
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if is_fault(said) else None)
    page.on("request", lambda asked: wrong.append(asked.url) if is_elsewhere(asked.url) else None)
    yield page
    assert not wrong
    context.close()


def is_elsewhere(url: str) -> bool:
    """Return True if a request leaves this machine; a file that the page saves has a `blob:` address."""
    return HERE not in url


@pytest.fixture(scope="module")
def served_model() -> Iterator[str]:
    """A real server of the embedded model."""
    options = "--port", "0", "--n-threads", "1", "-c", "4096", "--n-seq-max", str(N_STREAMS)
    with subprocess.Popen(
        [sys.executable, "-m", "cllm", "serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        url = next(line.split()[3] for line in process.stderr if " at http" in line)
        # A full pipe would stop the server.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            while httpx.get(f"{url}/health", timeout=60).status_code != 200:
                pass
            yield url
        finally:
            process.terminate()
            assert process.wait(30) == 0


def say(page: Any, text: str) -> None:
    """Send a message as soon as the page takes one: "Stop" has the place of "Send" while an answer comes."""
    page.locator("#send").wait_for()
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
