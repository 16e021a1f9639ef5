"""Rows of images in a list of tokens: what they spell, and positions behind them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.media import MAX_ROWS, MIN_ROWS
from cllm.engine.media_rows import NO_SPANS, Span, Spans, row_ids


@dataclass(frozen=True)
class Part:
    """Some tokens, or a chunk of an image."""

    n_rows: int
    n_positions: int | None = None
    has_one_time: bool = False


tokens_of = st.integers(1, 6).map(Part)
chunks = st.integers(MIN_ROWS, 12).flatmap(
    lambda n: st.sampled_from([Part(n, n), *(Part(n, k, has_one_time=True) for k in (1, 2, n))])
)
prompts = st.lists(tokens_of | chunks, max_size=6)


def written(parts: list[Part]) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and the position of each row, counted one by one."""
    tokens: list[int] = []
    positions: list[int] = []
    p = 0
    for number, part in enumerate(parts):
        if part.n_positions is None:
            tokens += [7] * part.n_rows
            positions += range(p, p + part.n_rows)
            p += part.n_rows
            continue
        tokens += row_ids(
            b"%d" % number, part.n_rows, part.n_positions, has_one_time=part.has_one_time
        )
        positions += [p + i * (not part.has_one_time) for i in range(part.n_rows)]
        p += part.n_positions
    return tokens, positions


@given(prompts)
def test_a_list_of_tokens_says_where_its_chunks_are_and_which_positions_rows_have(
    parts: list[Part],
) -> None:
    tokens, positions = written(parts)
    spans = Spans.of(tokens)
    ends = [sum(p.n_rows for p in parts[: i + 1]) for i in range(len(parts))]
    expected = [
        Span(end - part.n_rows, end, part.n_positions, part.has_one_time)
        for end, part in zip(ends, parts, strict=True)
        if part.n_positions is not None
    ]
    assert list(spans) == expected
    assert [spans.position(n) for n in range(len(tokens))] == positions
    assert [spans.last_position(n) for n in range(1, len(tokens) + 1)] == positions
    assert spans.last_position(0) is None


@given(prompts, st.data())
def test_no_border_is_inside_a_chunk(parts: list[Part], data: st.DataObject) -> None:
    tokens, _ = written(parts)
    spans = Spans.of(tokens)
    n = data.draw(st.integers(0, len(tokens)))
    inside = [span for span in spans if span.start < n < span.end]
    assert spans.floor(n) == (inside[0].start if inside else n)
    assert spans.ceil(n) == (inside[0].end if inside else n)
    at = [i for i, span in enumerate(spans) if span.start <= n < span.end]
    assert spans.index_at(n) == (at[0] if at else None)
    following = [span.start for span in spans if span.start >= n]
    expected = 0 if at else following[0] - n if following else None
    assert spans.n_tokens_from(n) == expected


@given(prompts, st.data())
def test_rows_are_read_back_from_a_position_down_to_whole_chunks(
    parts: list[Part], data: st.DataObject
) -> None:
    tokens, _ = written(parts)
    spans = Spans.of(tokens)
    n_held = data.draw(st.integers(0, len(tokens)))
    n_before = data.draw(st.integers(0, n_held))
    n_read = spans.n_rows(spans.last_position(n_held), n_before)
    assert n_read == spans.floor(n_read)
    assert spans.floor(n_before) <= n_read <= n_held
    ends_in_image = any(span.start < n_held <= span.end for span in spans)
    assert ends_in_image or n_read == n_held


def test_rows_of_equal_images_are_equal_and_of_others_differ() -> None:
    assert row_ids(b"a", 16, 16) == row_ids(b"a", 16, 16)
    others = [row_ids(b"b", 16, 16), row_ids(b"a", 16, 4), row_ids(b"a", 17, 16)]
    for other in [*others, row_ids(b"a", 16, 16, has_one_time=True)]:
        assert not set(row_ids(b"a", 16, 16)[1:]) & set(other[1:])
    assert all(-(2**31) <= row < 0 for row in row_ids(b"a", 300, 300))


@pytest.mark.parametrize(("n_rows", "n_positions"), [(MIN_ROWS, 1), (MAX_ROWS, MAX_ROWS)])
def test_the_smallest_and_the_largest_chunk_are_read_back(n_rows: int, n_positions: int) -> None:
    for one_time in (False, True):
        rows = row_ids(b"", n_rows, n_positions, has_one_time=one_time)
        assert list(Spans.of(rows)) == [Span(0, n_rows, n_positions, one_time)]


def test_tokens_alone_have_no_spans() -> None:
    assert Spans.of([1, 2, 3]) is NO_SPANS
