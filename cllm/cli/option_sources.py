"""Options of a command from the environment (`CLLM_…`), and from a TOML file (`--config FILE.toml`).

The names are those of options: `--n-ctx` is `CLLM_` with `N_CTX` in the environment, and `n-ctx` or `n_ctx`
in a file.  The command line has precedence over the environment, and the environment over the file.  A
value that another source overrides is not checked.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.checks import closest
from cllm.cli.texts import PREFIX, in_words
from cllm.removed import replacement

NOT_FROM_SOURCES = ("--config", "--help", "-h")
OTHERS = (
    "CLLM_API_KEY",
    "CLLM_LIBRARY",
    "CLLM_LOG_FORMAT",
    "CLLM_LOG_LEVEL",
    "CLLM_DEBUG",
    "CLLM_AUDIT",
)
# Kubernetes sets PREFIX + "PORT" to tcp://ADDRESS:PORT in each pod beside a Service that is called cllm.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
# Each names the model, or says that there is none: those of the source with precedence are used, the others
# ignored.  `file` is the argument of `cllm tune`.
RIVALS = {"model", "hf", "fake", "file"}
# Functions that return the values of options, called only for options that the command line lacks.
Values = dict[str, Callable[[], Any]]


def config_file(variables: Mapping[str, str]) -> Any:
    """Return the annotation of a `--config` parameter, which loads options from file and environment.

    Parameters
    ----------
    variables : mapping of str to str
        Environment variable of a parameter, by its name; used if the `CLLM_…` variable is not set.
    """

    def take(context: typer.Context, path: Path | None) -> Path | None:
        if context.resilient_parsing:
            return path
        of_file = {} if path is None else _of_file(context, path)
        of_environment = _of_environment(context, variables, os.environ)
        for variable, meant in _misspelt(context.command, os.environ):
            typer.echo(f"cllm: {variable} is not an option; did you mean {meant}?", err=True)
        if RIVALS & of_environment.keys():
            for name in RIVALS:
                of_file.pop(name, None)
        context.default_map = of_file | of_environment
        return path

    return Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            envvar=PREFIX + "CONFIG",
            show_envvar=False,
            is_eager=True,
            callback=take,
            help="Read options from this file.  The command line and CLLM_… variables have precedence.",
        ),
    ]


def _of_file(context: typer.Context, path: Path) -> Values:
    known = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for name in parameter.opts
        if name not in NOT_FROM_SOURCES
    }
    options: Values = {}
    for key, value in _read(path).items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is None:
            option = f"--{key.replace('_', '-')}"
            if option not in NOT_FROM_SOURCES and option in _options_of_all():
                continue  # of another command, which may have the same file
            near = closest(key.replace("-", "_"), known)
            hint = "" if near is None else f"; did you mean {near}?"
            if instead := replacement(key):
                hint = f"; instead: {instead}"
            raise typer.BadParameter(f"{key} is not an option{hint}", param_hint=str(path))
        if parameter.name in options:
            raise typer.BadParameter(
                "it is there under another name too", param_hint=f"{path}: {key}"
            )
        options[parameter.name] = partial(
            _value, context, parameter, f"{path}: {key}", _typed, value
        )
    return options


def _of_environment(
    context: typer.Context, variables: Mapping[str, str], environment: Mapping[str, str]
) -> Values:
    options: Values = {}
    for parameter in context.command.params:
        names = [name for name in parameter.opts if name.startswith("--")]
        given = [
            variable
            for name in names
            if name not in NOT_FROM_SOURCES and _is_set(environment, variable := _variable_of(name))
        ]
        if len(given) > 1:
            raise typer.BadParameter("it is there under another name too", param_hint=given[1])
        own_name = str(parameter.name)
        if not given and _is_set(environment, other := variables.get(own_name, "")):
            given = [other]
        for variable in given:
            text = environment[variable]
            options[own_name] = partial(_value, context, parameter, variable, _split, text)
    return options


def _misspelt(command: Any, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each variable that is probably a misspelt option, and the variable that was meant.

    A variable that is similar to none is ignored: Kubernetes sets a dozen for a Service that is called cllm.
    """
    known, found = set(map(_variable_of, _options(command))), []
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or not _is_set(environment, variable):
            continue
        if variable not in known and variable not in OTHERS:
            name = variable.removeprefix(PREFIX)
            if (positive := PREFIX + name.removeprefix("NO_")) in known:
                found.append((variable, f"{positive}=off"))
                continue
            meant = closest(name, (each.removeprefix(PREFIX) for each in known))
            if meant is not None and meant[0] == name[:1] and abs(len(meant) - len(name)) <= 1:
                found.append((variable, PREFIX + meant))
    everywhere = set(map(_variable_of, _options_of_all())) if found else set()
    return [each for each in found if each[0] not in everywhere]


@cache
def _options_of_all() -> frozenset[str]:
    """Return the long options of all commands; it imports all of them."""
    from cllm.cli.app import command_line

    commands = vars(typer.main.get_command(command_line()))["commands"].values()
    return frozenset().union(*map(_options, commands))


def _variable_of(name: str) -> str:
    """Return the variable of an option, `--n-ctx`."""
    return PREFIX + name[2:].replace("-", "_").upper()


def _options(command: Any) -> set[str]:
    """Return the long options of a command."""
    return {
        name for parameter in command.params for name in parameter.opts if name.startswith("--")
    }


def _is_set(environment: Mapping[str, str], variable: str) -> bool:
    """Return True if a variable is set, not empty, and not a link that Kubernetes sets for a service."""
    given = environment.get(variable, "")
    return bool(given) and not SERVICE_LINK.match(given)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, no TOML
        problem = str(error)
    raise typer.BadParameter(f"cannot read {path}: {problem}", param_hint="--config")


def _typed(value: Any, parameter: Any) -> Any:
    """Return a TOML value in the form of the command line: bool for a flag, otherwise text or texts."""
    if _is_auto(value, parameter):
        return None
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise typer.BadParameter(f"it is of type {type(value).__name__}, must be true or false")
        return value
    values = value if parameter.multiple and isinstance(value, list) else [value]
    for one in values:
        if type(one) not in (str, int, float):
            what = "a list of texts" if parameter.multiple else "a text or a number"
            raise typer.BadParameter(
                f"there is a value of type {type(one).__name__}, must be {what}"
            )
    return list(map(str, values)) if parameter.multiple else str(value)


def _is_auto(value: Any, parameter: Any) -> bool:
    """Return True for "auto" of a switch, such as `--flash-attn`: the option keeps its default."""
    return bool(parameter.is_flag) and parameter.default is None and value == "auto"


def _split(text: str, parameter: Any) -> str | list[str] | None:
    """Return the text of a variable; that of a repeatable option is split at line breaks, or else at commas."""
    if _is_auto(text, parameter):
        return None
    if not parameter.multiple:
        return text
    return [value for value in text.split("\n" if "\n" in text else ",") if value]


def _value(
    context: typer.Context,
    parameter: Any,
    where: str,
    read: Callable[[Any, Any], Any],
    value: Any,
) -> Any:
    """Return the value of an option not on the command line, or None if a rival is; errors name `where`."""
    if parameter.name in RIVALS:
        # Typed options are processed before all others.
        sources = map(context.get_parameter_source, RIVALS)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            return None
    try:
        typed = read(value, parameter)
        parameter.process_value(context, typed)
    except typer.BadParameter as error:
        raise typer.BadParameter(in_words(error), param_hint=where) from None
    return typed
