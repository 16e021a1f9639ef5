"""Text does not depend on how bytes were cut into pieces, with and without stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core.detokenizer import Detokenizer
from tests.conftest import examples

DETERMINISTIC = examples(300)

# Whole characters, their parts, and bytes that are never valid.
FRAGMENTS = st.sampled_from(
    (
        *(b"a", b"b", b"ab", b"\n", b"", "é".encode(), "€".encode(), "🙂".encode()),
        *(b"\xc3", b"\xa9", b"\xe2\x82", b"\xf0\x9f\x99"),
        *(b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90"),
    )
)
BYTES = st.one_of(st.binary(max_size=40), st.lists(FRAGMENTS, max_size=16).map(b"".join))
STOPS = st.lists(st.text("abé€", min_size=1, max_size=4), max_size=4)
TEXTS = st.text("abé€", max_size=24)


def cut(data: bytes, ends: Sequence[int]) -> list[bytes]:
    """`data` in pieces that end at these places; some may be empty."""
    places = [0, *sorted(min(end, len(data)) for end in ends), len(data)]
    return [data[i:j] for i, j in pairwise(places)]


def run(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[str, str | None]:
    """The text of pieces pushed one by one, and the stop string that ended it."""
    detokenizer = Detokenizer(stop)
    texts = []
    for piece in pieces:
        texts.append(detokenizer.push(piece))
        if detokenizer.stop_match is not None:
            break
    texts.append(detokenizer.flush())
    return "".join(texts), detokenizer.stop_match


def expected(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the first stop string to be complete; of two at once, the longer."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            match = max(complete, key=len)
            return text[: end - len(match)], match
    return text, None


CUTS = st.lists(st.integers(0, 60), max_size=12)


@given(BYTES, CUTS)
@DETERMINISTIC
def test_any_cuts_of_any_bytes_give_the_text_of_one_decode(data: bytes, ends: list[int]) -> None:
    assert run(cut(data, ends)) == (data.decode(errors="replace"), None)


@given(BYTES)
@DETERMINISTIC
def test_bytes_one_by_one_give_the_text_of_one_decode(data: bytes) -> None:
    assert run([data[i : i + 1] for i in range(len(data))])[0] == data.decode(errors="replace")


@given(st.one_of(BYTES, TEXTS.map(str.encode)), CUTS, STOPS)
@DETERMINISTIC
def test_the_first_stop_string_to_be_complete_wins_for_any_cuts(
    data: bytes, ends: list[int], stop: list[str]
) -> None:
    assert run(cut(data, ends), stop) == expected(data.decode(errors="replace"), stop)


@given(TEXTS, CUTS, STOPS)
@DETERMINISTIC
def test_what_was_streamed_is_never_taken_back(text: str, ends: list[int], stop: list[str]) -> None:
    whole, _ = expected(text, stop)
    detokenizer, streamed = Detokenizer(stop), ""
    for piece in cut(text.encode(), ends):
        streamed += detokenizer.push(piece)
        assert whole.startswith(streamed)
        if detokenizer.stop_match is not None:
            break
    assert streamed + detokenizer.flush() == whole


@given(TEXTS, STOPS)
@DETERMINISTIC
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stop: list[str]) -> None:
    detokenizer, streamed, seen = Detokenizer(stop), "", ""
    for character in text:
        seen += character
        streamed += detokenizer.push(character.encode())
        if detokenizer.stop_match is not None:
            return
        held = seen[len(streamed) :]
        assert not held or any(s.startswith(held) and s != held for s in stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "match"),
    [
        (["on", "e STO", "P two"], ["STOP"], "one ", "STOP"),
        (["one STOP two"], ["STOP"], "one ", "STOP"),
        (["a STO", "NE b"], ["STOP"], "a STONE b", None),
        (["a STO"], ["STOP"], "a STO", None),
        (["abcd"], ["bcd", "c"], "ab", "c"),
        (["ab", "cd"], ["cd", "bc"], "a", "bc"),
        (["abc"], ["c", "abc"], "", "abc"),
        (["aab"], ["aab", "ab"], "", "aab"),
        (["x", "x", "y"], ["y"], "xx", "y"),
        (["aaab"], ["aab"], "a", "aab"),
        (["STOP"], ["STOP", "STOP"], "", "STOP"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    pieces: list[str], stop: list[str], text: str, match: str | None
) -> None:
    assert run([piece.encode() for piece in pieces], stop) == (text, match)


def test_text_that_cannot_begin_a_stop_string_is_released_at_once() -> None:
    detokenizer = Detokenizer(["\n\n"])
    assert detokenizer.push(b"a\n") == "a"
    assert detokenizer.push(b"b") == "\nb"
    assert detokenizer.push(b"\n\nc") == ""
    assert detokenizer.stop_match == "\n\n"
    assert detokenizer.push(b"more") == ""
    assert detokenizer.flush() == ""


def test_without_stop_strings_only_half_characters_are_held_back() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push("aé".encode()[:2]) == "a"
    assert detokenizer.push("aé".encode()[2:]) == "é"
    assert detokenizer.push("€".encode()[:2]) == ""
    assert detokenizer.flush() == "\ufffd"
