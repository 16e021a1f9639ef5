"""Checks of arguments, made before a call of libllama that would abort, hang or return wrong results.

`tests/reliability/hazard_rows.py` is the table of such calls.

A check returns the value, converted where its type says so; `check_several` returns None.  A wrong value
raises an error that names field, value and limit: `error(field, value, limit)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TypeVar

from cllm.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    PromptTooLongError,
    TooMuchTextError,
)

E = TypeVar("E", bound=IntEnum)
ErrorType = Callable[[str, object, str], Exception]

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234e38
# llama.cpp's tokenizers are quadratic in places: 43 s for 600 KB of newlines.
MAX_TEXT_BYTES = 1 << 20  # limit of one text to tokenize
# A text with more characters than this for each token of the context is rejected without tokenizing it.
# Tokens of real vocabularies are much shorter, except for runs of spaces.
MAX_CHARACTERS_PER_TOKEN = 64
MAX_CHAT_BYTES = 4 << 20  # limit of all messages of a chat, as large as a template's output may be
MAX_TEMPLATE_BYTES = 256 << 10  # of a chat template
MAX_SEED = 2**32 - 2  # 2**32 - 1 asks llama.cpp for a random seed
MAX_THREADS = 512
# Names that other libraries and APIs have.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens", "n_predict": "max_tokens", "response_format": "json_schema",
    "format": "json_schema", "guided_json": "json_schema", "guided_regex": "regex",
    "repetition_penalty": "repeat_penalty", "stop_sequences": "stop", "num_ctx": "n_ctx",
    "max_model_len": "n_ctx", "timeout_s": "timeout",
}  # fmt: skip
MAX_TENANT = 256  # characters of a name


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is meant by `name`, a name of another API or a misspelling; None if none is similar."""
    import difflib  # only after a mistake

    known = list(known)
    if (other := OTHER_NAMES.get(name)) in known:
        return other
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def check_int(
    field: str, value: object, low: int, high: int, error: ErrorType = InvalidArgumentError
) -> int:
    """Return `value` as an `int` if it is an integer with `low <= value <= high`; otherwise raise `error`."""
    if type(value) is int and low <= value <= high:  # checked for every row of a batch
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise error(field, value, "an integer")
    try:
        number: int = value.__index__()
    except TypeError:  # an array with more than one element
        raise error(field, value, "an integer") from None
    if not low <= number <= high:
        raise error(field, value, f"{low} to {high}")
    return number


def check_float(
    field: str,
    value: object,
    low: float = -FLOAT32_MAX,
    high: float = FLOAT32_MAX,
    error: ErrorType = InvalidArgumentError,
) -> float:
    """Return `value` as a `float` if it is a finite number with `low <= value <= high`.

    The default range is that of float32, which the C side uses.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise error(field, value, "a number")
    if (isinstance(value, int) and abs(value) > FLOAT32_MAX) or not math.isfinite(value):
        raise error(field, value, "finite")
    if not low <= value <= high:
        raise error(field, value, f"{low:g} to {high:g}")
    return float(value)


def check_timeout(value: object, error: ErrorType) -> float | None:
    """Return a `timeout` in seconds as a `float`; None, which is no limit, stays None."""
    return None if value is None else check_float("timeout", value, 0.0, 1e9, error)


def check_bool(field: str, value: object, error: ErrorType = InvalidArgumentError) -> bool:
    """Return `value` if it is True or False; otherwise raise `error`."""
    if not isinstance(value, bool):
        raise error(field, value, "True or False")
    return value


def check_tenant(field: str, name: object, error: ErrorType = InvalidArgumentError) -> str:
    """Return the name of a tenant: a text of at most 256 characters."""
    if not isinstance(name, str) or len(name) > MAX_TENANT:
        raise error(field, name, f"a string of at most {MAX_TENANT} characters")
    encode_text(field, name, error)
    return name


def check_several(
    field: str, value: object, limit: str, error: ErrorType = InvalidArgumentError
) -> None:
    """Raise `error` unless `value` is a sequence or an array.  Text, bytes and mappings are rejected too."""
    try:
        n = len(value)  # type: ignore[arg-type]  # it may have no length
    except TypeError:
        n = -1
    is_one = isinstance(value, str | bytes | bytearray | memoryview | Mapping)
    if n < 0 or is_one or not hasattr(value, "__getitem__"):
        raise error(field, value, limit)


def check_enum(field: str, value: object, kind: type[E]) -> E:
    """Return the member of `kind` with the number `value`; raise `InvalidArgumentError` if there is none."""
    try:
        return kind(check_int(field, value, -(2**31), INT32_MAX))
    except ValueError:
        names = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise InvalidArgumentError(field, value, f"one of {names}") from None


def encode_text(field: str, text: str, error: ErrorType = InvalidArgumentError) -> bytes:
    """Return `text` in UTF-8.  A lone surrogate raises `error`: it has no UTF-8 form."""
    if not isinstance(text, str):
        raise error(field, text, "a str")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as failure:
        lone = text[failure.start : failure.start + 1]
        raise error(field, lone, "text without lone surrogates") from None


def encode_prompt(text: str, field: str = "text", error: ErrorType = InvalidArgumentError) -> bytes:
    """Return a text in UTF-8 for a tokenizer; raise `error` above `MAX_TEXT_BYTES` bytes."""
    encoded = encode_text(field, text, error)
    if len(encoded) > MAX_TEXT_BYTES:
        raise error(field, f"{len(encoded)} bytes", f"at most {MAX_TEXT_BYTES} bytes")
    return encoded


def check_lengths(texts: Sequence[str], n_ctx: int, field: str) -> None:
    """Reject texts that cannot fit together, or of which one is too long to be tokenized at once."""
    n_characters = sum(map(len, texts))
    if n_characters > n_ctx * MAX_CHARACTERS_PER_TOKEN:
        raise PromptTooLongError(n_characters // MAX_CHARACTERS_PER_TOKEN, n_ctx)
    for text in texts:
        n_bytes = len(encode_text(field, text, InvalidRequestError))
        if n_bytes > MAX_TEXT_BYTES:
            raise TooMuchTextError(
                field, f"{n_bytes} bytes", f"at most {MAX_TEXT_BYTES} bytes, with any model"
            )
