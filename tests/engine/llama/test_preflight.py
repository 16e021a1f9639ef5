"""A model that ends or hangs the process that loads it ends another one first."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from cllm import (
    ClosedError,
    Engine,
    EngineConfig,
    EngineStatus,
    InvalidArgumentError,
    LibraryError,
    ModelLoadError,
)
from cllm.engine.child_process import child_environment
from cllm.engine.llama import preflight
from cllm.engine.llama.preflight import Preflight, model_files
from tests.conftest import QUIET, is_there
from tests.engine.test_lifecycle import assert_clean, run_child
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

pytestmark = [
    pytest.mark.one_loop,
    pytest.mark.same_process("what starts a process here starts it there"),
]

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, **QUIET}
MakeHelper = Callable[[str], None]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHelper:
    """Lets another program be what tries the models."""

    def replace(code: str) -> None:
        (tmp_path / "stand_in_helper.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(preflight, "HELPER", "stand_in_helper")

    return replace


@pytest.fixture
def running_child(tmp_path: Path, helper: MakeHelper) -> Callable[[], int]:
    """Makes every child hang; waits for one, and tells its pid."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    helper(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(fifo)!r}).write_text(str(os.getpid()))\n"
        "signal.pause()"
    )
    return lambda: int(fifo.read_text())


async def failure_of(model: Path | None, **options: Any) -> ModelLoadError:
    """Why a model cannot be entered."""
    with anyio.fail_after(60), pytest.raises(ModelLoadError) as caught:
        async with Engine(model, preflight=True, **{**OPTIONS, **options}):
            raise AssertionError
    return caught.value


# --- Models ----------------------------------------------------------------------------------
@pytest.mark.anyio
async def test_a_good_model_is_tried_and_then_used(
    tiny_model_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    async with Engine(tiny_model_path, preflight=True, **OPTIONS) as engine:
        assert [child.returncode for child in children] == [0]
        assert (await engine.generate("a", max_tokens=2, ignore_eos=True)).usage.n_output == 2
    assert len(children) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    "layout", [{}, {"kv_unified": True}, {"kv_unified": False}, {"deterministic": True}], ids=str
)
async def test_a_good_model_passes_in_every_layout(
    tiny_model_path: Path, layout: dict[str, Any]
) -> None:
    async with Engine(tiny_model_path, preflight=True, **layout, **OPTIONS) as engine:
        assert (await engine.generate("a", max_tokens=2, ignore_eos=True)).usage.n_output == 2


@pytest.mark.anyio
async def test_without_the_setting_nothing_is_started(
    children: list[subprocess.Popen[bytes]],
) -> None:
    async with Engine(**OPTIONS) as engine:
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert children == []


