"""The pictures and greetings that the embedded model learns: questions have one answer, and some are kept back."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tools.tiny_vocabulary import END
from tools.training_greetings import GREETINGS, UNKNOWN, greeting_example, make_greeting
from tools.training_pictures import (
    COLOURS,
    DIGITS,
    SHAPES,
    SIDE,
    Scene,
    Thing,
    in_words,
    make_picture,
    make_scene,
    picture_example,
    question_about,
    questions_about,
    unseen_example,
)

N_ROWS = 64  # of the encoder


@pytest.mark.parametrize("seed", range(50))
def test_things_are_in_the_picture_and_where_they_are_said_to_be(seed: int) -> None:
    picture = make_picture(random.Random(seed))
    assert picture.seen().shape == (SIDE, SIDE, 3)
    for thing, (left, top, right, bottom) in zip(picture.scene.things, picture.boxes, strict=True):
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        middles = (top + bottom) / 2, (left + right) / 2
        for place, middle in zip(thing.place, middles, strict=True):
            assert (middle < 0.42, 0.42 <= middle <= 0.58, middle > 0.58)[place]


def test_a_caption_has_a_character_for_each_row_and_says_the_whole_scene() -> None:
    places = [*product(range(3), range(3))]
    for name, colour, place in product((*SHAPES, *DIGITS), COLOURS, places):
        thing = Thing(name, colour, place)
        for background in COLOURS:
            caption = Scene((thing, thing), background).caption
            assert len(caption) == N_ROWS
            told = f"{colour} {name} {thing.where}"
            assert caption.split() == [*told.split(), *told.split(), background]


@pytest.mark.parametrize("seed", range(50))
def test_each_question_about_a_picture_has_one_answer(seed: int) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng)
    questions = [question for question, _ in questions_about(scene)]
    assert len(set(questions)) == len(questions)
    assert all(thing.name in in_words(scene) for thing in scene.things)
    assert all(question_about(rng, scene)[1] for _ in range(20))


@pytest.mark.parametrize("make", [picture_example, unseen_example, greeting_example])
def test_what_is_learned_of_pictures_and_greetings_are_answers(make: object) -> None:
    assert callable(make)
    rng = random.Random(1)
    for _ in range(60):
        example = make(rng)
        assert len(example.tokens) == len(example.asked)
        learned = [example.tokens[i + 1] for i, asked in enumerate(example.asked[:-1]) if asked]
        assert END in learned


def test_one_picture_in_twenty_is_kept_back() -> None:
    rng = random.Random(1)
    n_kept_back = sum(make_picture(rng).is_held_out for _ in range(400))
    assert 8 <= n_kept_back <= 40


def test_greetings_have_answers() -> None:
    rng = random.Random(1)
    assert {make_greeting(rng)[1] for _ in range(500)} == {*GREETINGS, UNKNOWN}
