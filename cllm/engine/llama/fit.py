"""Fit a model into the memory of GPUs: as many layers as they hold, experts in host memory first.

The bytes of weights come from the model's file, those of the KV cache from its header.  llama.cpp computes the
buffers without an allocation.  Layers are divided as llama.cpp divides them (`load_tensors`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from cllm.bindings import Device
from cllm.bindings.context import MAX_CELLS
from cllm.engine.config import N_CTX, EngineConfig
from cllm.engine.device_settings import override_pairs
from cllm.engine.llama.devices import gpus_of
from cllm.engine.llama.gguf_header import read_sizes
from cllm.engine.llama.memory import (
    AMPLE_BYTES,
    MAX_LAYERS,
    MIB,
    N_STEP,
    PlannedContext,
    choose_n_ctx,
    encoder_bytes,
    kv_bytes,
    kv_layers,
    largest_n_ctx,
    n_trained,
    wanted_n_ctx,
)
from cllm.engine.llama.preflight import other_files
from cllm.errors import CllmError, ModelLoadError

logger: logging.Logger = logging.getLogger("cllm.engine")

HOST = "CPU"
LAYER = re.compile(r"blk\.(\d+)\.")
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
# llama.cpp keeps these in host memory.
INPUTS = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Left free on each GPU: for the display, other programs, and what a backend allocates beside its buffers.
MARGIN_BYTES, MARGIN_PART = 1 << 30, 8
N_MEASURED_MAX = 4  # times that the buffers are measured for one load


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
    kv_scale : float
        Measured bytes of the KV cache, as a part of those that the header states.

    Raises
    ------
    OSError, ValueError
        The file cannot be read, or its layers have no sensible numbers.
    """

    def __init__(self, config: EngineConfig, gpus: Sequence[Device]) -> None:
        self._gpus = gpus
        self._tensors = read_sizes(config.model_path)
        numbers = [int(found[1]) for name in self._tensors if (found := LAYER.match(name))]
        self.n_blocks: int = max(numbers, default=-1) + 1
        if not 0 < self.n_blocks <= MAX_LAYERS:
            raise ValueError(f"the file has {self.n_blocks} layers")
        self.has_experts: bool = any(map(EXPERTS.search, self._tensors))
        self.buffers: Counter[str] = Counter()
        self.kv_scale: float = 1.0
        # Other models, and the buffers of the media encoder, count fully on the first GPU.
        self._n_beside = sum(file.stat().st_size for file in other_files(config))
        self._n_beside += encoder_bytes(config)

    @property
    def n_layers(self) -> int:
        """Number of layers that `n_gpu_layers` counts: the output is one."""
        return self.n_blocks + 1

    def bytes(self, config: EngineConfig) -> Counter[str]:
        """Return bytes by device of weights, KV cache and buffers; `HOST` is host memory."""
        places = self._places(config)
        n_cpu_moe = min(config.n_cpu_moe, self.n_blocks)
        overrides = [*_compiled(override_pairs(config.override_tensor, n_cpu_moe))]
        found = Counter[str]({self._gpus[0].name: self._n_beside} if config.n_gpu_layers else {})

        def add(n_bytes: float, place: dict[str, float]) -> None:
            for device, part in place.items():
                found[device] += int(n_bytes * part)

        for name, n_bytes in self._tensors.items():
            layer = LAYER.match(name)
            place = places[int(layer[1]) if layer else -1]
            if name.startswith(INPUTS):
                place = {HOST: 1.0}
            # The default buffer type of a device has the device's name.
            types = (buffer_type for pattern, buffer_type in overrides if pattern.search(name))
            if (buffer_type := next(types, None)) is not None:
                place = {buffer_type: 1.0}
            add(n_bytes, place)
        if OUTPUT not in self._tensors:  # llama.cpp takes a copy of the embeddings
            add(self._tensors.get(EMBEDDING, 0), places[-1])
        for layer_number, n_bytes in enumerate(kv_layers(config)):
            place = places[min(layer_number, len(places) - 1)] if config.kv_offload else {HOST: 1.0}
            add(n_bytes * self.kv_scale, place)
        return found + self.buffers

    def measure(self, config: EngineConfig, contexts: Iterable[PlannedContext]) -> None:
        """Let llama.cpp compute buffers and KV cache without an allocation; `bytes` counts them from then on."""
        self.buffers = Counter()
        for planned in contexts:
            needs = planned.needs(config)
            if needs is None:
                continue
            self.buffers.update(needs.on_devices)
            if not planned.generates:
                self.buffers[self._gpus[0].name] += needs.n_context
            elif (estimated := kv_bytes(config)) and needs.n_context:
                # Sliding windows, states of recurrent layers: the header does not say all of it.
                self.kv_scale = needs.n_context / estimated

    def fits(self, config: EngineConfig) -> bool:
        """Return True if every GPU has enough memory."""
        needed = self.bytes(config)
        return all(needed[gpu.name] <= room_of(gpu) for gpu in self._gpus if needed[gpu.name])

    def summary(self, config: EngineConfig) -> str:
        """Return a log line: layers on GPUs, and MiB on each."""
        needed = self.bytes(config)
        names = ", ".join(
            f"{gpu.name} {needed[gpu.name] / MIB:,.0f} of {gpu.n_free_bytes / MIB:,.0f} MiB"
            for gpu in self._gpus
        )
        experts = f", experts of {config.n_cpu_moe} in host memory" if config.n_cpu_moe else ""
        return f"{self._n_on_gpus(config)} of {self.n_layers} layers on GPUs{experts}: {names}"

    def shortage(self, config: EngineConfig) -> str:
        """Return the error text for a placement that does not fit, with settings that do."""
        needed = self.bytes(config)
        full = next(gpu for gpu in self._gpus if needed[gpu.name] > room_of(gpu))
        n_most = config.n_cells or min(n_trained(config), MAX_CELLS)
        n_ctx = largest_n_ctx(n_most, lambda n_ctx: self.fits(replace(config, n_ctx=n_ctx)))
        layers = [
            n for n in range(self._n_on_gpus(config)) if self.fits(replace(config, n_gpu_layers=n))
        ]
        works = [f"n_ctx={n_ctx}"] * bool(n_ctx)
        works += [f"n_gpu_layers={n}" for n in layers[-1:]]
        reason = (
            f"it needs {needed[full.name] / MIB:,.0f} MiB on {full.name}, where "
            f"{room_of(full) / MIB:,.0f} MiB can be used ({full.n_free_bytes / MIB:,.0f} MiB are free)"
        )
        return f"{reason}; {' or '.join(works)} would fit" if works else reason

    def _n_on_gpus(self, config: EngineConfig) -> int:
        n_layers = self.n_layers
        return n_layers if config.n_gpu_layers < 0 else min(config.n_gpu_layers, n_layers)

    def _places(self, config: EngineConfig) -> list[dict[str, float]]:
        """Return for each layer, the output last, the devices and the part of the layer on each."""
        n_gpu = self._n_on_gpus(config)
        shares = [*config.tensor_split, *[0.0] * len(self._gpus)][: len(self._gpus)]
        if not any(shares):
            shares = [float(gpu.n_free_bytes) for gpu in self._gpus]
        # In the precision of llama.cpp: another one would put layers at a border elsewhere.
        ends = np.cumsum(np.array(shares if any(shares) else [1.0] * len(shares), np.float32))
        ends /= ends[-1]
        places: list[dict[str, float]] = [{HOST: 1.0}] * (self.n_layers - n_gpu)
        for layer in range(n_gpu):
            index = int(np.searchsorted(ends, np.float32(layer) / np.float32(n_gpu), "right"))
            places.append({self._gpus[min(index, len(ends) - 1)].name: 1.0})
        return places


