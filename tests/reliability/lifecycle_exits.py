"""The cases of `lifecycle` in which a process ends, is told to end, or has children."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from typing import Any

import anyio
import anyio.lowlevel

from cllm import Engine, TokenStream
from cllm.errors import WrongProcessError
from tests.reliability.lifecycle_requests import (
    ENDLESS,
    GREEDY,
    LIMIT_S,
    LONG,
    METHODS,
    N_STREAMS,
    OPTIONS,
    SHORT,
    error_of,
)


def say_running() -> None:
    """Print "running": from now on the parent may send a signal, and times the end."""
    sys.stdout.write("running\n")
    sys.stdout.flush()


KEPT: list[object] = []


async def exit_with_live_engine(seed: int) -> None:
    """End the program, by itself or by `sys.exit`, while eight streams of an engine are open."""
    engine = await Engine(**OPTIONS).__aenter__()
    streams = [engine.stream(LONG, ENDLESS) for _ in range(N_STREAMS)]
    for stream in streams:
        await stream.__anext__()
    say_running()
    if seed % 2:
        sys.exit(0)
    KEPT.extend([engine, streams])


async def exit_in_callback(seed: int) -> None:
    """Call `sys.exit` in `on_progress`: the program must end with that code."""

    def on_progress(n_done: int, n_total: int) -> None:
        if n_done == 1 + seed % 10:
            sys.exit(7)

    async with Engine(**OPTIONS) as engine:
        await engine.generate_all([f"{n}+{n}=" for n in range(30)], GREEDY, on_progress=on_progress)


# --- Signals and forks -----------------------------------------------------------------------
async def under_load(seed: int) -> None:
    """Read eight endless streams; print "running" when all of them run."""
    n_running = 0

    async def read(engine: Engine) -> None:
        nonlocal n_running
        async with engine.stream(LONG, ENDLESS) as stream:
            await stream.__anext__()
            n_running += 1
            if n_running == N_STREAMS:
                say_running()
            async for _ in stream:
                pass
        await anyio.sleep_forever()

    async with Engine(**OPTIONS | {"n_ctx": 8192}) as engine, anyio.create_task_group() as tasks:
        for _ in range(N_STREAMS):
            tasks.start_soon(read, engine)


async def stopped_by_sigterm(seed: int) -> None:
    """Run `under_load`, and end in order at SIGTERM, as a program under systemd does."""
    async with anyio.create_task_group() as tasks:
        with anyio.open_signal_receiver(signal.SIGTERM) as received:
            tasks.start_soon(under_load, seed)
            async for _ in received:
                tasks.cancel_scope.cancel()
                break
    sys.exit(128 + signal.SIGTERM)


async def fork_under_load(seed: int) -> None:
    """Fork: every method must raise `WrongProcessError` in the child, and the parent's streams be right."""
    async with Engine(**OPTIONS) as engine:
        expected = (await engine.generate(SHORT, GREEDY)).text
        texts: list[str] = []
        streams = [engine.stream(SHORT, GREEDY) for _ in range(N_STREAMS)]
        for stream in streams:
            await stream.__anext__()

        async def read(stream: TokenStream) -> None:
            texts.append((await stream.completion()).text)

        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(read, stream)
            for _ in range(seed):
                await anyio.lowlevel.checkpoint()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # threads are running: that is the point
                pid = os.fork()
            if pid == 0:
                os._exit(_in_the_child(engine))
        assert texts == [expected] * N_STREAMS
        assert await engine.audit() == []
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status


def _in_the_child(engine: Engine) -> int:
    """Return the number of methods of the parent's engine that do not raise `WrongProcessError`.

    The child calls them in a new thread: for trio, the forked main thread still runs its loop.
    """
    signal.alarm(int(LIMIT_S))
    wrong = []

    async def call_all() -> None:
        for name, call in METHODS.items():
            error = await error_of(call, engine)
            if error is not WrongProcessError:
                wrong.append((name, error))

    thread = threading.Thread(target=asyncio.run, args=(call_all(),))
    thread.start()
    thread.join()
    os.write(2, f"in the child: {wrong}\n".encode() if wrong else b"")
    return len(wrong)


def spawned(into: Any) -> None:
    """Answer a request in a process that multiprocessing started, and put the answer into a queue."""

    async def ask() -> str:
        async with Engine(**OPTIONS) as engine:
            return (await engine.generate("20+22=", GREEDY)).text

    into.put(anyio.run(ask))


async def spawn(seed: int) -> None:
    """Use an engine here, and another one in a process that multiprocessing spawns."""
    context = multiprocessing.get_context("spawn")
    async with Engine(**OPTIONS) as engine:
        into = context.SimpleQueue()
        process = context.Process(target=spawned, args=(into,))
        process.start()
        assert (await engine.generate("20+22=", GREEDY)).text == "42"
        answer = await anyio.to_thread.run_sync(into.get)
        process.join()
        assert (answer, process.exitcode) == ("42", 0)
        process.close()
        into.close()
