"""`cllm serve` has its engine in a process of its own; without one it tries files that it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cllm import EngineConfig
from cllm.cli.serve import serve
from tests.cli.children import run_cllm_apart

app = typer.Typer()
app.command()(serve)


def settings_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> EngineConfig:
    """Return the settings with which `cllm serve` starts a server."""
    given: list[EngineConfig] = []

    def served(engine: EngineConfig, *others: Any) -> int:
        given.append(engine)
        return 0

    monkeypatch.setattr("cllm.server.serving.serve", served)
    monkeypatch.setattr("cllm.server.operation.logs.configure_logging", lambda: None)
    CliRunner().invoke(app, ["--port", "0", *options], standalone_mode=False)
    (engine,) = given
    return engine


@pytest.mark.parametrize(
    ("options", "process", "preflight"),
    [
        ([], True, False),
        (["--supervise"], True, False),
        (["--no-supervise", "--process"], True, False),
        (["--process", "--preflight"], True, True),
        (["--no-process"], False, "unseen"),
        (["--no-supervise"], False, "unseen"),
        (["--no-process", "--preflight"], False, True),
        (["--no-process", "--no-preflight"], False, False),
    ],
)
def test_the_options_become_settings_of_the_engine(
    options: list[str], process: bool, preflight: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = settings_of(monkeypatch, *options)
    assert (engine.process, engine.preflight) == (process, preflight)


def test_weights_of_keys_and_of_options_are_both_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[alice]\nkey = 'a'\nweight = 2\n[bob]\nkey = 'b'\nweight = 5\n")
    options = ["--api-keys", str(keys), "--tenant-weight", "zoe=3", "--tenant-weight", "bob=4"]
    engine = settings_of(monkeypatch, *options)
    assert dict(engine.tenant_weights or ()) == {"alice": 2.0, "bob": 4.0, "zoe": 3.0}
    assert dict(settings_of(monkeypatch, *options[:2]).tenant_weights or ()) == {
        "alice": 2.0,
        "bob": 5.0,
    }


def test_rules_and_a_model_exclude_each_other(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text("[]")
    for models in (["-m", "a=x.gguf", "-m", "b=y.gguf"], ["-m", "x.gguf"], ["-hf", "user/repo"]):
        result = CliRunner().invoke(app, ["--fake", str(rules), *models])
        assert result.exit_code == 2
        assert "leave out --model" in result.output


def test_there_is_no_process_by_default_where_children_cannot_inherit_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cllm.engine.config.can_pass_descriptors", lambda: False)
    monkeypatch.setattr("cllm.cli.serve.can_pass_descriptors", lambda: False)
    assert settings_of(monkeypatch).process is False


@pytest.mark.full
@pytest.mark.parametrize("how", ["--process", "--no-process"])
def test_a_model_that_aborts_its_process_ends_the_server_with_its_last_words(
    how: str, deadly_model: Path, tmp_path: Path
) -> None:
    """It is no crash of a process that has served: nothing is started again."""
    options = ("--port", "0", "--n-threads", "1", how)
    done = run_cllm_apart("serve", "-m", str(deadly_model), *options, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert f"cannot load {str(deadly_model)!r}: " in said
    assert "SIGABRT" in said
    assert "GGML_ASSERT" in done.stderr
    assert "started again" not in done.stderr
