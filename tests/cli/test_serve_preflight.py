"""`cllm serve` tries files that it has not seen before in another process first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cllm import EngineConfig
from cllm.cli.serve import serve
from cllm.server.worker import read_settings, settings_line
from tests.cli.children import run_cllm

app = typer.Typer()
app.command()(serve)


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], "unseen"), (["--preflight"], True), (["--no-preflight"], False)],
)
@pytest.mark.parametrize("how", ["--supervise", "--no-supervise"])
def test_the_option_becomes_a_setting_that_reaches_the_worker(
    options: list[str], expected: bool | str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EngineConfig] = []

    def served(engine: EngineConfig, config: Any, *others: object) -> int:
        told, _ = read_settings(settings_line(engine, config))
        given.append(told)
        return 0

    monkeypatch.setattr("cllm.server.supervisor.supervise", served)
    monkeypatch.setattr("cllm.server.worker.serve", served)
    monkeypatch.setattr("cllm.server.logs.configure_logging", lambda: None)
    CliRunner().invoke(app, ["--port", "0", how, *options], standalone_mode=False)
    assert [engine.preflight for engine in given] == [expected]


@pytest.mark.full
@pytest.mark.parametrize("how", ["--supervise", "--no-supervise"])
def test_a_model_that_aborts_its_process_ends_the_server_with_its_last_words(
    how: str, deadly_model: Path, tmp_path: Path
) -> None:
    """It is no crash of the worker: nothing is started again."""
    options = ("--port", "0", "--n-threads", "1", how)
    done = run_cllm("serve", "-m", str(deadly_model), *options, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert f"cannot load {str(deadly_model)!r}: SIGABRT ends a process with it: " in said
    assert "GGML_ASSERT" in said
    assert "starting another" not in done.stderr
