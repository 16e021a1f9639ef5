"""Each assertion about records holds for good ones and names what is wrong with the others."""

from __future__ import annotations

import dataclasses
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from cllm import FinishReason, QueueFullError, Timings, Usage
from cllm.errors import InvalidArgumentError
from cllm.testing.records import (
    N_FOR_DRIFT,
    PromptKey,
    Records,
    RequestRecord,
    assert_as_alone,
    assert_isolated,
    assert_no_drift,
)

ORACLE: dict[PromptKey, tuple[int, ...]] = {"a": (1, 2, 3, 9), "b": (4, 9)}
REFUSED = QueueFullError(3, 1.0)


def record(number: int = 0, **changes: Any) -> RequestRecord:
    """A good request: prompt "a", four tokens, ten milliseconds each."""
    timings = Timings(0.0, 0.01, 0.03, 0.01, 0.04, 0.01, 0.01, 0)
    made = RequestRecord(
        prompt="a",
        request_id=f"id-{number}",
        token_ids=ORACLE["a"],
        text="abc",
        max_tokens=None,
        finish_reason=FinishReason.STOP,
        stop_reason=9,
        error=None,
        usage=Usage(5, 1, 4),
        timings=timings,
        started_s=float(number),
        first_token_s=number + 0.01,
        finished_s=number + 0.04,
        n_deltas=4,
    )
    return replace(made, **changes)


def refused(number: int = 0) -> RequestRecord:
    """A request that did not run."""
    return record(
        number,
        token_ids=(),
        finish_reason=None,
        error=REFUSED,
        usage=None,
        timings=None,
        first_token_s=None,
    )


# --- Summaries ------------------------------------------------------------------------------------
def test_a_summary_can_be_copied_and_sent_to_another_process() -> None:
    summary = Records([record(0), record(1)]).summary()
    assert pickle.loads(pickle.dumps(summary)) == summary
    assert dataclasses.asdict(summary)["n_finished"] == summary.n_finished


def test_a_summary_counts_and_measures_what_ran() -> None:
    cancelled = record(2, finish_reason=FinishReason.CANCELLED, token_ids=(1,), first_token_s=2.03)
    summary = Records([record(0), record(1), cancelled, refused(9)]).summary()
    assert (summary.n_requests, summary.n_refused, summary.n_errors) == (4, 1, 0)
    assert (summary.n_finished[FinishReason.STOP], sum(summary.n_finished.values())) == (2, 3)
    assert summary.n_output_tokens == 9
    assert summary.seconds == pytest.approx(9.04)
    assert summary.tokens_per_s == pytest.approx(9 / 9.04)
    assert summary.ttft_p50_s == pytest.approx(0.01)
    assert summary.ttft_p99_s == pytest.approx(0.03)
    assert summary.total_p99_s == pytest.approx(0.04)
    assert (summary.itl_p50_s, summary.itl_max_p99_s) == (0.01, 0.01)
    assert summary.cached_share == pytest.approx(0.2)


def test_percentiles_are_by_nearest_rank() -> None:
    records = [record(n, first_token_s=n + n / 1000) for n in range(1, 201)]
    summary = Records(records).summary()
    assert summary.ttft_p50_s == pytest.approx(0.100)
    assert summary.ttft_p99_s == pytest.approx(0.198)


def test_nothing_has_a_summary_too() -> None:
    summary = Records([]).summary()
    assert (summary.n_requests, summary.tokens_per_s, summary.ttft_p50_s) == (0, 0.0, None)
    assert str(summary).splitlines()[0].split() == ["requests", "0"]
    assert Records([]).table().startswith("request")


def test_a_summary_and_a_table_are_aligned_text() -> None:
    records = Records([record(0, prompt="x" * 100), refused(1000)])
    lines = str(records.summary()).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["stop", "1"]
    head, first, second = records.table().splitlines()
    assert first.startswith("id-0     stop ")
    assert second.startswith("id-1000  refused: QueueFullError")
    assert head.index("prompt") == first.index("'xxx") == second.index("'a'")
    assert first.endswith("...")


