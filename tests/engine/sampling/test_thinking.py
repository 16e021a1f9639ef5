"""What an output is constrained to begins when it has thought, and it thinks no longer than it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cllm.engine.constraint import Mask
from cllm.engine.request import Thinking
from cllm.engine.sampling.thinking import ThinkingConstraint, ThinkingFamily
from cllm.testing.fake_vocabulary import FakeVocabulary

VOCABULARY = FakeVocabulary()
END = FakeVocabulary.END
ENDING = tuple(b"\n</think>\n\n")


class Digits:
    """A constraint: digits, and then the end."""

    def __init__(self) -> None:
        self.said = b""
        self.is_closed = False

    @property
    def family(self) -> Digits:
        return self

    def masks(self, constraints: Sequence[Any]) -> list[Mask | Exception]:
        mask: Mask = np.zeros(VOCABULARY.n_tokens, np.bool_)
        mask[list(b"0123456789")] = True
        return [mask for _ in constraints]

    def allows(self, token: int) -> bool:
        return token in b"0123456789" or (token == END and bool(self.said))

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self.said += VOCABULARY.piece(token)

    def forced(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.is_closed = True


def constraint(
    inner: Digits | None,
    *,
    start: bytes = b"<think>",
    is_open: bool = True,
    budget: int | None = None,
) -> ThinkingConstraint:
    family = ThinkingFamily(VOCABULARY.n_tokens, VOCABULARY.is_eog)
    rules = Thinking(start, (b"</think>",), is_open, budget, ENDING)
    return ThinkingConstraint(family, rules, inner, VOCABULARY.spelling)


def follow(limited: ThinkingConstraint, wanted: bytes) -> bytes:
    """What an output becomes that wants to say this: refused tokens give way to the first allowed."""
    said = b""
    for token in wanted:
        if not limited.allows(token):
            (mask,) = limited.family.masks([limited])
            assert not isinstance(mask, Exception)
            token = int(np.flatnonzero(mask)[0])
        limited.accept(token)
        said += VOCABULARY.piece(token)
    return said


def test_a_marker_that_is_one_token_begins_a_thought_though_the_answer_might_have_it() -> None:
    inner = Digits()
    limited = constraint(inner, start=b"5", is_open=False)
    assert follow(limited, b"5x</think>7") == b"5x</think>7"
    assert inner.said == b"7"


def test_a_thought_is_free_and_what_follows_is_not() -> None:
    inner = Digits()
    assert follow(constraint(inner), b"a 7?</think>\n\n4x2") == b"a 7?</think>\n\n402"
    assert inner.said == b"402"


def test_an_output_that_does_not_think_is_constrained_from_its_first_token() -> None:
    inner = Digits()
    limited = constraint(inner, is_open=False)
    assert not limited.allows(ord("a"))
    assert limited.allows(ord("<"))
    assert follow(limited, b"12") == b"12"
    assert not limited.allows(ord("<"))


@pytest.mark.parametrize("space", [b"\n", b" ", b"\n\n", b" \t\r\n"])
def test_white_space_before_a_thought_is_no_answer(space: bytes) -> None:
    limited = constraint(None, is_open=False, budget=2)
    assert follow(limited, space + b"<think>ab" + b"c" * 9) == space + b"<think>ab\n</think>"
    limited = constraint(None, is_open=False, budget=2)
    assert follow(limited, space + b"1<think>abc") == space + b"1<think>abc"


def test_more_white_space_than_a_template_has_is_the_answer() -> None:
    limited = constraint(None, is_open=False, budget=2)
    assert follow(limited, b"     <think>abcdef") == b"     <think>abcdef"


def test_an_output_may_begin_to_think_by_itself() -> None:
    inner = Digits()
    assert follow(constraint(inner, is_open=False), b"<think>ab</think>5") == b"<think>ab</think>5"
    assert inner.said == b"5"


@pytest.mark.parametrize("wanted", [b"<thno", b"<b7", b"<7", b"   7", b"7<think>"])
def test_what_only_looks_like_a_thought_breaks_no_constraint(wanted: bytes) -> None:
    inner = Digits()
    said = follow(constraint(inner, is_open=False), wanted)
    if said.startswith(b"<"):
        assert b"<think>".startswith(said[:7])  # the marker is written whole
    else:
        assert said == inner.said
        assert said.isdigit()


@pytest.mark.parametrize("begun", [b"<", b"<thi"])
def test_an_output_does_not_end_inside_of_a_marker_that_it_has_begun(begun: bytes) -> None:
    limited = constraint(Digits(), is_open=False)
    assert follow(limited, begun) == begun
    assert not limited.allows(END)
    (mask,) = limited.family.masks([limited])
    assert not isinstance(mask, Exception)
    assert not mask[END]


class Tags(Digits):
    """A constraint: `<b>`, and nothing else."""

    def allows(self, token: int) -> bool:
        return token == b"<b>"[len(self.said)] if len(self.said) < 3 else token == END


def test_an_answer_that_begins_like_a_thought_is_an_answer() -> None:
    inner = Tags()
    assert follow(constraint(inner, is_open=False), b"<b>") == b"<b>" == inner.said


def test_without_a_constraint_anything_may_come_instead_of_a_thought() -> None:
    assert follow(constraint(None, is_open=False, budget=3), b"<thno> yes") == b"<thno> yes"


def test_a_thought_without_a_beginning_is_open_at_once() -> None:
    limited = constraint(Digits(), start=b"", is_open=False)
    assert limited.allows(ord("a"))


def test_an_output_that_wants_to_end_in_its_thought_answers_first() -> None:
    inner = Digits()
    limited = constraint(inner)
    follow(limited, b"hm")
    assert not limited.allows(END)
    said = b""
    for _ in ENDING:
        (mask,) = limited.family.masks([limited])
        assert not isinstance(mask, Exception)
        (token,) = np.flatnonzero(mask)
        assert limited.allows(int(token))
        limited.accept(int(token))
        said += VOCABULARY.piece(int(token))
    assert said == bytes(ENDING)
    assert limited.allows(ord("3"))
    assert not limited.allows(ord("a"))


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_ends_when_its_budget_is_used_up(budget: int) -> None:
    wanted = b"x" * 30
    said = follow(constraint(None, budget=budget), wanted)
    assert said == (b"x" * budget + bytes(ENDING) + b"x" * 30)[:30]


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    wanted = b"short</think>\n\nand then as long as it wants"
    assert follow(constraint(None, budget=20), wanted) == wanted


def test_a_budget_does_not_cut_a_character_in_two() -> None:
    wanted = "aé".encode() * 20
    said = follow(constraint(None, budget=2), wanted)
    assert said.startswith("aé".encode() + bytes(ENDING))


@pytest.mark.parametrize("budget", range(3, 12))
def test_a_budget_does_not_cut_the_end_marker_in_two(budget: int) -> None:
    """Half of the marker would be text of the thought, before the whole marker."""
    wanted = b"abc</think>\n\nanswer" + b"x" * 20
    said = follow(constraint(None, budget=budget), wanted)
    if budget == 3:  # the marker has not begun
        assert said.startswith(b"abc" + bytes(ENDING))
    else:
        assert said == wanted


def test_text_that_only_begins_like_the_end_marker_is_cut_a_little_later() -> None:
    said = follow(constraint(None, budget=5), b"abc</thank you" + b"x" * 20)
    assert said.startswith(b"abc</tha" + bytes(ENDING))


@pytest.mark.parametrize("n", range(1, 8))
def test_an_output_that_would_end_inside_the_end_marker_completes_it(n: int) -> None:
    begun, rest = b"abc" + b"</think>"[:n], b"</think>"[n:]
    limited = constraint(Digits())
    assert follow(limited, begun) == begun
    for byte in rest:
        (mask,) = limited.family.masks([limited])
        assert not isinstance(mask, Exception)
        assert np.flatnonzero(mask).tolist() == [byte]
        limited.accept(byte)
    assert limited.allows(ord("5"))


def test_closing_closes_what_comes_after_the_thought() -> None:
    inner = Digits()
    constraint(inner).close()
    assert inner.is_closed
    constraint(None).close()
