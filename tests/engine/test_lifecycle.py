"""Exit, leaks and signals: each in a child process, which may crash and must not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import asyncio, os, sys, threading
import anyio
from cllm import Engine
from cllm.engine.core.commands import Read
from cllm.errors import WrongProcessError
OPTIONS = dict(n_ctx=2048, n_seq_max=8, n_threads=1, n_threads_batch=1)
LONG = "count:100..299"
"""


def run_child(code: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `code` after the prelude, in development mode and with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def assert_clean(done: subprocess.CompletedProcess[str], returncode: int = 0) -> None:
    """Exit code as expected, and nothing was complained about at exit."""
    assert done.returncode == returncode, (done.returncode, done.stderr[-2000:])
    for sign in ("Exception ignored", "ResourceWarning", "Fatal Python error", "Traceback"):
        assert sign not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_whole_life_leaks_nothing(backend: str) -> None:
    """Development mode and `-W error` see no unclosed handle, stream or thread."""
    done = run_child(f"""
        import gc
        async def main():
            for _ in range(3):
                async with Engine(**OPTIONS) as engine:
                    results = await engine.generate_all(
                        [f"{{n}}+{{n}}=" for n in range(20)], temperature=0)
                    async with engine.stream(LONG, temperature=0.8, seed=1) as stream:
                        async for _ in stream:
                            break
                    assert await engine.audit() == []
            gc.collect()
        anyio.run(main, backend={backend!r})
        gc.collect()
        assert threading.active_count() == 1, threading.enumerate()
    """)
    assert_clean(done)


def test_an_engine_that_is_never_closed_is_not_freed_under_its_thread() -> None:
    done = run_child("""
        async def main():
            engine = await Engine(**OPTIONS).__aenter__()
            await engine.generate("1+1=", temperature=0)
        asyncio.run(main())
    """)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Fatal" not in done.stderr


def test_ctrl_c_during_a_generation_ends_the_program_as_usual() -> None:
    done = run_child("""
        import signal
        # A job in the background inherits an ignored SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        async def main():
            async with Engine(**OPTIONS) as engine:
                async with engine.stream(LONG, temperature=0) as stream:
                    async for _ in stream:
                        signal.raise_signal(signal.SIGINT)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    assert_clean(done, returncode=130)


def test_an_event_loop_that_dies_takes_its_engine_along() -> None:
    """The thread notices that nobody listens any more, and ends."""
    done = run_child("""
        loop = asyncio.new_event_loop()
        async def main():
            engine = await Engine(**OPTIONS).__aenter__()
            stream = engine.stream(LONG, temperature=0)
            await stream.__anext__()
            return engine, stream
        engine, stream = loop.run_until_complete(main())
        loop.close()
        engine._parts.inbox.put(Read(stream.request_id, 64))  # it may wait for its reader by now
        engine._parts.thread.join(10)
        assert not engine._parts.thread.is_alive
    """)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_forked_child_gets_a_clear_error_instead_of_hanging() -> None:
    done = run_child("""
        import warnings
        async def main():
            async with Engine(**OPTIONS) as engine:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    pid = os.fork()
                if pid == 0:
                    try:
                        engine.stream("1+1=")
                    except WrongProcessError:
                        os._exit(42)
                    os._exit(1)
                _, status = os.waitpid(pid, 0)
                assert os.waitstatus_to_exitcode(status) == 42
                assert (await engine.generate("1+1=", temperature=0)).text
        asyncio.run(main())
    """)
    assert_clean(done)


def test_two_engines_live_side_by_side() -> None:
    done = run_child("""
        async def main():
            async with Engine(**OPTIONS) as one, Engine(**OPTIONS) as two:
                results = [None, None]
                async def ask(index, engine):
                    results[index] = (await engine.generate("20+22=", temperature=0)).text
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, 0, one)
                    tasks.start_soon(ask, 1, two)
                assert results == ["42", "42"], results
        asyncio.run(main())
    """)
    assert_clean(done)


def test_a_cancelled_start_frees_everything() -> None:
    done = run_child("""
        async def main():
            with anyio.move_on_after(0):
                async with Engine(**OPTIONS):
                    raise AssertionError
            assert threading.active_count() == 1, threading.enumerate()
        anyio.run(main)
    """)
    assert_clean(done)


def test_importing_cllm_loads_no_library_and_starts_no_thread() -> None:
    done = run_child("""
        import cllm, cllm.bindings._library as library
        assert library._library is None
        assert threading.active_count() == 1
    """)
    assert_clean(done)


def test_sigterm_under_load_ends_the_process_by_that_signal() -> None:
    done = run_child("""
        import signal
        async def main():
            async with Engine(**OPTIONS) as engine:
                async for _ in engine.stream(LONG, temperature=0):
                    os.kill(os.getpid(), signal.SIGTERM)
        asyncio.run(main())
    """)
    assert done.returncode == -signal.SIGTERM


def test_an_engine_that_was_only_made_before_a_fork_is_entered_in_the_child() -> None:
    """As a server does that loads the application before it forks its workers."""
    done = run_child("""
        engine = Engine(**OPTIONS)
        pid = os.fork()
        if pid == 0:
            code = 1
            async def main():
                async with engine:
                    return (await engine.generate("1+1=", temperature=0)).text
            try:
                code = 42 if asyncio.run(main()) == "2" else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 42
    """)
    assert_clean(done)


def test_a_child_that_was_forked_while_the_library_was_loaded_can_load_it() -> None:
    done = run_child("""
        import signal
        from cllm.bindings import _library, library
        with _library._library_lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                os._exit(42 if library() else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 42
    """)
    assert_clean(done)


def test_closing_or_dropping_an_engine_in_a_forked_child_ends_its_use_there_alone() -> None:
    done = run_child("""
        import gc, warnings
        async def main():
            async with Engine(**OPTIONS) as engine:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        await engine.aclose()
                        assert engine.health().status == "closed"
                        del engine
                        gc.collect()
                        code = 42
                    finally:
                        os._exit(code)
                _, status = os.waitpid(pid, 0)
                assert os.waitstatus_to_exitcode(status) == 42
                assert (await engine.generate("1+1=", temperature=0)).text == "2"
        asyncio.run(main())
    """)
    assert_clean(done)