def test_records_are_a_sequence_and_a_slice_is_one_too() -> None:
    records = Records([record(n) for n in range(5)])
    assert [r.request_id for r in records[1:3]] == ["id-1", "id-2"]
    assert records[1:].summary().n_requests == 4
    assert (records[-1].request_id, len(records), record(3) in records) == ("id-4", 5, True)
    assert repr(records) == "<Records n=5 by_themselves=5>"


# --- Drift ----------------------------------------------------------------------------------------
def test_rows_that_stay_do_not_drift_nor_do_those_that_become_fewer() -> None:
    same = [record(n) for n in range(N_FOR_DRIFT)]
    assert_no_drift(same)
    assert same[0].n_rows == 5 - 1 + 4 - 1
    assert_no_drift([replace(same[0], usage=Usage(5, 0, 4)), *same[1:]], tolerance=1.0)


def test_rows_that_grow_are_named_with_their_requests() -> None:
    records = [record(n) for n in range(40)]
    records[38] = replace(records[38], usage=Usage(9, 1, 4))
    with pytest.raises(AssertionError, match=r"at most 7 in 4, then 11 in id-38$"):
        assert_no_drift(records)


def test_the_first_request_of_a_prompt_is_cold_and_no_measure_for_the_last() -> None:
    """Nobody computes more than who finds nothing in the cache."""
    cached = [0, *[9] * 38]
    records = [record(n, usage=Usage(10, n_cached, 4)) for n, n_cached in enumerate(cached)]
    assert_no_drift(records)
    records.append(record(99, usage=Usage(10, 3, 4)))
    with pytest.raises(AssertionError, match=r"at most 4 in 4, then 10 in id-99$"):
        assert_no_drift(records)


def test_a_request_without_output_has_no_rows_to_compare() -> None:
    """Its prompt may not have been computed at all."""
    expired = record(finish_reason=FinishReason.DEADLINE, token_ids=(), usage=Usage(500, 0, 0))
    assert (expired.n_rows, refused().n_rows) == (None, None)


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, 0.0, -1.0])
def test_a_tolerance_that_nothing_or_everything_exceeds_is_refused(tolerance: float) -> None:
    with pytest.raises(InvalidArgumentError, match="tolerance"):
        assert_no_drift([record(n) for n in range(N_FOR_DRIFT)], tolerance=tolerance)


def test_the_order_of_calls_counts_not_that_of_the_records() -> None:
    records = [record(n) for n in range(40)]
    records[0] = replace(records[0], usage=Usage(9, 1, 4))
    assert_no_drift(records)
    assert_no_drift(records[::-1])
    with pytest.raises(AssertionError, match="id-0"):
        assert_no_drift([replace(r, started_s=-r.started_s) for r in records])


def test_every_prompt_is_compared_with_itself() -> None:
    long = [record(n, prompt="b", usage=Usage(500, 0, 4)) for n in range(20, 40)]
    assert_no_drift([record(n) for n in range(20)] + long)
    long[-1] = replace(long[-1], usage=Usage(501, 0, 4))
    with pytest.raises(AssertionError, match="prompt 'b'"):
        assert_no_drift([record(n) for n in range(20)] + long)


def test_decode_time_that_grows_beyond_the_tolerance_is_named() -> None:
    fast = record().timings
    assert fast is not None
    slow = replace(fast, decode_s=0.06)
    records = [record(n, timings=slow if n >= 90 else fast) for n in range(100)]
    assert_no_drift(records, tolerance=2.0)
    assert_no_drift(records)
    with pytest.raises(
        AssertionError,
        match=r"\(up to id-10\) is 10\.000 ms per token, that of the last \(from id-90 on\) 20\.000 ms",
    ):
        assert_no_drift(records, tolerance=1.9)
    records[95] = replace(records[95], timings=fast)
    with pytest.raises(AssertionError, match=r"2\.00 times"):
        assert_no_drift(records, tolerance=1.5)


def test_too_few_records_show_no_drift_and_are_no_proof() -> None:
    few = [record(n) for n in range(N_FOR_DRIFT - 1)]
    cancelled = record(99, finish_reason=FinishReason.CANCELLED)
    with pytest.raises(ValueError, match="but 19"):
        assert_no_drift([*few, cancelled, refused()])
    single = [record(n, token_ids=(1,)) for n in range(N_FOR_DRIFT)]
    with pytest.raises(ValueError, match="two output tokens"):
        assert_no_drift(single, tolerance=2.0)


