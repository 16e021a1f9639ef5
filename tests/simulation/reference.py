"""The expected outcome of a request, computed alone, without cache, batch, chunks or pieces.

The simulator compares every answer of an engine's core with it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from cllm.engine.constraint import Mask
from cllm.engine.lora import NO_LORA, LoraUse
from cllm.engine.output import FinishReason
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import Answer, seen_token
from cllm.testing.fake_engine import AskedSampler
from cllm.testing.fake_vocabulary import FakeVocabulary

VOCABULARY = FakeVocabulary()
END = FakeVocabulary.END
COMPLETED = {FinishReason.STOP, FinishReason.LENGTH}
GREEDY = SamplingParams(temperature=0)

# Letters, parts of UTF-8 characters, and sometimes an end: answers end in every possible way.
ALPHABET: tuple[int, ...] = (*b"aaabbbc", *"é€".encode(), 0xFF, END)


def babble(prefix: Sequence[int]) -> int:
    """Return a token that depends on every token before it."""
    return ALPHABET[zlib.crc32(array("i", prefix)) % len(ALPHABET)]


def endless(prefix: Sequence[int]) -> int:
    """Return a letter that depends on every token before it; never an end."""
    return ord("a") + zlib.crc32(array("i", prefix)) % 26


def says(text: bytes, *, n_prompt: int) -> Answer:
    """Return an `Answer`: the bytes of a text, then the end, after any prompt of `n_prompt` tokens."""
    return lambda prefix: (*text, END)[len(prefix) - n_prompt]


class CountingSampler(AskedSampler):
    """A sampler with a state: choice number n, counted from 0, is n letters after the best token."""

    def __init__(self) -> None:
        self.n_chosen = 0
        self.n_closed = 0

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        return shifted(int(scan.row.argmax()), self.n_chosen)

    def accept(self, token: int) -> None:
        self.n_chosen += 1

    def close(self) -> None:
        self.n_closed += 1


def shifted(token: int, n: int) -> int:
    """Return the byte that is n after a token, modulo 256; `END` is returned unchanged."""
    return token if token == END else (token + n) % 256


class Outcome(NamedTuple):
    """Tokens, text and reasons with which a request ends."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop_reason: str | int | None


@lru_cache(10_000)
def alone(
    prompt: tuple[int, ...],
    params: SamplingParams,
    n_ctx_seq: int,
    answer: Answer,
    lora: LoraUse = NO_LORA,
) -> Outcome:
    """Return the outcome of a request alone, computed without cache, batch, chunks or pieces."""
    tokens, n_prompt, said, text = list(prompt), len(prompt), b"", ""
    while True:
        token = answer([seen_token(token, lora.at(i)) for i, token in enumerate(tokens)])
        if not params.is_greedy:
            token = shifted(token, len(tokens) - n_prompt)
        tokens.append(token)
        output = tuple(tokens[n_prompt:])
        if token == END or token in params.stop_token_ids:
            return Outcome(output, text, FinishReason.STOP, token)
        said += VOCABULARY.piece(token)
        text = said.decode(errors="replace")
        matches = [(text.index(stop), stop) for stop in params.stop if stop in text]
        if matches:
            start, stop = min(matches)
            return Outcome(output, text[:start], FinishReason.STOP, stop)
        if len(output) == params.max_tokens:
            return Outcome(output, text, FinishReason.LENGTH, "max_tokens")
        if len(tokens) > n_ctx_seq:
            return Outcome(output, text, FinishReason.LENGTH, "context")
