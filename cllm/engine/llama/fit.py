"""Fit a model into the memory of GPUs: as many layers as they hold, experts in host memory first.

The bytes of weights come from the model's file, those of the KV cache from its header.  llama.cpp computes the
buffers without an allocation.  Layers are divided as llama.cpp divides them (`load_tensors`).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from cllm.bindings import Device, MemoryNeeds, memory_needs
from cllm.engine.config import N_CTX, EngineConfig
from cllm.engine.device_settings import override_pairs
from cllm.engine.llama.devices import gpus_of, placement_of
from cllm.engine.llama.gguf_header import read_sizes
from cllm.engine.llama.memory import (
    AMPLE_BYTES,
    MIB,
    N_STEP,
    PlannedContext,
    choose_n_ctx,
    encoder_bytes,
    kv_layers,
    largest_n_ctx,
    made,
    n_trained,
    wanted_n_ctx,
)
from cllm.engine.llama.preflight import other_files
from cllm.errors import CllmError, ModelLoadError

logger: logging.Logger = logging.getLogger("cllm.engine")

HOST = "CPU"
LAYER = re.compile(r"blk\.(\d+)\.")
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
INPUT = "token_embd."  # llama.cpp keeps it in host memory
# Left free on each GPU: for the display, other programs, and what a backend allocates beside its buffers.
MARGIN_BYTES, MARGIN_PART = 1 << 30, 8


class ModelOnDevices:
    """The bytes of one model, layer by layer.

    Parameters
    ----------
    config : EngineConfig
    gpus : sequence of Device
        GPUs in use, in llama.cpp's order.

    Attributes
    ----------
    n_blocks : int
        Number of layers, without the output.
    has_experts : bool
        True if it is a mixture of experts.
    buffers : Counter of str
        Bytes of buffers by device; they count with the rest.

    Raises
    ------
    OSError
        The file cannot be read.
    """

    def __init__(self, config: EngineConfig, gpus: Sequence[Device]) -> None:
        self._gpus = gpus
        self._tensors = read_sizes(config.model_path)
        numbers = [int(found[1]) for name in self._tensors if (found := LAYER.match(name))]
        self.n_blocks: int = max(numbers, default=-1) + 1
        self.has_experts: bool = any(map(EXPERTS.search, self._tensors))
        self.buffers: Counter[str] = Counter()
        # Other models and an encode are on the first GPU, all of them.
        self._n_beside = sum(file.stat().st_size for file in other_files(config))
        self._n_beside += encoder_bytes(config)

    @property
    def n_layers(self) -> int:
        """Number of layers that `n_gpu_layers` counts: the output is one."""
        return self.n_blocks + 1

    def bytes(self, config: EngineConfig) -> Counter[str]:
        """Return the bytes of weights, KV cache and buffers by device, `HOST` for host memory."""
        places = self._places(config)
        overrides = [*_compiled(override_pairs(config.override_tensor, config.n_cpu_moe))]
        found = Counter[str]({self._gpus[0].name: self._n_beside} if config.n_gpu_layers else {})
        for name, n_bytes in self._tensors.items():
            layer = LAYER.match(name)
            place = places[int(layer[1]) if layer else -1]
            if name.startswith(INPUT):
                place = {HOST: 1.0}
            # A device is called like its buffer type.
            for pattern, buffer_type in overrides:
                if pattern.search(name):
                    place = {buffer_type: 1.0}
                    break
            for device, part in place.items():
                found[device] += int(n_bytes * part)
        for layer_number, n_bytes in enumerate(kv_layers(config)):
            place = places[min(layer_number, len(places) - 1)] if config.kv_offload else {HOST: 1.0}
            for device, part in place.items():
                found[device] += int(n_bytes * part)
        return found + self.buffers

    def fits(self, config: EngineConfig) -> bool:
        """True if each GPU has room for its part."""
        needed = self.bytes(config)
        return all(needed[gpu.name] <= room_of(gpu) for gpu in self._gpus)

    def told(self, config: EngineConfig) -> str:
        """Return one line for users about a division of the model."""
        needed = self.bytes(config)
        names = ", ".join(
            f"{gpu.name} {needed[gpu.name] / MIB:,.0f} of {gpu.n_free_bytes / MIB:,.0f} MiB"
            for gpu in self._gpus
        )
        experts = f", experts of {config.n_cpu_moe} in host memory" if config.n_cpu_moe else ""
        return f"{self._n_on_gpus(config)} of {self.n_layers} layers on GPUs{experts}: {names}"

    def shortage(self, config: EngineConfig) -> str:
        """Return why a division does not fit, and what does."""
        needed = self.bytes(config)
        full = next(gpu for gpu in self._gpus if needed[gpu.name] > room_of(gpu))
        n_most = config.n_cells or n_trained(config)
        n_ctx = largest_n_ctx(n_most, lambda n_ctx: self.fits(replace(config, n_ctx=n_ctx)))
        layers = [
            n for n in range(self._n_on_gpus(config)) if self.fits(replace(config, n_gpu_layers=n))
        ]
        works = [f"n_ctx={n_ctx}"] * bool(n_ctx)
        works += [f"n_gpu_layers={n}" for n in layers[-1:]]
        return (
            f"it needs {needed[full.name] / MIB:,.0f} MiB on {full.name}, and "
            f"{room_of(full) / MIB:,.0f} MiB of {full.n_free_bytes / MIB:,.0f} free ones can be used"
            + f": {' or '.join(works)} fits"
            * bool(works)
        )

    def _n_on_gpus(self, config: EngineConfig) -> int:
        n_layers = self.n_layers
        return n_layers if config.n_gpu_layers < 0 else min(config.n_gpu_layers, n_layers)

    def _places(self, config: EngineConfig) -> list[dict[str, float]]:
        """Return for each layer, the output last, the devices and the part of the layer on each."""
        n_gpu = (
            self.n_layers if config.n_gpu_layers < 0 else min(config.n_gpu_layers, self.n_layers)
        )
        shares = [*config.tensor_split, *[0.0] * len(self._gpus)][: len(self._gpus)]
        if not any(shares):
            shares = [float(gpu.n_free_bytes) for gpu in self._gpus]
        ends = [*itertools.accumulate(share / sum(shares) for share in shares)]
        places: list[dict[str, float]] = [{HOST: 1.0}] * (self.n_layers - n_gpu)
        for layer in range(n_gpu):
            if config.split_mode in ("row", "tensor"):
                parts = zip(self._gpus, shares, strict=True)
                places.append({gpu.name: share / sum(shares) for gpu, share in parts})
            else:
                index = bisect.bisect_right(ends, layer / n_gpu)
                places.append({self._gpus[min(index, len(ends) - 1)].name: 1.0})
        return places


def _compiled(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[re.Pattern[str], str]]:
    for pattern, buffer_type in pairs:
        try:
            yield re.compile(pattern), buffer_type
        except re.error:  # loading the model reports the reason
            continue


def fitted(config: EngineConfig, contexts: Iterable[PlannedContext]) -> EngineConfig:
    """Return the settings with the layers that the GPUs hold; the settings as they are without a GPU.

    Without `n_gpu_layers`, experts move to host memory from the first layer on until the rest fits, and then
    whole layers.  Settings that place tensors leave everything as it is.

    Raises
    ------
    ModelLoadError
        Layers were asked for that do not fit: the reason names the GPU and what fits.  Only logged with
        `allow_overcommit`.
    """
    gpus = known_gpus(config)
    if not gpus or config.n_gpu_layers == 0:
        return config
    try:
        model = ModelOnDevices(config, gpus)
        if not model.n_blocks:
            return config
        # llama.cpp may end the process for a cache that no device can hold.
        measured = config if model.fits(config) else replace(config, n_ctx=N_CTX)
        model.buffers = _buffers(measured, contexts)
    except (OSError, ValueError, CllmError):  # loading the model reports the reason
        return config
    if not model.fits(config):
        if not is_free(config):
            reason = model.shortage(config)
            if not config.allow_overcommit:
                reason += "; allow_overcommit loads it all the same"
                raise ModelLoadError(str(config.model_path), reason)
            logger.warning("%s: %s", config.model_path.name, reason)
            return config
        config = next(tried for tried in _candidates(config, model) if model.fits(tried))
    logger.info("%s", model.told(config))
    return config


def fitting_n_ctx(config: EngineConfig) -> tuple[int, str]:
    """Return `n_ctx` for "auto", and an explanation: as `choose_n_ctx`, or as many cells as the GPUs hold.

    All layers are on the GPUs then, if the smallest context fits with them.  Experts are in host memory if it
    does not fit with them.
    """
    gpus = known_gpus(config)
    n_shares, n_wanted = wanted_n_ctx(config)
    if not gpus or not n_wanted or config.n_gpu_layers == 0:
        return choose_n_ctx(config)
    try:
        model = ModelOnDevices(config, gpus)
    except (OSError, ValueError):
        return choose_n_ctx(config)

    for gpu in gpus:
        model.buffers[gpu.name] = min(AMPLE_BYTES, gpu.n_total_bytes // MARGIN_PART)

    def fits(n_ctx: int) -> bool:
        return model.fits(replace(config, n_ctx=n_ctx))

    if model.has_experts and is_free(config) and not fits(N_CTX):
        config = replace(config, n_cpu_moe=model.n_blocks)
    if fits(n_wanted):
        return n_wanted, f"{n_wanted:,} tokens of context, on GPUs"
    step = N_STEP * n_shares
    n_ctx = max(N_CTX, largest_n_ctx(n_wanted, fits) // step * step)
    return (
        n_ctx,
        f"{n_ctx:,} tokens of context: the GPUs have no room for {n_wanted:,} (-c takes more)",
    )


def known_gpus(config: EngineConfig) -> Sequence[Device]:
    """Return the GPUs that an engine uses; none if one of them does not state its memory, or with RPC servers."""
    gpus = () if config.rpc else gpus_of(config)
    return gpus if all(gpu.n_total_bytes for gpu in gpus) else ()


def room_of(gpu: Device) -> int:
    """Return the bytes of a GPU that a model may use."""
    return gpu.n_free_bytes - min(MARGIN_BYTES, gpu.n_total_bytes // MARGIN_PART)


def is_free(config: EngineConfig) -> bool:
    """True if no setting says which tensors are on a GPU."""
    stated = (config.tensor_split, config.override_tensor, config.n_cpu_moe)
    return config.n_gpu_layers == -1 and not any(stated)


def _candidates(config: EngineConfig, model: ModelOnDevices) -> Iterator[EngineConfig]:
    """Yield settings, each with less on the GPUs than the one before; the last has nothing there."""
    experts = range(1, model.n_blocks + 1) if model.has_experts else range(0)
    yield from (replace(config, n_cpu_moe=n) for n in experts)
    n_cpu_moe = model.n_blocks if model.has_experts else 0
    for n in range(model.n_layers - 1, 0, -1):
        yield replace(config, n_gpu_layers=n, n_cpu_moe=n_cpu_moe)
    yield replace(config, n_gpu_layers=0)


def _buffers(config: EngineConfig, contexts: Iterable[PlannedContext]) -> Counter[str]:
    """Return the bytes of all buffers by device, as llama.cpp computes them."""
    found = Counter[str]()
    for path, make in contexts:
        is_main = path == config.model_path
        needs: MemoryNeeds | None = memory_needs(
            path,
            partial(made, make, config),
            n_gpu_layers=config.n_gpu_layers,
            placement=placement_of(config, is_main=is_main),
        )
        if needs is not None:
            found.update(needs.on_devices)
    return found
