"""assert_reproducible: finds what depends on more than the request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cllm import Engine
from cllm.testing import FakeEngine, assert_reproducible
from tests.conftest import QUIET

pytestmark = pytest.mark.anyio

PROMPTS: list[str | list[int]] = [
    "12+30=",
    "count:5..19",
    "count:5..9",
    "repeat:abc",
    "A",
    "note:abc\n12+30=",
    [256, 65],
]
TIGHT: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 3, "n_batch": 16, "stream_buffer": 1}


async def test_a_deterministic_engine_is_reproducible(anyio_backend: str) -> None:
    async with Engine(deterministic=True, **TIGHT, **QUIET) as engine:
        alone = await assert_reproducible(
            engine, PROMPTS, max_tokens=30, temperature=0.8, seed=4, ignore_eos=True
        )
        assert engine.statistics().n_preemptions > 0
    assert [len(completion.token_ids) for completion in alone] == [30] * len(PROMPTS)
    assert all(completion.logprobs is not None for completion in alone)


async def test_another_answer_in_company_is_found(anyio_backend: str) -> None:
    answers = itertools.chain(["abc", "abd"], itertools.repeat("abc"))
    async with FakeEngine(lambda prompt: next(answers)) as engine:
        with pytest.raises(AssertionError, match=r"round 0, prompt \d .*: token 2 "):
            await assert_reproducible(engine, ["a", "b"], temperature=0.0, n_rounds=20)


async def test_drawing_without_a_seed_is_refused(anyio_backend: str) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(ValueError, match="seed"):
            await assert_reproducible(engine, ["a"], temperature=0.5)
