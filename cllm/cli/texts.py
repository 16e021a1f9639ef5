"""Texts from files and from standard input."""

from __future__ import annotations

from collections.abc import Callable

from cllm import InvalidRequestError


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
