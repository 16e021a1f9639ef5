"""Read the metadata of a GGUF file without llama.cpp: a damaged file can make llama.cpp end the process.

`read_header` reads numbers, texts and lists of numbers, up to the vocabulary.  `read_shapes` reads the
shapes of tensors, `read_sizes` their bytes.  See ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from cllm.engine.file_content import open_regular

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

_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)
MAX_SKIPPED = 1 << 32
MAX_TENSORS = 1 << 17
# Limits of a whole header, which bound the time and the memory of reading a hostile one: values, bytes of those before
# the vocabulary, and texts of the lists that are skipped (the tokens and merges of a vocabulary are below a million).
MAX_VALUES, MAX_READ, MAX_TEXTS = 1 << 16, 1 << 24, 1 << 22

Shapes = dict[str, tuple[int, ...]]
F32, F16 = 0, 1  # of `ggml_type`
# Q2_K to Q6_K, IQ1, IQ2, IQ3 and IQ4_XS: ggml-cpu/tiled/tiled.cpp.
TILED = frozenset({10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29})
Value = str | int | float | bool | list[int | float | bool]


def read_header(path: Path) -> dict[str, Value]:
    """Return the values before the first `tokenizer.` key; of a damaged file, those that can be read.

    A list of texts is returned as an empty list.

    Raises
    ------
    OSError
        The file cannot be opened.
    """
    known: dict[str, Value] = {}
    with open_regular(path) as file:
        try:
            magic, version, _, n_values = _unpack(file, "4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                return known
            for _ in range(min(n_values, MAX_VALUES)):
                key = _text(file)
                if key.startswith("tokenizer.") or file.tell() > MAX_READ:
                    break
                known[key] = _value(file)
        except (ValueError, struct.error):
            pass
    return known


def model_parts(path: Path) -> list[Path]:
    """Return the files of a model in order: all parts that exist if it is split, otherwise `path` alone.

    llama.cpp also loads a file whose name has the form of a part, but a number that no part has.  Such a file has no
    other parts.
    """
    split = _PART.fullmatch(path.name)
    if split is None:
        return [path]
    name, n_parts = split.groups()
    names = [f"{name}-{number:05}-of-{n_parts}.gguf" for number in range(1, int(n_parts) + 1)]
    if path.name not in names:
        return [path]
    try:
        present = {path.name, *os.listdir(path.parent)}  # noqa: PTH208  # names, not paths
    except OSError:  # the directory may be searched, but not read
        present = set(names)
    parts = [path.with_name(name) for name in names if name in present]
    return [part for part in parts if part == path or part.exists()]


def read_shapes(path: Path) -> Shapes:
    """Return the shapes of a model's tensors, in ggml's order; of a damaged file, those that can be read.

    All parts of a split model are read.

    Raises
    ------
    OSError
        It cannot be opened.
    """
    found = [_read_tensors(part) for part in model_parts(path)]
    return {name: shape for tensors in found for name, (shape, *_) in tensors.items()}


def read_types(path: Path) -> dict[str, int]:
    """Return the `ggml_type` of each tensor of a file; of a damaged file, those that can be read.

    Raises
    ------
    OSError
        The file cannot be opened.
    """
    return {name: kind for name, (_, kind, _) in _read_tensors(path).items()}


def read_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of a model's tensors by name; of a damaged file, those that can be read.

    All parts of a split model are read.  The padding behind a tensor counts.

    Raises
    ------
    OSError
        It cannot be opened.
    """
    sizes: dict[str, int] = {}
    for part in model_parts(path):
        places = sorted((at, name) for name, (_, _, at) in _read_tensors(part).items())
        # The tensors begin behind the header, which is small beside them: the last one counts with it.
        ends = [*(at for at, _ in places[1:]), part.stat().st_size]
        sizes |= {name: max(0, end - at) for (at, name), end in zip(places, ends, strict=False)}
    return sizes


def has_plain_matrix(path: Path) -> bool:
    """Return True if a matrix of the file is F16 or F32.

    llama.cpp multiplies such a matrix with one row by another method than with several rows.

    Raises
    ------
    OSError
        The file cannot be opened.
    """
    tensors = _read_tensors(path).values()
    return any(kind in (F32, F16) and len(shape) > 1 for shape, kind, _ in tensors)


def has_tiled_matrix(path: Path) -> bool:
    """True if llama.cpp multiplies a matrix of the file by tiles where a batch has enough rows.

    Raises
    ------
    OSError
        It cannot be opened.
    """
    return any(kind in TILED for _, kind, _ in _read_tensors(path).values())


def _read_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return shape, type and offset of each tensor."""
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    with open_regular(path) as file:
        try:
            magic, version, n_tensors, n_values = _unpack(file, "4sIQQ")
            is_known = magic == b"GGUF" and version in (2, 3)
            if not is_known or n_tensors > MAX_TENSORS or n_values > MAX_VALUES:
                return tensors
            n_texts = 0
            for _ in range(n_values):
                _skip_text(file)
                n_texts += _skip_value(file, _unpack(file, "I")[0], MAX_TEXTS - n_texts)
            for _ in range(n_tensors):
                name = _text(file)
                (n_dimensions,) = _unpack(file, "I")
                if n_dimensions > 4:
                    raise ValueError("too many dimensions")
                shape = _unpack(file, f"{n_dimensions}Q")
                kind, offset = _unpack(file, "IQ")
                tensors[name] = shape, kind, offset
        except (ValueError, struct.error):
            pass
    return tensors


def _skip_text(file: BinaryIO) -> None:
    n: int = _unpack(file, "Q")[0]
    _skip(file, n)


def _skip_value(file: BinaryIO, kind: int, n_texts_max: int) -> int:
    """Skip a value, and return the number of texts in its list; raise `ValueError` for more than the limit."""
    n_texts = 0
    if kind == _STRING:
        _skip_text(file)
    elif kind == _ARRAY:
        kind, n = _unpack(file, "IQ")
        if kind == _STRING:
            if n > n_texts_max:
                raise ValueError("too many texts")
            for _ in range(n):
                _skip_text(file)
            n_texts = n
        else:
            _skip(file, n * _size(kind))
    else:
        _skip(file, _size(kind))
    return n_texts


def _size(kind: int) -> int:
    if kind not in _SCALARS:
        raise ValueError("the file has a value of an unknown type")
    return struct.calcsize(f"<{_SCALARS[kind]}")


def _skip(file: BinaryIO, n_bytes: int) -> None:
    if n_bytes > MAX_SKIPPED:
        raise ValueError("too long")
    file.seek(n_bytes, os.SEEK_CUR)


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
        raise ValueError("the file has a value of an unknown type")
    (value,) = _unpack(file, _SCALARS[kind])
    scalar: int | float | bool = value
    return scalar


def _skipped(file: BinaryIO, n: int) -> list[int | float | bool]:
    for _ in range(n):
        _text(file)
    return []
