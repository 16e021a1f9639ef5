"""cllm.sync: the same engine and errors without an event loop, for any number of threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.to_thread
import pytest

import cllm
from cllm import (
    ClosedError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
    WrongThreadError,
)
from cllm.sync import Engine
from tests.conftest import QUIET, our_threads

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, **QUIET}
SAME: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(**OPTIONS) as engine:
        yield engine


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a child process, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_calls_return_what_they_return_with_await(engine: Engine) -> None:
    completion = engine.generate("1+1=", max_tokens=6, **SAME)
    assert completion.usage.n_output == 6
    assert engine.detokenize(engine.tokenize("a b", add_special=False)) == "a b"
    assert [c.token_ids for c in engine.generate_all(["1+1="] * 2, max_tokens=6, **SAME)] == [
        completion.token_ids
    ] * 2
    assert engine.chat([{"role": "user", "content": "hi"}], max_tokens=3).usage.n_output
    assert engine.model.name == "cllm-tiny"
    assert engine.health().status == "ready"
    assert engine.statistics().n_output_tokens > 6
    assert b"".join(engine.pieces(engine.tokenize("a b", add_special=False))) == b"a b"
    abilities = engine.template_abilities()
    assert abilities is not None
    assert abilities.system
    assert len(engine.slots()) >= engine.config.n_seq_max
    assert engine.sampling_defaults == engine.model.sampling
    engine.reset_prefix_cache()
    assert engine.statistics().n_kv_cells_cached == 0


def test_a_stream_is_read_with_for(engine: Engine) -> None:
    whole = engine.generate("1+1=", max_tokens=6, **SAME)
    stream = engine.stream("1+1=", max_tokens=6, **SAME)
    assert tuple(token for delta in stream for token in delta.token_ids) == whole.token_ids
    assert list(stream) == []
    assert stream.completion().token_ids == whole.token_ids


def test_leaving_the_block_of_a_stream_cancels_its_request(engine: Engine) -> None:
    with engine.stream("x", max_tokens=900, **SAME) as stream:
        next(stream)
    assert stream.completion().finish_reason == "cancelled"
    with pytest.raises(ClosedError):
        next(stream)


def test_errors_are_those_of_the_engine(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        engine.generate("x", temperature=-1)
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        engine.stream("x", temperature=-1)
    with pytest.raises(ModelLoadError):
        Engine("nowhere.gguf").start()


def test_a_call_that_waits_in_one_thread_does_not_delay_those_of_others(engine: Engine) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    async def wait() -> bool:
        begun.set()
        return await anyio.to_thread.run_sync(goes_on.wait, 60)

    with ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(engine._wait, wait)
        assert begun.wait(60)
        calls = [pool.submit(engine.generate, f"{n}", max_tokens=4, **SAME) for n in range(3)]
        assert [call.result(60).usage.n_output for call in calls] == [4] * 3
        assert not waiting.done()
        goes_on.set()
        assert waiting.result(60)


def test_an_engine_without_a_block_is_started_once_and_closed() -> None:
    engine = Engine(**OPTIONS)
    with pytest.raises(ClosedError, match="call `start`"):
        engine.generate("x")
    assert engine.start() is engine
    with pytest.raises(ClosedError, match="once"):
        engine.start()
    assert engine.generate("x", max_tokens=2, **SAME).usage.n_output == 2
    assert repr(engine) == "<Engine cllm-tiny.gguf ready open=0>"
    for _ in range(2):
        engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.generate("x")
    with pytest.raises(ClosedError, match="once"):
        engine.start()
    assert our_threads() == []


def test_of_several_threads_that_start_an_engine_one_succeeds() -> None:
    engine = Engine(**OPTIONS)

    def start(_: int) -> bool:
        try:
            engine.start()
        except ClosedError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(start, range(4))) == 1
    assert engine.generate("x", max_tokens=2, **SAME).usage.n_output == 2
    engine.close()
    assert our_threads() == []


def test_a_failed_start_leaves_no_thread() -> None:
    with pytest.raises(ModelLoadError):
        Engine("nowhere.gguf").start()
    assert our_threads() == []


def test_close_ends_the_calls_of_other_threads() -> None:
    engine = Engine(**OPTIONS).start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, "x", max_tokens=900, **SAME)
        while not engine.statistics().n_running and not call.done():
            pass
        engine.close()
        if (error := call.exception()) is not None:  # the answer may have been complete
            assert isinstance(error, ClosedError | GenerationError)


def test_a_dropped_engine_warns_and_its_threads_end() -> None:
    engine = Engine(**OPTIONS).start()
    threads = [t for t in threading.enumerate() if t.name in our_threads()]
    with pytest.warns(ResourceWarning, match="dropped without being closed"):  # noqa: PT031
        del engine
        gc.collect()
    for thread in threads:
        thread.join(60)
    assert our_threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_gets_an_error_and_ends() -> None:
    done = run(f"""
