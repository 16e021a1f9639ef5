"""Settings of placement: each wrong value is an error with its field, before a model is read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig, InvalidArgumentError
from cllm.engine.device_settings import EXPERTS, override_pairs, processors_of
from tests.conftest import QUIET

TASKS = Path("/proc/self/task")


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("devices", "CUDA0", "a sequence of texts"),
        ("devices", ["CUDA0", "CUDA0"], "each device once"),
        ("devices", [" "], "not blank"),
        ("devices", [f"CUDA{n}" for n in range(17)], "at most 16 devices"),
        ("split_mode", "columns", "one of none, layer, row, tensor"),
        ("tensor_split", "3,1", "a sequence of numbers"),
        ("tensor_split", [0.0, 0.0], "at least one above 0"),
        ("tensor_split", [-1.0], "0 to 1e"),
        ("tensor_split", [float("nan")], "finite"),
        ("tensor_split", [1.0] * 17, "at most 16 numbers"),
        ("main_gpu", 16, "0 to 15"),
        ("main_gpu", -1, "0 to 15"),
        ("override_tensor", ["ffn"], "PATTERN=TYPE"),
        ("override_tensor", ["=CPU"], "PATTERN=TYPE"),
        ("override_tensor", ["ffn="], "PATTERN=TYPE"),
        ("n_cpu_moe", -1, "0 to 512"),
        ("op_offload", "yes", "True or False"),
        ("cpu_mask", "0", "a hexadecimal mask or FIRST-LAST"),
        ("cpu_mask", "3-1", "a hexadecimal mask or FIRST-LAST"),
        ("cpu_mask", "0-512", "processors 0 to 511"),
        ("cpu_mask", 3, "a hexadecimal mask"),
        ("poll", 101, "0 to 100"),
        ("numa", "mirror", "one of distribute, isolate, numactl"),
        ("load_mode", "fast", "one of none, mmap"),
    ],
)
def test_a_wrong_value_is_an_error_by_name(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit) as caught:
        EngineConfig(**{field: value})
    assert str(caught.value).startswith(f"{field} is ")


def test_a_deterministic_engine_takes_no_products_from_a_gpu() -> None:
    with pytest.raises(InvalidArgumentError, match="op_offload is True, must be False or None"):
        EngineConfig(deterministic=True, op_offload=True)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0xf", {0, 1, 2, 3}), ("F0", {4, 5, 6, 7}), ("2-4", {2, 3, 4}), ("7-7", {7}), ("4-x", set())],
)
def test_processors_are_a_mask_or_a_range(text: str, numbers: set[int]) -> None:
    assert processors_of(text) == numbers


def test_overrides_of_the_user_come_before_those_of_the_experts() -> None:
    pairs = override_pairs(["blk.0.=GPU0", "a=b=CPU"], 2)
    assert pairs == (
        ("blk.0.", "GPU0"),
        ("a=b", "CPU"),
        (EXPERTS.format(0), "CPU"),
        (EXPERTS.format(1), "CPU"),
    )


@pytest.mark.parametrize(
    ("options", "mode", "is_mapped"),
    [
        ({}, "mmap", True),
        ({"use_mmap": False}, "none", False),
        ({"use_mlock": True}, "mmap+mlock", True),
        ({"use_mmap": False, "use_mlock": True}, "mlock", False),
        ({"load_mode": "dio"}, "dio", False),
        ({"load_mode": "auto", "use_mmap": False}, "auto", True),
    ],
)
def test_a_load_mode_takes_the_place_of_mmap_and_mlock(
    options: dict[str, Any], mode: str, is_mapped: bool
) -> None:
    config = EngineConfig(**options)
    assert (config.used_load_mode, config.is_mapped) == (mode, is_mapped)


needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system binds no threads to processors"
)


@needs_affinity
@pytest.mark.same_process("the threads of another process are not listed here")
@pytest.mark.anyio
async def test_an_engine_computes_on_the_processors_of_its_mask_alone() -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    async with Engine(n_ctx=512, cpu_mask=f"{first}-{first}", **QUIET) as engine:
        assert (await engine.generate("37+58=", temperature=0)).text == "95"
        masks = []
        for task in TASKS.iterdir():
            with suppress(ProcessLookupError):  # the thread has ended
                masks.append(os.sched_getaffinity(int(task.name)))
        assert {first} in masks
        assert os.sched_getaffinity(0) == allowed  # the event loop's thread is not bound


@needs_affinity
@pytest.mark.anyio
async def test_a_mask_without_a_processor_of_this_process_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="one of the processors that this process may"):
        async with Engine(n_ctx=512, cpu_mask="511-511", **QUIET):
            pass
