"""LoRA adapters: small weights that are added to those of a model while a context computes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import forward_log, library
from cllm.bindings.model import Model, check_model_file
from cllm.checks import MAX_THREADS, check_float, check_int
from cllm.errors import InvalidArgumentError, LlamaCallError, ModelLoadError


class LoraAdapter(NativeHandle):
    """LoRA weights for one model; `Context.set_loras` applies them.

    Load it in the thread that computes with the model, or before that thread starts: contexts of the
    model read its adapters.

    Attributes
    ----------
    path : str
    invocation_tokens : tuple of int
        Tokens from which an activated adapter (aLoRA) applies; empty for other adapters.  See
        `llama_adapter_get_alora_invocation_tokens` in llama.h.

    Raises
    ------
    ModelLoadError
        The file is missing, or is not an adapter for this model.
    """

    def __init__(self, model: Model, path: str | Path) -> None:
        path = str(path)
        check_model_file(path)
        lib = library()
        forward_log()
        pointer = lib.llama_adapter_lora_init(model._pointer, os.fsencode(path))
        reason = forward_log()
        if not pointer:
            raise ModelLoadError(path, reason or "not a LoRA adapter for this model")
        super().__init__(pointer, lib.llama_adapter_lora_free, parent=model)
        self.path = path
        with self._closed_on_error():
            n_tokens = lib.llama_adapter_get_alora_n_invocation_tokens(pointer)
            tokens = lib.llama_adapter_get_alora_invocation_tokens(pointer)
            self.invocation_tokens: tuple[int, ...] = tuple(tokens[:n_tokens]) if n_tokens else ()


class LoraContext(NativeHandle):
    """Context whose LoRA adapters and number of threads can be changed."""

    _loras: tuple[LoraAdapter, ...] = ()

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the number of threads for the next batches: of one row, and of several rows.

        Raises
        ------
        InvalidArgumentError
            Less than 1, or more than 512.

        Notes
        -----
        See `llama_set_n_threads` in llama.h.
        """
        n_threads = check_int("n_threads", n_threads, 1, MAX_THREADS)
        n_threads_batch = check_int("n_threads_batch", n_threads_batch, 1, MAX_THREADS)
        library().llama_set_n_threads(self._pointer, n_threads, n_threads_batch)

    def set_loras(self, adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        """Apply these adapters with these scales, and no others.

        The next decode reserves its buffers anew.  See `llama_set_adapters_lora` in llama.h.

        Raises
        ------
        InvalidArgumentError
            An adapter of another model, or a scale beyond ±10,000.
        LlamaCallError
            llama.cpp cannot apply the adapters.
        """
        pointer = self._pointer
        scales = [check_float("scale", scale, -1e4, 1e4) for _, scale in adapters]
        for adapter, _ in adapters:
            if adapter._parent is not self._parent:
                raise InvalidArgumentError("adapter", adapter, "an adapter of this context's model")
        pointers = [adapter._pointer for adapter, _ in adapters]
        n = len(adapters)
        lib: Any = library()
        adapter_type = lib.llama_adapter_lora_init.restype
        code = lib.llama_set_adapters_lora(
            pointer, (adapter_type * n)(*pointers), n, (ctypes.c_float * n)(*scales)
        )
        forward_log()
        if code != 0:
            raise LlamaCallError("llama_set_adapters_lora", code)
        for adapter in self._loras:
            adapter._children.discard(self)
        # Adapters in use stay alive, and their `close` raises an error.
        self._loras = tuple(adapter for adapter, _ in adapters)
        for adapter in self._loras:
            adapter._children.add(self)
