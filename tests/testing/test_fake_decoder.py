"""FakeDecoder: which of the faults that a test scripted happens, and when a decode counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cllm.errors import DecodeFailedError, InvalidArgumentError
from cllm.testing import FakeDecoder
from cllm.testing.fake_decoder import FakeRun, Fault


def decode(scripted: Fault | None, poison: Mapping[int, Fault]) -> int | list[bool]:
    """Decode a row of sequence 0 and one of sequence 1: the code, or which rows are NaN."""
    decoder = FakeDecoder(
        faults={} if scripted is None else {1: scripted},
        poison=lambda run: poison.get(run.seq_id),
    )
    decoder.add(0, [1], 0, n_outputs=1)
    decoder.add(1, [2], 0, n_outputs=1)
    try:
        return np.isnan(decoder.decode()).any(axis=1).tolist()
    except DecodeFailedError as error:
        return error.code


@pytest.mark.parametrize(
    ("scripted", "poison", "expected"),
    [
        (None, {}, [False, False]),
        ("nan", {}, [True, False]),
        (None, {1: "nan"}, [False, True]),
        ("nan", {1: "nan"}, [True, True]),
        (-2, {0: -3, 1: -4}, -2),
        (-2, {0: "nan"}, -2),
        ("nan", {1: -3}, -3),
        (None, {0: -3, 1: -4}, -3),
        (None, {0: "nan", 1: -4}, -4),
    ],
)
def test_a_scripted_failure_comes_before_those_of_runs_and_both_before_nan(
    scripted: Fault | None, poison: Mapping[int, Fault], expected: int | list[bool]
) -> None:
    assert decode(scripted, poison) == expected


def test_a_decode_counts_from_its_beginning_and_its_fault_is_settled_then() -> None:
    counts = []

    def latency(runs: Sequence[FakeRun]) -> float:
        counts.append(decoder.n_decodes)
        decoder.faults[1] = -3
        return 0.0

    decoder = FakeDecoder(latency_s=latency)
    decoder.add(0, [1], 0, n_outputs=1)
    decoder.decode()
    assert counts == [decoder.n_decodes] == [1]


def test_an_aborted_decode_counts_and_stores_nothing() -> None:
    decoder = FakeDecoder(faults={2: -3})
    decoder.add(0, [1], 0, n_outputs=1)
    decoder.abort()
    with pytest.raises(DecodeFailedError) as caught:
        decoder.decode()
    assert (caught.value.code, decoder.n_decodes, decoder.n_cells_used) == (2, 1, 0)
    decoder.allow()
    with pytest.raises(DecodeFailedError) as caught:
        decoder.decode()
    assert (caught.value.code, decoder.n_decodes) == (-3, 2)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("faults", {"1": -3}),
        ("faults", {0: -3}),
        ("faults", {1: "nope"}),
        ("faults", {1: 3}),
        ("call_faults", {("nope", 1): False}),
        ("call_faults", {("seq_rm", 0): False}),
        ("call_faults", {"seq_rm": False}),
        ("call_faults", {("seq_rm", 1): "no"}),
    ],
)
def test_a_fault_that_would_never_occur_is_rejected(name: str, given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        FakeDecoder(**{name: given})
