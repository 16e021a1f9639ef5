"""What a step of a chat template may cost, known before the step is taken.  Pure; needs jinja2.

No value may be longer, bigger or deeper than the limits here, and what a call would make of values
within the limits is computed before the call.  So every step ends soon, and it is enough to look at
the clock between two of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import islice
from types import MethodType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_SECONDS = 2.0
MAX_TEXT = 4 << 20  # characters of one value, and of the output
MAX_VALUES = 1 << 18  # values in one container, with all that is inside
MAX_DEPTH = 100  # hash() of tuples nested 100,000 deep ends the process
MAX_BITS = 1 << 14
MAX_PRODUCT = 1 << 28  # steps of a search that takes length × length
MAX_DIGITS = 400  # of a float
# Units of about four bytes that a template may allocate in all: 256 MiB, if nothing were freed.
MAX_WORK = 1 << 26
UNITS_PER_VALUE = 16
UNITS_PER_REFERENCE = 2
SHOWN_OBJECT = 64  # characters of `<built-in method ...>`

CONTAINERS: Any = (list, tuple, set, *map(type, ({}.keys(), {}.values(), {}.items())))
# Filters that look at their first argument, or step through it, but not at what is inside.
SHALLOW_FILTERS = _words(
    "attr batch count d default first items last length list map random reject rejectattr reverse"
    " select selectattr slice"
)
# Filters that take all of their first argument in one call of C.
EAGER_FILTERS = _words("groupby join list max min slice sort sum unique")
DEEP_TESTS = _words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
# `'%9999999d' is odd` would format a text.
NUMBER_TESTS = frozenset(("divisibleby", "even", "odd"))
# Methods that are allowed: those of text without `encode` and `translate`, and those that read.
TEXT_METHODS = _words(
    "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii"
    " isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join"
    " ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust"
    " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
MAPPING_METHODS = frozenset(("copy", "get", "items", "keys", "values"))
SEQUENCE_METHODS = frozenset(("copy", "count", "index"))
# Those that compare every character of one text with every character of the other.
QUADRATIC_METHODS = _words("lstrip rfind rindex rpartition rsplit rstrip strip")
PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill"))


class LimitError(Exception):
    """A template wants more time or memory than it is given."""


class Meter:
    """What one rendering has used of its time and memory.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = clock() + MAX_SECONDS
        self._room = MAX_WORK

    def spend(self, n_units: int = 0) -> None:
        """Take one step that allocates so much."""
        self._room -= n_units + UNITS_PER_VALUE
        if self._room < 0:
            raise LimitError("one that takes fewer steps and less memory")
        if self._clock() >= self._deadline:
            raise LimitError(f"one that renders within {MAX_SECONDS:g} s")

    def made(self, value: Any, units: int = UNITS_PER_VALUE) -> Any:
        """What a step has made, paid for; `units` for each value in a container."""
        if isinstance(value, str):
            fit(len(value))
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict | set):
            fit(len(value), MAX_VALUES)
            self.spend(len(value) * units)
        elif isinstance(value, int):
            fit(value.bit_length(), MAX_BITS)
        return value

    def measure(self, value: Any) -> tuple[int, int, int]:
        """How many values there are in a value, how many characters, how many levels.

        For whatever goes into a call that takes it apart: lists that hold the same list twice,
        forty levels of them, make a tree that nothing walks to its end.
        """
        if isinstance(value, str):
            fit(len(value))
            return 1, len(value), 0
        n_values = n_characters = deepest = 0
        rest = [(value, 0)]
        while rest:
            value, depth = rest.pop()
            inside: Iterable[Any] = ()
            if isinstance(value, str):
                n_characters += len(value)
            elif isinstance(value, int):
                fit(value.bit_length(), MAX_BITS)
                n_characters += value.bit_length() // 3
            elif isinstance(value, dict):
                inside = (*value, *value.values())
            elif isinstance(value, CONTAINERS):
                inside = value
            elif isinstance(value, Namespace):
                inside = value._Namespace__attrs.values()
            elif isinstance(value, range):
                n_values += len(value)
            elif isinstance(value, MethodType):  # its repr has the repr of its object
                inside = (value.__self__,)
            elif value is not None:
                n_characters += SHOWN_OBJECT
                n_characters += len(value.name) if isinstance(value, Macro) else 0
            n_values += 1
            deepest = max(deepest, depth)
            fit(n_values, MAX_VALUES)
            fit(n_characters)
            fit(depth, MAX_DEPTH)
            if n_values % 4096 == 0:
                self.spend()
            rest += [(item, depth + 1) for item in inside]
        return n_values, n_characters, deepest


# The meter of the rendering that this thread is in.
METER: ContextVar[Meter] = ContextVar("cllm_template_meter")


def fit(n: float, limit: int = MAX_TEXT) -> None:
    """Refuse what would be too long."""
    if n > limit:
        raise LimitError(f"one with smaller values, up to {limit}")


def taken(value: Any) -> Any:
    """Something to iterate over, as a container if it is not one yet."""
    if isinstance(value, list | tuple | dict | Undefined):
        return value
    items = list(islice(value, MAX_VALUES + 1))
    fit(len(items), MAX_VALUES)
    return items


