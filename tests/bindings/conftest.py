"""Fixtures named after states: the random-weight model, loaded once for each file, and contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm.bindings import Context, Model, Vocabulary

NewContext = Callable[..., Context]


@pytest.fixture(scope="module")
def model(tiny_model_path: Path) -> Iterator[Model]:
    """The loaded model."""
    with Model(tiny_model_path) as model:
        yield model


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocabulary:
    """The vocabulary of the model."""
    return model.vocab


@pytest.fixture
def new_context(model: Model) -> Iterator[NewContext]:
    """Makes small contexts and closes them."""
    made: list[Context] = []

    def new(**parameters: Any) -> Context:
        defaults: dict[str, Any] = {
            "n_ctx": 512, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4, "n_threads": 1,
            "n_threads_batch": 1,
        }  # fmt: skip
        made.append(Context(parameters.pop("model", model), **{**defaults, **parameters}))
        return made[-1]

    yield new
    for context in made:
        context.close()


@pytest.fixture(params=[True, False], ids=["unified", "per sequence"])
def context(request: pytest.FixtureRequest, new_context: NewContext) -> Context:
    """A context in each of the two layouts."""
    return new_context(kv_unified=request.param)


def error_in_another_thread(act: Callable[[], object]) -> Exception | None:
    """Return the exception that `act` raises in another thread; None if it raises nothing."""
    caught: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None
