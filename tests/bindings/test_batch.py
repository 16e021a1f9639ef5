"""Batch: rows are runs of consecutive positions of one sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.bindings import Batch, Run
from cllm.errors import InvalidArgumentError, PositionError

runs_of_tokens = st.lists(
    st.tuples(
        st.integers(0, 255),
        st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8),
        st.integers(0, 2**31 - 100),
        st.integers(0, 8),
    ),
    max_size=8,
    unique_by=lambda run: run[0],
)


@given(runs=runs_of_tokens)
@settings(deadline=None)
def test_the_struct_holds_what_was_added(
    runs: list[tuple[int, list[int], int, int]],
) -> None:
    batch = Batch(64)
    batch.add(0, [1, 2, 3], 0, n_outputs=3)
    batch.clear()  # what was there before does not show through
    expected: list[tuple[int, int, int, bool]] = []
    n_outputs_so_far = 0
    for seq_id, tokens, p0, wanted in runs:
        n_outputs = min(wanted, len(tokens))
        rows = batch.add(seq_id, tokens, p0, n_outputs=n_outputs)
        assert rows == range(n_outputs_so_far, n_outputs_so_far + n_outputs)
        n_outputs_so_far += n_outputs
        first_output = len(tokens) - n_outputs
        expected += [(t, p0 + i, seq_id, i >= first_output) for i, t in enumerate(tokens)]
    struct = batch.struct
    assert struct.n_tokens == batch.n_rows == len(expected)
    assert batch.n_outputs == n_outputs_so_far
    for row, (token, position, seq_id, is_output) in enumerate(expected):
        assert (struct.token[row], struct.pos[row]) == (token, position)
        assert (struct.n_seq_id[row], struct.seq_id[row][0]) == (1, seq_id)
        assert bool(struct.logits[row]) == bool(batch.output_flags[row]) == is_output
    assert batch.runs == [Run(seq_id, p0, len(tokens)) for seq_id, tokens, p0, _ in runs]


def test_a_refused_run_leaves_the_batch_unchanged() -> None:
    batch = Batch(8)
    batch.add(0, [1, 2], 0, n_outputs=1)
    before = batch.tokens.copy()
    for seq_id, tokens, p0, n_outputs in ((0, [5], 5, 0), (1, [5] * 9, 0, 0), (1, [-1], 0, 0)):
        with pytest.raises(InvalidArgumentError):
            batch.add(seq_id, tokens, p0, n_outputs=n_outputs)
    assert (batch.n_rows, batch.n_outputs, batch.runs) == (2, 1, [Run(0, 0, 2)])
    assert np.array_equal(batch.tokens, before)


def test_a_position_error_has_the_numbers() -> None:
    batch = Batch(8)
    batch.add(3, [1, 2], 10)
    with pytest.raises(PositionError) as caught:
        batch.add(3, [1], 14)
    assert (caught.value.seq_id, caught.value.last_pos, caught.value.first_pos) == (3, 11, 14)


def test_a_sequence_may_continue_behind_another() -> None:
    batch = Batch(8)
    batch.add(0, [1], 0)
    batch.add(1, [1], 0)
    batch.add(0, np.array([2, 3], np.int32).tolist(), 1)
    assert [run.p1 for run in batch.runs] == [1, 1, 3]
    assert repr(batch) == "<Batch rows=4/8 outputs=0>"
