"""Devices that libllama can use, and which of them hold the tensors of a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cllm.bindings import _llama_h as h
from cllm.bindings._library import GPUS, Library, library
from cllm.bindings.vocabulary import c_string
from cllm.checks import check_float, check_int
from cllm.errors import InvalidArgumentError

SPLIT_MODES = {mode.name.lower(): mode for mode in h.SplitMode}


class Device(NamedTuple):
    """Processor that computes, with its memory.

    Attributes
    ----------
    name : str
        Name in options and in llama.cpp's log: "CPU", "CUDA0", "Vulkan1".
    description : str
        Name of the product.
    kind : str
        "cpu", "gpu", "igpu" (a GPU that uses host memory), "accel" or "meta".
    n_free_bytes, n_total_bytes : int
        Free and total memory; 0 if the backend does not report it.
    """

    name: str
    description: str
    kind: str
    n_free_bytes: int
    n_total_bytes: int

    @property
    def is_gpu(self) -> bool:
        """True if layers of a model can be on it."""
        return self.kind in ("gpu", "igpu")


def devices() -> tuple[Device, ...]:
    """Return all devices in llama.cpp's order.  Devices of RPC servers appear after their registration.

    Notes
    -----
    See `ggml_backend_dev_get` and `ggml_backend_dev_memory` in ggml-backend.h.
    """
    lib = library()
    return tuple(_described(lib, pointer) for pointer in _pointers(lib))


def _pointers(lib: Library) -> list[Any]:
    return [lib.ggml_backend_dev_get(index) for index in range(lib.ggml_backend_dev_count())]


def _name(lib: Library, device: Any) -> str:
    return str(lib.ggml_backend_dev_name(device).decode("utf-8", "replace"))


def _described(lib: Library, device: Any) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return Device(
        _name(lib, device),
        lib.ggml_backend_dev_description(device).decode("utf-8", "replace").strip(),
        h.DeviceType(lib.ggml_backend_dev_type(device)).name.lower(),
        free.value,
        total.value,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of the tensors of a model.  Without arguments: as llama.cpp decides.

    Parameters
    ----------
    devices : sequence of str, optional
        Names of the GPUs to use, in this order; empty: none.  None: all of them, integrated ones only if
        there are no others.
    split_mode : str
        "layer": whole layers on each GPU; "row": rows of each matrix; "tensor": rows and KV cells, which is
        experimental; "none": all on `main_gpu`.
    main_gpu : int
        Index of the GPU that holds the model with `split_mode` "none"; unused otherwise.
    tensor_split : sequence of float
        Proportions of the model on each GPU; empty: by their free memory.
    overrides : sequence of (str, str)
        Regular expression of names of tensors, and the buffer type that they get, "CPU" or the name of a
        device.  The first one that matches counts.

    Raises
    ------
    InvalidArgumentError
        A value is out of range, or this library has no such device.

    Notes
    -----
    See `llama_model_params` in llama.h.
    """

    devices: Sequence[str] | None = None
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: Sequence[float] = ()
    overrides: Sequence[tuple[str, str]] = field(default=())

    @property
    def uses_gpu(self) -> bool:
        """True if layers may be on a GPU of this machine."""
        return library().has_gpu if self.devices is None else bool(self.devices)

    def apply(self, params: Any) -> list[object]:
        """Set the fields of `llama_model_params`; return the objects to keep alive until the model is loaded."""
        lib = library()
        limit = f"one of {', '.join(SPLIT_MODES)}"
        if self.split_mode not in SPLIT_MODES:
            raise InvalidArgumentError("split_mode", self.split_mode, limit)
        params.split_mode = SPLIT_MODES[self.split_mode]
        gpus = {
            _name(lib, each): each
            for each in _pointers(lib)
            if lib.ggml_backend_dev_type(each) in GPUS
        }
        kept: list[object] = []
        if self.devices is not None:
            kept.append(_device_list(lib, self.devices, gpus))
            params.devices = kept[-1]
        n_gpus = len(gpus if self.devices is None else self.devices)
        params.main_gpu = check_int("main_gpu", self.main_gpu, 0, max(0, n_gpus - 1))
        if self.tensor_split:
            kept.append(self._shares(n_gpus, lib.llama_max_devices()))
            params.tensor_split = kept[-1]
        if self.overrides:
            kept.append(self._override_list(lib))
            params.tensor_buft_overrides = kept[-1]
        return kept

    def _shares(self, n_gpus: int, n_max: int) -> object:
        """Return `tensor_split` as an array of `llama_max_devices` floats."""
        if len(self.tensor_split) > n_gpus:
            limit = f"at most {n_gpus} values, one for each GPU"
            raise InvalidArgumentError("tensor_split", self.tensor_split, limit)
        shares = [check_float("tensor_split", share, 0.0, 1e6) for share in self.tensor_split]
        if not any(shares):
            limit = "proportions with at least one above 0"
            raise InvalidArgumentError("tensor_split", self.tensor_split, limit)
        return (ctypes.c_float * n_max)(*shares)

    def _override_list(self, lib: Library) -> object:
        types = dict[str, Any]()
        for device in _pointers(lib):
            is_gpu = lib.ggml_backend_dev_type(device) in GPUS
            if is_gpu and self.devices is not None and _name(lib, device) not in self.devices:
                continue  # no backend of the context could compute with it: llama.cpp ends the process
            if buffer_type := lib.ggml_backend_dev_buffer_type(device):
                name = lib.ggml_backend_buft_name(buffer_type).decode("utf-8", "replace")
                types.setdefault(name, buffer_type)
        kind = h.DECLARATIONS.structs["llama_model_tensor_buft_override"]
        found = (kind * (len(self.overrides) + 1))()  # ends with an empty one
        for each, (pattern, name) in zip(found, self.overrides, strict=False):
            if name not in types:
                limit = f"a buffer type of the devices in use: {', '.join(types)}"
                raise InvalidArgumentError("override_tensor", name, limit)
            each.pattern, each.buft = c_string("override_tensor", pattern), types[name]
        return found


def _device_list(lib: Library, names: Sequence[str], gpus: dict[str, Any]) -> object:
    for name in names:
        if name not in gpus:
            limit = f"one of {', '.join(gpus)}" if gpus else "left out: this library finds no GPU"
            raise InvalidArgumentError("devices", name, limit)
    if len(set(names)) < len(names):
        raise InvalidArgumentError("devices", tuple(names), "each GPU once")
    kind = lib.ggml_backend_dev_get.restype
    return (kind * (len(names) + 1))(*(gpus[name] for name in names))  # ends with NULL
