"""LogprobReader: a log-softmax, in the words of the vocabulary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cllm.engine.output import TokenLogprob
from cllm.engine.sampling.batch_sampler import NotFiniteError
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.testing import FakeVocabulary

Row = NDArray[np.float32]

SIZES = [1, 2, 33, 258, 1000, 4096 + 7]
TOLERANCE = 1e-5
NAN, INFINITE = math.nan, math.inf


class Numbers:
    """Every token is spelled as its number."""

    def piece(self, token: int) -> bytes:
        return b"" if token % 10 == 0 else self.spelling(token)

    def spelling(self, token: int) -> bytes:
        return str(token).encode()


def read(row: Row, token: int, n_top: int) -> TokenLogprob:
    return LogprobReader(Numbers(), len(row)).read(row, token, n_top)


def log_softmax(row: Row) -> NDArray[np.float64]:
    """By the definition of it, in double precision."""
    exact = row.astype(np.float64)
    shifted: NDArray[np.float64] = exact - exact.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Logits of many or few levels, narrow or wide, some of them -inf, one finite at least."""
    n_vocab = draw(st.sampled_from(SIZES))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    scale = draw(st.sampled_from([0.0, 1.0, 12.0, 1e4]))
    row = (random.standard_normal(n_vocab) * scale).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row)  # ties
    share = draw(st.sampled_from([0.0, 0.1, 0.99, 1.0]))
    row[random.random(n_vocab) < share] = -INFINITE
    row[random.integers(n_vocab)] = draw(st.floats(-50, 50, width=32))
    row.flags.writeable = False
    return row


ROWS_AND_TOKENS = rows().flatmap(
    lambda row: st.tuples(st.just(row), st.integers(0, len(row) - 1), st.integers(0, 256))
)


@given(ROWS_AND_TOKENS)
def test_the_log_probability_is_that_of_a_log_softmax_in_double_precision(
    drawn: tuple[Row, int, int],
) -> None:
    row, token, n_top = drawn
    expected, actual = log_softmax(row), read(row, token, n_top)
    for entry in (actual, *actual.top):
        assert entry.logprob == pytest.approx(expected[entry.token_id], rel=1e-6, abs=TOLERANCE)
        assert entry.logprob <= 0
        assert type(entry.logprob) is float
        assert type(entry.token_id) is int


@given(ROWS_AND_TOKENS)
def test_the_top_are_the_largest_most_likely_first_and_equals_by_their_ids(
    drawn: tuple[Row, int, int],
) -> None:
    row, token, n_top = drawn
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    top = read(row, token, n_top).top
    assert [entry.token_id for entry in top] == order[:n_top]
    assert [entry.logprob for entry in top] == sorted((e.logprob for e in top), reverse=True)
    assert all(entry.top == () for entry in top)


@given(ROWS_AND_TOKENS)
def test_a_token_has_the_same_entry_by_itself_and_among_the_top(
    drawn: tuple[Row, int, int],
) -> None:
    row, token, n_top = drawn
    actual = read(row, token, n_top)
    assert actual.token_id == token
    assert actual.text == str(token)
    assert actual.bytes == Numbers().piece(token)
    own = [entry for entry in actual.top if entry.token_id == token]
    assert own in ([], [TokenLogprob(token, actual.text, actual.bytes, actual.logprob)])
    assert read(row, token, 0) == own[0] if own else True


@pytest.mark.parametrize("n_vocab", SIZES)
def test_more_alternatives_than_tokens_are_all_tokens(n_vocab: int) -> None:
    row = np.arange(n_vocab, dtype=np.float32)
    top = read(row, 0, 5000).top
    assert [entry.token_id for entry in top] == list(range(n_vocab))[::-1][:5000]
    assert math.fsum(math.exp(entry.logprob) for entry in top) == pytest.approx(1, abs=TOLERANCE)


def test_many_equal_logits_are_equally_likely() -> None:
    entry = read(np.full(4103, 7.5, np.float32), 4102, 3)
    assert entry.logprob == pytest.approx(-math.log(4103), abs=TOLERANCE)
    assert [other.token_id for other in entry.top] == [0, 1, 2]