def _compiled(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[re.Pattern[str], str]]:
    for pattern, buffer_type in pairs:
        try:
            yield re.compile(pattern), buffer_type
        except re.error:  # loading the model reports the reason
            continue


def fitted(config: EngineConfig, contexts: Iterable[PlannedContext]) -> EngineConfig:
    """Return settings whose layers fit on the GPUs; unchanged without GPUs.

    Without `n_gpu_layers`, experts move to host memory from the first layer on until the rest fits, and then
    whole layers.  Settings that place tensors leave everything as it is.

    Raises
    ------
    ModelLoadError
        The requested layers do not fit.  The reason names the full GPU, and settings that fit.  With
        `allow_overcommit` this is only logged.
    """
    gpus, planned = known_gpus(config), list(contexts)
    if not gpus or config.n_gpu_layers == 0:
        return config
    try:
        model = ModelOnDevices(config, gpus)
        # llama.cpp may end the process for a cache that no device can hold.
        model.measure(config if model.fits(config) else replace(config, n_ctx=N_CTX), planned)
        if places_automatically(config):
            config = _automatic(config, model, planned)
            if config.n_gpu_layers == 0:
                logger.info("no layer fits on the GPUs: they have too little free memory")
                return config
        elif not model.fits(config):
            reason = model.shortage(config)
            if not config.allow_overcommit:
                reason += "; allow_overcommit skips this check"
                raise ModelLoadError(str(config.model_path), reason)
            logger.warning("%s: %s", config.model_path.name, reason)
            return config
        logger.info("%s", model.summary(config))
    except ModelLoadError:
        raise
    except (OSError, ValueError, OverflowError, CllmError):  # loading the model reports the reason
        pass
    return config


