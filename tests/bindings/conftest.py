"""Fixtures named after states: the random-weight model, loaded once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cllm.bindings import Model, Vocabulary


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> Iterator[Model]:
    """The loaded model."""
    with Model(tiny_model_path) as model:
        yield model


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocabulary:
    """Its vocabulary."""
    return model.vocab