import os, sys
import cllm
engine = cllm.sync.Engine(**{OPTIONS!r}).start()
if os.fork() == 0:
    try:
        engine.generate("x")
    except cllm.WrongProcessError:
        print("wrong process", flush=True)
    engine.close()
    sys.exit(0)
_, status = os.wait()
print(status, engine.generate("x", max_tokens=2, ignore_eos=True).usage.n_output)
engine.close()
""")
    assert (done.returncode, done.stdout) == (0, "wrong process\n0 2\n"), done.stderr


def test_an_engine_is_not_closed_by_its_own_callback(engine: Engine) -> None:
    errors = list[Exception]()

    def close(_done: int, _all: int) -> None:
        try:
            engine.close()
        except WrongThreadError as error:
            errors.append(error)

    engine.generate_all(["x"], on_progress=close, max_tokens=2)
    assert len(errors) == 1
    assert engine.generate("x", max_tokens=2, ignore_eos=True).usage.n_output == 2


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    with Engine(**OPTIONS):
        assert {t.name for t in set(threading.enumerate()) - before} >= {"cllm-sync"}
    assert set(threading.enumerate()) == before


def test_a_program_ends_although_its_engine_was_not_closed() -> None:
    done = run(f"""
import cllm
engine = cllm.sync.Engine(**{OPTIONS!r}).start()
print(engine.generate("x", max_tokens=2, ignore_eos=True).usage.n_output)
""")
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_an_interrupted_call_cancels_its_request_and_the_engine_goes_on() -> None:
    done = run(f"""
import os, signal, threading
import cllm
signal.signal(signal.SIGINT, signal.default_int_handler)
with cllm.sync.Engine(**{OPTIONS!r}) as engine:
    def interrupt():
        while not engine.statistics().n_running and not engine.statistics().n_ticks:
            pass
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        engine.generate("x", max_tokens=900, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(engine.generate("x", max_tokens=2, ignore_eos=True).usage.n_output)
    while not engine.statistics().n_finished["cancelled"]:  # or the parent's patience ends
        pass
""")
    assert (done.returncode, done.stdout) == (0, "interrupted\n2\n"), done.stderr


def test_the_module_is_there_without_an_import_of_its_own() -> None:
    assert cllm.sync.Engine is Engine


def test_a_program_ends_although_a_generator_holds_an_open_stream() -> None:
    ended = run("""
from cllm.sync import Engine
engine = Engine(n_ctx=1024, n_threads=1, n_threads_batch=1, tune=None).start()
def text():
    with engine.stream("1+1=", ignore_eos=True, max_tokens=900) as stream:
        yield from (delta.text for delta in stream)
answer = text()
next(answer)
print("end")
""")
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_leaving_a_stream_of_a_closed_engine_passes_the_error_of_the_block_on() -> None:
    engine = Engine(**OPTIONS).start()
    stream = engine.stream("a")

    def block() -> None:
        with stream:
            engine.close()
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        block()
    stream.close()
