"""Limits of a JSON schema on numbers, lengths and counts, as far as llguidance can enforce them.  Pure."""

from __future__ import annotations

import math
import sys

COUNTS = frozenset(
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
)
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# llguidance rejects bounds of more digits, before or after the point.
LARGEST, SMALLEST = 10**17, 1e-50
LARGEST_LOOSE = 10**18  # of bounds away from zero on their own side, such as a minimum of -10**18
ANYTHING = 0.999 * sys.float_info.max
# Tables for the remainder of a division grow with the divisor: 99,991 takes seconds.
MAX_DIVISOR, MAX_MULTIPLE = 10_000, 10**9


def enforceable_limit(keyword: str, value: object, *, is_integer: bool) -> object:
    """Return the value of a keyword as llguidance takes it; None if it cannot enforce it.

    Keywords without a limit keep their values, and so do values of wrong types.  An infinite bound asserts nothing:
    numbers are doubles, and none is beyond the largest one.

    Parameters
    ----------
    is_integer : bool
        True if all numbers that the schema allows are integers.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) == math.inf:
        return value
    if keyword in COUNTS:
        return int(value) if value == int(value) else value
    if keyword in LOWER or keyword in UPPER:
        return _bound(keyword, value, is_integer=is_integer)
    if keyword == "multipleOf":
        return value if _is_small(value) else None
    return value


def _bound(keyword: str, value: float, *, is_integer: bool) -> float | None:
    is_lower, size = keyword in LOWER, abs(value)
    if size <= LARGEST:
        return value if size == 0 or size >= SMALLEST else None
    if value > 0 if is_lower else value < 0:  # only numbers of more digits are allowed
        return None
    if size >= ANYTHING:
        return math.copysign(math.inf, value)
    if is_integer:  # those of 64 bits are common, and no answer has them
        return -LARGEST_LOOSE if is_lower and size > LARGEST_LOOSE else value
    return value if size <= LARGEST_LOOSE else None


def _is_small(divisor: float) -> bool:
    """Return True if llguidance can compute remainders of a division by this number."""
    if not 0 < divisor <= MAX_MULTIPLE:
        return divisor <= 0  # which is rejected elsewhere
    while divisor != int(divisor):
        divisor *= 10  # as llguidance does, with its rounding
    whole = int(divisor)
    while whole % 10 == 0:
        whole //= 10
    return whole < MAX_DIVISOR
