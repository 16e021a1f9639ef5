"""Results of a load on an engine: a record of every request, their summary, and assertions about them.

For the tests of programs that embed cllm.  Nothing here needs pytest: a failed assertion raises an
`AssertionError` with the request and the numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, overload

from cllm import Engine, FinishReason, Timings, Usage
from cllm.errors import InvalidArgumentError
from cllm.testing.load_summary import LoadSummary, aligned, ms, percentile

# A prompt as records and oracles name it: a text, or token ids in a tuple.
PromptKey = str | tuple[int, ...]
# Any: `Mapping` is invariant in its keys, so a `dict[str, ...]` is no mapping from `PromptKey`.
Oracle = Mapping[Any, Sequence[int]] | Callable[[PromptKey], Sequence[int]]

N_FOR_DRIFT = 20  # records of one prompt that `assert_no_drift` needs


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Record of one request as its caller saw it; times in seconds of `anyio.current_time`.

    Attributes
    ----------
    prompt : str or tuple of int
    token_ids, text : tuple of int, str
        Tokens and text of the stream's deltas.
    max_tokens : int or None
        Limit of the request.
    finish_reason : FinishReason or None
        None if the request was rejected before it ran.
    stop_reason : str, int or None
        As in `Completion`.
    error : Exception or None
        Error that the request raised.
    usage, timings : Usage or None, Timings or None
        Counts and times of the engine; None if the request ended without a completion.
    started_s, finished_s : float
        Time of the call, and time when its stream had ended.  With `poisson`, the time of the call is the
        moment it was due, even if a busy event loop made it later.
    first_token_s : float or None
        Time at which the caller received the first token; None without a token.
    n_deltas : int
        Deltas that the caller received.
    """

    prompt: PromptKey
    request_id: str
    token_ids: tuple[int, ...]
    text: str
    max_tokens: int | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: Exception | None
    usage: Usage | None
    timings: Timings | None
    started_s: float
    first_token_s: float | None
    finished_s: float
    n_deltas: int

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call to the first token; None without a token."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def total_s(self) -> float:
        """Seconds from the call to the end."""
        return self.finished_s - self.started_s

    @property
    def is_by_itself(self) -> bool:
        """True if the request ended with `stop` or `length`."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def n_rows(self) -> int | None:
        """Number of computed rows: uncached prompt tokens and all output tokens but the last.

        None for a request without output.  Rows that were computed again after preemptions and failed
        decodes do not count.
        """
        usage = self.usage
        if usage is None or not usage.n_output:
            return None
        return usage.n_prompt - usage.n_cached + usage.n_output - 1


class Records(Sequence[RequestRecord]):
    """The records of a load, in the order of its prompts."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self._records = tuple(records)

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | Records:
        if isinstance(index, slice):
            return Records(self._records[index])
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<Records n={len(self)} by_themselves={sum(r.is_by_itself for r in self)}>"

    def summary(self) -> LoadSummary:
        """Return counts, rates and percentiles; times of whole answers only of those that were not ended early."""
        records = self._records
        reasons = Counter(record.finish_reason for record in records)
        usages = [record.usage for record in records if record.usage is not None]
        timings = [record.timings for record in records if record.timings is not None]
        n_tokens = sum(len(record.token_ids) for record in records)
        started_s = min((record.started_s for record in records), default=0.0)
        seconds = max((record.finished_s for record in records), default=0.0) - started_s
        ttft = [r.ttft_s for r in records if r.ttft_s is not None]
        itl = [t.itl_p50_s for t in timings if t.itl_p50_s is not None]
        gaps = [t.itl_max_s for t in timings if t.itl_max_s is not None]
        total = [r.total_s for r in records if r.is_by_itself]
        return LoadSummary(
            n_requests=len(records),
            n_finished={reason: reasons[reason] for reason in FinishReason},
            n_refused=reasons[None],
            n_errors=sum(r.error is not None and r.finish_reason is not None for r in records),
            n_output_tokens=n_tokens,
            seconds=seconds,
            tokens_per_s=n_tokens / seconds if seconds > 0 else 0.0,
            ttft_p50_s=percentile(ttft, 50),
            ttft_p99_s=percentile(ttft, 99),
            itl_p50_s=percentile(itl, 50),
            itl_max_p99_s=percentile(gaps, 99),
            total_p50_s=percentile(total, 50),
            total_p99_s=percentile(total, 99),
            cached_share=sum(u.n_cached for u in usages) / max(1, sum(u.n_prompt for u in usages)),
        )

    def table(self) -> str:
        """Return a table as text: a header, and a line for each request."""
        rows = [("request", "end", "tokens", "cached", "first ms", "total ms", "prompt")]
        for record in self._records:
            end = record.finish_reason or "refused"
            rows.append(
                (
                    record.request_id,
                    end if record.error is None else f"{end}: {type(record.error).__name__}",
                    str(len(record.token_ids)),
                    "-" if record.usage is None else str(record.usage.n_cached),
                    ms(record.ttft_s),
                    ms(record.total_s),
                    _shown(record.prompt),
                )
            )
        return aligned(rows, left=2)


