"""Derive the cause of growing latency from the numbers of identical requests.  Pure functions.

Rows, positions and cells decide, because they are the same on every machine.  Times depend on them; they are
only reported, as a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from cllm.doctor.findings import Cause, Conclusion, Diagnosis, Experiment, Measurement, Refusal

# With equal work, a larger ratio of times is explained in the answer.
STEADY = 1.25
N_MIN = 3  # fewer requests show no pattern


def growth(values: Sequence[float]) -> float:
    """Return the ratio of the medians of the last and the first quarter; 1 if the first is 0 or empty."""
    quarter = max(1, len(values) // 4)
    first = median(values[:quarter]) if values else 0.0
    return median(values[-quarter:]) / first if first > 0 else 1.0


def diagnose(requests: Sequence[Measurement], refusal: Refusal | None = None) -> Diagnosis:
    """Return the cause of the pattern in the measurements.

    The cases, in this order: a batch was rejected; the rows grow; the last positions grow; cells are left
    after a request; only requests ahead were found; nothing grows.  `Cause.UNKNOWN` stands for fewer than
    three requests, and for rows, positions or cells that go up and down.
    """
    if refusal is not None:
        return _of_refusal(refusal)
    if len(requests) < N_MIN:
        return Diagnosis(Cause.UNKNOWN, f"{len(requests)} requests show no pattern")
    rows = [request.n_rows for request in requests]
    positions = [-1 if request.pos_max is None else request.pos_max for request in requests]
    if _grows(rows):
        return Diagnosis(
            Cause.HISTORY_RESENT,
            f"rows grow ({_span(rows)}): tokens of earlier requests are decoded again, because the "
            "caller's prompt, history or batch is not emptied",
        )
    if not _is_flat(rows):
        return Diagnosis(Cause.UNKNOWN, f"rows go up and down ({_span(rows)}): not identical")
    if _grows(positions):
        return _of_growing_positions(requests, f"rows flat ({rows[0]}), pos_max grows")
    if not _is_flat(positions):
        return Diagnosis(Cause.UNKNOWN, f"positions go up and down ({_span(positions)})")
    flat = f"rows flat ({rows[0]}), pos_max flat ({positions[0]})"
    if any(request.n_cells_left for request in requests):
        return _of_cells_left(requests, flat)
    flat += ", nothing left in the KV cache"
    most_ahead = max(request.n_ahead for request in requests)
    if most_ahead:
        return Diagnosis(
            Cause.QUEUEING,
            f"{flat}; up to {most_ahead} requests ahead: latency is waiting for the lock, the work "
            "of a request stays the same",
        )
    return Diagnosis(Cause.FLAT, f"{flat}: the completion callback clears the sequence")


def _of_refusal(refusal: Refusal) -> Diagnosis:
    if refusal.code != -1 or not refusal.is_unchanged:
        state = "unchanged" if refusal.is_unchanged else "changed"
        return Diagnosis(
            Cause.UNKNOWN,
            f"llama_decode returns {refusal.code} for positions that restart, the KV cache is {state}",
        )
    return Diagnosis(
        Cause.POSITIONS_RESTARTED,
        f"llama_decode returns -1: sequence {refusal.seq_id} ends at X = {refusal.last_pos}, the "
        f"tokens start at Y = {refusal.first_pos}; positions restart without seq_rm",
    )


def _of_growing_positions(requests: Sequence[Measurement], pattern: str) -> Diagnosis:
    positions = [request.pos_max or 0 for request in requests]
    pattern = f"{pattern} ({_span(positions)})"
    cleared = {request.cleared_seq_id for request in requests} - {None}
    used = {request.seq_id for request in requests}
    if cleared and not cleared & used:
        return Diagnosis(
            Cause.WRONG_SEQ_ID,
            f"{pattern}: seq_rm is called for seq_id {_names(cleared)}, the requests are in seq_id "
            f"{_names(used)}",
        )
    if cleared:
        return Diagnosis(Cause.UNKNOWN, f"{pattern} although seq_rm is called for its seq_id")
    return Diagnosis(
        Cause.NOT_CLEARED,
        f"{pattern}: the completion callback does not clear the sequence, the next request "
        "continues behind it",
    )


def _of_cells_left(requests: Sequence[Measurement], pattern: str) -> Diagnosis:
    cells = [request.n_cells for request in requests]
    n_seq_ids = len({request.seq_id for request in requests})
    if any(request.cleared_seq_id == request.seq_id for request in requests):
        return Diagnosis(
            Cause.UNKNOWN, f"{pattern}, but cells are left ({_span(cells)}) after seq_rm"
        )
    if n_seq_ids == len(requests):
        return Diagnosis(
            Cause.NOT_CLEARED,
            f"{pattern}, cells grow ({_span(cells)}): each request has a new seq_id and none is "
            "cleared",
        )
    if not _is_flat(cells[n_seq_ids - 1 :]):
        return Diagnosis(Cause.UNKNOWN, f"{pattern}, cells go up and down ({_span(cells)})")
    return Diagnosis(
        Cause.CLEARED_ON_REUSE,
        f"{pattern}, cells grow ({_span(cells)}) over the first {n_seq_ids} requests and stay: a "
        f"sequence is cleared when its seq_id is used again, not when it ends",
    )


def conclude(experiments: Sequence[Experiment], subject: Experiment) -> Conclusion:
    """Return the answer to "does latency grow?", from `subject`, the experiment "clear on finish"."""
    requests = subject.requests
    n_rows = requests[0].n_rows if requests else 0
    grows = subject.diagnosis.cause is not Cause.FLAT
    ratio = growth([request.decode_s for request in requests])
    if grows:
        text = f"Yes: {subject.diagnosis.text}."
    else:
        text = (
            f"No. {len(requests)} identical requests, each cleared by seq_rm when it ended: "
            f"{n_rows} rows each time, positions 0 to {requests[-1].pos_max}, nothing left in the "
            f"KV cache. Decode time of the last quarter over the first: ×{ratio:.2f}."
        )
        if not 1 / STEADY <= ratio <= STEADY:
            text += " The work was the same: what changed is the machine (other load, heat)."
    strange = [experiment.name for experiment in experiments if not experiment.is_expected]
    if strange:
        text += f" Not as expected: {', '.join(strange)}."
    text += (
        " Where latency grows, three numbers of each request name the cause: the rows passed to "
        "llama_decode, seq_pos_max of every seq_id before it, and the time inside llama_decode."
    )
    return Conclusion(grows, text)


def _is_flat(values: Sequence[int]) -> bool:
    return len(set(values)) <= 1


def _grows(values: Sequence[int]) -> bool:
    return values[-1] > values[0] and all(earlier <= later for earlier, later in pairwise(values))


def _span(values: Sequence[int]) -> str:
    return f"{values[0]} → {values[-1]}"


def _names(seq_ids: set[int] | set[int | None]) -> str:
    return ", ".join(str(seq_id) for seq_id in sorted(seq_ids, key=str))
