"""Tuning with llama.cpp: where results are kept, and which engines use them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import current_token

from cllm import Engine, EngineConfig, InvalidArgumentError
from cllm.engine.child_process import JsonChild
from cllm.engine.core.tick_shares import SHAPES
from cllm.engine.llama import tuner as tuner_module
from cllm.engine.llama import tuning_cache
from cllm.engine.llama.tuner import Tuner, measured_config
from cllm.engine.llama.tuning import Candidate, Tuning
from cllm.engine.llama.tuning_cache import (
    FILE,
    SHARES_FILE,
    load_shares,
    load_tuning,
    save_shares,
    save_tuning,
    tuning_key,
)
from cllm.engine.llama.tuning_child import Measurements, answering
from cllm.engine.process.engine_process import EngineProcess
from tests.conftest import QUIET
from tools import make_model

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, "tune": "cached", **QUIET}
AUTO: dict[str, Any] = {**OPTIONS, "tune": "auto"}
pytestmark = pytest.mark.same_process("what is replaced or listened to here is not there")


@pytest.fixture
def path() -> Path:
    return make_model.ensure("qwen3-wide", "Q4_K_M")


@pytest.fixture(autouse=True)
def cache(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory.  The test models are in another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cllm"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Settings of each search; none is measured, and all find that `repack` is slower."""
    searched: list[EngineConfig] = []

    def found(self: Tuner, limit_s: float, on_stage: object = None) -> Tuning:
        searched.append(self._config)
        return Tuning({"repack": False}, {})

    monkeypatch.setattr(Tuner, "measure", found)
    return searched


def know(config: EngineConfig, **chosen: bool | int) -> None:
    save_tuning(tuning_key(config), dict(chosen), "name")


# --- What is kept ----------------------------------------------------------------------------
def test_a_result_is_for_a_model_a_machine_and_settings(path: Path) -> None:
    config = EngineConfig(model=path, n_threads=None)
    other = make_model.ensure("qwen3-wide", "Q6_K")
    different = [
        config, EngineConfig(), replace(config, model=other), replace(config, process=True),
        replace(config, n_threads=3), replace(config, type_k="q8_0"), replace(config, repack=False),
        replace(config, override_tensor=("ffn=CPU",)), replace(config, use_mmap=False),
        replace(config, cpu_mask="0-0"),
    ]  # fmt: skip
    assert len(set(map(tuning_key, different))) == len(different)
    same = [
        replace(config, n_ctx=64, n_seq_max=2, chat_template="{{ 1 }}"),
        replace(config, n_gpu_layers=0, load_mode="mmap"),
    ]
    assert {*map(tuning_key, same)} == {tuning_key(config)}
    own = [replace(config, n_threads=3), replace(config, n_threads=3, n_threads_batch=3)]
    assert len({*map(tuning_key, own)}) == 1
    masks = [replace(config, cpu_mask="0-0"), replace(config, cpu_mask="0x1")]
    assert len({*map(tuning_key, masks)}) == 1


def test_a_copy_of_a_model_has_the_same_result(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert tuning_key(EngineConfig(model=copy)) == tuning_key(EngineConfig(model=path))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"KEY": 3}', '{"KEY": {"chosen": {"n_threads": "many"}}}', '{"KEY": {"chosen": []}}',
        '{"KEY": {"chosen": {"n_threads": true}}}', '{"KEY": {"chosen": {"n_threads": 1e400}, "1": 1e400}}',
        '{"KEY": {"1": true, "2": -1, "4": 1' + 400 * "0" + "}}",
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_no_result(
    cache: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / FILE).write_text(text)
    monkeypatch.setattr(tuning_cache, "_shares_key", lambda _: "KEY")
    (cache / SHARES_FILE).write_text(text)
    assert load_tuning("KEY") is None
    assert set(load_shares(EngineConfig()).values()) == {1 / len(SHAPES)}


