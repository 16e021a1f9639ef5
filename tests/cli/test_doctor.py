"""`cllm doctor` as it is typed, on an app of its own."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from cllm.cli.doctor import _show_check, doctor
from cllm.doctor import Check, Status, has_matplotlib
from cllm.doctor.experiments import SETUPS

app = typer.Typer()
app.command()(doctor)


def run_doctor(*arguments: str) -> Result:
    """Run the command; its exit code is `return_value`, as `cllm.cli.app.run` uses it."""
    return CliRunner().invoke(app, arguments, standalone_mode=False)


def test_json_is_one_object_with_checks_experiments_and_the_answer() -> None:
    done = run_doctor("--quick", "--json")
    assert done.exception is None
    assert done.return_value == 0
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["healthy"] is True
    assert told["conclusion"]["grows"] is False
    assert [e["name"] for e in told["experiments"]] == [setup.name for setup in SETUPS]
    assert all(e["is_expected"] for e in told["experiments"])
    assert {check["status"] for check in told["checks"]} <= {"ok", "warning"}


def test_control_characters_of_a_model_are_symbols() -> None:
    said = StringIO()
    _show_check(Console(file=said), Check("model", Status.OK, "a\x1b[2Jb"))
    assert "a␛[2Jb" in said.getvalue()


@pytest.mark.full
def test_rows_are_measured_and_nothing_else() -> None:
    done = run_doctor("--rows", "--quick", "--json", "--threads", "1")
    assert done.return_value == 0
    told: dict[str, Any] = json.loads(done.stdout)
    assert [*told["decode_ms"]] == [str(rows) for rows in range(1, 65)]
    assert min(told["decode_ms"].values()) > 0
    assert 1 <= told["best"] <= 64


def test_rows_of_a_model_that_cannot_be_used_are_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    done = run_doctor("--rows", "--model", str(path))
    assert done.return_value == 1
    assert "failed" in done.stderr


@pytest.mark.full
def test_the_tables_show_each_experiment_its_verdict_and_the_answer() -> None:
    done = run_doctor("--quick", "--tables", "--threads", "1")
    assert done.return_value == 0
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) >= 10
    for setup in SETUPS:
        assert f"{setup.name}: {setup.question}" in lines
        assert any(line.startswith(f"→ {setup.expected}: ") for line in lines)
    assert any(line.startswith("cllm: p0 is 0, must be ") for line in lines)
    assert any("inconsistent sequence positions" in line for line in lines)
    assert lines[-1].startswith("Does latency grow over identical requests here? No. ")


@pytest.mark.full
def test_in_a_hurry_each_experiment_is_a_question_and_a_verdict() -> None:
    done = run_doctor("--quick", "--threads", "1")
    lines = done.stdout.splitlines()
    for setup in SETUPS:
        place = lines.index(f"{setup.name}: {setup.question}")
        assert lines[place + 1].startswith(f"→ {setup.expected}: ")
    assert lines[-1].startswith("Does latency grow over identical requests here? No. ")


@pytest.mark.full
@pytest.mark.skipif(not has_matplotlib(), reason="needs the extra plot")
def test_a_picture_is_saved_where_it_was_asked_for(tmp_path: Path) -> None:
    picture = tmp_path / "doctor.png"
    done = run_doctor("--quick", "--json", "--plot", str(picture))
    assert done.return_value == 0
    assert picture.stat().st_size > 10_000
    assert json.loads(done.stdout)["healthy"]


@pytest.mark.full
def test_without_matplotlib_it_says_so_in_one_line_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.cli.doctor.has_matplotlib", lambda: False)
    done = run_doctor("--quick", "--json", "--plot", str(tmp_path / "doctor.png"))
    assert done.return_value == 0
    assert done.stderr == "cllm: no picture without the extra plot: pip install 'cllm[plot]'\n"
    assert json.loads(done.stdout)["healthy"]


@pytest.mark.parametrize("name", ["doctor.txt", "no-such-directory/doctor.png"])
def test_a_picture_that_cannot_be_saved_is_refused_before_the_examination(
    name: str, tmp_path: Path
) -> None:
    done = run_doctor("--plot", str(tmp_path / name))
    assert isinstance(done.exception, typer.BadParameter)
    assert done.stdout == ""


def test_a_model_that_cannot_be_used_is_a_failed_check_and_exit_code_1(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    done = run_doctor("-m", missing)
    assert done.exception is None
    assert done.return_value == 1
    assert done.stdout.splitlines()[-1].startswith("failed  preflight     cannot load ")
    told = json.loads(run_doctor("-m", missing, "--json").stdout)
    assert told["healthy"] is False
    assert (told["plan"], told["experiments"], told["conclusion"]) == (None, [], None)
