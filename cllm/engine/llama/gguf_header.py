"""The metadata of a GGUF file without llama.cpp, which a damaged file may end the process of.

Only what comes before the vocabulary, and only numbers, texts and lists of numbers.  See ggml's
`docs/gguf.md`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

# Types of values, by their number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
MAX_LENGTH = 1 << 16  # of a key, a text or a list that is read

Value = str | int | float | bool | list[int | float | bool]


def read_header(path: Path) -> dict[str, Value]:
    """What the file says up to its vocabulary; of a damaged one, what can be read of that.

    Raises
    ------
    OSError
        It cannot be opened.
    """
    known: dict[str, Value] = {}
    with path.open("rb") as file:
        try:
            magic, version, _, n_values = _unpack(file, "4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                return known
            for _ in range(n_values):
                key = _text(file)
                if key.startswith("tokenizer."):
                    break
                known[key] = _value(file)
        except (ValueError, struct.error):
            pass
    return known


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    data = file.read(struct.calcsize(layout))
    return struct.unpack(layout, data)


def _length(file: BinaryIO) -> int:
    n: int = _unpack(file, "Q")[0]
    if n > MAX_LENGTH:
        raise ValueError("too long")
    return n


def _text(file: BinaryIO) -> str:
    return file.read(_length(file)).decode()


def _value(file: BinaryIO) -> Value:
    (kind,) = _unpack(file, "I")
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        (kind,) = _unpack(file, "I")
        n = _length(file)
        return (
            list(_unpack(file, f"{n}{_SCALARS[kind]}")) if kind in _SCALARS else _skipped(file, n)
        )
    if kind not in _SCALARS:
        raise ValueError("no such type")
    (value,) = _unpack(file, _SCALARS[kind])
    scalar: int | float | bool = value
    return scalar


def _skipped(file: BinaryIO, n: int) -> list[int | float | bool]:
    for _ in range(n):
        _text(file)
    return []
