"""FakeLoras: adapters without weights, for a `FakeDecoder`."""

from __future__ import annotations

from cllm.engine.lora import LoraInfo
from cllm.errors import InvalidRequestError


class FakeLoras:
    """Loaded adapters by name; see `thread.backend.Loras`.  A file of any name is an adapter.

    Attributes
    ----------
    invocation_tokens : dict of str to tuple of int
        By path: those of activated adapters.
    load_faults : dict of str to Exception
        By path: what is raised instead.
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
        """Load one."""
        if name in self._loaded:
            raise InvalidRequestError("name", name, "a name that no loaded adapter has")
        if (fault := self.load_faults.get(path)) is not None:
            raise fault
        tokens = self.invocation_tokens.get(path, ())
        self._loaded[name] = LoraInfo(name, path, scale, tokens)

    def unload(self, name: str) -> None:
        """Free one."""
        if name not in self._loaded:
            raise InvalidRequestError("name", name, "the name of a loaded adapter")
        del self._loaded[name]
