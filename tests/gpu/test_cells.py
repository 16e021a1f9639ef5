"""KV cells on GPUs: shared, preempted, suspended, forked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cllm import Engine, SavedGeneration
from cllm.bindings import Device
from tests.gpu.answers import ANSWERS, GREEDY, OPTIONS, SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


# --- What an engine does with KV cells -----------------------------------------------------------
async def test_prefixes_are_shared(gpus: Sequence[Device]) -> None:
    note = "note:" + "It was a bright cold day in April. " * 8 + "\n"
    async with Engine(**OPTIONS) as engine:
        for prompt, answer in ANSWERS.items():
            completion = await engine.generate(note + prompt, **GREEDY)
            assert completion.text == answer
        assert completion.usage.n_cached > 200
        assert await engine.audit() == []


@pytest.mark.parametrize("prefix_cache_bytes", [1 << 24, 0])
async def test_under_pressure_requests_are_preempted_and_right(
    gpus: Sequence[Device], prefix_cache_bytes: int
) -> None:
    asked = [f"count:{first}..{first + 29}" for first in range(100, 900, 100)]
    async with Engine(
        n_ctx=512, n_seq_max=8, prefix_cache_bytes=prefix_cache_bytes, **SMALL
    ) as engine:
        for completion, prompt in zip(
            await engine.generate_all(asked, temperature=0, max_tokens=200), asked, strict=True
        ):
            first, last = map(int, prompt.removeprefix("count:").split(".."))
            assert completion.text == " ".join(map(str, range(first, last + 1)))
        assert engine.statistics().n_preemptions > 0
        assert await engine.audit() == []


async def test_a_stream_is_suspended_saved_and_resumed(
    gpus: Sequence[Device], tmp_path: Path
) -> None:
    async with Engine(**OPTIONS, stream_buffer=2) as engine:
        async with engine.stream("count:1..30", temperature=0, max_tokens=200) as stream:
            first = await anext(stream)
            saved = await stream.suspend()
        saved.save(tmp_path / "a.state")
        again = SavedGeneration.load(tmp_path / "a.state")
        async with engine.resume(again) as stream:
            completion = await stream.completion()
        assert completion.text == " ".join(map(str, range(1, 31)))
        assert completion.text.startswith(first.text)
        assert await engine.audit() == []


async def test_a_stream_forks(gpus: Sequence[Device]) -> None:
    async with Engine(**OPTIONS, stream_buffer=2) as engine:
        async with engine.stream("count:1..20", temperature=0, max_tokens=200) as stream:
            await anext(stream)
            for fork in [*stream.fork(2), stream]:
                async with fork:
                    completion = await fork.completion()
                assert completion.text == " ".join(map(str, range(1, 21)))
        assert await engine.audit() == []
