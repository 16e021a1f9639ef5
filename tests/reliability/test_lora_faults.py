"""Every native call about adapters fails once, at each of its calls: nobody's answer is another's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from cllm import CllmError, Engine, GenerationError, ModelLoadError
from tests.conftest import QUIET
from tests.lora_files import make_lora
from tests.reliability.native_faults import Fault, NativeFaults, Outcome, raises, returns
from tools import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.full]
OPTIONS: dict[str, Any] = {**QUIET, "n_ctx": 512, "n_seq_max": 4}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETS: list[Mapping[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"a": 1.0}]
ERRORS = (raises(RuntimeError), raises(MemoryError), raises(RuntimeError, after=True))
OUTCOMES: dict[str, tuple[Outcome, ...]] = {
    "llama_set_adapters_lora": (returns(-1), *ERRORS),
    "llama_decode": (returns(1), returns(2), returns(-1), returns(-3), *ERRORS),
}
LOADING: dict[str, tuple[Outcome, ...]] = {
    "llama_adapter_lora_init": (returns(None), *ERRORS[:2]),
    "llama_adapter_get_alora_n_invocation_tokens": ERRORS[:2],
}


@pytest.fixture
async def faults(anyio_backend: str) -> AsyncIterator[NativeFaults]:
    with NativeFaults() as faults:
        yield faults


@pytest.fixture(scope="module")
def model_path() -> Path:
    return make_model.ensure("tiny-llama", "Q8_0")


@pytest.fixture(scope="module")
def loras(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("loras")
    return [
        (name, make_lora(directory / f"{name}.gguf", model_path, seed=seed), 0.0)
        for seed, name in enumerate("ab")
    ]


async def answers_of(engine: Engine) -> list[tuple[int, ...] | None]:
    """Of four requests with three sets at once; None where one has failed."""
    found: list[tuple[int, ...] | None] = [None] * len(SETS)

    async def ask(index: int, lora: Mapping[str, float]) -> None:
        with contextlib.suppress(GenerationError):
            found[index] = (await engine.generate("The fox", lora=lora, **GREEDY)).token_ids

    async with anyio.create_task_group() as tasks:
        for index, lora in enumerate(SETS):
            tasks.start_soon(ask, index, lora)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "outcome"),
    [(function, outcome) for function, outcomes in OUTCOMES.items() for outcome in outcomes],
    ids=str,
)
async def test_a_call_that_fails_once_gives_nobody_the_answer_of_other_adapters(
    faults: NativeFaults, model_path: Path, loras: list[Any], function: str, outcome: Outcome
) -> None:
    # What is computed again after a fault is computed in another shape.
    exact = {**OPTIONS, "deterministic": True, "prefix_cache": False}
    async with Engine(model_path, lora=loras, **exact) as engine:
        wholes = await answers_of(engine)
        assert len(set(wholes)) == 3
        assert None not in wholes
        faults.arm()
        await answers_of(engine)
        n_calls = faults.n_calls[function]
        assert n_calls >= 6
        for k in range(1, n_calls + 1):
            faults.arm(Fault(function, k, outcome))
            assert await answers_of(engine) == wholes, k
            faults.disarm()
            assert await engine.audit() == []


@pytest.mark.parametrize(
    ("function", "outcome"),
    [(function, outcome) for function, outcomes in LOADING.items() for outcome in outcomes],
    ids=str,
)
async def test_a_load_that_fails_leaves_nothing_and_may_be_repeated(
    faults: NativeFaults, model_path: Path, loras: list[Any], function: str, outcome: Outcome
) -> None:
    name, path, _ = loras[0]
    async with Engine(model_path, prefix_cache=False, **OPTIONS) as engine:
        plain = await engine.generate("The fox", **GREEDY)
        faults.arm(Fault(function, 1, outcome))
        with pytest.raises(CllmError) as caught:
            await engine.load_lora(name, path)
        faults.disarm()
        assert isinstance(caught.value, ModelLoadError)
        assert engine.model.loras == ()
        await engine.load_lora(name, path)
        adapted = await engine.generate("The fox", lora={name: 1.0}, **GREEDY)
        assert adapted.token_ids != plain.token_ids
        assert (await engine.generate("The fox", **GREEDY)).token_ids == plain.token_ids