@pytest.mark.anyio
async def test_a_model_that_aborts_its_process_is_an_error_with_llama_cpps_last_words(
    deadly_model: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    error = await failure_of(deadly_model)
    assert error.path == str(deadly_model)
    assert error.reason.startswith("the process that tried it ended with SIGABRT: ")
    assert "GGML_ASSERT" in error.reason
    assert [child.returncode for child in children] == [-signal.SIGABRT]
    async with Engine(**OPTIONS) as engine:  # this process is as good as before
        assert (await engine.generate("1+1=", temperature=0)).text == "2"


@pytest.mark.anyio
async def test_a_model_that_can_be_loaded_but_not_decoded_with_is_an_error(
    tiny_model_path: Path, tmp_path: Path, anyio_backend: str
) -> None:
    data = bytearray(tiny_model_path.read_bytes())
    key = b"attention.layer_norm_rms_epsilon"
    place = data.index(key) + len(key) + 4  # behind the type
    data[place : place + 4] = struct.pack("<f", -1.0)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    assert "the process that tried it ended with SIGABRT" in (await failure_of(damaged)).reason


@pytest.mark.full
@pytest.mark.anyio
async def test_what_the_engine_refuses_is_said_in_its_own_words(
    tiny_model_path: Path, tmp_path: Path, anyio_backend: str
) -> None:
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(tiny_model_path.read_bytes()[:5000])
    missing = tmp_path / "missing.gguf"
    assert str(await failure_of(missing)) == (
        f"cannot load {str(missing)!r}: No such file or directory"
    )
    with pytest.raises(ModelLoadError) as caught:
        async with Engine(truncated, **OPTIONS):
            pass
    assert str(await failure_of(truncated)) == str(caught.value)
    assert "cannot generate" in (await failure_of(make_model.ensure("tiny-encoder", "F16"))).reason
    assert "type_k is 'f17', must be one of" in (await failure_of(None, type_k="f17")).reason
    adapter = await failure_of(tiny_model_path, lora=[(truncated, 1.0)])
    assert adapter.path == str(truncated)


@pytest.mark.anyio
async def test_without_a_library_there_is_no_child(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLLM_LIBRARY", "/nowhere")
    with pytest.raises(LibraryError, match="CLLM_LIBRARY points nowhere"):
        async with Engine(preflight=True, **OPTIONS):
            raise AssertionError
    assert children == []


# --- The process -----------------------------------------------------------------------------
@pytest.mark.anyio
async def test_cancelling_the_start_ends_the_child_and_meanwhile_the_loop_goes_on(
    running_child: Callable[[], int],
) -> None:
    engine = Engine(preflight=True, **OPTIONS)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.__aenter__)
            pid = await anyio.to_thread.run_sync(running_child)
            assert engine.health().status is EngineStatus.STARTING
            assert is_there(pid)
            group.cancel_scope.cancel()
    assert not is_there(pid)
    assert engine.health().status is EngineStatus.CLOSED


@pytest.mark.anyio
@pytest.mark.parametrize("n_checkpoints", [0, 1, 2, 10])
async def test_a_start_that_is_cancelled_early_leaves_no_child(
    children: list[subprocess.Popen[bytes]], n_checkpoints: int, anyio_backend: str
) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(Engine(preflight=True, **OPTIONS).__aenter__)
            for _ in range(n_checkpoints):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert all(child.returncode is not None for child in children)


@pytest.mark.anyio
async def test_closing_during_the_start_ends_the_child(running_child: Callable[[], int]) -> None:
    engine = Engine(preflight=True, **OPTIONS)

    async def enter() -> None:
        with pytest.raises(ClosedError):
            await engine.__aenter__()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            pid = await anyio.to_thread.run_sync(running_child)
            await engine.aclose()
    assert not is_there(pid)


@pytest.mark.anyio
async def test_a_child_that_hangs_is_ended_and_is_an_error(
    helper: MakeHelper,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: str,
) -> None:
    helper("import signal\nsignal.pause()")
    monkeypatch.setattr(preflight, "TIME_LIMIT_S", 0.2)
    error = await failure_of(None)
    assert error.reason == (
        "its preflight hung or was too slow (limit 0.2 s), and was ended; preflight=False skips it"
    )
    assert [child.returncode for child in children] == [-signal.SIGKILL]


@pytest.mark.anyio
async def test_a_child_that_closes_its_output_and_stays_is_ended(
    helper: MakeHelper,
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: str,
) -> None:
    helper("import os, signal\nos.close(1)\nos.close(2)\nsignal.pause()")
    monkeypatch.setattr(preflight, "EXIT_S", 0.05)
    assert "and was ended" in (await failure_of(None)).reason
    assert children[0].returncode == -signal.SIGKILL


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "the process that tried it ended with status 0: it said nothing"),
        (
            "raise RuntimeError('no luck')",
            "the process that tried it ended with status 1: RuntimeError: no luck",
        ),
        ("print('not\\n\\n[1]\\n\\n')", "the process that tried it ended with status 0: [1]"),
        ("print('{}')", "the process that tried it ended with status 0: {}"),
        (
            "import os; os.close(0); os.kill(os.getpid(), 9)",
            "the process that tried it ended with SIGKILL (",
        ),
        (
            "print('x' * 1_000_000)",
            "the process that tried it ended with status 0: " + "x" * preflight.MAX_WORDS,
        ),
    ],
)
async def test_a_child_that_ends_without_an_answer_is_an_error(
    helper: MakeHelper, code: str, reason: str, anyio_backend: str
) -> None:
    """Also if it ends well: where SIGCHLD is ignored every exit code is 0."""
    helper(code)
    assert (await failure_of(None)).reason.startswith(reason)


# After this, processes that try a model are stopped as soon as they begin, and `stopped` has their ids.
STOP_TRIALS = """
import signal
from cllm.engine.llama.preflight import Preflight
stopped, converse = [], Preflight._converse
def stop_and_converse(preflight, process, *given):
    process.send_signal(signal.SIGSTOP)
    stopped.append(process.pid)
    return converse(preflight, process, *given)
def stop_trials():
    Preflight._converse = stop_and_converse
"""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_trials_that_pass_fail_or_are_cancelled_leak_nothing(
    backend: str, deadly_model: Path
) -> None:
    code = f"""
        import gc
        from cllm import ModelLoadError
        async def main():
            async with Engine(preflight=True, **OPTIONS) as engine:
                await engine.generate("1+1=", temperature=0)
            try:
                await Engine({str(deadly_model)!r}, preflight=True).__aenter__()
            except ModelLoadError:
                pass
            stop_trials()
            engine = Engine(preflight=True, **OPTIONS)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.__aenter__)
                while not stopped:
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            gc.collect()
        anyio.run(main, backend={backend!r})
        gc.collect()
        assert threading.active_count() == 1, threading.enumerate()
    """
    assert_clean(run_child(STOP_TRIALS + textwrap.dedent(code)))


