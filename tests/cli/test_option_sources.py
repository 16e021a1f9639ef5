"""Options of `cllm serve` from a file, under llama-server's names too, and what a shell is told of them."""

from __future__ import annotations

import codecs
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cllm import EngineConfig
from cllm.cli import option_sources
from cllm.cli.app import command_line, run
from cllm.cli.options import text_or_file
from cllm.server import serving
from cllm.server.config import ServerConfig
from cllm.server.http.api_keys import read_keys
from cllm.server.operation import logs
from tests.cli.test_app import COMMANDS

listen = serving.listen
ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What `cllm serve` would serve with, which it does not."""
    found: list[tuple[EngineConfig, ServerConfig]] = []

    def note(engine: EngineConfig, server: ServerConfig, *_: Any) -> int:
        found.append((engine, server))
        return 0

    monkeypatch.setattr(serving, "listen", lambda _: listen(ServerConfig(port=0)))
    monkeypatch.setattr(serving, "serve", note)
    monkeypatch.setattr(logs, "configure_logging", lambda: None)
    return found


def serve(*arguments: str) -> int:
    """The exit code of `cllm serve`; what it says is on stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cllm", "serve", *arguments])
        return run()


FILE = """
model-name = "small"
ctx-size = 2048       # llama-server's name
n_seq_max = 3
process = false
prefix-cache = true
drain_timeout = 1
lora = []
allowed_host = ["a.example", "b.example"]
"""


