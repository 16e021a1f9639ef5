"""Requests of a soak, and their expected answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm import Completion, Engine, Image, SamplingParams
from cllm.testing.records import PromptKey

GREEDY: dict[str, Any] = {"temperature": 0.0}
# Each prompt and its answer have at most 150 tokens together, so each fits the smallest cache alone.
PROMPTS = [
    *(f"{n}+{97 - n}=" for n in range(10, 30)),
    *(f"count:{n}..{n + 20}" for n in range(0, 120, 10)),
    *(f"repeat:{text}" for text in ("你好🙂", "Hello, world", "naïve", "a.b.c")),
    *(f"reverse:{word}" for word in ("streams", "token", "batch")),
]
LONG = [prompt for prompt in PROMPTS if prompt.startswith("count:")]
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[0-9]{1,4}"},
    {"grammar": "root ::= [0-9]+"},
    {"json_schema": {"type": "integer", "minimum": 0, "maximum": 500}},
]
CONSTRAINED = [
    (prompt, SamplingParams(temperature=0.0, max_tokens=12, **constraint))
    for constraint in CONSTRAINTS
    for prompt in PROMPTS[:4]
]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[::6]]
SCORED = [("37+58=", "95"), ("37+58=", "17"), ("count:1..", "9"), ("repeat:abc", "abc")]


TEXTS = [f"{prompt} and more " * (1 + i % 9) for i, prompt in enumerate(PROMPTS)]


N_IMAGES = 4
# Random weights say nothing about an image: only the probabilities of the first token are compared.
FIRST_TOKEN: dict[str, Any] = {**GREEDY, "max_tokens": 1, "logprobs": 2, "ignore_eos": True}


def about_image(seed: int) -> list[int | str | Image]:
    """Return a prompt with an image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    return ["look: ", Image(pixels), "1+1="]


def by_rule(prompt: str) -> str:
    """Return the answer to a prompt that the embedded model was trained to give."""
    if prompt.endswith("="):
        return str(sum(map(int, prompt[:-1].split("+"))))
    task, given = prompt.split(":", 1)
    if task == "count":
        first, last = map(int, given.split(".."))
        return " ".join(map(str, range(first, last + 1)))
    return given if task == "repeat" else given[::-1]


@dataclass
class Answers:
    """Expected results: those of each request alone."""

    plain: dict[PromptKey, tuple[int, ...]]
    constrained: list[tuple[int, ...]]
    chats: list[str]
    scores: list[float]
    logprobs: dict[str, tuple[float, ...]]
    vectors: dict[str, NDArray[np.float32]]
    images: list[tuple[float, ...]]

    @classmethod
    async def of(cls, engine: Engine) -> Answers:
        """Make each request once, alone; raise `AssertionError` if an answer is not that of `by_rule`."""
        alone = {prompt: await engine.generate(prompt, **GREEDY) for prompt in PROMPTS}
        for prompt, completion in alone.items():
            assert completion.text == by_rule(prompt), (prompt, completion.text)
        return cls(
            plain={prompt: completion.token_ids for prompt, completion in alone.items()},
            constrained=[(await engine.generate(*asked)).token_ids for asked in CONSTRAINED],
            chats=[(await engine.chat(messages, **GREEDY)).text for messages in CHATS],
            scores=[(await engine.score(*asked)).total for asked in SCORED],
            vectors={text: (await engine.embed([text]))[0] for text in TEXTS},
            images=[
                logprobs_of(await engine.generate(about_image(seed), **FIRST_TOKEN))
                for seed in range(N_IMAGES)
            ],
            logprobs={
                prompt: logprobs_of(await engine.generate(prompt, logprobs=2, **GREEDY))
                for prompt in PROMPTS[::5]
            },
        )


def logprobs_of(completion: Completion) -> tuple[float, ...]:
    """Return the log probabilities of the sampled tokens."""
    return tuple(token.logprob for token in completion.logprobs or ())
