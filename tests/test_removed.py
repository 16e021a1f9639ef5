"""Using a removed option or method gives an error that names its replacement."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from cllm import Engine, EngineConfig
from cllm.cli import app
from cllm.cli.option_sources import _of_file
from cllm.removed import REPLACEMENTS, replacement

OPTIONS = [
    ("--resume-window", "generated"),
    ("--slot-save-path", "prefix-cache-dir"),
    ("--tick-log", "--trace"),
    ("--allow-grammar", "need no option"),
]


@pytest.mark.parametrize(("option", "instead"), OPTIONS)
def test_a_removed_option_of_the_command_line_names_its_replacement(
    option: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cllm", "serve", option, "5"])
    assert app.run() == app.EXIT_USAGE
    error = capsys.readouterr().err
    assert option in error
    assert instead in error


@pytest.mark.parametrize(("option", "instead"), OPTIONS)
def test_a_removed_option_in_a_file_names_its_replacement(
    option: str, instead: str, tmp_path: Path
) -> None:
    path = tmp_path / "cllm.toml"
    path.write_text(f"{option.removeprefix('--')} = 5\n")
    command = typer.main.get_command(app.command_line("serve"))
    with pytest.raises(typer.BadParameter, match=instead):
        _of_file(typer.Context(command), path)


def test_a_removed_setting_of_an_engine_names_its_replacement() -> None:
    with pytest.raises(TypeError, match="trace"):
        Engine(tick_log="a")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["save_slot", "restore_slot"])
def test_a_removed_method_names_its_replacement(name: str) -> None:
    with pytest.raises(AttributeError, match="prefix_cache_dir"):
        getattr(Engine(), name)


def test_other_names_that_an_engine_lacks_are_plain_attribute_errors() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'generat'$"):
        Engine().generat  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_no_removed_name_is_there_any_more(name: str) -> None:
    assert name not in EngineConfig.__dataclass_fields__
    assert not hasattr(Engine, name)
    assert replacement(f"--{name.replace('_', '-')}") == REPLACEMENTS[name]


def test_what_moved_from_cllm_testing_says_where_it_is() -> None:
    import cllm.testing

    assert len(cllm.testing.__all__) <= 25
    with pytest.raises(AttributeError, match=r"tests\.simulation"):
        cllm.testing.simulate  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'simulat'$"):
        cllm.testing.simulat  # noqa: B018