def test_a_program_that_ends_during_a_trial_ends_the_child() -> None:
    code = """
        stop_trials()
        loop = asyncio.new_event_loop()
        engine = Engine(preflight=True, **OPTIONS)
        async def main():
            start = asyncio.create_task(engine.__aenter__())
            while not stopped:
                await asyncio.sleep(0)
            print(*stopped)
            return start
        start = loop.run_until_complete(main())
    """
    done = run_child(STOP_TRIALS + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert not is_there(int(done.stdout))


@pytest.mark.anyio
async def test_a_child_that_cannot_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "cannot start the process that tries it: " in (await failure_of(None)).reason


ENDLESS = """
import sys, anyio, cllm.engine.preflight_child as helper
async def use_once(config):
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    await anyio.sleep_forever()
helper.use_once = use_once
helper.main(sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.parametrize(("seconds", "returncode"), [(60, 1), (1, -signal.SIGALRM)])
def test_a_child_ends_with_its_parent_or_in_time(seconds: int, returncode: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        if seconds > 1:
            assert child.stdout.readline() == b"ready\n"
            child.stdin.close()  # as when its parent is gone
        assert child.wait(30) == returncode


# --- Settings --------------------------------------------------------------------------------
def test_the_child_gets_every_setting_of_a_load() -> None:
    a_number: Any = np.int32(7)
    config = EngineConfig(
        model=Path("a/\udcff.gguf"), n_threads=3, n_gpu_layers=a_number, flash_attn=False, type_k="q8_0", use_mmap=False, check_tensors=True, n_ubatch=64,
        rope_scaling="yarn", rope_freq_base=1e6, yarn_orig_ctx=32, lora=[(Path("b.gguf"), 0.5)],
        trace="log", preflight=True, prefix_cache_tokens=100,
    )  # fmt: skip
    told = EngineConfig(**json.loads(preflight._settings_line(config)))
    changed = {"n_ctx": 512, "preflight": False, "trace": None}
    for name in EngineConfig.__slots__:
        expected = changed.get(name, getattr(config, name))
        if name == "model":
            expected = str(expected)
        if name == "lora":
            expected = (("b.gguf", 0.5),)
        assert getattr(told, name) == expected, name


@pytest.mark.anyio
async def test_a_projector_that_aborts_at_its_first_image_is_rejected_by_the_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml has no operation for an F16 tensor in this place, and llama.cpp loads the file."""
    tensors = make_projector._tensors
    wrong = "v.position_embd.weight"
    monkeypatch.setattr(
        make_projector, "_tensors",
        lambda *args: {n: v.astype("f2") if n == wrong else v for n, v in tensors(*args).items()},
    )  # fmt: skip
    path = tmp_path / "mmproj.gguf"
    make_projector._write(path, PROJECTORS["gemma3"])
    model = make_model.ensure(PROJECTORS["gemma3"].text_model)
    with pytest.raises(ModelLoadError, match="the process that tried it ended"):
        async with Engine(model, mmproj=path, n_ctx=512, preflight=True, **QUIET):
            pass


@pytest.mark.parametrize("value", [0, 1, "seen", None, ["unseen"]])
def test_another_value_of_the_setting_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"preflight is .*, must be True, False or"):
        EngineConfig(preflight=value)


def test_a_large_model_gets_the_time_that_a_slow_disk_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large.gguf"
    with large.open("wb") as file:
        file.truncate(10**10)  # all hole
    limits: list[float] = []
    monkeypatch.setattr(Preflight, "_try", lambda self, _: limits.append(self._limit_s))
    for model in (large, tmp_path / "missing.gguf"):
        Preflight(EngineConfig(model=model, preflight=True)).run()
    assert limits == [preflight.TIME_LIMIT_S + 200, preflight.TIME_LIMIT_S]


def test_the_files_of_a_model_are_its_parts_and_adapters(tmp_path: Path) -> None:
    names = [f"m[1]-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for name in [*names, "m1-00001-of-00003.gguf", "m[1]-00001-of-00004.gguf", "m[1].gguf"]:
        (tmp_path / name).touch()
    config = EngineConfig(model=tmp_path / names[0], lora=[(tmp_path / "lora.gguf", 1.0)])
    found = [path.name for path in model_files(config)]
    assert found == [*names, "lora.gguf"]
    assert model_files(EngineConfig(model="m[1].gguf")) == [Path("m[1].gguf")]
