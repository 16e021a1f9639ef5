"""memory_needs: the memory of a context, as llama.cpp computes it without an allocation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from cllm.bindings._library import captured_log
from cllm.bindings.context import Context
from cllm.bindings.devices import Placement
from cllm.bindings.embedding_context import EmbeddingContext
from cllm.bindings.model import Model
from cllm.bindings.mtp_context import MtpContext

MIB = 1 << 20
_MEMORY = re.compile(r"^llama_\w+: size =\s*([\d.]+) MiB \(")
_COMPUTE = re.compile(r"(\S+)\s+(?:compute|output) buffer size =\s*([\d.]+) MiB")


class MemoryNeeds(NamedTuple):
    """Memory of a context, in bytes, without the weights.

    Attributes
    ----------
    n_context : int
        KV cache, and the states of recurrent layers.
    n_compute : int
        Buffers for one batch, and for its output, on all devices.
    on_devices : mapping of str to int
        `n_compute` by the name of the device.
    """

    n_context: int
    n_compute: int
    on_devices: Mapping[str, int] = MappingProxyType({})

    @property
    def n_bytes(self) -> int:
        """Sum of `n_context` and `n_compute`, in bytes."""
        return self.n_context + self.n_compute


def memory_needs(
    path: str | Path,
    make_context: Callable[[Model], Context | EmbeddingContext | MtpContext],
    *,
    n_gpu_layers: int = -1,
    placement: Placement | None = None,
    load_mtp: bool = False,
) -> MemoryNeeds | None:
    """Return the memory, in bytes, that a context would take; None if this llama.cpp does not log it.

    Reads the metadata and the vocabulary of the file, but no weights.

    Parameters
    ----------
    make_context : callable
        Returns the context to measure, for a model that was opened with `no_alloc=True`.
    n_gpu_layers : int
    placement : Placement, optional
    load_mtp : bool
        As for `Model`.

    Raises
    ------
    ModelLoadError, ContextError, InvalidArgumentError
        The model cannot be loaded, or `make_context` cannot create the context.

    Notes
    -----
    See `no_alloc` of `llama_model_params` in llama.h.  The numbers are those that llama.cpp logs.
    """
    with (
        Model(
            path,
            n_gpu_layers=n_gpu_layers,
            placement=placement,
            use_mmap=False,
            no_alloc=True,
            load_mtp=load_mtp,
        ) as model,
        captured_log() as lines,
    ):
        make_context(model).close()
    sizes = [float(found[1]) for line in lines if (found := _MEMORY.search(line))]
    compute = Counter[str]()
    for line in lines:
        if found := _COMPUTE.search(line):
            compute[found[1]] += int(float(found[2]) * MIB)
    if not compute:
        return None
    return MemoryNeeds(int(sum(sizes) * MIB), compute.total(), compute)