def test_only_speed_can_be_changed_by_a_file(cache: Path) -> None:
    cache.mkdir(parents=True)
    chosen = {"repack": False, "model": "/etc/passwd", "prefix_cache_dir": "/tmp"}
    (cache / FILE).write_text(json.dumps({"KEY": {"chosen": chosen}}))
    assert load_tuning("KEY") == {"repack": False}


def test_shapes_of_older_engines_count_half(path: Path) -> None:
    nothing = dict.fromkeys(SHAPES, 0.0)
    config = EngineConfig(model=path)
    save_shares(config, nothing | {"1": 100.0})
    save_shares(config, nothing | {"8": 150.0})
    save_shares(config, nothing | {"16": 5.0})  # too short to say anything
    assert load_shares(config) == nothing | {"1": 0.25, "8": 0.75}


# --- What engines do -------------------------------------------------------------------------
@pytest.mark.anyio
async def test_an_engine_uses_what_is_known(path: Path, measured: list[EngineConfig]) -> None:
    know(EngineConfig(model=path, **OPTIONS), repack=False)
    async with (
        Engine(path, **OPTIONS) as engine,
        Engine(path, **{**OPTIONS, "tune": None}) as plain,
    ):
        assert engine.model.tuned == {"repack": False}
        assert plain.model.tuned == {}
        assert engine.model.fingerprint != plain.model.fingerprint
        async with Engine(path, **{**OPTIONS, "tune": None, "repack": False}) as same:
            assert engine.model.fingerprint == same.model.fingerprint
        done = await engine.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
        assert done.usage.n_output == 2
    assert measured == []


@pytest.mark.anyio
async def test_auto_measures_where_nothing_is_known_and_only_then(
    path: Path, measured: list[EngineConfig]
) -> None:
    for _ in range(2):
        async with Engine(path, **AUTO) as engine:
            assert engine.model.tuned == {"repack": False}
    assert len(measured) == 1


