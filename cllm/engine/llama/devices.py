"""Placement of a model on the devices and processors of this machine, as a configuration asks for it."""

from __future__ import annotations

import os

from cllm.bindings import Device, Placement, devices, library
from cllm.bindings._llama_h import NumaStrategy
from cllm.engine.config import EngineConfig
from cllm.engine.device_settings import override_pairs, processors_of
from cllm.errors import InvalidArgumentError
from cllm.system import allowed_processors


def placement_of(config: EngineConfig, *, is_main: bool = True) -> Placement:
    """Return the placement of a model of an engine.

    Parameters
    ----------
    is_main : bool
        True for the model that generates: `override_tensor` and `n_cpu_moe` are for its tensors alone.
    """
    overrides = override_pairs(config.override_tensor, config.n_cpu_moe) if is_main else ()
    if not uses_gpu(config):
        return Placement(devices=(), overrides=overrides)
    return Placement(
        config.devices, config.split_mode, config.main_gpu, config.tensor_split, overrides
    )


def uses_gpu(config: EngineConfig) -> bool:
    """True if a configuration lets GPUs compute: those of layers, or those of `op_offload`."""
    return (config.n_gpu_layers != 0 or config.op_offload is True) and config.devices != ()


def gpus_of(config: EngineConfig) -> tuple[Device, ...]:
    """Return the GPUs that an engine uses, with their free memory; empty if it uses none.

    Integrated GPUs are used only if there are no others, or if `devices` names them.
    """
    found = {each.name: each for each in devices() if each.is_gpu} if uses_gpu(config) else {}
    if config.devices is not None:
        own = [found[name] for name in config.devices if name in found]
    else:
        own = [each for each in found.values() if each.kind == "gpu"] or [*found.values()]
    if config.split_mode == "none":
        own = own[config.main_gpu : config.main_gpu + 1]
    return tuple(own)


def use_processors(config: EngineConfig) -> None:
    """Bind this thread, and the threads that it starts from now on, to the processors of `cpu_mask`; set `numa`.

    Raises
    ------
    InvalidArgumentError
        This process may use none of the processors, or the system has no such call.
    """
    if config.cpu_mask is not None:
        _bind(config.cpu_mask)
    if config.numa is not None:
        library().llama_numa_init(NumaStrategy[config.numa.upper()])


def _bind(cpu_mask: str) -> None:
    allowed = allowed_processors(os.getpid())
    if allowed is None:
        limit = "None on this system, which cannot bind threads to processors"
        raise InvalidArgumentError("cpu_mask", cpu_mask, limit)
    if not (wanted := processors_of(cpu_mask) & allowed):
        limit = f"one of the processors that this process may use: {', '.join(map(str, sorted(allowed)))}"
        raise InvalidArgumentError("cpu_mask", cpu_mask, limit)
    os.sched_setaffinity(0, wanted)
