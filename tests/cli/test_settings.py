"""The table of settings: what is stated of a field once is its check, its option, its help and its page."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest
import typer

from cllm import EngineConfig, EngineOptions, InvalidArgumentError, SamplingOptions, SamplingParams
from cllm.cli.app import command_line, run
from cllm.cli.options import (
    READERS,
    EngineFlags,
    Flags,
    SamplingFlags,
    ServerFlags,
    options_of,
    options_table,
)
from cllm.server import ServerConfig, serving
from cllm.server.http import api_keys
from cllm.server.operation import logs
from cllm.settings import KEY, Setting, boolean, descriptions, settings_of

KINDS: tuple[type[Flags], ...] = (EngineFlags, ServerFlags, SamplingFlags)
PAGE = Path(__file__).parents[2] / "docs" / "options.md"
# What is typed for an option that does not take "40".
TYPED = {
    "type_k": "q8_0", "type_v": "q8_0", "pooling": "mean", "lora": "n=b.gguf:0.5",
    "tenant_weights": "a=2", "rpc": "127.0.0.1:50052", "max_header_bytes": "400",
    "main_gpu": "3", "split_mode": "row", "override_tensor": "a=CPU", "numa": "isolate", "load_mode": "dio",
    "tune": "auto", "root_path": "/40",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_states_a_setting_and_has_a_sentence(kind: type[Flags]) -> None:
    said = descriptions(kind.configuration)
    for field in fields(kind.configuration):
        assert isinstance(field.metadata[KEY], Setting), field.name
        assert said[field.name].endswith("."), field.name
        assert len(said[field.name]) < 160, field.name


@pytest.mark.parametrize(
    ("options", "configuration"), [(EngineOptions, EngineConfig), (SamplingOptions, SamplingParams)]
)
def test_the_keyword_arguments_are_the_fields(options: Any, configuration: Any) -> None:
    """Type checkers cannot derive one from the other."""
    hints = get_type_hints(configuration)
    hints.pop("model", None)
    for name, hint in get_type_hints(options).items():
        field = hints.pop(name)
        assert set(get_args(hint)) <= set(get_args(field)) if get_args(hint) else hint == field, (
            name
        )
    assert not hints


@pytest.mark.parametrize("kind", [EngineFlags, ServerFlags])
def test_the_page_about_the_server_has_the_tables_of_options(kind: type[Flags]) -> None:
    assert "\n".join(options_table(kind)) in PAGE.read_text()


def test_every_field_of_a_configuration_has_an_option() -> None:
    for kind in (EngineFlags, ServerFlags):
        assert options_of(kind).keys() - kind.extra == settings_of(kind.configuration).keys()


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "bench", "embed"])
def test_a_command_takes_every_option_of_the_engine(name: str) -> None:
    group: Any = typer.main.get_command(command_line())
    taken = {parameter.name for parameter in group.commands[name].params}
    assert taken >= options_of(EngineFlags).keys()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """The settings of the servers that were to be run."""
    configs: list[tuple[EngineConfig, ServerConfig]] = []

    def note(engine: EngineConfig, server: ServerConfig, *_: object) -> int:
        configs.append((engine, server))
        return 0

    listen = serving.listen
    monkeypatch.setattr(serving, "listen", lambda _: listen(ServerConfig(port=0)))
    monkeypatch.setattr(serving, "check_certificate", lambda _: None)
    monkeypatch.setattr(api_keys, "read_keys", lambda _: {})
    monkeypatch.setattr(serving, "serve", note)
    monkeypatch.setattr(logs, "configure_logging", lambda: None)
    monkeypatch.setattr("cllm.cli.options.find_model", Path)
    return configs


@pytest.mark.parametrize("source", ["environment", "file", "typed"])
def test_every_option_of_a_server_may_be_typed_or_come_from_a_file_or_the_environment(
    source: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group: Any = typer.main.get_command(command_line("serve"))
    options = {parameter.name: parameter for parameter in group.commands["serve"].params}
    for kind in (EngineFlags, ServerFlags):
        for name in settings_of(kind.configuration):
            parameter = options[name]
            default = name == "process" or getattr(kind.configuration(), name) is True
            text = str(not default).lower() if parameter.is_flag else TYPED.get(name, "40")
            long = next(each for each in parameter.opts if each.startswith("--"))
            arguments: list[str] = []
            with monkeypatch.context() as patch:
                if source == "environment":
                    patch.setenv("CLLM_" + long[2:].replace("-", "_").upper(), text)
                elif source == "file":
                    value = text if parameter.is_flag else f'"{text}"'
                    (tmp_path / "a.toml").write_text(f"{long[2:]} = {value}")
                    arguments = ["--config", str(tmp_path / "a.toml")]
                elif parameter.is_flag:
                    off = next(each for each in parameter.secondary_opts if each.startswith("--"))
                    arguments = [off if default else long]
                else:
                    arguments = [long, text]
                patch.setattr(sys, "argv", ["cllm", "serve", *arguments])
                assert run() == 0, (name, text, capsys.readouterr().err)
            engine, server = served.pop()
            made = getattr(engine if kind is EngineFlags else server, name)
            if parameter.is_flag:
                assert made is (not default), name
            else:
                assert made != getattr(kind.configuration(), name), name


def test_what_is_typed_goes_before_the_environment_and_that_before_the_file(
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "cllm.toml"
    path.write_text("n-ctx = 1024\nmax-queue = 1\nn-seq-max = 2\ncors-origin = ['https://a']")
    for variable, value in {
        "CLLM_CONFIG": str(path), "CLLM_MAX_QUEUE": "3", "CLLM_N_SEQ_MAX": "4",
        "CLLM_ALLOWED_HOST": "a.example,b.example", "CLLM_PREFIX_CACHE": "off", "CLLM_PORT": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", "-np", "5"])
    assert run() == 0
    ((engine, server),) = served
    assert (engine.n_ctx, engine.max_queue, engine.n_seq_max) == (1024, 3, 5)
    assert (server.allowed_hosts, server.cors_origins) == (
        ("a.example", "b.example"),
        ("https://a",),
    )
    assert (engine.prefix_cache, server.port) == (False, 18081)


@pytest.mark.parametrize(
    ("typed", "variables", "file", "model"),
    [
        (["-hf", "u/typed"], {"CLLM_MODEL": "v.gguf"}, "model = 'f.gguf'", "hf:u/typed"),
        (["-m", "t.gguf"], {"CLLM_HF_REPO": "u/v"}, "hf-repo = 'u/f'", "t.gguf"),
        ([], {"CLLM_HF_REPO": "u/v"}, "model = 'f.gguf'", "hf:u/v"),
        ([], {"CLLM_MODEL": "v.gguf"}, "hf-repo = 'u/f'", "v.gguf"),
        ([], {"CLLM_MODEL": "a,b.gguf\n"}, "", "a,b.gguf"),
    ],
)
def test_the_two_options_that_name_the_model_have_the_precedence_of_their_sources(
    typed: list[str],
    variables: dict[str, str],
    file: str,
    model: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "a.toml").write_text(file)
    for variable, value in {"CLLM_CONFIG": str(tmp_path / "a.toml"), **variables}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", *typed])
    assert run() == 0
    assert str(served.pop()[0].model) == model


@pytest.mark.parametrize("named", [["-m", "a=x.gguf"], ["-m", "a.gguf"]])
def test_a_model_by_name_beside_a_file_is_rejected(
    named: list[str],
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", *named, "-hf", "u/r"])
    assert run() == 2
    assert "give -m or -hf, not both" in capsys.readouterr().err
    assert not served


def test_a_value_that_is_not_used_is_not_read(
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "a.toml").write_text("n-ctx = 'x'\nn-seq-max = 'y'\nngl = 7")
    for variable, value in {
        "CLLM_CONFIG": str(tmp_path / "a.toml"), "CLLM_N_SEQ_MAX": "4", "CLLM_MAX_QUEUE": "z",
        "CLLM_PORT": "tcp://10.0.0.1:80", "CLLM_OTLP_TRACES_ENDPOINT": "http://own",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://general",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    typed = ["-c", "1024", "--max-queue", "5"]
    for endpoint in ([], ["--otlp-traces-endpoint", ""]):
        monkeypatch.setattr(sys, "argv", ["cllm", "serve", *typed, *endpoint])
        assert run() == 0
    (engine, server), (_, untraced) = served
    assert (engine.n_ctx, engine.n_seq_max, engine.max_queue) == (1024, 4, 5)
    assert (engine.n_gpu_layers, server.port) == (7, 18081)
    assert (server.otlp_traces_endpoint, untraced.otlp_traces_endpoint) == ("http://own", None)


def test_an_empty_option_of_text_means_none_also_where_another_value_is_the_default(
    served: list[tuple[EngineConfig, ServerConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    optional = [
        field.name
        for field in fields(EngineConfig)
        if field.metadata[KEY].is_optional and isinstance(field.default, str)
    ]
    assert {"speculation", "tune"} <= set(optional)
    for name in optional:  # the suite has None for some
        default = EngineConfig.__dataclass_fields__[name].default
        monkeypatch.setitem(EngineConfig.__init__.__kwdefaults__ or {}, name, default)
    typed = [text for name in optional for text in (f"--{name.replace('_', '-')}", "")]
    for given in ([], typed):
        monkeypatch.setattr(sys, "argv", ["cllm", "serve", *given])
        assert run() == 0
    (default, _), (engine, _) = served
    for name in optional:
        assert isinstance(getattr(default, name), str)
        assert getattr(engine, name) is None


def test_a_switch_of_three_states_takes_auto_from_the_environment_and_from_a_file(
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    switches = [
        field
        for field in fields(EngineConfig)
        if field.metadata[KEY].is_optional and field.metadata[KEY].check is boolean
    ]
    assert "flash_attn" in {field.name for field in switches}
    path = tmp_path / "a.toml"
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", "--config", str(path)])
    for field in switches:
        variable = f"CLLM_{field.name.upper()}"
        for of_file, of_environment, made in [
            ("'auto'", "", None), ("false", "", False), ("false", "auto", None), ("'auto'", "off", False),
        ]:  # fmt: skip
            path.write_text(f"{field.name} = {of_file}")
            monkeypatch.setenv(variable, of_environment)
            assert run() == 0, capsys.readouterr().err
            assert getattr(served.pop()[0], field.name) is made
        monkeypatch.delenv(variable)
    path.write_text("flash-attn = 'perhaps'\n")
    assert run() == 2
    assert "flash-attn: it is of type str, must be true or false" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["-fa", "auto"], ["--flash-attn=auto"]])
def test_a_typed_auto_goes_before_the_environment_and_a_file(
    typed: list[str],
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.toml"
    path.write_text("flash-attn = false")
    monkeypatch.setenv("CLLM_FLASH_ATTN", "off")
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", "--config", str(path), *typed])
    assert run() == 0
    assert served[0][0].flash_attn is None


@pytest.mark.parametrize("how", ["environment", "file"])
@pytest.mark.parametrize("name", ["model", "hf-repo"])
def test_a_typed_fake_server_ignores_the_model_of_other_sources(
    how: str,
    name: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (path := tmp_path / "a.toml").write_text(f"{name} = 'a/b'" if how == "file" else "")
    if how == "environment":
        monkeypatch.setenv(f"CLLM_{name.replace('-', '_').upper()}", "a/b")
    (rules := tmp_path / "rules.json").write_text("[]")
    monkeypatch.setattr(sys, "argv", ["cllm", "serve", "--config", str(path), "--fake", str(rules)])
    assert run() == 0
    assert served[0][0].model is None


def test_an_error_about_a_secret_leaves_the_value_out() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^api_key is a secret, must be text") as raised:
        ServerConfig(api_key=cast(str, 123456))
    assert "123456" not in str(raised.value)
    assert raised.value.value != 123456


def test_a_path_from_a_file_may_begin_with_the_home_directory() -> None:
    lora = [("a", "~/a.gguf", 1.0)]
    config = EngineConfig(model="~/m.gguf", lora=lora, prefix_cache_dir=Path("~/p"))
    home = str(Path.home())
    assert config.model == f"{home}/m.gguf"
    assert config.prefix_cache_dir == f"{home}/p"
    assert config.lora == (("a", f"{home}/a.gguf", 1.0),)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("CLLM_PORT", "70000", "CLLM_PORT: port is 70000, must be 0 to 65535"),
        ("CLLM_PORT", "x", "CLLM_PORT: "),
        ("CLLM_PAGE", "perhaps", "CLLM_PAGE: "),
        ("CLLM_TENANT_WEIGHT", "a=2,b", "CLLM_TENANT_WEIGHT: 'b' is not NAME=WEIGHT"),
        ("CLLM_CTX_SIZE", "-1", "CLLM_CTX_SIZE: n_ctx is -1, must be 0 to"),
        ("CLLM_CONFIG", "/nowhere.toml", "cannot read /nowhere.toml"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(
    variable: str,
    value: str,
    told: str,
    served: list[tuple[EngineConfig, ServerConfig]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["cllm", "serve"])
    assert run() == 2
    assert told in capsys.readouterr().err
    assert not served


def test_weights_of_tenants_have_names() -> None:
    read = READERS["tenant_weights"]
    config = EngineConfig(tenant_weights=read(["a=2", "b=x=0.5"]))
    assert config.tenant_weights == (("a", 2.0), ("b=x", 0.5))
    assert hash(config) == hash(EngineConfig(tenant_weights=read(["a=2", "b=x=0.5"])))
    for text in ("3", "a=much"):
        with pytest.raises(typer.BadParameter, match=r"NAME=WEIGHT"):
            read([text])


def test_adapters_are_files_with_or_without_a_name_and_a_scale() -> None:
    given = ["a.gguf", "b.gguf:0.5", "c:d.gguf", "pirate=e.gguf", "poet=f.gguf:0", "x/y=z.gguf:2"]
    assert READERS["lora"](given) == (
        ("a.gguf", 1.0), ("b.gguf", 0.5), ("c:d.gguf", 1.0),
        ("pirate", "e.gguf", 1.0), ("poet", "f.gguf", 0.0), ("x/y=z.gguf", 2.0),
    )  # fmt: skip
