"""slow_readers on the embedded model: who stops, until when, and that nobody else suffers for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import pytest

from cllm import Engine, FinishReason, SamplingOptions
from cllm.errors import InvalidArgumentError
from cllm.testing.load import oracle, slow_readers
from cllm.testing.records import assert_books_agree, assert_isolated
from tests.conftest import QUIET, submitted_together
from tests.testing.callers import diary_of_callers

pytestmark = pytest.mark.anyio

GREEDY: SamplingOptions = {"temperature": 0.0}


@pytest.mark.parametrize("n_deltas", [0, 2])
@pytest.mark.parametrize("share", [0.25, 0.75])
async def test_slow_readers_read_on_when_all_others_have_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, share: float, n_deltas: int
) -> None:
    """All run at once; the slow ones read so many deltas, and no more before that."""
    prompts = [f"count:{n}..{n + 9}" for n in range(8)]
    n_quick = len(prompts) - round(share * len(prompts))
    diary = diary_of_callers(monkeypatch)
    with submitted_together(engine, len(prompts)):
        records = await slow_readers(engine, prompts, share=share, n_deltas=n_deltas, **GREEDY)
    ended = [request_id for what, request_id in diary if what == "leave"]
    before = diary[: diary.index(("leave", ended[n_quick - 1]))]
    slow = {r.request_id for r in records} - set(ended[:n_quick])
    n_read = Counter(request_id for what, request_id in before if what == "read")
    assert {n_read[request_id] for request_id in slow} == {n_deltas}
    assert {("enter", request_id) for request_id in slow} <= set(before)
    assert {r.finish_reason for r in records} == {FinishReason.STOP}


@pytest.mark.parametrize("share", [0.75, 1.0])
async def test_more_slow_readers_than_sequences_hold_nobody_up_and_miss_nothing(
    anyio_backend: str, share: float
) -> None:
    """They are preempted: else those that wait could not begin, and nobody would ever read on."""
    prompts = [f"count:{n}..{n + 9}" for n in range(8)]
    async with Engine(n_ctx=1024, n_seq_max=2, stream_buffer=2, **QUIET) as engine:
        alone = await oracle(engine, prompts, **GREEDY)
        assert min(map(len, alone.values())) > 2 + 2 + 1  # all are paused
        with anyio.fail_after(30):
            records = await slow_readers(engine, prompts, share=share, **GREEDY)
        assert_isolated(records, alone)
        assert {r.finish_reason for r in records} == {FinishReason.STOP}
        assert engine.statistics().n_preemptions >= round(share * 8) - 2
        await assert_books_agree(engine, n_requests=16)


async def test_readers_that_are_all_slow_read_on_when_all_have_stopped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"count:{n}..{n + 9}" for n in range(8)]
    diary = diary_of_callers(monkeypatch)
    with submitted_together(engine, len(prompts)):
        records = await slow_readers(engine, prompts, share=1.0, n_deltas=2, **GREEDY)
    reads = [request_id for what, request_id in diary if what == "read"]
    assert Counter(reads[:16]) == {r.request_id: 2 for r in records}
    assert {r.finish_reason for r in records} == {FinishReason.STOP}


async def test_a_slow_reader_that_ends_first_holds_nobody_up(engine: Engine) -> None:
    """Refused, or with fewer deltas than it would have read before it stopped."""
    prompts = ["1+1=", "x" * 9000, "count:1..30"]
    with anyio.fail_after(30):
        records = await slow_readers(engine, prompts, share=1.0, n_deltas=10, **GREEDY)
    assert [r.finish_reason for r in records] == ["stop", None, "stop"]


async def test_what_no_slow_reader_can_do_is_refused(engine: Engine) -> None:
    wrong: list[dict[str, Any]] = [{"n_deltas": -1}, {"n_deltas": 1.5}, {"share": 1.1}]
    for options in wrong:
        with pytest.raises(InvalidArgumentError, match=next(iter(options))):
            await slow_readers(engine, ["1+1="], **options, **GREEDY)
