"""The functions of a shared library, with the signatures of its declarations."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

from cllm.bindings._declarations import Declarations
from cllm.bindings._layout import layouts_of
from cllm.errors import AbiMismatchError, LibraryError


class Functions:
    """The functions of a shared library as attributes; each subclass declares those of one header.

    Calls that can take long release the GIL (`ctypes.CDLL`).  All others keep it (`ctypes.PyDLL`): after a
    release, getting the GIL back can take a switch interval (5 ms), far longer than a short call.

    Parameters
    ----------
    path : Path
        The shared library, which is loaded.
    built_with : Path
        The libllama whose build record has the layouts of the structures.

    Attributes
    ----------
    declared : Declarations
        Functions that the library must have, and structures whose fields are laid out.

    Raises
    ------
    AbiMismatchError
        The library lacks a required function, or a field of a structure that cllm sets.
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
        """Make calls of this function raise `LibraryError`; raise `AbiMismatchError` now if it is required."""
        if name not in self.declared.optional:
            raise AbiMismatchError(f"{self.path} has no function {name}")

        def absent(*_: object) -> None:
            raise LibraryError(f"{self.path} has no function {name}, which this call needs")

        setattr(self, name, absent)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"function {name!r} is not declared for {self.declared.header}")
