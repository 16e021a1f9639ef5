"""Ctypes structures and signatures, derived from the C text of `_llama_h` and `_mtmd_h`.

The C compiler compares the text with the headers of a library before the library is compiled
(`tools/native/check_headers.py`), and in the tests cffi's parser reads the same text independently.

llama.cpp's structures of parameters gain and lose fields from version to version, and fields move.
The compiler measures where a library has them; `Declarations.lay_out` puts them there.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALARS: dict[str, Any] = {
    "void": None,
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
}


@dataclass(frozen=True, slots=True)
class Prototype:
    """One function: its C text and the ctypes signature derived from it."""

    name: str
    text: str
    restype: Any
    argtypes: tuple[Any, ...]


class Declarations:
    """Types and signatures of the C text: `types`, `structs`, `callbacks` and `prototypes`, each by C name.

    Parameters
    ----------
    typedefs, structs, prototypes : str
        C text.  Tests pass changed texts to check that a change is detected.
    enums : mapping
        The C name of each enum, and the prefix of its members.
    parameters : frozenset of str
        Structures with only some of the library's fields; `lay_out` sets their offsets.
    releases_gil : frozenset of str
        Functions that release the GIL, because a call can take long.
    optional : frozenset of str
        Functions that a library may lack.
    header : str
        The file that declares all this.
    base : Declarations, optional
        Types that the text uses without declaring them.

    Attributes
    ----------
    typedefs : dict of str to str
        The C text of each.
    fields : dict of str to dict of str to str
        The C types of the fields, by structure.
    """

    def __init__(
        self,
        typedefs: str,
        structs: str,
        prototypes: str,
        enums: Mapping[Any, tuple[str, str]],
        *,
        parameters: frozenset[str] = frozenset(),
        releases_gil: frozenset[str] = frozenset(),
        optional: frozenset[str] = frozenset(),
        header: str = "llama.h",
        base: Declarations | None = None,
    ) -> None:
        self.text = (typedefs, structs, prototypes)
        self.enums = enums
        self.parameters = parameters
        self.releases_gil = releases_gil
        self.optional = optional
        self.header = header
        self.typedefs: dict[str, str] = {}
        self.fields: dict[str, dict[str, str]] = {}
        self.types: dict[str, Any] = dict(SCALARS if base is None else base.types)
        self.structs: dict[str, type[ctypes.Structure]] = {}
        self.callbacks: dict[str, Any] = {}
        self.prototypes: dict[str, Prototype] = {}
        for line in _statements(typedefs):
            self._typedef(line)
        for name, body in re.findall(r"struct (\w+) \{(.*?)\};", structs, re.S):
            self.structs[name] = self._struct(name)
            self.fields[name] = {}
            for line in _statements(body):
                field = line.replace("*", " ").split()[-1]
                self.fields[name][field] = line.removesuffix(field).strip()
            if name not in self.parameters:
                self.structs[name]._fields_ = [*self._types(name).items()]
        for line in _statements(prototypes):
            self._prototype(line)

    @property
    def digest(self) -> str:
        """Hash of everything that the compiler checks, 12 hexadecimal digits."""
        enums = [f"{names} {dict(enum.__members__)}" for enum, names in self.enums.items()]
        return hashlib.sha256("\n".join([*self.text, *enums]).encode()).hexdigest()[:12]

    def lay_out(self, layouts: Mapping[str, Mapping[str, Any]]) -> None:
        """Put the fields of the structures of parameters where a library has them.

        A second library in one process has to have them in the same places.

        Parameters
        ----------
        layouts : mapping of str to mapping
            By structure: its `size`, and the `offsets` of its fields, in bytes.

        Raises
        ------
        ValueError
            The library lacks one of the fields, or an offset does not fit the types.
        """
        for name in sorted(self.parameters):
            layout = layouts.get(name, {"size": 0, "offsets": {}})
            if gone := self.fields[name].keys() - layout["offsets"].keys():
                raise ValueError(f"{name} has no {', '.join(sorted(gone))}")
            placed = sorted((layout["offsets"][field], field) for field in self.fields[name])
            types, fields, end = self._types(name), list[tuple[str, Any]](), 0
            for offset, field in [*placed, (layout["size"], "")]:
                if offset > end:
                    fields.append((f"_{end}", ctypes.c_char * (offset - end)))
                if field:
                    fields.append((field, types[field]))
                    end = offset + ctypes.sizeof(types[field])
            if "_fields_" not in vars(self.structs[name]):
                self.structs[name]._fields_ = fields
            found = [getattr(self.structs[name], field).offset for _, field in placed]
            size = ctypes.sizeof(self.structs[name])
            if (size, found) != (layout["size"], [offset for offset, _ in placed]):
                raise ValueError(f"the fields of {name} cannot be at {dict(layout)}")

    def _struct(self, name: str) -> type[ctypes.Structure]:
        """Return the structure called `name`; it has no fields until its text is read."""
        known: type[ctypes.Structure] = self.types.setdefault(
            # Without __slots__, a name that is no field could be set.
            f"struct {name}",
            type(name, (ctypes.Structure,), {"__slots__": ()}),
        )
        return known

    def _types(self, name: str) -> dict[str, Any]:
        """Return the types of the fields of a structure."""
        return {
            field: self._type(f"{c_type} {field}")[0] for field, c_type in self.fields[name].items()
        }

    def _typedef(self, text: str) -> None:
        if callback := re.fullmatch(r"typedef (.+?)\(\*(\w+)\)\((.*)\)", text):
            result, name, parameters = callback.groups()
            self.typedefs[name] = text
            types = [self._type(p)[0] for p in _parameters(parameters)]
            self.callbacks[name] = self.types[name] = ctypes.CFUNCTYPE(
                self._type(result + " r")[0], *types
            )
            return
        alias, name = self._type(text.removeprefix("typedef "))
        self.types[name], self.typedefs[name] = alias, text

    def _prototype(self, text: str) -> None:
        match = re.fullmatch(r"(.+?)(\w+)\((.*)\)", text)
        assert match, text
        result, name, parameters = match.groups()
        types = tuple(self._type(p)[0] for p in _parameters(parameters))
        self.prototypes[name] = Prototype(name, text, self._type(result + " r")[0], types)

    def _type(self, text: str) -> tuple[Any, str]:
        """Return the ctypes type and the name of one C declarator such as `const char * key`."""
        is_const = text.strip().startswith("const ")
        words = text.replace("*", " * ").replace("const ", " ").split()
        name, n_stars = words[-1], words.count("*")
        base = " ".join(word for word in words[:-1] if word != "*")
        if base.startswith("enum "):
            ctype: Any = ctypes.c_uint32 if base == "enum llama_token_attr" else ctypes.c_int32
        elif base.startswith("struct "):
            ctype = self._struct(base.removeprefix("struct "))
        else:
            ctype = self.types[base]
        if n_stars and base == "void":
            ctype, n_stars = ctypes.c_void_p, n_stars - 1
        elif n_stars and base == "char" and is_const:
            ctype, n_stars = ctypes.c_char_p, n_stars - 1
        for _ in range(n_stars):
            ctype = ctypes.POINTER(ctype)
        return ctype, name


def _statements(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


def _parameters(text: str) -> list[str]:
    return [] if text.strip() == "void" else text.split(",")
