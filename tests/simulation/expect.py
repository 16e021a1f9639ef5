"""Assertions `expect` and `demand`, with a text for the error; `python -O` does not remove them."""

from __future__ import annotations


def expect(actual: object, expected: object, what: str) -> None:
    """Raise an `AssertionError` if two values differ; `what` names the compared thing."""
    if actual != expected:
        raise AssertionError(f"{what}: {actual}, expected {expected}")


def demand(is_so: bool, what: str) -> None:
    """Raise an `AssertionError` with the text `what` if a condition is false."""
    if not is_so:
        raise AssertionError(what)
