"""A GGUF file in pieces, and together again to the byte: for tests that damage one.

Unlike `gguf.GGUFReader`, it records the position of every number in the file, and can write invalid
values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
ALIGNMENT = 32


@dataclass
class Tensor:
    """Name, shape, type and data of a tensor."""

    name: bytes
    dims: tuple[int, ...]
    type: int
    data: bytes


@dataclass
class Gguf:
    """A file in pieces.

    Attributes
    ----------
    values : dict
        Key → type and encoded value, in the order of the file.
    borders : list of int
        Offsets at which the pieces of the file begin.
    numbers : list of (place, width)
        Offset and size, in bytes, of every length, count, type, dimension and tensor offset.
    n_head : int
        Bytes before the first tensor's data.
    """

    values: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)
    numbers: list[tuple[int, int]] = field(default_factory=list)
    n_head: int = 0

    def encoded(self) -> bytes:
        """Return the bytes of the file."""
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.values))
        for key, (kind, value) in self.values.items():
            head += text(key) + struct.pack("<I", kind) + value
        data = b""
        for tensor in self.tensors:
            head += text(tensor.name) + struct.pack("<I", len(tensor.dims))
            head += b"".join(struct.pack("<Q", n) for n in tensor.dims)
            head += struct.pack("<IQ", tensor.type, len(data))
            data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
        return head + bytes(-len(head) % ALIGNMENT) + data


def text(value: bytes) -> bytes:
    """Return the encoded string: its length in 8 bytes, then its bytes."""
    return struct.pack("<Q", len(value)) + value


def texts(values: Sequence[bytes]) -> bytes:
    """An array of strings."""
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def texts_of(value: bytes) -> list[bytes]:
    """The strings of an array."""
    place, found = 12, []
    while place < len(value):
        (n_bytes,) = struct.unpack_from("<Q", value, place)
        found.append(value[place + 8 : place + 8 + n_bytes])
        place += 8 + n_bytes
    return found


class Reader:
    """Takes a sound file apart, and records the offsets of its pieces and numbers."""

    def __init__(self, whole: bytes) -> None:
        self._whole = whole
        self._place = 0
        self.file = Gguf()

    def _take(self, n_bytes: int) -> bytes:
        self._place += n_bytes
        return self._whole[self._place - n_bytes : self._place]

    def _number(self, form: str) -> int:
        width = struct.calcsize(form)
        self.file.numbers.append((self._place, width))
        value: int = struct.unpack(form, self._take(width))[0]
        return value

    def _border(self) -> None:
        self.file.borders.append(self._place)

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            self._take(self._number("<Q"))
        elif kind == ARRAY:
            kind, n_elements = self._number("<I"), self._number("<Q")
            self._border()
            for _ in range(n_elements):
                self._skip(kind)
        else:
            self._take(struct.calcsize(SCALARS[kind]))

    def read(self) -> Gguf:
        self._border()
        self._take(4)
        self._border()
        self._number("<I")
        self._border()
        n_tensors = self._number("<Q")
        self._border()
        n_values = self._number("<Q")
        for _ in range(n_values):
            self._value()
        offsets = [self._tensor() for _ in range(n_tensors)]
        self._border()
        start = self.file.n_head = -(-self._place // ALIGNMENT) * ALIGNMENT
        ends = [*offsets[1:], len(self._whole) - start]
        for tensor, begin, end in zip(self.file.tensors, offsets, ends, strict=True):
            self.file.borders.append(start + begin)
            tensor.data = self._whole[start + begin : start + end]
        return self.file

    def _value(self) -> None:
        self._border()
        key = self._take(self._number("<Q"))
        self._border()
        kind = self._number("<I")
        self._border()
        begin = self._place
        self._skip(kind)
        self.file.values[key] = kind, self._whole[begin : self._place]

    def _tensor(self) -> int:
        self._border()
        name = self._take(self._number("<Q"))
        dims = tuple(self._number("<Q") for _ in range(self._number("<I")))
        self.file.tensors.append(Tensor(name, dims, self._number("<I"), b""))
        return self._number("<Q")
