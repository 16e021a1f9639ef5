"""Memory that forgets gives up the rows of wrong drafts, and goes on as if there had been none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cllm import Completion, Engine, SamplingParams
from cllm.bindings import Batch, Context, Model, quantize
from tests.conftest import QUIET, some_in_fast
from tests.simulation.oracle_drafter import OracleDrafter, OracleEngine, known_answers
from tools import architecture_models

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.one_loop,
    pytest.mark.same_process("drafts of the test are not made there"),
    pytest.mark.usefixtures("free_rows"),
]

# With states of recurrent layers, and with sliding windows of 32 positions.
ARCHITECTURES = (
    "qwen35", "deepseek4", "nemotron_h", "lfm2", "kimi-k3", "qwen35moe", "qwen4exp", "glm5-next",
    "nemotron_h_moe", "lfm2moe", "bailingmoe3", "gemma3", "gpt-oss", "cohere2", "muse-glimmer",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "unified": {"kv_unified": True},
    "per-sequence": {"kv_unified": False},
}
MAX_DIFFERENCE = 1e-2
CASES = [(name, layout) for layout in LAYOUTS for name in ARCHITECTURES]


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: the decoder does not depend on it."""
    return "asyncio"


def random_tokens(choose: random.Random, n: int) -> list[int]:
    return choose.choices(range(1, 127), k=n)


async def assert_as_scored(path: Path, asked: list[tuple[list[int], Completion]]) -> None:
    """Each token is as likely as it is to an engine that computes the whole text at once."""
    async with Engine(path, n_ctx=2048, n_seq_max=1, prefix_cache=False, **QUIET) as engine:
        for prompt, answer in asked:
            assert answer.logprobs is not None
            score = await engine.score(prompt, answer.token_ids)
            found = [each.logprob for each in answer.logprobs]
            assert found == pytest.approx(score.logprobs, abs=MAX_DIFFERENCE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_streams", [1, 3])
@pytest.mark.parametrize(("name", "layout"), some_in_fast(CASES, len(ARCHITECTURES)))
async def test_drafts_change_no_token(name: str, layout: str, n_streams: int) -> None:
    (path,) = architecture_models.ensure(name)
    choose = random.Random(3)
    options: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 4, **LAYOUTS[layout], **QUIET}
    prompts = [random_tokens(choose, 40 + 7 * i) for i in range(n_streams)]
    params = SamplingParams(max_tokens=50, temperature=0, logprobs=1, ignore_eos=True)
    async with Engine(path, **options) as engine:
        alone = [await engine.generate(prompt, params) for prompt in prompts]
    drafter = OracleDrafter(known_answers(alone), 0.6)
    async with OracleEngine(path, drafter=drafter, **options) as engine:
        answers = await engine.generate_all(prompts, params)
        asked = list(zip(prompts, answers, strict=True))
        # The last rows of these are drafts, which are removed before the prefix is kept.
        for prompt, answer in zip(prompts, answers, strict=True):
            stops = replace(params, stop_token_ids=(answer.token_ids[30],))
            cut = await engine.generate(prompt, stops)
            turn = [*prompt, *cut.token_ids, *random_tokens(choose, 3)]
            asked += [(prompt, cut), (turn, await engine.generate(turn, params))]
            assert asked[-1][1].usage.n_cached >= len(prompt) + len(cut.token_ids) - 1
        async with engine.stream(prompts[0], params) as stream:
            for _ in range(20):
                await stream.__anext__()
            (fork,) = stream.fork(1)
            asked.append((prompts[0], await fork.completion()))
            asked.append((prompts[0], await stream.completion()))
        statistics = engine.statistics()
        assert await engine.audit() == []
    assert 0 < statistics.n_accepted_tokens < statistics.n_drafted_tokens
    assert statistics.n_rebuilds == 0
    await assert_as_scored(path, asked)


@pytest.mark.parametrize("name", some_in_fast(["qwen35", "lfm2", "nemotron_h", "kimi-k3"], 4))
async def test_with_deterministic_drafts_of_a_hybrid_model_change_no_bit(
    name: str, tmp_path: Path
) -> None:
    (source,) = architecture_models.ensure(name)
    path, choose = tmp_path / "model.gguf", random.Random(3)
    quantize(source, path, "Q8_0")
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 4, "deterministic": True, **QUIET}
    prompts = [random_tokens(choose, 40 + 7 * i) for i in range(3)]
    params = SamplingParams(max_tokens=40, temperature=0, logprobs=1, ignore_eos=True)
    async with Engine(path, **options) as engine:
        alone = [await engine.generate(prompt, params) for prompt in prompts]
    drafter = OracleDrafter(known_answers(alone), 0.6)
    async with OracleEngine(path, drafter=drafter, **options) as engine:
        together = await engine.generate_all(prompts, params)
        assert engine.statistics().n_accepted_tokens > 0
    for found, expected in zip(together, alone, strict=True):
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs


@pytest.fixture
def hybrid() -> Iterator[Context]:
    """A context of a hybrid model that can give up rows."""
    (path,) = architecture_models.ensure("qwen35")
    options: dict[str, Any] = {"n_ctx": 512, "n_batch": 64, "n_seq_max": 4, "n_outputs_max": 16}
    with Model(path) as model, Context(model, n_rs_seq=4, n_threads=1, **options) as context:
        yield context


def decoded(context: Context, seq_id: int, tokens: list[int], p0: int) -> NDArray[np.float32]:
    """Logits of the last row."""
    batch = Batch(64)
    batch.add(seq_id, tokens, p0, n_outputs=1)
    return np.array(context.decode(batch).rows[-1], np.float32)


@pytest.mark.parametrize("no_op", [False, True], ids=["", "after a removal of nothing"])
def test_a_copy_of_a_sequence_that_was_cut_has_its_state_to_the_bit(
    hybrid: Context, no_op: bool
) -> None:
    prompt, drafts = random_tokens(random.Random(5), 30), random_tokens(random.Random(6), 4)
    rows = []
    for is_copied in (False, True):
        decoded(hybrid, 0, prompt, 0)
        decoded(hybrid, 0, drafts, 30)
        assert hybrid.seq_rm(0, 32)
        if no_op:
            assert hybrid.seq_rm(0, 40)
        if is_copied:
            hybrid.seq_cp(0, 1)
            assert hybrid.seq_rm(0)
        rows.append(decoded(hybrid, int(is_copied), [7], 32))
        for seq_id in (0, 1):
            hybrid.seq_rm(seq_id)
    assert np.array_equal(rows[0], rows[1])


def test_rows_that_llama_cpp_would_give_up_wrongly_are_not_given_up(hybrid: Context) -> None:
    tokens = random_tokens(random.Random(5), 9)
    decoded(hybrid, 0, tokens, 0)
    decoded(hybrid, 1, tokens, 0)
    assert not hybrid.seq_rm(0, 8)  # another decode has been since
    assert hybrid.seq_rm(1, 7)
    assert not hybrid.seq_rm(1, 6)  # it has been cut already
    assert not hybrid.seq_rm(0, 0, 3)
    assert [hybrid.seq_pos_max(seq_id) for seq_id in (0, 1)] == [8, 6]
