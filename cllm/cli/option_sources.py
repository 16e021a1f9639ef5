"""Options of a command from the environment (`CLLM_…`), and from a TOML file (`--config FILE.toml`).

The names are those of options: `--n-ctx` is `CLLM_` with `N_CTX` in the environment, and `n-ctx` or `n_ctx` in a file.  A
typed option has precedence over the environment, and the environment over the file.  A value that is not used is
not read.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.removed import replacement

PREFIX = "CLLM_"
NOT_FROM_SOURCES = ("--config", "--help", "-h")
# Kubernetes sets PREFIX + "PORT" to tcp://ADDRESS:PORT in each pod beside a Service that is called cllm.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
# Two options that name the model: the one with precedence is used, whatever the other one says.
RIVALS = {"model": "hf", "hf": "model"}
# Called if the option was not typed.
Values = dict[str, Callable[[], Any]]


def config_file(variables: Mapping[str, str]) -> Any:
    """Return the type of a command's parameter that reads the options of all sources.

    Parameters
    ----------
    variables : mapping of str to str
        Variables of the environment that set an option if `CLLM_…` does not, by the names of parameters.
    """

    def take(context: typer.Context, path: Path | None) -> Path | None:
        if context.resilient_parsing:
            return path
        of_file = {} if path is None else _of_file(context, path)
        of_environment = _of_environment(context, variables, os.environ)
        for name in RIVALS.keys() & of_environment:
            of_file.pop(RIVALS[name], None)
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
            help="Take options from a file.  Typed options have precedence, and then CLLM_… of the environment.",
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
            near = difflib.get_close_matches(key.replace("-", "_"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
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
            if name not in NOT_FROM_SOURCES
            and _is_set(environment, variable := PREFIX + name[2:].replace("-", "_").upper())
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


def _is_set(environment: Mapping[str, str], variable: str) -> bool:
    """An empty variable is none, as for other programs."""
    given = environment.get(variable, "")
    return bool(given) and not SERVICE_LINK.match(given)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, no TOML
        problem = str(error)
    raise typer.BadParameter(f"cannot read {path}: {problem}", param_hint="--config")


def _typed(value: Any, parameter: Any) -> Any:
    """Return a value of a file as it would be typed, if it could be."""
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


def _split(text: str, parameter: Any) -> str | list[str]:
    """Return the values of a variable, which commas separate, or line breaks if there are any."""
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
    """Return the value of an option that was not typed, as it would be typed."""
    rival = RIVALS.get(parameter.name, "")
    source = context.get_parameter_source(rival)  # typed options are processed before all others
    if source is not None and source.name == "COMMANDLINE":
        return None
    try:
        typed = read(value, parameter)
        parameter.process_value(context, typed)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=where) from None
    return typed
