"""Limits of a JSON schema on numbers, lengths and counts, as far as llguidance can enforce them.  Pure."""

from __future__ import annotations

import math
import sys

COUNTS = frozenset(
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
)
MAX_COUNT = 2**31 - 1
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# Largest size of a bound that every number beyond exceeds, such as a minimum of 10**17, and of one that only longer
# numbers break, such as a maximum of 10**18.  llguidance rejects larger bounds.
LARGEST, LARGEST_LOOSE = 10**17, 10**18
SMALLEST = 1e-50  # size of a bound that is not 0
ALL_NUMBERS = 0.999 * sys.float_info.max  # a bound that all doubles keep
# llguidance computes the remainder of a division digit by digit, with tables that grow with the divisor: the table of
# 65,521 takes a second.  Powers of ten take no table.
MAX_DIVISOR, MAX_MULTIPLE = 2**16, 10**9


def enforceable_limit(keyword: str, value: object, *, is_integer: bool) -> object:
    """Return the value of a keyword as llguidance takes it; None if it cannot enforce it.

    Keywords without a limit keep their values, and so do values of wrong types.  An infinite value stands for a limit
    that asserts nothing: no text is as long, and no double as large.

    Parameters
    ----------
    is_integer : bool
        True if all numbers that the schema allows are integers.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) == math.inf:
        return value
    if keyword in COUNTS:
        if value <= MAX_COUNT:
            return int(value)
        return math.inf if keyword.startswith("max") else None
    if keyword in LOWER or keyword in UPPER:
        return _bound(keyword, value, is_integer=is_integer)
    if keyword == "multipleOf":
        return value if value <= 0 or _has_small_table(value) else None
    return value


def _bound(keyword: str, value: float, *, is_integer: bool) -> float | None:
    is_lower, size = keyword in LOWER, abs(value)
    if size <= LARGEST:
        return value if size == 0 or size >= SMALLEST else None
    if value > 0 if is_lower else value < 0:  # only numbers of more digits are allowed
        return None
    if size >= ALL_NUMBERS:
        return math.copysign(math.inf, value)
    if is_integer:  # those of 64 bits are common, and no answer has them
        return -LARGEST_LOOSE if is_lower and size > LARGEST_LOOSE else value
    return value if size <= LARGEST_LOOSE else None


def _has_small_table(divisor: float) -> bool:
    """Return True if llguidance can compute remainders of a division by this positive number."""
    if divisor > MAX_MULTIPLE:
        return False
    while divisor != int(divisor):
        divisor *= 10  # as llguidance does, with its rounding
    whole = int(divisor)
    while whole % 10 == 0:
        whole //= 10
    return whole <= MAX_DIVISOR
