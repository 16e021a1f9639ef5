"""Options that several commands share: the settings of a configuration, as a command line takes them.

A command takes `EngineFlags`, `ServerFlags` or `SamplingFlags` as a parameter; `with_flags` shows typer
the settings (`cllm/settings.py`) as options in its place, and adds `--config`.  An option that is not
given leaves the default of the command, or else of the configuration.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from cllm import EngineConfig, EngineOptions, InvalidArgumentError, SamplingParams
from cllm.cli.habits import hint_for_model
from cllm.cli.option_sources import config_file
from cllm.cli.texts import decoded, without_bom
from cllm.engine.config import AUTO, LoraSetting
from cllm.errors import InvalidRequestError
from cllm.hub.download import find_model, find_projector
from cllm.hub.names import PREFIX, is_name
from cllm.server.config import ServerConfig
from cllm.settings import Setting, descriptions, settings_of

NAMED = re.compile(r"([\w.-]+)=(.+)")
TOY = (
    "the embedded model is a toy of 0.9 million parameters, made for tests; "
    "-m FILE or -m hf:USER/REPO takes a real one"
)
NO_OPTION = "-"
NOTHING = object()  # an optional setting was given as "", and is None


class Flags:
    """The options of one configuration that were given, read and checked.

    Attributes
    ----------
    configuration : type
        Class whose settings become options.
    panel : str
        Heading of the options in a command's help.
    extra : dict of str to type
        Typer annotations of further options, by the names of their parameters.
    own_defaults : dict of str to object
        Defaults of every command that differ from those of the configuration.
    given : dict of str to object
        Values of the given options, by the names of their fields.
    defaults : dict of str to object
        Defaults of the command, over `own_defaults`; a None is left out.
    """

    configuration: ClassVar[type[Any]]
    panel: ClassVar[str]
    extra: ClassVar[dict[str, Any]] = {}
    own_defaults: ClassVar[dict[str, object]] = {}

    def __init__(
        self, given: Mapping[str, object], defaults: Mapping[str, object] | None = None
    ) -> None:
        # Typer has [] or None, by version, for a list that is not given.
        self.given: dict[str, object] = {
            name: None if value is NOTHING else value
            for name, value in given.items()
            if value not in (None, [])
        }
        self.defaults: dict[str, object] = self.own_defaults | {
            name: value for name, value in (defaults or {}).items() if value is not None
        }

    def make(self, **defaults: object) -> Any:
        """Return the configuration.  Given options override `defaults`, and these the command's defaults.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        try:
            return self.configuration(**{**self.defaults, **defaults, **self.given})
        except (InvalidArgumentError, InvalidRequestError) as error:
            raise typer.BadParameter(str(error)) from None


class EngineFlags(Flags):
    """Options of bench, chat, embed, generate and serve; they become an `EngineConfig`."""

    configuration = EngineConfig
    panel = "Engine"
    own_defaults: ClassVar[dict[str, object]] = {"n_ctx": AUTO}
    extra: ClassVar[dict[str, Any]] = {
        "hf": Annotated[
            str | None,
            typer.Option(
                "-hf",
                "-hfr",
                "--hf-repo",
                help="A model by name, as -m hf:…",
                rich_help_panel="Engine",
            ),
        ]
    }

    def config(self, **defaults: Unpack[EngineOptions]) -> EngineConfig:
        """Return the settings of the one model that was given.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        models = cast(list[str], self.given.get("model", []))
        if len(models) > 1:
            raise typer.BadParameter(f"give one model, not {len(models)}", param_hint="-m")
        model = models[0] if models else None
        if (name := self.given.get("hf")) is not None:
            if model is not None:
                raise typer.BadParameter("give -m or -hf, not both")
            model = PREFIX + str(name).removeprefix(PREFIX)
        return self._of_model(model, defaults)

    def configs(self, **defaults: Unpack[EngineOptions]) -> dict[str, EngineConfig]:
        """Return the settings of several models, by name; empty for one model without a name.

        Raises
        ------
        typer.BadParameter
            As for `config`; also if a model has no name, two have the same, or there is a `trace`.
        """
        models = cast(list[str], self.given.get("model", []))
        named = [NAMED.fullmatch(model) for model in models]
        if not any(named) and len(named) < 2:
            return {}
        if "hf" in self.given:
            raise typer.BadParameter("give -m or -hf, not both")
        if self.given.get("trace") is not None:
            raise typer.BadParameter("one file is for one model", param_hint="--trace")
        configs: dict[str, EngineConfig] = {}
        for given, found in zip(models, named, strict=True):
            if found is None:
                raise typer.BadParameter(f"{given!r} has no name: NAME=MODEL", param_hint="-m")
            if found[1] in configs:
                raise typer.BadParameter(f"two models are called {found[1]!r}", param_hint="-m")
            configs[found[1]] = self._of_model(found[2], defaults)
        return configs

    def _of_model(self, model: str | None, defaults: EngineOptions) -> EngineConfig:
        given = {name: value for name, value in self.given.items() if name != "hf"}
        given.pop("model", None)
        if model is not None:
            given["model"] = model
        if given.get("mmproj") == AUTO and is_name(named := given.get("model")):
            given["model"] = model_file(named)
            given["mmproj"] = find_projector(named)  # of the repository: the file is not beside it
        for name in ("model", "speculation", "embedding_model"):
            value = given.get(name)
            # A word such as "ngram" is a kind of speculation.
            if is_name(value) or (
                isinstance(value, str)
                and (name != "speculation" or ":" in value)
                and hint_for_model(value)
            ):
                given[name] = model_file(value)
        # `n_threads` alone sets the threads of batches too.
        if "n_threads" in given:
            given.setdefault("n_threads_batch", given["n_threads"])
        flags = EngineFlags({}, self.defaults)
        flags.given = given
        return cast(EngineConfig, flags.make(**defaults))


class ServerFlags(Flags):
    """Options of a server; they become a `ServerConfig`."""

    configuration = ServerConfig
    panel = "Server"

    def config(self) -> ServerConfig:
        """Return the settings.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        return cast(ServerConfig, self.make())


