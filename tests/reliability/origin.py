"""Helpers for tests of isolation: questions with answers, checks of an idle engine, starts of requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cllm import Completion, Engine, FinishReason, SamplingOptions
from cllm.bindings import Batch, Context
from cllm.bindings.context import Logits

GREEDY: SamplingOptions = {"temperature": 0.0}


def counting(first: int, last: int) -> tuple[str, str]:
    """Return a question and its answer of many tokens."""
    return f"count:{first}..{last}", " ".join(str(n) for n in range(first, last + 1))


MIXED = [
    ("1+1=", "2"), ("37+58=", "95"), ("99+99=", "198"), counting(1, 40), ("repeat:你好🙂", "你好🙂"),
]  # fmt: skip


def check(completions: Sequence[Completion], expected: Sequence[str]) -> None:
    """Check that every text is right and every request stopped by itself."""
    assert [c.text for c in completions] == list(expected)
    assert {c.finish_reason for c in completions} == {FinishReason.STOP}


async def assert_idle_and_clean(engine: Engine) -> None:
    """Check that the bookkeeping agrees with llama.cpp, and that no cell, seq_id or request is left."""
    assert await engine.audit() == []
    statistics = engine.statistics()
    assert (statistics.n_kv_cells_used, statistics.n_seq_ids_used) == (0, 0)
    assert (statistics.n_waiting, statistics.n_running) == (0, 0)


async def cancel_one(engine: Engine, prompt: str) -> Completion:
    """Cancel a request after its first token, and return its completion."""
    async with engine.stream(prompt, **GREEDY) as stream:
        await stream.__anext__()
        await stream.cancel()
        return await stream.completion()


def starts_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets `(seq_id, p0)` of the first chunk of each request, in order of decoding."""
    found: list[tuple[int, int]] = []
    known: set[tuple[int, int]] = set()
    decode = Context.decode

    def listen(context: Context, batch: Batch) -> Logits:
        for run in batch.runs:
            if (run.seq_id, run.p0) not in known:
                found.append((run.seq_id, run.p0))
            known.discard((run.seq_id, run.p0))
            known.add((run.seq_id, run.p1))
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", listen)
    return found