def _automatic(
    config: EngineConfig, model: ModelOnDevices, contexts: Sequence[PlannedContext]
) -> EngineConfig:
    """Return the settings with the most on the GPUs that fit; the buffers are measured for them."""
    candidates = iter((config, *_candidates(config, model)))
    found = next(filter(model.fits, candidates), None)
    for _ in range(N_MEASURED_MAX):
        if found is None:
            break
        if found is not config:  # weights in host memory are copied to larger buffers
            model.measure(found, contexts)
        if model.fits(found):
            return found
        found = next(filter(model.fits, candidates), None)
    return replace(config, n_gpu_layers=0)


def check_placement(config: EngineConfig) -> None:
    """Check that explicit layers fit on the GPUs, without buffers.

    Raises
    ------
    ModelLoadError
    """
    gpus = known_gpus(config)
    if not gpus or config.n_gpu_layers == 0 or places_automatically(config):
        return
    try:
        model = ModelOnDevices(config, gpus)
        reason = None if model.fits(config) else model.shortage(config)
    except (OSError, ValueError, OverflowError, CllmError):  # loading the model reports the reason
        return
    if reason and not config.allow_overcommit:
        raise ModelLoadError(str(config.model_path), reason)


def fitting_n_ctx(config: EngineConfig) -> tuple[int, str]:
    """Return `n_ctx` for "auto", and an explanation: as `choose_n_ctx`, or as many cells as the GPUs hold.

    The context is sized for all layers on the GPUs.  If even the smallest context does not fit, experts count as
    host memory.
    """
    gpus = known_gpus(config)
    n_shares, n_wanted = wanted_n_ctx(config)
    if not gpus or not n_wanted or config.n_gpu_layers == 0:
        return choose_n_ctx(config)
    try:
        model = ModelOnDevices(config, gpus)
        for gpu in gpus:
            model.buffers[gpu.name] = min(AMPLE_BYTES, gpu.n_total_bytes // MARGIN_PART)
        moves_experts = model.has_experts and places_automatically(config)
        if moves_experts and not model.fits(replace(config, n_ctx=N_CTX)):
            config = replace(config, n_cpu_moe=model.n_blocks)
        n_wanted = min(n_wanted, MAX_CELLS)
        if model.fits(replace(config, n_ctx=n_wanted)):
            return n_wanted, f"{n_wanted:,} tokens of context, on GPUs"
        found = largest_n_ctx(n_wanted, lambda n_ctx: model.fits(replace(config, n_ctx=n_ctx)))
    except (OSError, ValueError, OverflowError, CllmError):  # loading the model reports the reason
        return choose_n_ctx(config)
    step = N_STEP * n_shares
    n_ctx = max(N_CTX, found // step * step)
    return n_ctx, f"{n_ctx:,} tokens of context: {n_wanted:,} do not fit on the GPUs"


def known_gpus(config: EngineConfig) -> Sequence[Device]:
    """Return the GPUs that an engine uses, or none where their memory cannot be planned.

    That is with RPC servers, with a backend that does not report its memory, and with a model that is divided
    otherwise than by layers.
    """
    if config.rpc or config.split_mode not in ("layer", "none"):
        return ()
    gpus = gpus_of(config)
    return gpus if all(gpu.n_total_bytes for gpu in gpus) else ()


def room_of(gpu: Device) -> int:
    """Return the bytes of a GPU that a model may use."""
    return max(0, gpu.n_free_bytes - min(MARGIN_BYTES, gpu.n_total_bytes // MARGIN_PART))


def places_automatically(config: EngineConfig) -> bool:
    """Return True if no setting fixes the placement of tensors."""
    stated = (config.tensor_split, config.override_tensor, config.n_cpu_moe)
    return config.n_gpu_layers == -1 and not any(stated)


def _candidates(config: EngineConfig, model: ModelOnDevices) -> Iterator[EngineConfig]:
    """Yield settings, each with less on the GPUs than the one before."""
    experts = range(1, model.n_blocks + 1) if model.has_experts else range(0)
    yield from (replace(config, n_cpu_moe=n) for n in experts)
    n_cpu_moe = model.n_blocks if model.has_experts else 0
    for n in range(model.n_layers - 1, 0, -1):
        yield replace(config, n_gpu_layers=n, n_cpu_moe=n_cpu_moe)