def test_a_token_without_any_probability_has_minus_infinity_and_comes_last() -> None:
    row = np.full(258, -INFINITE, np.float32)
    row[[3, 200]] = [1.0, 2.0]
    entry = read(row, 5, 4)
    assert entry.logprob == -INFINITE
    assert [(other.token_id, other.logprob > -INFINITE) for other in entry.top] == [
        (200, True), (3, True), (0, False), (1, False),
    ]  # fmt: skip
    only = read(np.array([-INFINITE, -3.5, -INFINITE], np.float32), 1, 1)
    assert only.logprob == only.top[0].logprob == 0.0


def test_the_lowest_float_counts_as_no_probability() -> None:
    row = np.full(258, np.finfo(np.float32).min, np.float32)
    row[7] = 30.0
    assert read(row, 7, 0).logprob == 0.0
    assert read(row, 8, 0).logprob < -1e38


# --- Rows that are of no use --------------------------------------------------------------------
@pytest.mark.parametrize("value", [NAN, INFINITE])
@pytest.mark.parametrize("n_vocab", [1, 32, 33, 64, 65, 258, 4096 + 7])
def test_one_value_that_is_not_finite_spoils_a_row(n_vocab: int, value: float) -> None:
    for place in {*range(0, n_vocab, 13), n_vocab - 1}:
        row = np.zeros(n_vocab, np.float32)
        row[place] = value
        with pytest.raises(NotFiniteError, match="not finite"):
            read(row, 0, 3)


@pytest.mark.parametrize("n_vocab", SIZES)
@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_a_row_without_any_number_is_of_no_use(n_vocab: int, value: float) -> None:
    with pytest.raises(NotFiniteError):
        read(np.full(n_vocab, value, np.float32), 0, 1)


def test_a_reader_is_as_good_as_new_after_a_row_of_no_use() -> None:
    reader = LogprobReader(Numbers(), 258)
    good = np.arange(258, dtype=np.float32)
    for _ in range(2):
        assert reader.read(good, 257, 5) == read(good, 257, 5)
        with pytest.raises(NotFiniteError):
            reader.read(np.full(258, NAN, np.float32), 257, 5)


def test_what_was_read_outlives_the_row() -> None:
    reader, row = LogprobReader(Numbers(), 258), np.arange(258, dtype=np.float32)
    entry, expected = reader.read(row, 9, 5), read(row.copy(), 9, 5)
    row[:] = 0
    reader.read(row, 0, 256)
    assert entry == expected


# --- Words --------------------------------------------------------------------------------------
def entry_of(token: int) -> TokenLogprob:
    row = np.zeros(FakeVocabulary.n_tokens, np.float32)
    return LogprobReader(FakeVocabulary(), FakeVocabulary.n_tokens).read(row, token, 0)


def test_a_control_token_is_spelled_by_its_name_and_adds_no_bytes() -> None:
    entry = entry_of(FakeVocabulary.END)
    assert (entry.text, entry.bytes) == ("<end>", b"")


def test_a_part_of_a_character_is_u_fffd_with_its_byte() -> None:
    for byte in range(256):
        entry = entry_of(byte)
        assert entry.bytes == bytes([byte])
        assert entry.text == (chr(byte) if byte < 128 else "\ufffd")


def test_the_bytes_of_a_text_join_to_its_characters() -> None:
    text = "é 你好 🙂"
    assert b"".join(entry_of(byte).bytes for byte in text.encode()).decode() == text


def test_whole_characters_beside_a_part_of_one_stay() -> None:
    class Pieces:
        def piece(self, token: int) -> bytes:
            return "ab€".encode()[:-1] if token else "你".encode()

        spelling = piece

    reader, row = LogprobReader(Pieces(), 2), np.zeros(2, np.float32)
    assert [reader.read(row, token, 0).text for token in (0, 1)] == ["你", "ab\ufffd"]
    assert reader.read(row, 1, 2).top[1].bytes == b"ab\xe2\x82"
