"""The embedded model, loaded once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cllm import EngineConfig
from cllm.bindings import Model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The loaded model."""
    with Model(EngineConfig().model_path) as model:
        yield model