class SamplingFlags(Flags):
    """Options of sampling; they become `SamplingParams`."""

    configuration = SamplingParams
    panel = "Sampling"

    def params(self) -> SamplingParams:
        """Return the parameters.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        return cast(SamplingParams, self.make())


def with_flags(**defaults: object) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that replaces each `Flags` parameter of a command by its options.

    Parameters
    ----------
    **defaults
        Defaults of the command, by field; None: the help shows none, as the command computes the value.
    """

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        hints = get_type_hints(command, include_extras=True)
        kinds = {
            name: hint
            for name, hint in hints.items()
            if inspect.isclass(hint) and issubclass(hint, Flags)
        }
        # The source of options is read before the options.
        parameters = [_keyword("_config", config_file(_variables(kinds.values())))]
        for name, parameter in inspect.signature(command).parameters.items():
            if name in kinds:
                parameters += [
                    _keyword(*each) for each in options_of(kinds[name], defaults).items()
                ]
            else:
                parameters.append(
                    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
                )

        @wraps(command)
        def run(_config: object, **given: object) -> int:
            for name, kind in kinds.items():
                names = options_of(kind, defaults)
                own = {field: value for field, value in defaults.items() if field in names}
                given[name] = kind({field: given.pop(field) for field in names}, own)
            return command(**given)

        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        return run

    return decorated


def _variables(kinds: Iterable[type[Flags]]) -> dict[str, str]:
    return {
        name: stated.variable
        for kind in kinds
        for name, stated in settings_of(kind.configuration).items()
        if stated.variable is not None
    }


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def options_of(kind: type[Flags], defaults: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the options of a configuration, as typer's annotations, by the names of the fields."""
    shown = {**kind.own_defaults, **(defaults or {})}
    options: dict[str, Any] = {}
    for name, stated, hint, said in _stated(kind, shown):
        option = typer.Option(
            *flags_of(name, stated, hint),
            help=said,
            rich_help_panel=kind.panel,
            callback=_reader(name, stated),
        )
        options[name] = Annotated[_typed(name, hint) | None, option]
    return options | kind.extra


def options_table(kind: type[Flags]) -> list[str]:
    """Return the options of a configuration as lines of a Markdown table."""
    rows = ["| option | |", "|---|---|"]
    for name, stated, hint, said in _stated(kind, kind.own_defaults):
        flags = ", ".join(f"`{flag.strip(' /')}`" for flag in flags_of(name, stated, hint))
        rows.append(f"| {flags} | {said.replace('|', chr(92) + '|')} (`{name}`) |")
        if name == "model":
            for _, option in map(get_args, kind.extra.values()):
                # typer takes the first name of an annotation for the default, until it reads the function.
                names = (option.default, *(option.param_decls or ()))
                flags = ", ".join(f"`{name}`" for name in names)
                rows.append(f"| {flags} | {option.help} |")
    return rows


def _stated(
    kind: type[Flags], shown: Mapping[str, object]
) -> Iterator[tuple[str, Setting, Any, str]]:
    """Yield the settings that are options: name, setting, type and help."""
    hints = get_type_hints(kind.configuration)
    said = descriptions(kind.configuration)
    for field in fields(kind.configuration):
        name = field.name
        stated = settings_of(kind.configuration)[name]
        if stated.flags != NO_OPTION:
            default = shown.get(name, field.default)
            yield name, stated, hints[name], _help(said.get(name, ""), hints[name], default)


def flags_of(name: str, stated: Setting, hint: object) -> list[str]:
    """Return the names of an option as typer takes them: `--name`, or `--name/--no-name` for a bool."""
    if stated.flags:
        # click takes a name that only means "no" after a space and a slash.
        return [f" {flag}" if flag.startswith("/") else flag for flag in stated.flags.split()]
    flag = name.replace("_", "-")
    return [f"--{flag}/--no-{flag}" if _typed(name, hint) is bool else f"--{flag}"]


def _help(said: str, hint: object, default: object) -> str:
    said = said.replace("`", "") + "  May be repeated." * _is_several(hint)
    if default is None or isinstance(default, tuple) or default == AUTO:
        return said
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    # The option itself has no default: None says that it is not given.
    return f"{said} [default: {shown}]"


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type; a generic type is replaced by its origin."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(member) or member for member in members)


def _is_several(hint: object) -> bool:
    members = _members(hint)
    kinds = Sequence if str in members else Sequence | Mapping  # a mapping is a text there
    return any(
        inspect.isclass(member) and issubclass(member, kinds) and member is not str
        for member in members
    )


def _typed(name: str, hint: object) -> Any:
    """Return the type that typer reads for an option."""
    if name == "model" or _is_several(hint):
        return list[str]
    if int in (members := _members(hint)) and Literal in members:
        return str
    return next((kind for kind in (bool, int, float) if kind in _members(hint)), str)


def _reader(name: str, stated: Setting) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if given is None or given == []:
            return given
        if given == "" and stated.is_optional and not stated.is_secret:
            return NOTHING
        value = READERS[name](given) if name in READERS else given
        if name == "model":  # may be NAME=MODEL; checked by `config` and `configs`
            return value
        try:
            return stated.checked(name, value, InvalidArgumentError)
        except InvalidArgumentError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def model_file(given: str | None) -> Path | None:
    """Return the path of a model; a model given as `hf:…` is downloaded if needed.  None: the embedded model.

    Raises
    ------
    typer.BadParameter
        The name is invalid, or the extra `hub` is not installed.
    DownloadError
    """
    try:
        if given is None:
            return None
        if is_name(given):
            return find_model(given)
        if hint := hint_for_model(given):
            raise typer.BadParameter(f"{given}: {hint}", param_hint="-m")
        return Path(given)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None


def output_file(path: Path | None) -> Path | None:
    """Return the path of a file that a command writes at its end; reject one that cannot be written.

    Raises
    ------
    typer.BadParameter
    """
    if path is None:
        return None
    directory = path.resolve().parent
    is_special = path.exists() and not path.is_file()  # such as /dev/stdout
    if not (directory.is_dir() or is_special):
        raise typer.BadParameter(f"there is no directory {directory}")
    if path.is_dir() or not os.access(path if is_special else directory, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="A GGUF file or hf:…; by default the embedded model."
    ),
]


