"""expect, demand: assertions that say what they are about, under `python -O` too."""

from __future__ import annotations


def expect(actual: object, expected: object, what: str) -> None:
    """They are equal; `what` names the thing."""
    if actual != expected:
        raise AssertionError(f"{what}: {actual}, expected {expected}")


def demand(is_so: bool, what: str) -> None:
    """It is so; `what` says it."""
    if not is_so:
        raise AssertionError(what)
