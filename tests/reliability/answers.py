"""What an answer in a batch owes to the one that the same request gives alone."""

from __future__ import annotations

from collections.abc import Sequence

from cllm import Completion
from cllm.engine.output import TokenLogprob

# A row's numbers depend a little on those beside it, as products of f16 do.
LOGPROB_NOISE = 0.05


def unlike(answer: Completion, alone: Completion) -> str:
    """How a whole answer differs: in its tokens, text, end or log probabilities; nothing if it does not."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        given, expected = getattr(answer, name), getattr(alone, name)
        if given != expected:
            return f"{name} {given!r}, alone {expected!r}"
    return _unlike_scores(answer, alone, is_whole=True)


def unlike_beginning(answer: Completion, alone: Completion) -> str:
    """How what there is of an answer differs from as much of the whole one."""
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
