"""FakeLoras: adapters without weights, for a `FakeDecoder`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from cllm.engine.lora import LoraInfo
from cllm.errors import InvalidRequestError

T = TypeVar("T")


class FakeLoras:
    """Loaded adapters by name; see `thread.backend.Loras`.  Any path can be loaded; no file is read.

    Attributes
    ----------
    invocation_tokens : dict of str to tuple of int
        Invocation tokens of activated adapters, by path.
    load_faults : dict of str to Exception
        Error that `load` raises for a path.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, LoraInfo] = {}
        self.invocation_tokens: dict[str, tuple[int, ...]] = {}
        self.load_faults: dict[str, Exception] = {}

    @property
    def infos(self) -> tuple[LoraInfo, ...]:
        """The loaded adapters."""
        return tuple(self._loaded.values())

    def load(self, name: str, path: str, scale: float) -> None:
        """Load an adapter; raise `InvalidRequestError` if its name is taken, or its error in `load_faults`."""
        if name in self._loaded:
            raise InvalidRequestError("name", name, "a name that no loaded adapter has")
        if (fault := _at(path, self.load_faults)) is not None:
            raise fault
        tokens = _at(path, self.invocation_tokens) or ()
        self._loaded[name] = LoraInfo(name, path, scale, tokens)

    def unload(self, name: str) -> None:
        """Free an adapter; raise `InvalidRequestError` if none of this name is loaded."""
        if name not in self._loaded:
            raise InvalidRequestError("name", name, "the name of a loaded adapter")
        del self._loaded[name]


def _at(path: str, values: Mapping[str, T]) -> T | None:
    """Return the value of a path, which an engine makes absolute; None if there is none."""
    return next((v for p, v in values.items() if Path(p).absolute() == Path(path).absolute()), None)
