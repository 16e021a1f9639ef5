"""Conversion of dataclasses, tuples, mappings and bytes to values that JSON can express, and back."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints


def as_plain(value: Any) -> Any:
    """Return a value as lists, dictionaries, strings and numbers; bytes become hexadecimal digits.

    Raises
    ------
    TypeError
        The value contains an object of another type.
    """
    if is_dataclass(value):
        return {f.name: as_plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def of_plain(kind: Any, plain: Any) -> Any:
    """Return the value of type `kind` from which `as_plain` has made `plain`.

    Raises
    ------
    TypeError, ValueError, LookupError
        `plain` does not represent a value of this type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if plain is None:
            return None
        *others, last = [a for a in arguments if a is not type(None)]
        for other in others:
            with suppress(TypeError):
                return of_plain(other, plain)
        return of_plain(last, plain)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: of_plain(hints[name], item) for name, item in plain.items()})  # type: ignore[operator]
    if origin is tuple:
        _check(plain, list)
        return tuple(of_plain(arguments[0], item) for item in plain)
    if origin is Mapping:
        _check(plain, dict)
        return {key: of_plain(arguments[1], item) for key, item in plain.items()}
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    if kind in (int, float, str, bool):
        _check(plain, kind)
        return plain
    if kind is bytes:
        return bytes.fromhex(plain)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(plain)
    raise TypeError(f"{kind} cannot be read from a file of saved values")


def _check(plain: Any, kind: type) -> None:
    if type(plain) is not kind:
        raise TypeError(f"{str(plain)[:40]!r} is not of the type {kind.__name__}")
