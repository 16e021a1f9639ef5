"""The options of a command from a TOML file: `cllm serve --config FILE.toml`.

Keys are the long names of options, with `-` or `_`.  What is typed, or in the environment, goes before.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.removed import replacement

NOT_FROM_FILES = ("--config", "--help")


def _take(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None and not context.resilient_parsing:
        context.default_map = _options_of(context, path)
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        is_eager=True,
        callback=_take,
        help="Take options from a file; what is typed goes before.",
    ),
]


def _options_of(context: typer.Context, path: Path) -> dict[str, Any]:
    known = {
        name.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for name in parameter.opts
        if name not in NOT_FROM_FILES
    }
    options: dict[str, Any] = {}
    for key, value in _read(path).items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is None:
            near = difflib.get_close_matches(key.replace("-", "_"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if instead := replacement(key):
                hint = f"; instead: {instead}"
            raise typer.BadParameter(f"{path}: {key} is not an option{hint}")
        if parameter.name in options:
            raise typer.BadParameter(f"{path}: {key} is there under another name too")
        assert parameter.name is not None
        options[parameter.name] = _checked(context, path, key, value, parameter)
    return options


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, no TOML
        problem = str(error)
    raise typer.BadParameter(f"cannot read {path}: {problem}")


def _checked(context: typer.Context, path: Path, key: str, value: Any, parameter: Any) -> Any:
    """The value as it would be typed, if it could be."""
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise typer.BadParameter(f"{path}: {key} is {value!r}, must be true or false")
        return value
    values = value if parameter.multiple and isinstance(value, list) else [value]
    if not all(type(one) in (str, int, float) for one in values):
        what = "a list of texts" if parameter.multiple else "a text or a number"
        raise typer.BadParameter(f"{path}: {key} is {value!r}, must be {what}")
    typed: Any = list(map(str, values)) if parameter.multiple else str(value)
    try:
        parameter.process_value(context, typed)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{path}: {key}: {error.message}") from None
    return typed