def _weights(given: Sequence[str]) -> dict[str, float]:
    """Return the weights of texts NAME=WEIGHT, by name."""
    weights = {}
    for text in given:
        name, separator, weight = text.rpartition("=")
        try:
            if not separator:
                raise ValueError(text)
            weights[name] = float(weight)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not NAME=WEIGHT") from None
    return weights


def _adapters(given: Sequence[str]) -> tuple[LoraSetting, ...]:
    """Return the adapters of texts [NAME=]FILE[:SCALE]; the default scale is 1."""
    adapters: list[LoraSetting] = []
    for text in given:
        named = NAMED.fullmatch(text)
        name, path = ("", text) if named is None else named.groups()
        file, _, last = path.rpartition(":")
        scale = 1.0
        if file:
            with contextlib.suppress(ValueError):
                path, scale = file, float(last)
        adapters.append((name, path, scale) if name else (path, scale))
    return tuple(adapters)


def _parts(given: Sequence[str]) -> tuple[str, ...]:
    """Return all parts of texts; each text may hold several, separated by commas, as in llama.cpp's programs."""
    return tuple(address for text in given for address in text.split(","))


def _devices(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of devices; empty for "none"."""
    names = _parts(given)
    return () if names == ("none",) else names


def _proportions(given: Sequence[str]) -> tuple[float, ...]:
    """Return the numbers of texts with commas or slashes between them."""
    try:
        return tuple(float(number) for text in given for number in re.split("[,/]", text))
    except ValueError:
        raise typer.BadParameter(f"{','.join(given)!r} is not NUMBER,NUMBER,…") from None


def text_or_file(given: str, option: str | None = None) -> str:
    """Return the text, or the content of the file that `@FILE` names.

    Raises
    ------
    typer.BadParameter
        The file cannot be read as UTF-8.
    """
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        return decoded(without_bom(path.read_bytes()), "its line {}".format)
    except OSError as error:
        problem = error.strerror or str(error)
    except InvalidRequestError as error:
        problem = str(error)
    raise typer.BadParameter(f"cannot read {path}: {problem}", param_hint=option)


def _number_or_word(given: str) -> int | str:
    try:
        return int(given)
    except ValueError:
        return given


READERS: dict[str, Callable[[Any], Any]] = {
    "n_ctx": _number_or_word,
    "tenant_weights": _weights,
    "lora": _adapters,
    "rpc": _parts,
    "devices": _devices,
    "tensor_split": _proportions,
    "override_tensor": _parts,
    "json_schema": text_or_file,
    "grammar": text_or_file,
    "lark": text_or_file,
}
