"""cllm.sync: the same engine and errors without an event loop, for any number of threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cllm
from cllm import ClosedError, InvalidRequestError, ModelLoadError
from cllm.sync import Engine
from tests.conftest import QUIET

OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, **QUIET}
SAME: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
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


def test_threads_share_the_engine_and_run_at_once(engine: Engine) -> None:
    together = threading.Barrier(3)

    def ask(n: int) -> int:
        with engine.stream(f"{n}+{n}=", max_tokens=60, **SAME) as stream:
            next(stream)
            together.wait(60)  # all three have begun, and none has ended
            return stream.completion().usage.n_output

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, range(3))) == [60] * 3


def test_an_engine_without_a_block_is_started_and_closed() -> None:
    engine = Engine(**OPTIONS)
    with pytest.raises(ClosedError, match="`start`"):
        engine.generate("x")
    assert engine.start() is engine
    with pytest.raises(ClosedError, match="once"):
        engine.start()
    engine = Engine(**OPTIONS).start()
    assert engine.generate("x", max_tokens=2, **SAME).usage.n_output == 2
    for _ in range(2):
        engine.close()
    with pytest.raises(ClosedError):
        engine.generate("x")


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    with Engine(**OPTIONS):
        loop = next(t for t in set(threading.enumerate()) - before if t.name == "cllm-sync")
    assert not loop.is_alive()


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
        while not engine.statistics().n_running:
            pass
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        engine.generate("x", max_tokens=900, ignore_eos=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(engine.generate("x", max_tokens=2, ignore_eos=True).usage.n_output)
    print(engine.statistics().n_finished["cancelled"])
""")
    assert (done.returncode, done.stdout) == (0, "interrupted\n2\n1\n"), done.stderr


def test_the_module_is_there_without_an_import_of_its_own() -> None:
    assert cllm.sync.Engine is Engine
