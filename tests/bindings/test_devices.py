"""Devices and placement: a wrong name or number is an error by name before the model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from cllm import InvalidArgumentError
from cllm.bindings import Context, Model, Placement, devices, library
from cllm.bindings import _llama_h as h
from cllm.engine.config import EMBEDDED_MODEL
from tests.conftest import n_threads


def test_the_processor_is_a_device_with_memory() -> None:
    cpu = next(device for device in devices() if device.kind == "cpu")
    assert cpu.name == "CPU"
    assert 0 < cpu.n_free_bytes <= cpu.n_total_bytes
    assert not cpu.is_gpu


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ("Nothing7",)}, "devices is 'Nothing7', must be "),
        ({"split_mode": "columns"}, "split_mode is 'columns', must be one of none, layer"),
        ({"main_gpu": 99}, "main_gpu is 99, must be 0 to"),
        ({"devices": (), "tensor_split": (1.0,)}, "must be at most 0 values"),
        (
            {"overrides": (("a", "Nothing7"),)},
            "override_tensor is 'Nothing7', must be a buffer type of",
        ),
        ({"overrides": (("a\0b", "CPU"),)}, "override_tensor"),
    ],
)
def test_what_does_not_fit_this_machine_is_an_error_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Model(EMBEDDED_MODEL, placement=Placement(**options))


def test_without_layers_on_a_gpu_no_gpu_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else products of many rows are computed there."""
    lists: list[bool] = []
    load = library().llama_model_load_from_file

    def note(path: bytes, params: Any) -> Any:
        lists.append(bool(params.devices) and not params.devices[0])
        return load(path, params)

    monkeypatch.setattr(library(), "llama_model_load_from_file", note)
    for n_gpu_layers in (0, -1):
        with Model(EMBEDDED_MODEL, n_gpu_layers=n_gpu_layers) as model:
            assert model.is_on_gpu == (n_gpu_layers != 0 and library().has_gpu)
    assert lists == [True, False]


@pytest.mark.parametrize("mode", ["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"])
def test_a_load_mode_takes_the_place_of_the_two_switches(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    load = library().llama_model_load_from_file

    def note(path: bytes, params: Any) -> Any:
        modes.append(params.load_mode)
        params.load_mode = h.LoadMode.MMAP  # locking memory may not be allowed here
        return load(path, params)

    monkeypatch.setattr(library(), "llama_model_load_from_file", note)
    for use_mmap in (False, True):
        Model(EMBEDDED_MODEL, use_mmap=use_mmap, load_mode=mode).close()
    assert modes == [h.LoadMode[{"dio": "DIRECT_IO"}.get(mode, mode.replace("+", "_").upper())]] * 2
    with pytest.raises(InvalidArgumentError, match="load_mode is 'fast', must be one of auto"):
        Model(EMBEDDED_MODEL, load_mode="fast")


def test_a_pattern_decides_where_a_tensor_is() -> None:
    with Model(EMBEDDED_MODEL, placement=Placement(overrides=[("ffn", "CPU")])) as model:
        Context(model, n_ctx=256).close()


def test_poll_is_rejected_with_openmp_and_changes_the_threads_without() -> None:
    has_openmp = b"OPENMP = 1" in library().llama_print_system_info()
    with Model(EMBEDDED_MODEL, n_gpu_layers=0) as model:
        if has_openmp:
            with pytest.raises(
                InvalidArgumentError, match="poll is 10, must be None with this library"
            ):
                Context(model, n_ctx=256, poll=10)
            return
        n_before = n_threads()
        with Context(model, n_ctx=256, poll=0, n_threads=4, n_threads_batch=4):
            assert n_threads() >= n_before + 3
