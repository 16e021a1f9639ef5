"""Adapters on SmolLM2: eight requests with three sets at once, each what it is alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from cllm import Completion, Engine
from tests.lora_files import make_lora
from tools.real_model import MODEL

pytestmark = [
    pytest.mark.real,
    pytest.mark.anyio,
    pytest.mark.skipif(not MODEL.is_file(), reason="not in the cache: make test-real fetches it"),
]

OPTIONS: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 8, "deterministic": True}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
SETS: list[Mapping[str, float]] = [{}, {"a": 1.0}, {"a": 0.5, "b": 0.5}]
QUESTIONS = ["What is the capital of France?", "Name three colours.", "What do bees make?"]


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: both are tested without the model."""
    return "asyncio"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory, model = tmp_path_factory.mktemp("loras"), MODEL
    return {
        name: make_lora(directory / f"{name}.gguf", model, seed=seed, rank=8, strength=0.05)
        for seed, name in enumerate("ab")
    }


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]


async def test_eight_requests_with_three_sets_at_once_get_each_what_it_gets_alone(
    adapters: dict[str, Path],
) -> None:
    uses = [SETS[number // len(QUESTIONS)] for number in range(8)]
    settings = [(name, path, 0.0) for name, path in adapters.items()]
    async with Engine(MODEL, lora=settings, **OPTIONS) as engine:
        expected = []
        for number, lora in enumerate(uses):
            await engine.reset_prefix_cache()
            expected.append(await engine.chat(chat(number), lora=lora, **GREEDY))
        assert len({completion.text for completion in expected}) >= 6
        for _ in range(2):  # the second time, with what the first has left
            found: list[Completion] = [expected[0]] * len(uses)

            async def ask(number: int, into: list[Completion] = found) -> None:
                into[number] = await engine.chat(chat(number), lora=uses[number], **GREEDY)

            async with anyio.create_task_group() as tasks:
                for number in range(len(uses)):
                    tasks.start_soon(ask, number)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert await engine.audit() == []


async def test_an_activated_adapter_begins_with_the_answer_and_shares_the_question(
    tmp_path: Path,
) -> None:
    async with Engine(MODEL, n_ctx=2048) as engine:
        invocation = await engine.tokenize("<|im_start|>assistant\n", parse_special=True)
        path = make_lora(
            tmp_path / "answers.gguf", MODEL, seed=5, rank=8, strength=0.05,
            invocation_tokens=invocation,
        )  # fmt: skip
        await engine.load_lora("answers", path)
        plain = await engine.chat(chat(0), **GREEDY)
        answer = await engine.chat(chat(0), lora={"answers": 1.0}, **GREEDY)
        rendered = await engine.render_chat(chat(0))
        assert answer.usage.n_cached == len(rendered.token_ids) - len(invocation)
        assert answer.text != plain.text


async def test_with_an_adapter_answers_are_the_same_from_the_prefix_cache(tmp_path: Path) -> None:
    path = make_lora(tmp_path / "lora.gguf", MODEL, seed=1, strength=0.05)
    options: dict[str, Any] = {"n_ctx": 4096, "n_seq_max": 2, "deterministic": True}
    async with Engine(MODEL, lora=[(str(path), 1.0)], **options) as engine:
        for prompt in (
            "The capital of France is",
            "Once upon a time there was a small",
            "1, 2, 3,",
        ):
            ask: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 1}
            first = await engine.generate(prompt, **ask)
            again = await engine.generate(prompt, **ask)
            assert again.usage.n_cached
            assert first.logprobs == again.logprobs
