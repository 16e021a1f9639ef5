"""`cllm tune` as it is typed, on an app of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner, Result

from cllm import EngineConfig
from cllm.cli import tune as command
from cllm.doctor import has_matplotlib
from cllm.engine.core.tick_shares import SHAPES, shares_of
from cllm.engine.llama.tuner import Tuner
from cllm.engine.llama.tuning import Candidate, Comparison, NotTunedError, Tuning
from cllm.engine.llama.tuning_cache import load_tuning, tuning_key

app = typer.Typer()
app.command()(command.tune)


def run_tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, standalone_mode=False, env={"COLUMNS": "200"})


def compared(score: float) -> Comparison:
    ratios = dict.fromkeys(SHAPES, score)
    return Comparison({"repack": False}, {}, ratios, dict.fromkeys(SHAPES, 1.0), ratios, score, 0.0)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[EngineConfig]]:
    """Make the search find that `repack=False` takes this ratio of the time; nothing is stored."""
    searched: list[EngineConfig] = []
    monkeypatch.setattr(Tuner, "save", lambda self, tuning: None)

    def finding(score: float) -> list[EngineConfig]:
        def measure(
            self: Tuner, limit_s: float, on_stage: Callable[[Sequence[Candidate]], None]
        ) -> Tuning:
            searched.append(self._config)
            on_stage([Candidate({"repack": False})])
            each = compared(score)
            return Tuning(each.settings if each.is_gain else {}, shares_of({}), (each,))

        monkeypatch.setattr(Tuner, "measure", measure)
        return searched

    return finding


def test_the_table_shows_ratios_and_the_setting_that_is_chosen(
    found: Callable[[float], list[EngineConfig]],
) -> None:
    searched = found(0.8)
    done = run_tune("-t", "3")
    assert done.exception is None
    assert "faster: repack=False" in done.stdout
    assert "×0.800" in done.stdout
    assert "Engines use repack=False with this model from now on." in done.stdout
    assert (searched[0].process, searched[0].n_threads) == (True, 3)


def test_the_defaults_stay_without_a_gain(
    found: Callable[[float], list[EngineConfig]],
) -> None:
    found(1.1)
    done = run_tune("--no-process", str(Path("m.gguf")))
    assert "The defaults stay: no setting is faster by 3%" in done.stdout
    assert "faster:" not in done.stdout.split("The defaults")[0]


def test_json_has_the_same_numbers(found: Callable[[float], list[EngineConfig]]) -> None:
    found(0.5)
    told = json.loads(run_tune("--json").stdout)
    assert told["chosen"] == {"repack": False}
    assert told["comparisons"][0]["score"] == 0.5


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib")
def test_a_picture_is_drawn(found: Callable[[float], list[EngineConfig]], tmp_path: Path) -> None:
    found(0.5)
    done = run_tune("--plot", str(tmp_path / "a.png"))
    assert done.exception is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each search: the first chooses `tiled_matmul=False`, the second finds nothing in no time."""
    limits: list[float] = []
    each = replace(compared(0.5), changes={"tiled_matmul": False})

    def measure(self: Tuner, limit_s: float, on_stage: object) -> Tuning:
        limits.append(limit_s)
        if limit_s == 0:
            raise NotTunedError("nothing was compared")
        return Tuning(each.settings if self._config.process else {}, shares_of({}), (each,))

    monkeypatch.setattr(Tuner, "measure", measure)
    monkeypatch.setattr(Tuner, "save", lambda self, tuning: None)
    return limits


@pytest.mark.parametrize("took_s", [20.0, 100.0])
def test_a_search_without_a_process_has_the_time_that_is_left(
    took_s: float, tiled: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((1000.0, 1000.0 + took_s))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("cllm.cli.tune.time", clock)
    done = run_tune("--json", "--seconds", "60")
    assert (done.exception, done.return_value) == (None, 0)
    assert tiled == [60.0, max(0.0, 60.0 - took_s)]
    said = json.loads(done.stdout)
    assert said["chosen"] == {"tiled_matmul": False}
    if took_s < 60:
        assert said["without_process"]["chosen"] == {}
    else:
        assert "without_process" not in said
        assert "Not tuned without a process: nothing was compared" in done.stderr


def test_a_result_that_cannot_be_stored_is_an_error_beside_the_table(
    found: Callable[[float], list[EngineConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Tuner, tuning: Tuning) -> None:
        raise PermissionError(13, "Permission denied")

    found(0.8)
    monkeypatch.setattr(Tuner, "save", refuse)
    done = run_tune()
    assert done.return_value == 1
    assert "faster: repack=False" in done.stdout
    assert "from now on" not in done.stdout
    assert "cannot be stored" in done.stderr


@pytest.mark.parametrize("variable", ["CLLM_MODEL", "CLLM_HF_REPO"])
def test_a_typed_model_goes_before_that_of_the_environment(
    variable: str,
    found: Callable[[float], list[EngineConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = found(0.8)
    monkeypatch.setenv(variable, "a/b")
    assert run_tune("typed.gguf").exception is None
    assert searched[0].model == "typed.gguf"


def test_a_model_that_is_named_twice_is_refused() -> None:
    done = run_tune("a.gguf", "-m", "b.gguf")
    assert isinstance(done.exception, Exception)
    assert "once" in str(done.exception.message)  # type: ignore[attr-defined]


def test_settings_that_cannot_be_tuned_are_refused_with_the_reason() -> None:
    done = run_tune("--deterministic")
    assert isinstance(done.exception, typer.BadParameter)
    assert "deterministic chooses these settings itself" in str(done.exception)


@pytest.mark.full
def test_the_embedded_model_is_measured_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cllm.engine.llama.tuning.DISTURBED", 1e9)  # beside other tests
    done = run_tune("--json", "--seconds", "600")
    assert done.exception is None
    told = json.loads(done.stdout)
    assert load_tuning(tuning_key(EngineConfig(process=True))) == told["chosen"]