# --- Isolation ------------------------------------------------------------------------------------
LENGTH, CANCELLED = FinishReason.LENGTH, FinishReason.CANCELLED


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"prompt": "b", "token_ids": (4, 9)},
        {
            "finish_reason": LENGTH,
            "stop_reason": "max_tokens",
            "max_tokens": 2,
            "token_ids": (1, 2),
        },
        {"finish_reason": LENGTH, "stop_reason": "context"},
        {"finish_reason": CANCELLED, "token_ids": ()},
        {"finish_reason": CANCELLED, "token_ids": (), "prompt": "of no oracle"},
        {"finish_reason": FinishReason.DEADLINE, "token_ids": (1, 2, 3)},
    ],
    ids=str,
)
def test_what_a_request_would_have_got_alone_is_right(good: dict[str, Any]) -> None:
    assert_isolated([record(**good), record()], ORACLE)
    assert_isolated([record(**good), record()], ORACLE.__getitem__)
    assert_as_alone(record(**good), ORACLE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"token_ids": (1, 2, 7, 9)}, "output token 2 is 7, alone it is 3"),
        ({"token_ids": (1, 2, 3)}, "output token 3 is missing, alone it is 9"),
        ({"token_ids": (1, 2, 3, 9, 9)}, "output token 4 is 9, alone it is missing"),
        (
            {
                "finish_reason": LENGTH,
                "stop_reason": "max_tokens",
                "max_tokens": 3,
                "token_ids": (1,),
            },
            "output token 1 is missing, alone it is 2",
        ),
        ({"finish_reason": LENGTH, "stop_reason": "context", "token_ids": (2,)}, "0 is 2, alone"),
        ({"finish_reason": LENGTH, "stop_reason": "context", "token_ids": (1, 2)}, "2 is missing"),
        ({"finish_reason": LENGTH, "stop_reason": "context", "token_ids": ()}, "0 is missing"),
        ({"finish_reason": CANCELLED, "token_ids": (1, 3)}, "output token 1 is 3, alone it is 2"),
        ({"finish_reason": FinishReason.DEADLINE, "token_ids": (4,)}, "0 is 4, alone it is 1"),
        ({"finish_reason": FinishReason.ERROR, "error": REFUSED}, "raised QueueFullError"),
    ],
    ids=str,
)
def test_what_it_would_not_have_got_is_named_with_the_first_request(
    bad: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_isolated([record(0), record(1, **bad), record(2, token_ids=(7,))], ORACLE)
    assert message in str(caught.value)
    assert str(caught.value).startswith("request 1 (id-1, ")


def test_records_of_which_none_ended_by_itself_show_nothing() -> None:
    cancelled = record(finish_reason=CANCELLED, token_ids=(1, 2))
    for records in ([], [cancelled, refused()]):
        with pytest.raises(ValueError, match=f"none of {len(records)} requests"):
            assert_isolated(records, ORACLE, errors=(QueueFullError,))


def test_errors_are_allowed_by_type_and_what_came_before_them_is_still_compared() -> None:
    with pytest.raises(AssertionError, match="raised QueueFullError"):
        assert_isolated([refused()], ORACLE, errors=(OSError,))
    assert_isolated([refused(), record()], ORACLE, errors=(QueueFullError,))
    failed = record(finish_reason=FinishReason.ERROR, error=REFUSED, token_ids=(1, 2))
    assert_isolated([failed, record()], ORACLE, errors=(QueueFullError,))
    with pytest.raises(AssertionError, match="0 is 2, alone it is 1"):
        assert_isolated([replace(failed, token_ids=(2,))], ORACLE, errors=(QueueFullError,))


def test_an_oracle_of_texts_alone_or_of_token_ids_alone_is_one() -> None:
    """For type checkers too: a mapping is not one of a wider type of keys."""
    texts: dict[str, list[int]] = {"a": [1, 2, 3, 9]}
    assert_isolated([record()], texts)
    tokens: dict[tuple[int, ...], list[int]] = {(5,): [1, 2, 3, 9]}
    assert_isolated([record(prompt=(5,))], tokens)