def price_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too long."""
    if operator not in "+*":
        METER.get().measure(left)
        METER.get().measure(right)
    if operator == "*":
        for n, value in ((left, right), (right, left)):
            if isinstance(n, int) and isinstance(value, str | list | tuple):
                fit(n * len(value), MAX_TEXT if isinstance(value, str) else MAX_VALUES)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        fit(left.bit_length() * right, MAX_BITS)
    elif operator == "%" and isinstance(left, str):
        _price_printf(left, right)


def price_format_spec(spec: str) -> None:
    """Refuse a width or a precision for which a field would be too long."""
    fit(_sum_of_numbers(spec))


def price_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
    """Refuse a method that is not known to end soon; otherwise give the arguments to call it with."""
    measure = METER.get().measure
    if isinstance(owner, str):
        allowed = TEXT_METHODS
    elif isinstance(owner, dict):
        allowed = MAPPING_METHODS
    else:
        allowed = SEQUENCE_METHODS
        measure(owner)
    if name not in allowed:
        raise SecurityError(f"a template may not call {type(owner).__name__}.{name}")
    if name == "join":
        args = tuple(map(taken, args))
    values = (*args, *kwargs.values())
    sizes = [measure(value) for value in values]
    if isinstance(owner, str):
        numbers = [abs(value) for value in values if isinstance(value, int)]
        texts = [value for value in values if isinstance(value, str)]
        if name in PADDING_METHODS:
            fit(max(numbers, default=0))
        elif name == "expandtabs":
            fit(len(owner) + owner.count("\t") * max(numbers, default=8))
        elif name == "join":
            fit(sum(n_characters + n_values * len(owner) for n_values, n_characters, _ in sizes))
        elif name == "replace" and len(texts) == 2:
            _price_replacement(owner, texts[0], texts[1], args[2] if len(args) > 2 else -1)
        elif name in QUADRATIC_METHODS:
            fit(len(owner) * max(map(len, texts), default=0), MAX_PRODUCT)
    return args


def _sum_of_numbers(text: str) -> int:
    """All numbers in a text together; of long ones the first digits are too much already."""
    return sum(int(digits[:9]) for digits in re.findall("[0-9]+", text))


def _price_printf(text: str, values: Any) -> None:
    """For `text % values`: all numbers in the text are taken for widths, whatever they are."""
    _, n_characters, _ = METER.get().measure(values)
    if "%(" in text:  # only by name can a value be used more than once
        n_characters *= text.count("%")
    fit(len(text) + n_characters + _sum_of_numbers(text) + text.count("%") * MAX_DIGITS)
    if "*" in text:
        items = values if isinstance(values, tuple) else (values,)
        width = max((abs(item) for item in items if isinstance(item, int)), default=0)
        fit(text.count("*") * width)


def _price_replacement(text: str, old: str, new: str, count: int = -1) -> None:
    n = text.count(old)
    n = min(n, count) if count >= 0 else n
    fit(len(text) + n * (len(new) - len(old)))


def _price_batch(value: Any, linecount: int, fill_with: Any = None) -> None:
    fit(linecount, MAX_VALUES)


def _price_center(value: Any, width: int = 80) -> None:
    fit(width)


def _price_format(value: Any, *args: Any, **kwargs: Any) -> None:
    _price_printf(str(value), kwargs or args)


def _price_indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    text = str(s)
    indentation = len(width) if isinstance(width, str) else width
    fit(len(text) + (len(text.splitlines()) + 1) * indentation)


def _price_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    n_values, n_characters, _ = METER.get().measure(value)
    fit(n_characters + n_values * len(str(d)))


def _price_replace(s: Any, old: Any, new: Any, count: int | None = None) -> None:
    _price_replacement(str(s), str(old), str(new), -1 if count is None else count)


def _price_round(value: Any, precision: int = 0, method: str = "common") -> None:
    fit(abs(precision), MAX_DIGITS)


def _price_slice(value: Any, slices: int, fill_with: Any = None) -> None:
    fit(slices, MAX_VALUES)


def _price_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("a template may not sum up what are not numbers")


def _price_tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> None:
    n_values, n_characters, depth = METER.get().measure(x)
    indentation = indent if isinstance(indent, int) else len(indent or "")
    between = sum(len(part) for part in separators or () if isinstance(part, str))
    fit(n_characters + n_values * (between + depth * indentation))


def _price_trim(value: Any, chars: Any = None) -> None:
    if isinstance(chars, str):
        fit(len(str(value)) * len(chars), MAX_PRODUCT)


FILTER_PRICES: Mapping[str, Callable[..., None]] = {
    "batch": _price_batch,
    "center": _price_center,
    "format": _price_format,
    "indent": _price_indent,
    "join": _price_join,
    "replace": _price_replace,
    "round": _price_round,
    "slice": _price_slice,
    "sum": _price_sum,
    "tojson": _price_tojson,
    "trim": _price_trim,
}


class _Lazy:
    """The iterator that a filter gave, metered.  True even if nothing comes, as any iterator is."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> _Lazy:
        return self

    def __next__(self) -> Any:
        return METER.get().made(next(self._items))


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it does; so do those that `map` calls by name."""
    # jinja2 passes a context to some filters, before the value.
    n_before = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.spend()
        before, values = args[:n_before], list(args[n_before:])
        if name in EAGER_FILTERS:
            values[0] = taken(values[0])
        for value in (*values[name in SHALLOW_FILTERS :], *kwargs.values()):
            meter.measure(value)
        if price := FILTER_PRICES.get(name):
            price(*values, **kwargs)
        result = function(*before, *values, **kwargs)
        return _Lazy(result) if isinstance(result, Iterator) else meter.made(result)

    return metered


def metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that pays for what it looks at."""
    if name not in DEEP_TESTS | NUMBER_TESTS:
        return function

    @functools.wraps(function)
    def metered(value: Any, *args: Any, **kwargs: Any) -> Any:
        METER.get().spend()
        if name in NUMBER_TESTS and isinstance(value, str):
            raise SecurityError(f"a template may not ask whether text is {name}")
        for item in (value, *args, *kwargs.values()):
            if name != "in" or not isinstance(item, dict):  # a mapping is asked, not searched
                METER.get().measure(item)
        return function(value, *args, **kwargs)

    return metered
