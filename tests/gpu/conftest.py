"""Fixtures of the tests on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cllm.bindings import Device, devices


@pytest.fixture
def anyio_backend() -> str:
    """Return one event loop: the results of a GPU are the same with each."""
    return "asyncio"


@pytest.fixture(scope="module")
def gpus() -> Sequence[Device]:
    found = [device for device in devices() if device.is_gpu]
    assert found, "this library finds no GPU: is GGML_VK_VISIBLE_DEVICES set?"
    return found