@pytest.mark.anyio
async def test_auto_uses_a_result_that_cannot_be_stored_and_logs_why(
    path: Path, cache: Path, measured: list[EngineConfig], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no directory")
    async with Engine(path, **AUTO) as engine:
        assert engine.model.tuned == {"repack": False}
    assert "cannot store the result of tuning" in caplog.text
    with pytest.raises(OSError, match="File exists"):
        know(EngineConfig(model=path, **OPTIONS))


@pytest.mark.anyio
async def test_a_deterministic_engine_ignores_tuning(measured: list[EngineConfig]) -> None:
    options = {**OPTIONS, "deterministic": True}
    path = make_model.ensure("tiny-llama", "Q8_0")
    know(EngineConfig(model=path, **options), repack=False)
    async with Engine(path, **{**options, "tune": "auto"}) as engine:
        assert engine.model.tuned == {}
    assert measured == []


@pytest.mark.full
@pytest.mark.anyio
async def test_a_restarted_process_computes_with_the_settings_of_the_first(path: Path) -> None:
    options = {**OPTIONS, "process": True}
    config = EngineConfig(model=path, **options)
    know(config, repack=False, tiled_matmul=False)
    restarted = anyio.Event()
    async with Engine(path, on_restart=lambda _: restarted.set(), **options) as engine:
        assert engine.model.tuned == {"repack": False, "tiled_matmul": False}
        know(config)  # another program has tuned since
        before = await engine.generate([5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
        process = engine._parts.thread
        assert isinstance(process, EngineProcess)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with anyio.fail_after(60):
            await restarted.wait()
        after = await engine.generate([5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True)
        assert after.token_ids == before.token_ids
        assert (process._config.repack, process._config.tiled_matmul) == (False, False)


@pytest.mark.parametrize("name", ["no.gguf", "\ud800", "/"])
@pytest.mark.parametrize("tune", ["cached", "auto"])
def test_a_path_that_no_model_has_changes_nothing(name: str, tune: Any) -> None:
    assert Tuner(EngineConfig(model=name, **{**OPTIONS, "tune": tune})).settings() == {}


@pytest.mark.anyio
async def test_an_engine_loads_where_nothing_can_be_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuner_module, "available_bytes", lambda: 1 << 20)
    async with Engine(path, **AUTO) as engine:
        assert engine.model.tuned == {}
    assert "processes with the model need" in caplog.text


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        ({"repack": False}, {"repack": False}),
        ({"tiled_matmul": False}, {"process": False}),
        ({"n_threads": 2}, {"n_threads": 1}),
    ],
)
def test_a_result_changes_nothing_that_other_settings_forbid(
    path: Path, chosen: dict[str, int], options: dict[str, Any]
) -> None:
    config = EngineConfig(model=path, **{**OPTIONS, **options})
    know(config, **chosen)
    assert Tuner(config).settings() == {}


@pytest.mark.full
@pytest.mark.anyio
async def test_cancelling_a_start_ends_its_measurements(path: Path) -> None:
    started, asked = anyio.Event(), []
    token, real = current_token(), JsonChild.ask

    def noted(self: JsonChild, request: Any, limit_s: float) -> Any:
        if self._command[3] == "cllm.engine.llama.tuning_child":
            asked.append(self)
            if len(asked) == 2:  # the process runs, and measures
                anyio.from_thread.run_sync(started.set, token=token)
        return real(self, request, limit_s)

    async def enter() -> None:
        async with Engine(path, **AUTO):
            raise AssertionError("it was cancelled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonChild, "ask", noted)
        patch.setattr(tuner_module, "AT_LOAD_S", 600.0)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter)
                await started.wait()
                tasks.cancel_scope.cancel()
    assert [child._process for child in asked] == [None] * len(asked)


# --- The measurements ------------------------------------------------------------------------
def test_each_shape_is_measured_again_and_again(path: Path) -> None:
    with ExitStack() as owned:
        measurements = Measurements(
            measured_config(EngineConfig(model=path, **OPTIONS), {}), 1, owned
        )
        for _ in range(12):  # longer than the sequences may become
            readings = measurements.turn(SHAPES)
            assert tuple(readings) == SHAPES
            assert all(seconds > 0 and spin_s > 0 for seconds, spin_s in readings.values())


@pytest.mark.parametrize("name", ["tiny-recurrent", "tiny-hybrid", "tiny-swa", "tiny-moe"])
def test_models_of_every_kind_of_memory_can_be_measured(name: str) -> None:
    path = make_model.ensure(name, "Q8_0" if name != "tiny-swa" else "F16")
    with ExitStack() as owned:
        measurements = Measurements(
            measured_config(EngineConfig(model=path, **OPTIONS), {}), 1, owned
        )
        assert tuple(measurements.turn(SHAPES)) == SHAPES


def test_a_file_that_is_no_model_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    config = measured_config(EngineConfig(model=bad, **OPTIONS), {})
    with ExitStack() as owned:
        assert "bad.gguf" in str(answering(owned)(["1"], json.loads(config.to_json()))["error"])


@pytest.mark.full
def test_a_search_in_processes_keeps_its_result(path: Path) -> None:
    config = EngineConfig(model=path, process=True, n_threads=1)
    stages: list[Sequence[Candidate]] = []
    with pytest.MonkeyPatch.context() as patch:
        # Beside other tests no machine is calm: here each reading counts.
        patch.setattr("cllm.engine.llama.tuning.DISTURBED", 1e9)
        tuning = Tuner(config).measure(600.0, stages.append)
    Tuner(config).save(tuning)
    assert len(tuning.comparisons) == len([c for stage in stages for c in stage])
    assert load_tuning(tuning_key(config)) == tuning.chosen
    for each in tuning.comparisons:
        assert each.ratios.keys() == each.ms.keys() == each.base_ms.keys()
    if "tiled_matmul" not in tuning.chosen:
        assert load_tuning(tuning_key(replace(config, process=False))) == tuning.chosen


def test_what_cannot_be_tuned_is_refused_with_the_reason() -> None:
    for options, reason in (
        ({"deterministic": True}, "deterministic"),
        ({"rpc": ("127.0.0.1:5000",), "process": True}, "RPC"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            Tuner(EngineConfig(**options)).measure(1.0)
