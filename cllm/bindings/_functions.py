"""The functions of a shared library, with the signatures of its declarations."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

from cllm.bindings._declarations import Declarations
from cllm.bindings._layout import layouts_of
from cllm.errors import AbiMismatchError, LibraryError


class Functions:
    """The functions of a shared library as attributes; a subclass says of which header.

    Calls that can take long release the GIL (`ctypes.CDLL`).  All others keep it (`ctypes.PyDLL`): for a
    call of a microsecond, giving the GIL away costs up to a switch interval to get it back.

    Parameters
    ----------
    path : Path
        The shared library, which is loaded.
    built_with : Path
        The libllama that has the record of layouts.

    Attributes
    ----------
    declared : Declarations
        The functions that the library has to have, and the structures whose fields are laid out.

    Raises
    ------
    AbiMismatchError
        A function is not there, or a field that is set.
    """

    declared: ClassVar[Declarations]

    def __init__(self, path: Path, built_with: Path) -> None:
        self.path = path
        declared = self.declared
        try:
            declared.lay_out(layouts_of(built_with, declared))
        except ValueError as error:
            raise AbiMismatchError(f"{path}: {error}") from None
        long_calls = ctypes.CDLL(str(path))
        short_calls = ctypes.PyDLL(str(path))
        for prototype in declared.prototypes.values():
            view = long_calls if prototype.name in declared.releases_gil else short_calls
            if not hasattr(view, prototype.name):
                self._lacks(prototype.name)
                continue
            function = view[prototype.name]
            function.restype = prototype.restype
            function.argtypes = prototype.argtypes
            setattr(self, prototype.name, function)

    def _lacks(self, name: str) -> None:
        """Let a call of this function raise an error, if the library may do without it."""
        if name not in self.declared.optional:
            raise AbiMismatchError(f"{self.path} has no function {name}")

        def absent(*_: object) -> None:
            raise LibraryError(f"{self.path} has no function {name}, which this call needs")

        setattr(self, name, absent)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"function {name!r} is not declared for {self.declared.header}")