def assert_no_drift(records: Sequence[RequestRecord], *, tolerance: float | None = None) -> None:
    """Assert that the last requests of a prompt cost no more than its first.

    Only prompts with at least 20 requests that ended with `stop` or `length` are checked, in the order of the
    calls.  No request of the last tenth may compute more rows than the largest number in the first tenth.
    The very first request is left out of the first tenth, because its prompt was in no cache.  Use outputs
    of equal length: greedy, seeded, or limited by `max_tokens`.

    Parameters
    ----------
    tolerance : float, optional
        Largest allowed ratio of the median decode time per output token, last tenth to first tenth.  Times
        of a busy machine vary: use it with hundreds of requests.  None: times are not compared.

    Raises
    ------
    AssertionError
        Names the prompt, the numbers and the requests.
    ValueError
        No prompt has 20 such requests; or with `tolerance`, no request of a tenth has two output tokens.
        Also if the tolerance is not a finite number above 0.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise InvalidArgumentError("tolerance", tolerance, "a finite number above 0")
    groups: dict[PromptKey, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.started_s):
        if record.is_by_itself and record.n_rows is not None:
            groups.setdefault(record.prompt, []).append(record)
    n_most_often = max(map(len, groups.values()), default=0)
    if n_most_often < N_FOR_DRIFT:
        raise ValueError(f"of no prompt there are {N_FOR_DRIFT} records, but {n_most_often}")
    for prompt, group in groups.items():
        if len(group) >= N_FOR_DRIFT:
            tenth = len(group) // 10
            first, last = group[1 : 1 + tenth], group[-tenth:]
            requests = f"over {len(group)} requests of prompt {_shown(prompt)}"
            _assert_no_more_rows(first, last, requests)
            if tolerance is not None:
                _assert_no_slower(first, last, requests, tolerance)


def _assert_no_more_rows(
    first: Sequence[RequestRecord], last: Sequence[RequestRecord], requests: str
) -> None:
    n_most = max(record.n_rows or 0 for record in first)
    grown = [record for record in last if (record.n_rows or 0) > n_most]
    if grown:
        then = ", ".join(f"{record.n_rows} in {record.request_id}" for record in grown)
        raise AssertionError(
            f"rows grow {requests}: after the first at most {n_most} in {len(first)}, then {then}"
        )


def _assert_no_slower(
    first: Sequence[RequestRecord],
    last: Sequence[RequestRecord],
    requests: str,
    tolerance: float,
) -> None:
    before, after = _seconds_per_token(first), _seconds_per_token(last)
    if after > before * tolerance:
        ratio = after / before if before else math.inf
        raise AssertionError(
            f"decode time grows {requests}: the median of the first requests (up to "
            f"{first[-1].request_id}) is {before * 1e3:.3f} ms per token, that of the last (from "
            f"{last[0].request_id} on) {after * 1e3:.3f} ms, {ratio:.2f} times as long; "
            f"at most {tolerance} times is allowed"
        )


def _seconds_per_token(records: Sequence[RequestRecord]) -> float:
    """Return the median over requests of decode seconds per token; the first token belongs to the prompt."""
    seconds = [
        record.timings.decode_s / (len(record.token_ids) - 1)
        for record in records
        if record.timings is not None and len(record.token_ids) > 1
    ]
    if not seconds:
        raise ValueError("no request has two output tokens: there is no decode time to compare")
    return median(seconds)


def assert_isolated(
    records: Sequence[RequestRecord],
    oracle: Oracle,
    *,
    errors: tuple[type[Exception], ...] = (),
) -> None:
    """Assert that every request got the tokens that it gets alone.

    A request that ended with `stop` or `length` must have the oracle's tokens, or the first `max_tokens` of
    them if that was its limit.  One that was cancelled, expired or failed must have a beginning of them.  A
    full context ends an output at the same token as alone: requests that do not fit beside others wait.

    Parameters
    ----------
    oracle : mapping or callable
        Token ids of each prompt's whole output, by prompt; see `cllm.testing.oracle`.  Make it with the same
        sampling parameters, and an engine with the same room for a sequence (`n_ctx`, `n_seq_max`,
        `kv_unified`).
    errors : tuple of exception types
        Errors that requests may have raised; by default none.

    Raises
    ------
    AssertionError
        Names the first request that is wrong, the position and both tokens, or its error.
    ValueError
        No request ended with `stop` or `length`, so no whole output was compared.
    KeyError
        The mapping has no entry for a prompt.
    """
    for number, record in enumerate(records):
        assert_as_alone(record, oracle, errors=errors, number=number)
    if not any(record.is_by_itself for record in records):
        raise ValueError(
            f"none of {len(records)} requests ended with stop or length: no whole output could be compared"
        )


def assert_as_alone(
    record: RequestRecord,
    oracle: Oracle,
    *,
    errors: tuple[type[Exception], ...] = (),
    number: int = 0,
) -> None:
    """Assert for one request what `assert_isolated` asserts; `number` is its index, for the message."""
    end, prompt = record.finish_reason or "refused", _shown(record.prompt)
    name = f"request {number} ({record.request_id}, {end}, prompt {prompt})"
    if record.error is not None and not isinstance(record.error, errors):
        raise AssertionError(f"{name} raised {record.error!r}") from record.error
    if not (record.is_by_itself or record.token_ids):
        return  # nothing that could be wrong
    expected = tuple(oracle(record.prompt) if callable(oracle) else oracle[record.prompt])
    if not record.is_by_itself:
        expected = expected[: len(record.token_ids)]
    elif record.stop_reason == "max_tokens" and record.finish_reason is FinishReason.LENGTH:
        expected = expected[: record.max_tokens]
    _assert_same(name, record.token_ids, expected)


def _assert_same(name: str, token_ids: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if token_ids == expected:
        return
    pairs = enumerate(zip(token_ids, expected, strict=False))
    differing = (i for i, (one, other) in pairs if one != other)
    position = next(differing, min(len(token_ids), len(expected)))
    got, alone = (
        f"is {ids[position]}" if position < len(ids) else "is missing"
        for ids in (token_ids, expected)
    )
    raise AssertionError(
        f"{name}: output token {position} {got}, alone it {alone} "
        f"({len(token_ids)} and {len(expected)} tokens)"
    )


async def assert_books_agree(
    engine: Engine, *, n_requests: int | None = None, idle: bool = False
) -> None:
    """Assert that the engine's bookkeeping agrees with llama.cpp, and that an idle engine holds nothing.

    An idle engine audits itself and repairs differences: those since it was entered fail this check too.
    Requests that were cancelled before this call have ended when the check is made.

    Parameters
    ----------
    n_requests : int, optional
        Number of requests that were submitted since the engine was entered.  All of them must have ended,
        and none may run or wait.
    idle : bool
        True if no request may run or wait.  If False, and without `n_requests`, the seq_ids and cells that
        requests hold are checked only if none runs or waits.

    Raises
    ------
    AssertionError
        Names what differs, or says how many requests still run or wait.
    ClosedError, EngineFailedError, WrongThreadError
        The engine is not open, has failed, or belongs to another event loop.
    """
    found = await engine.audit()  # answered after all earlier commands were carried out
    if found:
        raise AssertionError(f"the KV cache bookkeeping and llama.cpp disagree: {'; '.join(found)}")
    before = engine.statistics()
    slots = await engine.slots()
    after = engine.statistics()
    if after.n_discrepancies:
        raise AssertionError(f"{after.n_discrepancies} discrepancies were found and mended")
    n_alive = max(s.n_waiting + s.n_running for s in (before, after))
    n_finished, n_before = (sum(s.n_finished.values()) for s in (after, before))
    if n_alive or n_finished != n_before:
        if idle or n_requests is not None:
            raise AssertionError(
                f"the engine is not idle: {n_alive} requests still run or wait, "
                f"{n_finished - n_before} ended while it was looked at"
            )
        return
    for what, n, n_expected in (
        ("seq_ids are held by requests", after.n_seq_ids_used, 0),
        ("KV cells are held by requests", after.n_kv_cells_used, 0),
        ("seq_ids have a request", sum(slot.request_id is not None for slot in slots), 0),
        ("seq_ids are cached", sum(s.state == "cached" for s in slots), after.n_seq_ids_cached),
        ("requests have ended", n_finished, n_finished if n_requests is None else n_requests),
    ):
        if n != n_expected:
            raise AssertionError(f"nothing runs or waits, but {n} {what}, not {n_expected}")


def _shown(prompt: PromptKey) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else text[:57] + "..."
