"""Texts from files and from standard input, texts for a terminal, and those of errors about options."""

from __future__ import annotations

import codecs
from collections.abc import Callable

import typer

from cllm import InvalidRequestError

PREFIX = "CLLM_"  # of options in the environment

# What an option's value must be, by the type of pydantic's error.
LIMITS = {
    "int_parsing": "an integer", "int_from_float": "an integer", "int_type": "an integer",
    "float_parsing": "a number", "float_type": "a number", "finite_number": "a finite number",
    "bool_parsing": "on or off", "bool_type": "on or off",
    "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}",
    "greater_than": "more than {gt}", "less_than": "less than {lt}",
}  # fmt: skip

# Control characters in an output could move the cursor, or worse: a terminal gets visible symbols.
_PICTURES = {
    code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"
} | dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")


def visible(text: str) -> str:
    """Return the text with a visible symbol for each control character but tab and newline."""
    return text.translate(_PICTURES)


def without_bom(data: bytes) -> bytes:
    """Return the bytes of a text without the mark at its beginning that editors on Windows write."""
    return data.removeprefix(codecs.BOM_UTF8)


def decoded(data: bytes, source: Callable[[int], str]) -> str:
    """Return a text in UTF-8.

    Parameters
    ----------
    source : callable
        Returns the name of a line, by its number; the first has number 1.

    Raises
    ------
    InvalidRequestError
        Names the first line that is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        wrong = data[error.start : error.start + 1]
        raise InvalidRequestError(source(number), wrong, "UTF-8") from None


def in_words(error: typer.BadParameter) -> str:
    """Return the message of an error about an option; a value of a wrong type is named with the limit."""
    report = getattr(error.__cause__, "errors", None)
    if report is None:
        return error.message
    first = report()[0]
    limit = LIMITS.get(first["type"])
    if limit is None:
        return error.message
    return f"it is {first['input']!r}, must be {limit.format(**first.get('ctx', {}))}"
