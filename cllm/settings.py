"""The table of settings: each field of a configuration states its default, its limits and its option once.

A configuration is a frozen dataclass whose fields are made by `setting`, and whose docstring describes
each field in an entry of its own.  From these come:

- the checks and the conversions (`check_settings`, called by `__post_init__`),
- the options of the command line, the keys of `--config` and the environment variables
  (`cllm/cli/options.py`, `cllm/cli/option_sources.py`): the help is the first sentence of the entry,
- the tables of options in docs/options.md,
- what a fingerprint depends on (`Setting.affects`).
"""

from __future__ import annotations

import copyreg
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Flag, auto
from types import MappingProxyType
from typing import Any, Final

from cllm.checks import ErrorType, check_bool, check_float, check_int
from cllm.errors import InvalidArgumentError

Check = Callable[[str, object, ErrorType], object]
KEY: Final = "setting"
# An entry of a numpy docstring: names, a type, and indented lines.
ENTRY = re.compile(r"^([\w, ]+?) :[^\n]*\n((?:    [^\n]*\n?)+)", re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"`0-9])")

# Python itself cannot copy read-only mappings, which settings, statistics and requests contain.
copyreg.dispatch_table[MappingProxyType] = lambda mapping: (read_only, (dict(mapping),))

_SETTINGS: dict[type[Any], dict[str, Setting]] = {}


def read_only(values: Mapping[Any, Any]) -> MappingProxyType[Any, Any]:
    """Return a view of `values` that cannot be changed."""
    return MappingProxyType(values)


class Affects(Flag):
    """Effects of a setting besides speed and memory: on answers, on batches, on saved states."""

    NOTHING = 0
    ANSWERS = auto()  # the answers of every engine
    BATCHES = auto()  # the batches, and so the answers of an engine that is not deterministic
    STATE = auto()  # the bytes of a sequence's saved state


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties of one field, besides its name, its type and its default.

    Parameters
    ----------
    check : callable, optional
        Function of the name, the value and an error type.  It returns the value to keep, or raises
        `error(name, value, limit)`.  None: `__post_init__` or the bindings check the value.
    flags : str
        Names of the option, with spaces between; empty: from the name of the field; "-": no option.
    affects : Affects
        Parts of an engine's behavior that depend on the setting.
    is_optional : bool
        True if the value may be None.
    variable : str, optional
        An environment variable that sets the option if `CLLM_…` does not.
    is_secret : bool
        True if error messages do not contain the value.
    """

    check: Check | None
    flags: str
    affects: Affects
    is_optional: bool
    variable: str | None
    is_secret: bool

    def checked(self, name: str, value: object, error: ErrorType) -> object:
        """Return the value to keep for a field of this name.

        Raises
        ------
        InvalidArgumentError
            Or `error`: names the field, the value and the limit.
        """
        if self.check is None or (value is None and self.is_optional):
            return value
        if self.is_secret:
            return self.check(name, value, lambda field, _, limit: error(field, HIDDEN, limit))
        return self.check(name, value, error)


class _Hidden:
    def __repr__(self) -> str:
        return "a secret"


HIDDEN = _Hidden()


def setting(
    default: Any,
    check: Check | None = None,
    flags: str = "",
    *,
    affects: Affects = Affects.NOTHING,
    is_optional: bool | None = None,
    variable: str | None = None,
    is_secret: bool = False,
    hash: bool | None = None,
) -> Any:
    """Return a dataclass field with a `Setting`; by default, `is_optional` is True if the default is None."""
    optional = default is None if is_optional is None else is_optional
    stated = Setting(check, flags, affects, optional, variable, is_secret)
    if type(default).__hash__ is None:  # a read-only mapping, for dataclasses not a default
        return field(default_factory=lambda: default, hash=hash, metadata={KEY: stated})
    return field(default=default, hash=hash, metadata={KEY: stated})


def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """Return the settings of a configuration by the names of its fields."""
    if kind not in _SETTINGS:  # cached: this is called for each request
        _SETTINGS[kind] = {each.name: each.metadata[KEY] for each in fields(kind)}
    return _SETTINGS[kind]


def check_settings(configuration: Any, error: ErrorType = InvalidArgumentError) -> None:
    """Check each field of a frozen configuration, and store the value that its check returns.

    Raises
    ------
    InvalidArgumentError
        Or `error`: names the field, the value and the limit.
    """
    for name, stated in settings_of(type(configuration)).items():
        value = getattr(configuration, name)
        kept = stated.checked(name, value, error)
        if kept is not value:
            object.__setattr__(configuration, name, kept)


def descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the first sentence about each field, by its name, from the docstring of a configuration."""
    found: dict[str, str] = {}
    for names, text in ENTRY.findall(inspect.cleandoc(kind.__doc__ or "")):
        sentence = END_OF_SENTENCE.split(" ".join(text.split()))[0]
        found.update(dict.fromkeys(names.split(", "), sentence))
    return found


def boolean(name: str, value: object, error: ErrorType) -> bool:
    """Check that a value is True or False."""
    return check_bool(name, value, error)


def file_path(name: str, value: object, error: ErrorType) -> object:
    """Check that a value is a path, which need not exist; return it with a `~` at its beginning expanded."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise error(name, value, "a path: not empty, without NUL characters")
    # Unlike `Path.expanduser`, it raises nothing where there is no such user.
    return os.path.expanduser(text) if text.startswith("~") else value  # noqa: PTH111


def new_path(name: str, value: object, error: ErrorType) -> object:
    """Check that a value is a path at which a file can be made; see `file_path`."""
    path = file_path(name, value, error)
    try:
        os.fsencode(path)  # type: ignore[arg-type]  # a path
    except UnicodeEncodeError:
        raise error(name, value, "a path that the file system can encode") from None
    return path


def nonblank(name: str, value: object, error: ErrorType) -> object:
    """Check that a value is a text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise error(name, value, "text that is not blank")
    return value


def secret(name: str, value: object, error: ErrorType) -> str:
    """Return a key without the white space around it, such as the line break at the end of a file."""
    return str(nonblank(name, value, error)).strip()


def texts(name: str, value: object, error: ErrorType) -> tuple[str, ...]:
    """Return a sequence of texts as a tuple; a blank text is an error."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise error(name, value, "a sequence of texts")
    for each in value:
        nonblank(name, each, error)
    return tuple(value)


def integer(low: int, high: int) -> Check:
    """Return a check for integers from `low` to `high`."""
    return lambda name, value, error: check_int(name, value, low, high, error)


def number(low: float, high: float) -> Check:
    """Return a check for finite numbers from `low` to `high`."""
    return lambda name, value, error: check_float(name, value, low, high, error)


def one_of(*names: str) -> Check:
    """Return a check that accepts only these words."""

    def check(name: str, value: object, error: ErrorType) -> object:
        if not isinstance(value, str) or value not in names:
            raise error(name, value, "one of " + ", ".join(names))
        return value

    return check


def boolean_or(word: str) -> Check:
    """Return a check that accepts True, False and one word."""

    def check(name: str, value: object, error: ErrorType) -> object:
        if not (isinstance(value, str) and value == word) and not isinstance(value, bool):
            raise error(name, value, f"True, False or {word!r}")
        return value

    return check


def or_word(word: str, otherwise: Check) -> Check:
    """Return a check that accepts one word, and the values of another check."""
    return lambda name, value, error: (
        value if isinstance(value, str) and value == word else otherwise(name, value, error)
    )
