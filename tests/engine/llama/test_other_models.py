"""Architectures other than the embedded one: the bookkeeping agrees, and what cannot work says so."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import Completion, Engine, FinishReason
from cllm.bindings import Model
from cllm.engine.config import EngineConfig
from cllm.engine.core.checkpoints import MIN_GAIN, TAIL
from cllm.engine.core.saved_states import SavedStates
from cllm.engine.llama.decoder import measure_states
from cllm.errors import CllmError, ContextError
from tests.conftest import QUIET, running_batch, some_in_fast
from tools import make_model

pytestmark = pytest.mark.anyio

NAMES = ["tiny-llama", "tiny-qwen3", "tiny-swa", "tiny-recurrent", "tiny-hybrid"]
# Of whose sequences no part can be shared.
WHOLE_ONLY = ["tiny-swa", "tiny-recurrent", "tiny-hybrid"]


@pytest.fixture
def anyio_backend() -> str:
    """What a model can do does not depend on the event loop."""
    return "asyncio"


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", NAMES)
async def test_every_architecture_generates_in_company_and_leaves_nothing(
    name: str, file_type: make_model.FileType
) -> None:
    path = make_model.ensure(name, file_type)
    async with Engine(path, n_ctx=1024, n_seq_max=4, n_batch=64, **QUIET) as engine:
        prompts = [f"{'some text ' * n} {n}" for n in range(8)]
        results = await engine.generate_all(prompts, max_tokens=12, seed=3)
        assert all(1 <= r.usage.n_output <= 12 for r in results)
        async with engine.stream("to be cancelled", max_tokens=500, temperature=0) as stream:
            await stream.__anext__()
        assert await engine.audit() == []
        while engine.statistics().n_running:
            await engine.audit()
        assert engine.statistics().n_kv_cells_used == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"kv_unified": False},
        {"n_ctx": 256, "n_batch": 16},
        {"n_ctx": 256, "n_batch": 16, "prefix_cache": False},
        {"n_seq_max": 1, "n_ctx": 256, "n_batch": 8},
        {"flash_attn": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
async def test_every_architecture_stands_pressure_in_every_configuration(
    name: str, options: dict[str, Any]
) -> None:
    """Its bookkeeping is compared with llama.cpp's after every tick."""
    path = make_model.ensure(name, "F16")
    settings = {"n_ctx": 1024, "n_seq_max": 4, "n_batch": 64, **options}
    async with Engine(path, **settings, **QUIET) as engine:
        prompts = [f"{'some text ' * n} {n % 3}" for n in range(9)]
        results = await engine.generate_all(prompts, max_tokens=60, temperature=0)
        assert {r.finish_reason for r in results} <= {FinishReason.LENGTH, FinishReason.STOP}
        statistics = engine.statistics()
        may_share = options.get("prefix_cache", True)
        if name not in WHOLE_ONLY or not may_share:
            assert (statistics.n_kv_cells_cached > 0) == may_share
            assert (statistics.n_cached_tokens > 0) == may_share
        else:
            assert statistics.n_swaps == 0
        assert (await engine.audit(), statistics.n_kv_cells_used) == ([], 0)


async def test_a_sliding_window_shares_the_whole_of_a_turn_and_no_part_of_it() -> None:
    """llama.cpp uses the cells behind a window again: a part of a sequence may be gone."""
    path = make_model.ensure("tiny-swa", "F16")
    async with Engine(path, n_ctx=512, n_seq_max=2, **QUIET) as engine:
        first = await engine.generate("some text " * 4, max_tokens=60, temperature=0)
        turn = [*first.prompt_token_ids, *first.token_ids, 5, 6, 7]
        second = await engine.generate(turn, max_tokens=4, temperature=0)
        assert second.usage.n_cached == len(turn) - 4
        branch = await engine.generate([*turn[:30], 9, 9], max_tokens=4, temperature=0)
        assert branch.usage.n_cached == 0
    async with Engine(path, n_ctx=512, n_seq_max=2, prefix_cache=False, **QUIET) as engine:
        alone = await engine.generate(turn, max_tokens=4, temperature=0)
        assert second.token_ids == alone.token_ids


def random_tokens(rng: random.Random, n_tokens: int) -> list[int]:
    return rng.choices(range(5, 250), k=n_tokens)


def likeliest(completion: Completion) -> NDArray[np.float64]:
    """What the model thinks of the first token of an answer."""
    assert completion.logprobs is not None
    return np.array([each.logprob for each in completion.logprobs[0].top])


async def assert_as_alone(path: Path, asked: list[tuple[list[int], Completion]]) -> None:
    """The answers are those of an engine where nobody shares anything."""
    async with Engine(path, n_ctx=4096, n_seq_max=1, prefix_cache=False, **QUIET) as engine:
        for prompt, answer in asked:
            alone = await engine.generate(prompt, max_tokens=1, temperature=0, logprobs=20)
            np.testing.assert_allclose(likeliest(answer), likeliest(alone), atol=0.05)


