"""LlamaLoras: the LoRA adapters that are loaded for one model, by name.  Inference thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cllm.bindings import LoraAdapter, Model
from cllm.bindings.model import check_model_file
from cllm.engine.file_content import content_of, loading
from cllm.engine.lora import LoraInfo, LoraSet
from cllm.errors import InvalidRequestError


class LlamaLoras:
    """See `thread.backend.Loras`.

    Attributes
    ----------
    users : list of callable
        Functions that are called before an adapter is freed, to remove it from the contexts.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._adapters: dict[str, tuple[LoraAdapter, LoraInfo]] = {}
        self.users: list[Callable[[], None]] = []

    @property
    def infos(self) -> tuple[LoraInfo, ...]:
        """See `Loras`."""
        return tuple(info for _, info in self._adapters.values())

    def load(self, name: str, path: str, scale: float) -> None:
        """See `Loras`."""
        if name in self._adapters:
            raise InvalidRequestError("name", name, "a name that no loaded adapter has")
        check_model_file(path)
        content = content_of(path)
        with loading([content]):
            adapter = LoraAdapter(self._model, path)
        info = LoraInfo(name, path, scale, adapter.invocation_tokens, content)
        self._adapters[name] = adapter, info

    def unload(self, name: str) -> None:
        """See `Loras`."""
        if name not in self._adapters:
            raise InvalidRequestError("name", name, "the name of a loaded adapter")
        for let_go in self.users:
            let_go()
        adapter, _ = self._adapters.pop(name)
        adapter.close()

    def of(self, loras: LoraSet) -> Sequence[tuple[LoraAdapter, float]]:
        """Return the adapters that a context must apply."""
        return [(self._adapters[name][0], scale) for name, scale in loras]

    @property
    def defaults(self) -> LoraSet:
        """Adapters and scales for requests that name no adapters."""
        return tuple(sorted((i.name, i.scale) for i in self.infos if i.scale))

    def close(self) -> None:
        """Free all adapters; no context may use them any more."""
        while self._adapters:
            self._adapters.popitem()[1][0].close()
