"""A sampler or a constraint that fails ends its own output, and leaves nothing open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm.bindings import Model
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.constraint import Mask
from cllm.engine.llama.sampler import (
    LlamaChain,
    SamplerFactory,
)
from cllm.engine.sampling.batch_sampler import BatchSampler, NotFiniteError
from cllm.engine.sampling.row_sampler import RowSampler
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SamplingParams
from tests.engine.sampling.test_row_sampler import (
    N_CTX,
    N_VOCAB,
    RandomConstraint,
    mask_of,
    request_of,
)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(EMBEDDED_MODEL) as model:
        yield model


def row_of(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(N_VOCAB).astype(np.float32)


class CannotHappen:
    """A sampler that is never asked."""

    constraint = None

    is_greedy = False

    def may_be(self, token: int) -> bool:
        raise AssertionError(f"{token}: asked of those that are greedy")

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        raise AssertionError("a row without a finite maximum")

    def accept(self, token: int) -> None:
        raise AssertionError("nothing was chosen")

    def recall(self, token: int) -> None:
        raise AssertionError(f"{token}: nothing was chosen elsewhere")

    def close(self) -> None:
        """Nothing to free."""


def test_a_row_without_a_finite_maximum_fails_alone() -> None:
    rows = np.zeros((3, 10), np.float32)
    rows[0, 3] = np.nan
    rows[1, 4] = 1.0
    rows[2, 5] = np.inf
    for samplers in ([None, None, None], [None, None, CannotHappen()]):
        first, second, third = BatchSampler(10).sample(rows, range(3), samplers)
        assert isinstance(first, NotFiniteError)
        assert second == 4
        assert isinstance(third, NotFiniteError)


class Broken(RandomConstraint):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(1)
        self._where = where

    def _fail(self, where: str) -> None:
        if where == self._where:
            raise RuntimeError("scripted")

    def allows(self, token: int) -> bool:
        self._fail("allows")
        return False

    def accept(self, token: int) -> None:
        self._fail("accept")

    def masks(self, constraints: Sequence[RandomConstraint]) -> list[Mask]:
        self._fail("masks")
        return super().masks(constraints)


@pytest.mark.parametrize("where", ["allows", "masks", "accept"])
def test_a_constraint_that_fails_ends_its_own_output_only(model: Model, where: str) -> None:
    factory = SamplerFactory(model, N_CTX)
    params = SamplingParams(seed=1)
    broken = factory(replace(request_of(params), constraint=Broken(where)))
    fine = factory(replace(request_of(params), constraint=RandomConstraint(5)))
    logits = np.stack([row_of(seed) for seed in range(3)])
    first, second, third = BatchSampler(N_VOCAB).sample(logits, range(3), [broken, fine, None])
    assert isinstance(first, RuntimeError)
    assert isinstance(second, int)
    assert mask_of(5, 0)[second]
    assert third == int(logits[2].argmax())
    for sampler in (broken, fine):
        assert sampler is not None
        sampler.close()


class BrokenChain:
    """A chain whose every call raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def choose(self, ids: NDArray[np.integer], logits: NDArray[np.float32]) -> int:
        raise self._error

    def choose_from_row(self, row: NDArray[np.float32], banned: NDArray[np.integer]) -> int:
        raise self._error

    def accept(self, token: int) -> None:
        raise self._error

    def draw(self) -> None:
        raise self._error

    def close(self) -> None:
        raise self._error


def sampler_of(chain: LlamaChain | BrokenChain, constraint: RandomConstraint) -> RowSampler:
    return RowSampler(
        chain, SamplingParams(), prompt=(1,), banned=(), ends=(), n_ctx=N_CTX, constraint=constraint
    )


@pytest.mark.parametrize("error", [RuntimeError("scripted"), MemoryError("scripted")], ids=repr)
def test_a_sampler_that_fails_is_not_taken_for_a_refusal_of_its_constraint(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Only where nothing is left to choose from may the constraint say what else there is."""

    def masks(constraints: Sequence[RandomConstraint]) -> list[Mask]:
        raise AssertionError("not asked")

    constraint = RandomConstraint(1)
    monkeypatch.setattr(constraint, "masks", masks)
    sampler = sampler_of(BrokenChain(error), constraint)
    assert BatchSampler(N_VOCAB).sample(row_of(1)[None], [0], [sampler]) == [error]


def test_a_constraint_is_closed_even_if_the_samplers_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []
    constraint = RandomConstraint(1)
    monkeypatch.setattr(constraint, "close", lambda: closed.append(constraint))
    sampler = sampler_of(BrokenChain(RuntimeError("scripted")), constraint)
    with pytest.raises(RuntimeError, match="scripted"):
        sampler.close()
    assert closed == [constraint]
