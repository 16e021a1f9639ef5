"""RowScan finds what a look at every value of a row would find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.engine.sampling.row_scan import DEPTH, RowScan

Row = NDArray[np.float32]

# One bucket and many, with and without tokens that are left over when the row is folded.
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 258, 1000, 4096, 4096 + 7]
NAN, INFINITE = math.nan, math.inf


@st.composite
def rows(draw: st.DrawFn, *, n_vocab: int | None = None, specials: tuple[float, ...] = ()) -> Row:
    """Values of few levels, and so many ties, or of many; some places have special values."""
    size = draw(st.sampled_from(SIZES)) if n_vocab is None else n_vocab
    n_levels = draw(st.sampled_from([1, 2, 7, 1 << 20]))
    numbers = np.random.default_rng(draw(st.integers(0, 999))).integers(n_levels, size=size)
    row = (numbers * draw(st.sampled_from([1.0, -1e-3, 1e6]))).astype(np.float32)
    if draw(st.booleans()) and -INFINITE in specials:
        row[draw(st.integers(1, 3)) :] = -INFINITE  # a few are left
    if specials:
        places = st.dictionaries(st.integers(0, size - 1), st.sampled_from(specials), max_size=9)
        for place, value in draw(places).items():
            row[place] = value
    row.flags.writeable = False  # whoever changes it fails
    return row


ORDERED = rows(specials=(-INFINITE, INFINITE, 0.0, -0.0, 3e38, -3e38, 1e-45))


def scan_of(row: Row) -> RowScan:
    scan = RowScan(len(row))
    scan.read(row)
    return scan


# --- read ---------------------------------------------------------------------------------------
@given(ORDERED)
def test_reading_a_row_gives_its_maximum(row: Row) -> None:
    scan = RowScan(len(row))
    assert scan.read(row) == row.max() == scan.largest
    assert scan.row is row


@pytest.mark.parametrize("value", [-INFINITE, INFINITE, 0.0])
@pytest.mark.parametrize("n_vocab", SIZES)
def test_a_row_of_one_value_has_it_as_its_maximum(n_vocab: int, value: float) -> None:
    assert RowScan(n_vocab).read(np.full(n_vocab, value, np.float32)) == value


@pytest.mark.parametrize("n_vocab", SIZES)
@pytest.mark.parametrize("other", [0.0, INFINITE, -INFINITE])
def test_one_nan_at_any_place_of_a_row_is_its_maximum(n_vocab: int, other: float) -> None:
    scan = RowScan(n_vocab)
    for place in {*range(0, n_vocab, 1 + n_vocab // 300), n_vocab - 1}:
        row = np.full(n_vocab, other, np.float32)
        row[place] = NAN
        assert math.isnan(scan.read(row)), place


@given(rows(specials=(NAN, INFINITE, -INFINITE)))
def test_the_maximum_is_nan_exactly_if_any_value_is(row: Row) -> None:
    assert math.isnan(RowScan(len(row)).read(row)) == bool(np.isnan(row).any())


# --- at_least -----------------------------------------------------------------------------------
@given(ORDERED, st.data())
def test_at_least_k_tokens_are_found_and_none_smaller_than_any_left_out(
    row: Row, data: st.DataObject
) -> None:
    n_vocab = len(row)
    k = data.draw(st.one_of(st.integers(1, n_vocab), st.integers(1, 1 + n_vocab // 128)), label="k")
    ids = scan_of(row).at_least(k)
    if ids is None:
        # A bucket has fewer than twice DEPTH tokens, and what is left over is less than a bucket
        # of buckets.
        n_known = 2 * DEPTH * k + n_vocab // DEPTH
        is_large_part = k > n_vocab // (4 * DEPTH)
        assert is_large_part or np.count_nonzero(row > -INFINITE) <= n_known
        return
    assert len(ids) >= k
    assert (np.diff(ids) > 0).all(), "ascending"
    left_out = np.setdiff1d(np.arange(n_vocab), ids, assume_unique=True)
    assert not len(left_out) or row[left_out].max() < row[ids].min()


@given(st.sampled_from([n for n in SIZES if n >= 4 * DEPTH]), st.data())
def test_a_small_part_of_a_row_of_numbers_is_always_found(
    n_vocab: int, data: st.DataObject
) -> None:
    row = data.draw(rows(n_vocab=n_vocab))
    k = data.draw(st.integers(1, n_vocab // (4 * DEPTH)))
    assert scan_of(row).at_least(k) is not None


def test_few_more_than_k_tokens_are_found() -> None:
    row = np.random.default_rng(7).standard_normal(4096 + 7).astype(np.float32)
    ids = scan_of(row).at_least(20)
    assert ids is not None
    assert 20 <= len(ids) <= 40


@pytest.mark.parametrize("n_vocab", [n for n in SIZES if n >= 4 * DEPTH])
def test_where_all_but_a_few_are_minus_infinity_k_tokens_are_not_known(n_vocab: int) -> None:
    row = np.full(n_vocab, -INFINITE, np.float32)
    row[3] = 1.0
    scan = scan_of(row)
    found = scan.at_least(1)
    assert found is not None
    assert found.tolist() == [3]
    assert scan.at_least(2) is None


# --- above --------------------------------------------------------------------------------------
@given(ORDERED, st.data())
def test_above_a_cut_is_every_token_with_at_least_its_value(row: Row, data: st.DataObject) -> None:
    cut = data.draw(
        st.one_of(
            st.sampled_from(row.tolist()),
            st.floats(width=32),
            st.floats(-1e6, 1e6),  # a double: compared as the float that is nearest
            st.sampled_from([NAN, INFINITE, -INFINITE]),
        ),
        label="cut",
    )
    assert scan_of(row).above(cut).tolist() == np.flatnonzero(row >= np.float32(cut)).tolist()


# --- One scan for many rows ---------------------------------------------------------------------
@given(st.sampled_from(SIZES), st.data())
def test_a_scan_knows_only_the_row_it_read_last(n_vocab: int, data: st.DataObject) -> None:
    used = RowScan(n_vocab)
    for _ in range(data.draw(st.integers(1, 4))):
        used.read(data.draw(rows(n_vocab=n_vocab, specials=(NAN, INFINITE, -INFINITE))))
        used.at_least(1)
    row = data.draw(rows(n_vocab=n_vocab, specials=(-INFINITE, INFINITE)))
    new = scan_of(row)
    assert used.read(row) == new.largest
    k, cut = data.draw(st.integers(1, n_vocab)), data.draw(st.sampled_from(row.tolist()))
    assert used.above(cut).tolist() == new.above(cut).tolist()
    found, expected = used.at_least(k), new.at_least(k)
    assert (found is None) == (expected is None)
    assert found is None or expected is None or found.tolist() == expected.tolist()


def test_a_row_of_a_batch_is_scanned_where_it_lies() -> None:
    logits = np.random.default_rng(7).standard_normal((5, 1000)).astype(np.float32)
    before, scan = logits.copy(), RowScan(1000)
    for index, row in enumerate(logits):
        assert scan.read(row) == before[index].max()
        assert np.shares_memory(scan.row, logits)
        assert scan.above(1.0).tolist() == np.flatnonzero(before[index] >= 1).tolist()
    assert (logits == before).all()
