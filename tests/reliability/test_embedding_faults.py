"""Every native call that computes vectors fails once, at each of its calls: nobody's answer is another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import Embedder, EmbeddingError, Engine
from tests.conftest import QUIET
from tests.reliability.native_faults import Fault, NativeFaults, Outcome, raises, returns
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.full]
TEXTS = [[f"text {i} " * n for i in range(n, n + 6)] for n in (1, 5, 9)]
ERRORS = (raises(RuntimeError), raises(MemoryError), raises(RuntimeError, after=True))
OUTCOMES: dict[str, tuple[Outcome, ...]] = {
    "llama_decode": (
        returns(1), returns(2), returns(2, after=True), returns(-1), returns(-3),
        returns(-3, after=True), *ERRORS,
    ),
    "llama_synchronize": ERRORS,
    "llama_get_embeddings_seq": (returns(None), *ERRORS),
}  # fmt: skip
OPENING: dict[str, tuple[Outcome, ...]] = {
    "llama_init_from_model": (returns(None), raises(RuntimeError), raises(MemoryError)),
    "llama_get_memory": (raises(RuntimeError),),
}


@pytest.fixture
async def faults(anyio_backend: str) -> AsyncIterator[NativeFaults]:
    with NativeFaults() as faults:
        yield faults


async def embed_all(engine: Embedder | Engine) -> list[NDArray[np.float32]]:
    """The vectors of three calls at once."""
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(TEXTS)

    async def ask(index: int) -> None:
        found[index] = await engine.embed(TEXTS[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(TEXTS)):
            tasks.start_soon(ask, index)
    return found


@pytest.mark.parametrize(
    ("function", "outcome"),
    [(function, outcome) for function, outcomes in OUTCOMES.items() for outcome in outcomes],
    ids=str,
)
async def test_a_call_that_fails_once_costs_nobody_an_answer(
    faults: NativeFaults, function: str, outcome: Outcome
) -> None:
    path = make_model.ensure("tiny-encoder", "F16")
    async with Embedder(path, pooling="mean", **QUIET) as embedder:
        wholes = await embed_all(embedder)
        faults.arm()
        await embed_all(embedder)
        n_calls, n_open = faults.n_calls[function], faults.n_open.copy()
        assert n_calls
        for k in range(1, n_calls + 1):
            faults.arm(Fault(function, k, outcome))
            found = await embed_all(embedder)
            # Batches differ from run to run: a fault may find fewer calls than there were.
            assert len(faults.met) <= 1
            for got, whole in zip(found, wholes, strict=True):
                assert (got * whole).sum(axis=1).min() > 0.9999, (k, len(faults.met))
            faults.disarm()
            assert await embedder.audit() == []
            assert embedder.statistics().n_waiting_texts == 0
            assert faults.n_open == n_open


@pytest.mark.parametrize(
    ("function", "outcome"),
    [(function, outcome) for function, outcomes in OPENING.items() for outcome in outcomes],
    ids=str,
)
async def test_a_context_that_cannot_be_made_ends_those_who_wait_and_streams_go_on(
    faults: NativeFaults, function: str, outcome: Outcome
) -> None:
    async with Engine(pooling="mean", **QUIET) as engine:
        whole = await engine.generate("count:1..9", temperature=0)
        n_open = faults.n_open.copy()
        faults.arm(Fault(function, 1, outcome))
        async with engine.stream("count:1..9", temperature=0) as stream:
            with pytest.raises(EmbeddingError) as caught:
                await engine.embed(["a"])
            assert caught.value.__cause__ is not None
            assert (await stream.completion()).token_ids == whole.token_ids
        assert faults.n_open == n_open
        assert (await engine.embed(["a"])).shape[0] == 1  # a context is tried for again
        assert await engine.audit() == []
