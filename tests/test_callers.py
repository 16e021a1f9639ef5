"""Synchronous methods of libraries: an engine's event loop, called from threads that have none."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from cllm import DeadlineError
from cllm.integrations.caller import Caller, in_time
from cllm.testing import FakeEngine

pytestmark = pytest.mark.anyio


async def in_a_thread(call: Any) -> Any:
    """Run a call in a thread with a copy of this context, as LangChain and `asyncio.to_thread` do."""
    context = contextvars.copy_context()
    return await anyio.to_thread.run_sync(partial(context.run, call))


async def test_a_thread_with_a_copied_context_has_no_event_loop() -> None:
    async with FakeEngine({"1+1=": "2"}) as engine:
        caller = Caller()
        done = await in_a_thread(lambda: caller.run(lambda: engine.generate("1+1=")))
        assert done.text == "2"

        def read() -> list[str]:
            with caller.stream(lambda: engine.stream("1+1=")) as stream:
                return [delta.text for delta in stream]

        assert "".join(await in_a_thread(read)) == "2"
        with pytest.raises(RuntimeError, match="an event loop runs in this thread"):
            caller.run(lambda: engine.generate("1+1="))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_plain_thread_of_asyncio_has_no_event_loop_either(anyio_backend: str) -> None:
    async with FakeEngine({"1+1=": "2"}) as engine:
        caller = Caller()
        run = partial(caller.run, lambda: engine.generate("1+1="))
        assert (await asyncio.to_thread(run)).text == "2"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_gets_an_error_and_an_interrupted_wait_cancels_its_call() -> None:
    program = """
import os, signal, sys, threading
import anyio, anyio.to_thread
import cllm
from cllm.integrations.caller import Caller
from cllm.testing import FakeEngine

ready, done, left = threading.Event(), threading.Event(), threading.Event()
found = {}

async def main():
    async with FakeEngine(lambda _: "x" * 3000, n_ctx=4096, stream_buffer=2) as engine:
        found.update(engine=engine, caller=Caller())
        ready.set()
        await anyio.to_thread.run_sync(done.wait)

loop = threading.Thread(target=anyio.run, args=(main,))
loop.start()
ready.wait()
engine, caller = found["engine"], found["caller"]
if os.fork() == 0:
    try:
        caller.run(lambda: engine.generate("x"))
    except cllm.WrongProcessError:
        print("wrong process", flush=True)
    os._exit(0)
os.wait()
signal.signal(signal.SIGINT, signal.default_int_handler)

async def endless():
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        await anyio.sleep_forever()
    finally:
        left.set()

try:
    caller.run(endless)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("cancelled" if left.wait(30) else "not cancelled", flush=True)
done.set()
loop.join()
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.split("\n") == ["wrong process", "interrupted", "cancelled", ""], ran.stderr


async def test_an_answer_whose_time_was_over_is_an_error() -> None:
    async with FakeEngine(lambda _: "x" * 100) as engine:
        whole = await engine.generate("x")
        assert in_time(whole) is whole
        with pytest.raises(DeadlineError):
            in_time(await engine.generate("x", timeout=0))
