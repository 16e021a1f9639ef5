"""LoraRegistry: the adapters of an engine as its callers see them.  Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import anyio

from cllm.checks import check_float
from cllm.engine.core.commands import LoadLora, UnloadLora
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.lora import MAX_SCALE, LoraInfo, LoraUse, check_lora_name, lora_use
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.errors import InvalidRequestError
from cllm.settings import new_path


class LoraRegistry:
    """Loaded adapters, and those that are being loaded or unloaded.

    Parameters
    ----------
    check_file : callable
        Takes a path; raises `ModelLoadError` unless it is an adapter of the model.  May take long.
    is_fixed : bool
        True if no adapter can be loaded after the start of the engine.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerThreads,
        check_file: Callable[[Path], None],
        *,
        is_fixed: bool,
    ) -> None:
        self._dispatcher = dispatcher
        self._workers = workers
        self._check_file = check_file
        self._is_fixed = is_fixed
        self._thread: WorkerThread | None = None
        self._loading: set[str] = set()
        self._leaving: set[str] = set()  # which only running requests may name
        self._unloading: set[str] = set()

    @property
    def loaded(self) -> dict[str, LoraInfo]:
        """Adapters that requests may name."""
        model = self._dispatcher.model
        loras = () if model is None else model.loras
        return {lora.name: lora for lora in loras if lora.name not in self._leaving}

    def use(self, wanted: Mapping[str, float] | None, tokens: Sequence[int]) -> LoraUse:
        """Return the adapters of a request with this prompt; see `lora_use`."""
        return lora_use(wanted, self.loaded, tokens)

    def has(self, use: LoraUse) -> bool:
        """Return True if a request with these adapters may continue with them."""
        return use.names <= (self.loaded.keys() | self._leaving) - self._unloading

    async def load(self, name: str, path: str | Path, scale: float) -> LoraInfo:
        """See `Engine.load_lora`."""
        check_lora_name(name, field="name")
        scale = check_float("scale", scale, -MAX_SCALE, MAX_SCALE, InvalidRequestError)
        given = cast(str | Path, new_path("path", path, InvalidRequestError))
        # A process of the engine has the working directory in which it was started.
        path = Path(given).absolute()
        if self._is_fixed:
            limit = "an adapter that the engine was started with: it is deterministic"
            raise InvalidRequestError("name", name, limit)
        if name in self._loading or name in self._leaving or name in self.loaded:
            raise InvalidRequestError("name", name, "a name that no other adapter has")
        self._loading.add(name)
        try:
            if self._thread is None:
                self._thread = self._workers.start("cllm-lora")
            await self._thread.run(partial(self._check_file, path))
            await self._dispatcher.ask(LoadLora(name, str(path), float(scale)))
            return self.loaded[name]
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """See `Engine.unload_lora`."""
        if not isinstance(name, str) or name not in self.loaded:
            raise InvalidRequestError("name", name, "the name of a loaded adapter")
        self._leaving.add(name)
        try:
            # Here, because a stream that rewinds has no request for a moment.
            await self._dispatcher.wait_without(name)
            self._unloading.add(name)
            # The thread unloads it in any case: until then, no request may name it.
            with anyio.CancelScope(shield=True):
                await self._dispatcher.ask(UnloadLora(name))
        finally:
            self._unloading.discard(name)
            self._leaving.discard(name)