def test_a_file_has_the_options_by_their_names_and_what_is_typed_goes_before(
    served: list[tuple[EngineConfig, ServerConfig]], tmp_path: Path
) -> None:
    path = tmp_path / "cllm.toml"
    path.write_text(FILE)
    assert serve("--config", str(path)) == 0
    typed = "-np 5 -a typed --process --allowed-host c.example"
    assert serve("--config", str(path), *typed.split()) == 0
    (engine, server), (other_engine, other_server) = served
    assert (engine.n_ctx, engine.n_seq_max, engine.process) == (2048, 3, False)
    assert (server.model_name, server.drain_timeout_s) == ("small", 1.0)
    assert server.allowed_hosts == ("a.example", "b.example")
    assert (other_engine.n_ctx, other_engine.n_seq_max, other_engine.process) == (2048, 5, True)
    assert (other_server.model_name, other_server.allowed_hosts) == ("typed", ("c.example",))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("n_ctxx = 1", "n_ctxx is not an option; did you mean n_ctx?"),
        ("config = 'a.toml'", "config is not an option"),
        ("n_ctx = 1.5", "n_ctx: "),
        ("n_ctx = true", "n_ctx: there is a value of type bool, must be a text or a number"),
        ("process = 1", "process: it is of type int, must be true or false"),
        (
            "allowed_host = [[1]]",
            "allowed_host: there is a value of type list, must be a list of texts",
        ),
        ("[engine]\nn_ctx = 1", "engine is not an option"),
        ("n_ctx = 1\nctx-size = 2", "ctx-size: it is there under another name too"),
        ("port = 70000", "port: "),
        ("n_ctx = ", "cannot read"),
        ("\udcff", "cannot read"),
        (None, "No such file or directory"),
    ],
)
def test_what_a_file_cannot_say_is_said_with_its_name(
    text: str | None,
    told: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert serve("--config", str(path)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert told in said
    assert str(path) in said
    assert not served


def test_commands_may_share_a_file_that_has_options_of_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    monkeypatch.setenv("CLLM_CONFIG", str(path))
    monkeypatch.setattr(sys, "argv", ["cllm", "generate", "1+1="])
    path.write_text("port = 9\nmodel-name = 'small'\nmax-tokens = 0\n")
    assert run() == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("max-tokens: max_tokens is 0, must be 1 to 2147483647")


@pytest.mark.parametrize("name", ["c.toml", "keys.toml", "schema.json", "template.jinja"])
def test_the_mark_that_editors_on_windows_write_before_a_text_is_no_part_of_it(
    name: str, tmp_path: Path
) -> None:
    texts = {
        "c.toml": "n-ctx = 512\n", "keys.toml": '[a]\nkey = "k"\n', "schema.json": '{"type": "null"}',
        "template.jinja": "{{ messages[0].content }}",
    }  # fmt: skip
    path = tmp_path / name
    path.write_bytes(codecs.BOM_UTF8 + texts[name].encode())
    readers: dict[str, Callable[[], Any]] = {
        "c.toml": lambda: option_sources._read(path), "keys.toml": lambda: [*read_keys(path)],
        "schema.json": lambda: text_or_file(f"@{path}"),
        "template.jinja": lambda: EngineConfig(chat_template=path).read_chat_template(),
    }  # fmt: skip
    assert readers[name]() == {"c.toml": {"n-ctx": 512}, "keys.toml": ["a"]}.get(name, texts[name])


@pytest.mark.parametrize(
    ("typed", "variable", "told"),
    [
        (["-c", "1", "-np", "many"], "", "it is 'many', must be an integer"),
        (["--drain-timeout", "soon"], "", "it is 'soon', must be a number"),
        ([], "CLLM_N_SEQ_MAX=1.5", "CLLM_N_SEQ_MAX: it is '1.5', must be an integer"),
        ([], "CLLM_PREFIX_CACHE=maybe", "CLLM_PREFIX_CACHE: it is 'maybe', must be on or off"),
    ],
)
def test_a_value_of_another_type_is_named_with_the_limit(
    typed: list[str],
    variable: str,
    told: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable:
        monkeypatch.setenv(*variable.split("=", 1))
    assert serve(*typed) == 2
    assert told in capsys.readouterr().err
    assert not served


def test_the_short_options_of_llama_server_mean_the_same(
    served: list[tuple[EngineConfig, ServerConfig]],
) -> None:
    typed = (
        "-c 1024 -np 2 -b 256 -ub 128 -t 1 -tb 2 -ngl 0 -ctk q8_0 -ctv q8_0 -kvu -a name -md ngram"
    )
    assert serve(*typed.split()) == 0
    ((engine, server),) = served
    expected = EngineConfig(
        n_ctx=1024, n_seq_max=2, n_batch=256, n_ubatch=128, n_threads=1, n_threads_batch=2,
        n_gpu_layers=0, type_k="q8_0", type_v="q8_0", kv_unified=True, speculation="ngram",
        process=True, preflight=False,
    )  # fmt: skip
    assert engine == expected
    assert server.model_name == "name"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_stands_for_two_options_of_a_command(name: str) -> None:
    group: Any = typer.main.get_command(command_line())
    names = [
        option
        for parameter in group.commands[name].params
        for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    assert sorted(names) == sorted(set(names))


def completed(words: str, index: int) -> list[str]:
    """What bash is told; it asks the command itself."""
    asked = {"_CLLM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(index)}
    command = Path(sys.executable).with_name("cllm")
    done = subprocess.run(
        [command], capture_output=True, text=True, check=True, env={**os.environ, **asked}
    )
    return done.stdout.split()


@pytest.mark.full
def test_a_shell_completes_commands_and_options() -> None:
    assert completed("cllm se", 1) == ["serve"]
    assert completed("cllm serve --n-s", 2) == ["--n-seq-max"]


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    found = {
        name
        for path in ROOT.glob("cllm/**/*.py")
        for name in re.findall(r"\bCLLM_[A-Z_]+\b", path.read_text())
    }
    page = (ROOT / "docs" / "operation.md").read_text()
    assert len(found) >= 5
    assert not {name for name in found if f"`{name}`" not in page}


def test_models_with_names_are_served_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    def note(
        engine: EngineConfig, server: ServerConfig, _: Any, announce: Any, make_app: Any
    ) -> int:
        announce()
        made.append(make_app(engine, server, on_failed=lambda: None).state.server)
        return 0

    monkeypatch.setattr(serving, "listen", lambda _: listen(ServerConfig(port=0)))
    monkeypatch.setattr(serving, "serve", note)
    monkeypatch.setattr(logs, "configure_logging", lambda: None)
    assert serve("-m", "a=x.gguf", "-m", "b=hub/y.gguf", "--max-models", "1", "-c", "512") == 0
    (pool,) = made
    assert list(pool.models) == ["a", "b"]
    assert "cllm: a, b at http" in capsys.readouterr().err
    for models, told in [
        (("a=x", "y"), "'y' has no name: NAME=MODEL"),
        (("a=x", "a=y"), "two models are called 'a'"),
        (("x", "y"), "'x' has no name: NAME=MODEL"),
    ]:
        assert serve(*(word for model in models for word in ("-m", model))) == 2
        assert told in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cllm", "generate", "1+1=", "-m", "a", "-m", "b"])
        assert run() == 2
    assert "give one model, not 2" in capsys.readouterr().err


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = ("CLLM_SERVICE_HOST", "CLLM_PORT_8000_TCP_ADDR", "CLLM_SOMETHING_ELSE", "N_CTXX")
    for variable in (*others, "CLLM_N_CTXX", "CLLM_N_SEQ_MAXX", "CLLM_NO_PAGE"):
        monkeypatch.setenv(variable, "512")
    monkeypatch.setenv("CLLM_N_SEQ_MAX", "3")
    assert serve() == 0
    assert capsys.readouterr().err.splitlines() == [
        "cllm: CLLM_NO_PAGE is not an option; did you mean CLLM_PAGE=off?",
        "cllm: CLLM_N_CTXX is not an option; did you mean CLLM_N_CTX?",
        "cllm: CLLM_N_SEQ_MAXX is not an option; did you mean CLLM_N_SEQ_MAX?",
    ]
    ((engine, _),) = served
    assert (engine.n_ctx, engine.n_seq_max) == ("auto", 3)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_variables_of_one_command_are_no_misspelt_ones_of_another(command: str) -> None:
    commands = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    everywhere = {
        option_sources._variable_of(option): "1"
        for each in commands.values()
        for option in option_sources._options(each)
    } | dict.fromkeys(option_sources.OTHERS, "1")
    assert option_sources._misspelt(commands[command], everywhere) == []
