"""Comparison of the answer of a request in a batch with its answer alone."""

from __future__ import annotations

from collections.abc import Sequence

from cllm import Completion
from cllm.engine.output import TokenLogprob

# Largest difference of log probabilities: f16 products round differently in batches of other sizes.
LOGPROB_NOISE = 0.05


def unlike(answer: Completion, alone: Completion) -> str:
    """Return how a complete answer differs in tokens, text, end or log probabilities; "" if it does not."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        given, expected = getattr(answer, name), getattr(alone, name)
        if given != expected:
            return f"{name} {given!r}, alone {expected!r}"
    return _unlike_scores(answer, alone, is_whole=True)


def unlike_beginning(answer: Completion, alone: Completion) -> str:
    """Return how an incomplete answer differs from the beginning of the complete one; "" if it does not."""
    for name in ("token_ids", "text"):
        given, expected = getattr(answer, name), getattr(alone, name)
        if given != expected[: len(given)]:
            return f"{name} {given!r} before its end, alone {expected!r}"
    if answer.logprobs is not None and len(answer.logprobs) != len(answer.token_ids):
        return f"{len(answer.logprobs)} log probabilities of {len(answer.token_ids)} tokens"
    return _unlike_scores(answer, alone, is_whole=False)


def _unlike_scores(answer: Completion, alone: Completion, *, is_whole: bool) -> str:
    for name in ("logprobs", "prompt_logprobs"):
        given: Sequence[TokenLogprob | None] = getattr(answer, name) or ()
        expected: Sequence[TokenLogprob | None] = getattr(alone, name) or ()
        if len(given) != len(expected) if is_whole else len(given) > len(expected):
            return f"{len(given)} {name}, alone {len(expected)}"
        for position, (one, other) in enumerate(zip(given, expected, strict=False)):
            if not _is_near(one, other):
                return f"{name} at {position}: {one}, alone {other}"
    return ""


def _is_near(one: TokenLogprob | None, other: TokenLogprob | None) -> bool:
    if one is None or other is None:
        return one is other
    distance = abs(one.logprob - other.logprob)
    return (one.token_id, one.text) == (other.token_id, other.text) and distance <= LOGPROB_NOISE
