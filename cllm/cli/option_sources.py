"""Options of a command from the environment (`CLLM_…`), and from a TOML file (`--config FILE.toml`).

The names are the long names of options: `--n-ctx` is `CLLM_` with `N_CTX`, and `n-ctx` or `n_ctx` in a file.  An
option that is typed goes before one of the environment, and that goes before the file.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.removed import replacement

PREFIX = "CLLM_"
NOT_FROM_SOURCES = ("--config", "--help")


def _take(context: typer.Context, path: Path | None) -> Path | None:
    if context.resilient_parsing:
        return path
    known = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for name in parameter.opts
        if name.startswith("--") and name not in NOT_FROM_SOURCES
    }
    context.default_map = {
        **({} if path is None else _of_file(context, known, path)),
        **_of_environment(context, known, os.environ),
    }
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        envvar=PREFIX + "CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=_take,
        help="Take options from a file.  An option that is typed goes before, and then CLLM_… of the environment.",
    ),
]


def _of_file(context: typer.Context, known: Mapping[str, Any], path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
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
        typed = _typed(value, parameter, f"{path}: {key}")
        options[parameter.name] = _checked(context, typed, parameter, f"{path}: {key}")
    return options


def _of_environment(
    context: typer.Context, known: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, parameter in known.items():
        variable = PREFIX + name.upper()
        if not (given := environment.get(variable)):  # an empty one is none, as for other programs
            continue
        if parameter.name in options:
            raise typer.BadParameter("it is there under another name too", param_hint=variable)
        typed = given.split(",") if parameter.multiple else given
        options[parameter.name] = _checked(context, typed, parameter, variable)
    return options


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, no TOML
        problem = str(error)
    raise typer.BadParameter(f"cannot read {path}: {problem}", param_hint="--config")


def _typed(value: Any, parameter: Any, where: str) -> Any:
    """Return a value of a file as it would be typed, if it could be."""
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise typer.BadParameter(f"{value!r}, must be true or false", param_hint=where)
        return value
    values = value if parameter.multiple and isinstance(value, list) else [value]
    if not all(type(one) in (str, int, float) for one in values):
        what = "a list of texts" if parameter.multiple else "a text or a number"
        raise typer.BadParameter(f"{value!r}, must be {what}", param_hint=where)
    return list(map(str, values)) if parameter.multiple else str(value)


def _checked(context: typer.Context, typed: Any, parameter: Any, where: str) -> Any:
    """Return a typed value that the option accepts."""
    try:
        parameter.process_value(context, typed)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=where) from None
    return typed
