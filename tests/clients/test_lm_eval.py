"""lm-eval computes over HTTP what `Engine.score` and `Engine.generate` compute."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine
from tests.clients.conftest import served
from tests.clients.lm_eval_run import CHOICES, N_TOKENS, QUESTIONS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is in an environment of its own: make test-clients",
    ),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop: the requests come from another process."""
    return "asyncio"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(lambda: Engine(n_ctx=1024, deterministic=True)) as address:
        yield address


def answers_of(model: str, url: str, folder: Path) -> dict[str, list[Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.clients.lm_eval_run"]
    done = subprocess.run(
        [*command, model, url, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", ["gguf", "local-completions"])
async def test_lm_eval_finds_what_the_engine_computes(url: str, tmp_path: Path, model: str) -> None:
    found = answers_of(model, url, tmp_path)
    async with Engine(n_ctx=1024, deterministic=True) as engine:

        async def prompt(text: str) -> list[int]:
            # lm-eval's gguf sends text; local-completions sends the ids of /tokenize.
            return await engine.tokenize(text, add_special=model == "gguf")

        for question, choices, texts in zip(
            QUESTIONS, found["choices"], found["texts"], strict=True
        ):
            context = await prompt(question)
            for choice, (logprob, is_greedy) in zip(CHOICES, choices, strict=True):
                # It writes a space before an answer.
                whole = await prompt(f"{question} {choice}")
                score = await engine.score(context, whole[len(context) :])
                assert logprob == pytest.approx(score.total, abs=1e-4)
                best = await engine.generate(
                    context, max_tokens=len(score.logprobs), temperature=0, ignore_eos=True
                )
                assert is_greedy == (best.token_ids == tuple(whole[len(context) :]))
            n = 16 if model == "gguf" else N_TOKENS  # gguf leaves the number to the server
            answer = await engine.generate(context, max_tokens=n, temperature=0, stop=["\n"])
            assert texts[0].strip() == answer.text.strip()