@pytest.mark.parametrize(
    # Of two layers: 16 numbers for each of 128, and the last 3 of 128, in floats.
    ("name", "n_states"),
    [("tiny-llama", 0), ("tiny-recurrent", 2), ("tiny-hybrid", 1)],
)
async def test_what_a_state_takes_is_measured(name: str, n_states: int) -> None:
    path = make_model.ensure(name, "F16")
    with Model(path) as model:
        n_bytes, can_roll_back = measure_states(model, EngineConfig(n_threads=1))
    assert not can_roll_back
    assert n_states * 4 * 128 * (16 + 3) <= n_bytes < (n_states or 0.5) * 2 * 4 * 128 * (16 + 3)


LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_unified": True},
    # Copies in host memory: there are no cells to share.
    "per-sequence": {"kv_unified": False},
    "deterministic": {"deterministic": True},
}


def file_of(name: str, layout: str) -> Path:
    """Of whose matrices the products are to the bit where they have to be."""
    return make_model.ensure(name, "Q8_0" if layout == "deterministic" else "F16")


@pytest.fixture
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are put back however long that takes: these models compute a token in no time."""
    monkeypatch.setattr(SavedStates, "restore_s", lambda *_: 0.0)
    monkeypatch.setattr(SavedStates, "copy_s", lambda *_: 0.0)


@pytest.mark.same_process("what is measured is not measured there")
@pytest.mark.usefixtures("restoring")
@pytest.mark.parametrize(("name", "layout"), some_in_fast(product(WHOLE_ONLY, LAYOUTS), 4))
async def test_prompts_share_a_state_or_a_window_up_to_where_they_part(
    name: str, layout: str
) -> None:
    path, rng = file_of(name, layout), random.Random(1)
    head = random_tokens(rng, 400)
    prompts = [head + random_tokens(rng, 5 + 7 * i) for i in range(8)]
    async with Engine(path, n_ctx=8192, n_seq_max=8, **LAYOUTS[layout], **QUIET) as engine:
        answers = await engine.generate_all(prompts, max_tokens=12, temperature=0, logprobs=20)
        n_least = len(head) + sum(len(prompt) - len(head) for prompt in prompts)
        assert engine.statistics().n_prefill_tokens <= n_least + 7 * MIN_GAIN
        assert await engine.audit() == []
    await assert_as_alone(path, list(zip(prompts, answers, strict=True)))


@pytest.mark.same_process("what is measured is not measured there")
@pytest.mark.usefixtures("restoring")
@pytest.mark.parametrize(("name", "layout"), some_in_fast(product(WHOLE_ONLY, LAYOUTS), 4))
async def test_each_turn_of_a_chat_goes_on_from_the_prompt_before_it(
    name: str, layout: str
) -> None:
    """Its template leaves out what the model has thought, and so the end of each sequence."""
    path, rng = file_of(name, layout), random.Random(2)
    chat, asked = random_tokens(rng, 300), list[tuple[list[int], Completion]]()
    async with Engine(path, n_ctx=4096, n_seq_max=2, **LAYOUTS[layout], **QUIET) as engine:
        for _ in range(10):
            chat += random_tokens(rng, 40)
            prompt = [*chat, 7, 8, 9]
            answer = await engine.generate(prompt, max_tokens=20, temperature=0, logprobs=20)
            asked.append((prompt, answer))
            chat += [7, 8, *random_tokens(rng, 20)]
        n_cached = [answer.usage.n_cached for _, answer in asked]
        assert n_cached == [0] + [len(prompt) - TAIL for prompt, _ in asked[:-1]]
        assert await engine.audit() == []
    await assert_as_alone(path, asked)


@pytest.mark.parametrize("name", NAMES)
async def test_a_cancelled_decode_is_mended_in_every_architecture(name: str) -> None:
    """An abort leaves part of a batch behind; recurrent memory cannot give up a part of it."""
    path = make_model.ensure(name, "F16")
    async with Engine(
        path, n_ctx=8192, n_seq_max=2, n_batch=8192, n_ubatch=32, kv_unified=True, **QUIET
    ) as engine:
        alone = await engine.generate("some text", max_tokens=12, temperature=0)
        for _ in range(3):
            long = engine.stream([5] * 8000, request_id="long", temperature=0)
            await long.__aenter__()
            with anyio.fail_after(30):
                while "long" not in running_batch(engine):
                    await anyio.sleep(0)
            await long.cancel()
            assert (await long.completion()).finish_reason is FinishReason.CANCELLED
        await engine.reset_prefix_cache()
        again = await engine.generate("some text", max_tokens=12, temperature=0)
        assert again.token_ids == alone.token_ids
        assert await engine.audit() == []


@pytest.mark.parametrize("name", ["tiny-encoder", "tiny-t5-encoder"])
async def test_an_encoder_is_refused_with_a_clear_error(name: str) -> None:
    with pytest.raises(ContextError, match="cannot generate text"):
        async with Engine(make_model.ensure(name, "F16"), n_ctx=256, **QUIET):
            raise AssertionError("it loaded")
    assert issubclass(ContextError, CllmError)
