"""The command line as a whole: its help, its options, and what documents them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cllm
from cllm.bindings import find_library
from cllm.cli.app import command_line
from cllm.engine.config import EMBEDDED_MODEL
from cllm.server import ServerConfig, serving
from cllm.server.operation import logs
from tests.cli.children import Terminal, run_cllm, start_cllm
from tests.conftest import some_in_fast

serving_listen = serving.listen
PAGE = Path(__file__).parents[2] / "docs" / "options.md"
COMMANDS = ("demo", "generate", "chat", "serve", "doctor", "bench")


def test_without_a_command_the_help_is_shown() -> None:
    done = run_cllm()
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} ", done.stdout, re.MULTILINE), command


SIGNALLED = """
import os, signal, sys

class Signalling:
    def find_spec(self, name, path, target=None):
        if name == "cllm.cli":
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Signalling())
sys.argv = ["cllm", "{command}"]
from _cllm_main import main
main()
"""


@pytest.mark.parametrize(
    ("signal", "command", "code"),
    [("SIGTERM", "serve", 0), ("SIGTERM", "generate", -15), ("SIGINT", "serve", 130)],
)
def test_who_is_told_to_end_while_modules_are_imported_ends_as_later(
    signal: str, command: str, code: int
) -> None:
    program = SIGNALLED.format(signal=signal, command=command)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("run", "cllm chat"),
        ("list", "cllm models"),
        ("ps", "/api/ps"),
        ("stop", "Ctrl-C"),
        ("rm", "cllm models --remove"),
    ],
)
def test_a_command_of_ollama_names_the_one_that_does_it_here(command: str, instead: str) -> None:
    done = run_cllm(command, "llama3.2:1b")
    assert done.returncode == 2
    assert instead in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_command_that_there_is_not_is_wrong_usage_in_one_line() -> None:
    done = run_cllm("dance")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"cllm: .*dance.*\n", done.stderr)


def test_the_version_is_that_of_cllm_and_of_llama_cpp() -> None:
    done = run_cllm("--version")
    path, record = find_library()
    assert done.returncode == 0
    assert done.stdout.startswith(f"cllm {cllm.__version__}, llama.cpp {record['commit']} for ")
    assert done.stdout.endswith(f" CPU, {path}\n")


def test_without_a_library_the_version_says_so_and_where_to_look(tmp_path: Path) -> None:
    done = run_cllm("--version", CLLM_LIBRARY=str(tmp_path / "libllama.so"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "no llama.cpp that it can use (cllm doctor says why)" in done.stdout


def test_a_terminal_hears_that_the_embedded_model_is_a_toy_and_what_takes_a_real_one() -> None:
    with Terminal("chat") as terminal:
        terminal.until("is a toy of 0.9 million parameters")
        terminal.until("-m hf:USER/REPO")
        terminal.until("> ")
        terminal.send("/bye\n")
        assert terminal.exit_code() == 0
    with Terminal("chat", "-m", str(EMBEDDED_MODEL)) as terminal:
        assert "toy" not in terminal.until("> ")
        terminal.send("/bye\n")
        assert terminal.exit_code() == 0


@pytest.mark.parametrize("command", ["info", "--help"])
def test_a_reader_that_has_gone_is_no_error(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start_cllm(command, stdout=writing) as child:
        os.close(writing)
        assert child.stderr is not None
        assert (child.stderr.read(), child.wait(60)) == (b"", 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    with Path("/dev/full").open("wb") as full, start_cllm("info", stdout=full) as child:
        assert child.stderr is not None
        said = child.stderr.read().decode()
        assert child.wait(60) == 1
    assert said.startswith("cllm: ")
    assert said.endswith("No space left on device\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_defaults_are_shown_as_they_are_typed(command: str) -> None:
    shown = " ".join(re.sub(r"[│\s]+", " ", run_cllm(command, "--help").stdout).split())
    assert "[default: 256]" in shown
    assert "default: (" not in shown


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [((), False), (("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False)],
)
def test_a_server_that_the_network_may_use_without_a_key_says_so(
    options: tuple[str, ...], is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "listen", lambda _: serving_listen(ServerConfig(port=0)))
    monkeypatch.setattr(serving, "serve", lambda *_: 0)
    monkeypatch.setattr(logs, "configure_logging", lambda: None)  # of this process
    monkeypatch.delenv("CLLM_API_KEY", raising=False)
    done = CliRunner().invoke(command_line(), ["serve", *options])
    assert done.exit_code == 0, done.output
    warning = "cllm: warning: every client that reaches 0.0.0.0 may use the model: there is no --api-key\n"
    assert done.stderr == (warning if is_warned else "")


@pytest.mark.parametrize(
    "arguments", some_in_fast([["demo"], ["info"], ["--help"], ["generate", "count:1..3"]])
)
def test_a_terminal_without_all_characters_shows_others(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "cllm", *arguments],
        stdin=subprocess.DEVNULL,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
