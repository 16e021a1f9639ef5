"""The cases of `lifecycle`: `python -m tests.reliability.lifecycle_cases CASE LOOP SEED`.

A case raises an error, crashes or hangs if an engine misbehaves.  Its last output is a JSON object of figures.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import statistics
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from benchmarks.measure import malloc_mib, rss_mib
from cllm import ClosedError, Engine, SamplingParams
from tests.conftest import running_batch
from tests.reliability.lifecycle_exits import (
    exit_in_callback,
    exit_with_live_engine,
    fork_under_load,
    spawn,
    stopped_by_sigterm,
    under_load,
)
from tests.reliability.lifecycle_requests import (
    ENDLESS,
    GREEDY,
    LIMIT_S,
    LONG,
    METHODS,
    N_STREAMS,
    OPTIONS,
    SCHEMA,
    ends,
    error_of,
)


# --- Closing -------------------------------------------------------------------------------------
async def close_during(seed: int) -> None:
    """Close an engine at one of four moments, after a random delay; it must cut off every request."""
    moments = ("prompt", "first tick", "tokenizing", "compiling")
    moment, chance = moments[seed % 4], random.Random(seed)
    constrained = SamplingParams(json_schema=SCHEMA | {"title": str(seed)}, max_tokens=1000)
    found: list[str] = []
    room = {"n_ctx": 32768, "kv_unified": True, "n_batch": 8 if moment == "prompt" else 512}
    async with Engine(**OPTIONS | room) as engine:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "prompt": lambda: engine.generate([97] * 30_000, max_tokens=1, temperature=0.0),
            "first tick": lambda: engine.generate(LONG, ENDLESS),
            "tokenizing": lambda: engine.generate("a b" * 600, ENDLESS),
            "compiling": lambda: engine.generate("1+1=", constrained),
        }
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ends, calls[moment], found)
            await anyio.lowlevel.checkpoint()
            if moment in ("prompt", "first tick"):
                while not running_batch(engine):
                    await anyio.lowlevel.checkpoint()
            for _ in range(chance.randrange(100)):
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(LIMIT_S):
                await engine.aclose()
        assert len(found) == 3, found
        assert set(found) <= {"cancelled", "ClosedError"}, found
    sys.stdout.write(
        json.dumps({"n_cut": len(found), "n_cut_before_submission": found.count("ClosedError")})
    )


async def close_twice(seed: int) -> None:
    """Close an engine from two tasks at once, and once more; no thread or request may be left."""
    engine = await Engine(**OPTIONS).__aenter__()
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends, lambda: engine.generate(LONG, ENDLESS), found)
        for _ in range(seed):
            await anyio.lowlevel.checkpoint()
        tasks.start_soon(engine.aclose)
        tasks.start_soon(engine.aclose)
    await engine.aclose()
    assert not engine._parts.thread.is_alive
    assert len(found) == 1, found


async def methods_after_close(seed: int) -> None:
    """Call all methods of a closed engine: they must raise `ClosedError`, but health and statistics answer."""
    async with Engine(**OPTIONS) as engine:
        await engine.generate("1+1=", GREEDY)
    for name, call in METHODS.items():
        assert (error := await error_of(call, engine)) is ClosedError, (name, error)
    assert engine.health().status == "closed"
    assert engine.statistics().n_ticks > 0
    assert "closed" in repr(engine)


async def collected(seed: int) -> None:
    """Drop the last reference to a running engine: it must warn, and its threads must end."""

    async def forget() -> threading.Thread:
        engine = await Engine(**OPTIONS).__aenter__()
        stream = engine.stream(LONG, ENDLESS)
        await stream.__anext__()
        return engine._parts.thread._thread

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = await forget()
        gc.collect()
        await anyio.to_thread.run_sync(thread.join, LIMIT_S)
    assert not thread.is_alive()
    assert any("dropped without being closed" in str(warning.message) for warning in told), told
    async with Engine(**OPTIONS) as engine:
        assert (await engine.generate("1+1=", GREEDY)).text == "2"


async def body_raises(seed: int) -> None:
    """Raise in the body of `async with`: that exception must come out, and the engine must be closed."""
    found: list[str] = []  # some end with the engine, the others with the task group
    try:
        async with anyio.create_task_group() as tasks, Engine(**OPTIONS) as engine:
            for _ in range(N_STREAMS):
                tasks.start_soon(ends, lambda: engine.generate(LONG, ENDLESS), found)
            while len(running_batch(engine)) <= seed % N_STREAMS:
                await anyio.lowlevel.checkpoint()
            raise LookupError("of the body")
    except* LookupError:
        pass
    assert not engine._parts.thread.is_alive
    assert engine.health().status == "closed"


async def cancelled_start(seed: int) -> None:
    """Cancel the start of an engine after `seed**2` checkpoints; no thread may be left."""
    engine = Engine(**OPTIONS, preflight=seed % 2 == 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.__aenter__)
        for _ in range(seed**2):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    await engine.aclose()
    assert threading.active_count() == 1, threading.enumerate()


# --- Several engines -------------------------------------------------------------------------
SUMS = [f"{n}+{n + 1}=" for n in range(20)]


async def sums(engine: Engine) -> list[str]:
    """Answers to twenty sums."""
    return [c.text for c in await engine.generate_all(SUMS, GREEDY)]


async def two_engines(seed: int) -> None:
    """Use two engines at once: the answers must be right, and each engine has its own bookkeeping."""
    async with Engine(**OPTIONS) as one:
        expected = await sums(one)
    async with Engine(**OPTIONS) as one, Engine(**OPTIONS | {"kv_unified": False}) as two:
        answers: list[list[str]] = []

        async def ask(engine: Engine) -> None:
            answers.append(await sums(engine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, one)
            tasks.start_soon(ask, two)
            tasks.start_soon(ask, two)
        assert answers == [expected] * 3
        n_finished = [sum(e.statistics().n_finished.values()) for e in (one, two)]
        assert n_finished == [len(SUMS), 2 * len(SUMS)], n_finished
        assert await one.audit() == await two.audit() == []


def two_loops(backend: str, seed: int) -> None:
    """Use an engine in each of two threads, one under asyncio and the other under `backend`."""
    backends = ("asyncio", backend)
    answers: list[list[str]] = []
    barrier = threading.Barrier(2)

    async def ask() -> None:
        async with Engine(**OPTIONS) as engine:
            await anyio.to_thread.run_sync(barrier.wait)
            for _ in range(3):
                answers.append(await sums(engine))
            assert await engine.audit() == []

    threads = [threading.Thread(target=anyio.run, args=(ask,), kwargs={"backend": b}) for b in backends]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 6
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][:3] == ["1", "3", "5"], answers[0]


def reload(backend: str, n_times: int) -> None:
    """Load a model `n_times` in one process: threads and descriptors must not change after the tenth time.

    The growth of resident and malloc memory is printed.  Resident memory sometimes grows in steps,
    memory allocated by malloc does not.
    """

    async def use() -> None:
        async with Engine(**OPTIONS) as engine:
            assert (await engine.generate("1+1=", GREEDY)).text == "2"

    def held() -> tuple[float, float, int, int]:
        gc.collect()
        n_fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        return rss_mib(), malloc_mib(), n_fds, threading.active_count()

    def growth(values: Sequence[float]) -> float:
        n_each = max(1, len(values) // 4)
        return round(statistics.median(values[-n_each:]) - statistics.median(values[:n_each]), 3)

    after: list[tuple[float, float, int, int]] = []
    for _ in range(n_times):
        anyio.run(use, backend=backend)
        after.append(held())
    rss, malloc, fds, threads = zip(*after[min(9, n_times // 2) :], strict=True)
    assert len(set(fds)) == 1, fds
    assert set(threads) == {1}, threads
    grown = {"rss_growth_mib": growth(rss), "malloc_growth_mib": growth(malloc)}
    sys.stdout.write(json.dumps(grown))


ASYNC_CASES: dict[str, Callable[[int], Awaitable[None]]] = {
    f.__name__: f
    for f in (
        close_during, close_twice, methods_after_close, collected, body_raises, exit_in_callback,
        exit_with_live_engine, cancelled_start, under_load, stopped_by_sigterm, fork_under_load,
        spawn, two_engines,
    )
}  # fmt: skip
PLAIN_CASES = {f.__name__: f for f in (two_loops, reload)}


def main(name: str, backend: str, seed: str) -> None:
    """Run a case; Ctrl-C ends it as it ends a shell's program."""
    # A background process may inherit an ignored SIGINT, and the event loops would then ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if name in PLAIN_CASES:
        PLAIN_CASES[name](backend, int(seed))
        return
    try:
        anyio.run(ASYNC_CASES[name], int(seed), backend=backend)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as group:  # trio and task groups raise groups
        if group.subgroup(KeyboardInterrupt) is not None:
            sys.exit(130)
        if len(group.exceptions) == 1 and isinstance(group.exceptions[0], SystemExit):
            sys.exit(group.exceptions[0].code)
        raise
    if name == "exit_with_live_engine":
        return
    gc.collect()
    # trio keeps its idle threads for a while; those of asyncio have been asked to end.
    others = [t for t in threading.enumerate()[1:] if "Trio" not in t.name]
    for thread in others:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in others), others


if __name__ == "__main__":
    main(*sys.argv[1:])
