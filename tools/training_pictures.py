"""Training pictures of the embedded model: drawn shapes and digits, and questions about them.

A picture has one or two things, each a shape or a digit of one colour.  The answers name shape, digit, colour
and place.  Pictures whose hash falls into one bucket of twenty are never trained on.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tools.tiny_vocabulary import ANSWER, END, START
from tools.training_dialogues import begin, explicit, question_turn, random_tool, written
from tools.training_tasks import HELD_OUT_BUCKETS, Example, make_note, random_text

SIDE = 64  # of a picture as the encoder sees it, in pixels
PAD = (
    122,
    116,
    104,
)  # what libmtmd puts around a picture that is not square, with this kind of projector
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")
Colour = tuple[int, int, int]
# The first is the pure colour.  Between two of one name any mixture has the name.
COLOURS: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (200, 20, 20), (230, 40, 50), (170, 0, 0)),
    "orange": ((255, 140, 0), (255, 165, 0), (240, 120, 20)),
    "yellow": ((255, 255, 0), (240, 230, 40), (255, 220, 0)),
    "green": ((0, 128, 0), (0, 255, 0), (30, 180, 60), (60, 200, 40), (0, 90, 20)),
    "blue": ((0, 0, 255), (30, 60, 220), (40, 100, 250), (0, 0, 150)),
    "purple": ((128, 0, 128), (150, 40, 200), (110, 20, 160)),
    "black": ((0, 0, 0), (25, 25, 25)),
    "white": ((255, 255, 255), (238, 238, 238)),
    "gray": ((128, 128, 128), (105, 105, 105), (160, 160, 160)),
}
# Colours that are too near each other to be told apart on one another.
NEAR = {
    frozenset(pair)
    for pair in (
        ("red", "orange"), ("orange", "yellow"), ("yellow", "white"), ("blue", "purple"),
        ("gray", "white"), ("red", "purple"), ("black", "blue"), ("black", "purple"),
        ("gray", "green"), ("gray", "purple"), ("gray", "black"), ("black", "green"),
    )
}  # fmt: skip
# Characters of the fields of a caption, with a space behind them.
N_THINGS, N_COLOUR, N_NAME, N_PLACE, N_GROUND = 2, 7, 9, 13, 6
ROWS, COLUMNS = ("top", "", "bottom"), ("left", "", "right")
# Digits as strokes, for a hand without fonts: points between 0 and 1, y downwards.
STROKES: dict[str, tuple[tuple[tuple[float, float], ...], ...]] = {
    "0": (((0.5, 0), (0.85, 0.15), (1, 0.5), (0.85, 0.85), (0.5, 1), (0.15, 0.85), (0, 0.5), (0.15, 0.15), (0.5, 0)),),
    "1": (((0.15, 0.25), (0.55, 0), (0.55, 1)),),
    "2": (((0, 0.22), (0.2, 0.03), (0.6, 0), (0.95, 0.2), (0.85, 0.5), (0, 1), (1, 1)),),
    "3": (((0, 0.1), (0.5, 0), (0.9, 0.2), (0.7, 0.45), (0.35, 0.48), (0.75, 0.53), (1, 0.75), (0.6, 1), (0, 0.9)),),
    "4": (((0.75, 1), (0.75, 0), (0, 0.68), (1, 0.68)),),
    "5": (((0.95, 0), (0.1, 0), (0.05, 0.45), (0.5, 0.38), (0.95, 0.6), (0.8, 0.92), (0.4, 1), (0, 0.9)),),
    "6": (((0.85, 0.05), (0.4, 0.15), (0.05, 0.55), (0.1, 0.85), (0.5, 1), (0.95, 0.8), (0.8, 0.5), (0.4, 0.48), (0.06, 0.7)),),
    "7": (((0, 0), (1, 0), (0.35, 1)),),
    "8": (((0.5, 0.48), (0.1, 0.27), (0.3, 0.02), (0.7, 0.02), (0.9, 0.27), (0.5, 0.48), (0.02, 0.74), (0.25, 1), (0.75, 1), (0.98, 0.74), (0.5, 0.48)),),
    "9": (((0.92, 0.3), (0.6, 0.53), (0.15, 0.48), (0.05, 0.2), (0.5, 0), (0.9, 0.12), (0.94, 0.4), (0.6, 0.85), (0.2, 0.98)),),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Thing:
    """Shape or digit in a picture.

    Attributes
    ----------
    place : tuple of int
        Row and column of nine places: 0 to 2.
    """

    name: str
    colour: str
    place: tuple[int, int]

    @property
    def where(self) -> str:
        """Place of the thing in words: "top left"."""
        row, column = self.place
        return f"{ROWS[row]} {COLUMNS[column]}".strip() or "centre"

    @property
    def words(self) -> str:
        """The thing in words: "an orange star"."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.name}"


@dataclass(frozen=True, slots=True)
class Scene:
    """Things of a picture, in the order of their places, and the colour of its background."""

    things: tuple[Thing, ...]
    background: str

    @property
    def caption(self) -> str:
        """The scene in 64 characters, one for each row of the encoder: fields of fixed widths.

        The rows of a picture are the embeddings of these characters.  So the text model reads a picture as it
        reads a text, and learns its questions without an encoder.
        """
        fields = "".join(
            f"{thing.colour:<{N_COLOUR}}{thing.name:<{N_NAME}}{thing.where:<{N_PLACE}}"
            for thing in self.things
        )
        return f"{fields:<{N_THINGS * (N_COLOUR + N_NAME + N_PLACE)}}{self.background:<{N_GROUND}}"


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Drawn picture.

    Attributes
    ----------
    pixels : ndarray
        uint8, shape (height, width, 3).
    boxes : tuple of tuple of float
        Left, top, right and bottom of each thing, as parts of the width and the height.
    """

    scene: Scene
    pixels: NDArray[np.uint8]
    boxes: tuple[tuple[float, ...], ...] = ()

    @property
    def is_held_out(self) -> bool:
        """True if training must not see the picture."""
        return zlib.crc32(self.pixels.tobytes()) % HELD_OUT_BUCKETS == 0

    @property
    def frame(self) -> tuple[int, int, int, int]:
        """Left, top, width and height of the picture in the encoder's square, in pixels."""
        height, width = self.pixels.shape[:2]
        scale = min(SIDE / width, SIDE / height)
        w, h = min(math.ceil(width * scale), SIDE), min(math.ceil(height * scale), SIDE)
        return (SIDE - w) // 2, (SIDE - h) // 2, w, h

    def seen(self) -> NDArray[np.uint8]:
        """Return the pixels as libmtmd makes them for the encoder: uint8 (64, 64, 3)."""
        left, top, width, height = self.frame
        padded = Image.new("RGB", (SIDE, SIDE), PAD)
        image = Image.fromarray(self.pixels).resize((width, height), Image.Resampling.BICUBIC)
        padded.paste(image, (left, top))
        return np.asarray(padded)


def a_colour(rng: random.Random, name: str) -> Colour:
    """Return a colour that has this name; every second one is the pure colour."""
    tones = COLOURS[name]
    if rng.random() < 0.5:
        return tones[0]
    a, b, part = rng.choice(tones), rng.choice(tones), rng.random()
    red, green, blue = (round(x * part + y * (1 - part)) for x, y in zip(a, b, strict=True))
    return red, green, blue


def _outline(shape: str, r: float, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a shape around (0, 0)."""
    if shape == "square":
        angles, radii = [math.pi / 4 + i * math.pi / 2 for i in range(4)], [r * 1.25] * 4
    elif shape == "triangle":
        angles, radii = [-math.pi / 2 + i * 2 * math.pi / 3 for i in range(3)], [r * 1.2] * 3
    elif shape == "star":
        angles = [-math.pi / 2 + i * math.pi / 5 for i in range(10)]
        radii = [r * 1.15, r * 0.48] * 5
    else:  # a cross
        w = r * 0.33
        points = [(-w, -r), (w, -r), (w, -w), (r, -w), (r, w), (w, w), (w, r), (-w, r), (-w, w), (-r, w), (-r, -w), (-w, -w)]  # fmt: skip
        c, s = math.cos(turn), math.sin(turn)
        return [(x * c - y * s, x * s + y * c) for x, y in points]
    return [
        (radius * math.cos(angle + turn), radius * math.sin(angle + turn))
        for angle, radius in zip(angles, radii, strict=True)
    ]


def _draw_digit(
    draw: ImageDraw.ImageDraw, rng: random.Random, digit: str, at: tuple[float, float], r: float,
    colour: Colour, fonts: Sequence[str],
) -> None:  # fmt: skip
    x, y = at
    kind = rng.randrange(3)
    if kind == 0:
        width, lean = r * rng.uniform(1.0, 1.4), rng.uniform(-0.15, 0.15)
        line = max(2, round(r * rng.uniform(0.18, 0.42)))
        for stroke in STROKES[digit]:
            points = [
                (x + (px - 0.5 + lean * (0.5 - py)) * width, y + (py - 0.5) * 1.9 * r)
                for px, py in stroke
            ]
            draw.line(points, fill=colour, width=line, joint="curve")
        return
    size = r * 2.6
    name = rng.choice(fonts) if fonts and kind == 1 else None
    font = ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
    draw.text((x, y), digit, fill=colour, font=font, anchor="mm")


def make_scene(rng: random.Random, n_things: int | None = None) -> Scene:
    """Return a random scene of one or two things, which can be told from the background and from each other."""
    n_things = n_things or rng.choice((1, 1, 1, 2))
    backgrounds = ["white", "black", "gray"] if rng.random() < 0.5 else [*COLOURS]
    background = "white" if rng.random() < 0.3 else rng.choice(backgrounds)
    names = [n for n in COLOURS if n != background and frozenset((n, background)) not in NEAR]
    colours = rng.sample(names, n_things)
    while n_things == 2 and frozenset(colours) in NEAR:
        colours = rng.sample(names, n_things)
    kinds = rng.sample([rng.choice(SHAPES), rng.choice(DIGITS)], 2)
    if n_things == 2 and rng.random() < 0.5:
        kinds = rng.sample(SHAPES if rng.random() < 0.6 else DIGITS, 2)
    if n_things == 1:
        places = [(rng.randrange(3), rng.randrange(3))]
        if rng.random() < 0.3:
            places = [(1, 1)]
    else:
        places = rng.choice((
            [(1, 0), (1, 2)], [(0, 1), (2, 1)], [(0, 0), (2, 2)], [(0, 2), (2, 0)],
            [(0, 0), (0, 2)], [(2, 0), (2, 2)], [(0, 0), (2, 0)], [(0, 2), (2, 2)],
        ))  # fmt: skip
    things = [Thing(*parts) for parts in zip(kinds, colours, places, strict=False)]
    return Scene(tuple(sorted(things, key=lambda thing: thing.place)), background)


def draw(rng: random.Random, scene: Scene, fonts: Sequence[str] = ()) -> Picture:
    """Return a picture of a scene, of 64 to 410 pixels a side.

    Parameters
    ----------
    fonts : sequence of str
        Paths of fonts for its digits, besides Pillow's own font and strokes.
    """
    width = height = rng.choice((64, 96, 128, 128, 192, 224, 256))
    if rng.random() < 0.3:
        width = round(width * rng.uniform(1, 1.6))
        if rng.random() < 0.5:
            width, height = height, width
    short = min(width, height)
    smooth = 2 if rng.random() < 0.6 else 1  # drawn larger and made smaller: edges without steps
    image = Image.new("RGB", (width * smooth, height * smooth), a_colour(rng, scene.background))
    canvas, boxes = ImageDraw.Draw(image), list[tuple[float, ...]]()
    for thing in scene.things:
        is_alone = len(scene.things) == 1 and thing.place == (1, 1)
        r = rng.uniform(0.15, 0.4 if is_alone else 0.2) * short
        middle = []
        for index, side in zip(thing.place, (height, width), strict=True):
            edge = 1.25 * r
            low, high = (
                (edge, max(edge, 0.34 * side)),
                (0.45 * side, 0.55 * side),
                (min(side - edge, 0.66 * side), side - edge),
            )[index]
            middle.append(rng.uniform(low, high) * smooth)
        y, x = middle
        r *= smooth
        box = (x - r, y - r, x + r, y + r)
        boxes.append(tuple(v / side for v, side in zip(box, image.size * 2, strict=True)))
        colour = a_colour(rng, thing.colour)
        if thing.name in DIGITS:
            _draw_digit(canvas, rng, thing.name, (x, y), r, colour, fonts)
        elif thing.name == "circle":
            canvas.ellipse(box, fill=colour)
        else:
            turn = rng.choice((0.0, rng.uniform(-0.2, 0.2)))
            corners = [(x + dx, y + dy) for dx, dy in _outline(thing.name, r, turn)]
            canvas.polygon(corners, fill=colour)
    if smooth > 1:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image)
    if rng.random() < 0.2:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 6, pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return Picture(scene, pixels, tuple(boxes))


def make_picture(
    rng: random.Random, *, n_things: int | None = None, fonts: Sequence[str] = ()
) -> Picture:
    """Return a random picture; see `draw`."""
    return draw(rng, make_scene(rng, n_things), fonts)


# --- Questions -------------------------------------------------------------------------------
WHOLE = (
    "What is this?", "What do you see?", "What is in the picture?", "What is in this image?",
    "Describe the picture.", "Describe this image.", "What does the picture show?", "What's this?",
    "What is it?", "describe it", "Describe what you see.", "What's in this image?",
)  # fmt: skip
COLOUR = ("What colour is {}?", "Which colour is {}?", "What color is {}?", "What is the colour of {}?",
          "Which color does {} have?", "Name the colour of {}.")  # fmt: skip
SHAPE = ("What shape is it?", "Which shape is this?", "What shape do you see?", "What is the shape?",
         "Name the shape.", "Which shape is in the picture?")  # fmt: skip
DIGIT = ("Which digit is it?", "What digit is this?", "What number is it?", "Which number do you see?",
         "Name the digit.", "Which digit is in the picture?", "Read the digit.")  # fmt: skip
WHERE = ("Where is {}?", "Where do you see {}?", "What is the position of {}?")
BACKGROUND = ("What colour is the background?", "What color is the background?",
              "Which colour does the background have?")  # fmt: skip
COUNT = (
    "How many things are there?",
    "How many things do you see?",
    "How many objects are in the picture?",
)
UNSEEN, LOOK = "I see no picture.", "I look at the picture."


def in_words(scene: Scene) -> str:
    """Return what a picture shows: "a red circle and a blue 7"."""
    return " and ".join(thing.words for thing in scene.things)


def questions_about(scene: Scene) -> list[tuple[str, str]]:
    """Return every kind of question about a picture that has one answer, as it is first asked, and the answer."""
    found = [(WHOLE[0], in_words(scene)), (BACKGROUND[0], scene.background),
             (COUNT[0], str(len(scene.things)))]  # fmt: skip
    for thing in scene.things:
        is_digit = thing.name in DIGITS
        alike = [other for other in scene.things if (other.name in DIGITS) == is_digit]
        if len(alike) == 1:
            found.append((DIGIT[0] if is_digit else SHAPE[0], thing.name))
        # Of two things the model does not learn to find one by its name.
        calls = ("it", f"the {thing.name}", "the digit" if is_digit else "the shape")
        for call in calls if len(scene.things) == 1 else ():
            found += [
                (COLOUR[0].format(call), thing.colour),
                (WHERE[0].format(call), thing.where),
            ]
    return found


FORMS = {forms[0]: forms for forms in (WHOLE, SHAPE, DIGIT, BACKGROUND, COUNT)}


def reworded(rng: random.Random, question: str) -> str:
    """Return a question in other words, with another beginning or end."""
    if question in FORMS:
        text = rng.choice(FORMS[question])
    else:
        forms = COLOUR if question.startswith("What colour") else WHERE
        head, tail = forms[0].split("{}")
        text = rng.choice(forms).format(question.removeprefix(head).removesuffix(tail))
    if rng.random() < 0.3:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.25:
        text = text.rstrip("?.")
    return text


def question_about(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Return a random question about a picture, and the answer."""
    question, answer = rng.choice(questions_about(scene))
    return reworded(rng, question), answer


# --- Examples --------------------------------------------------------------------------------
def picture_example(rng: random.Random) -> Example:
    """Return a random example with pictures: a question about one, or a chat about several."""
    example = Example()
    if rng.random() < 0.3:
        shown = make_scene(rng)
        question, answer = question_about(rng, shown)
        parts = [rng.choice(("", "", "Look: ", "\n", "image: ")), shown.caption]
        parts += [rng.choice(("", "", " ", "\n")), question]
        if rng.random() < 0.2:
            parts = [question, rng.choice(("", " ", "\n")), shown.caption]
        if rng.random() < 0.2:
            parts = [make_note(rng, 120), *parts]
        example.say(*parts)
        example.say(ANSWER, answer, END, asked=True)
        return example
    thinks = rng.random() < 0.15
    tools = [random_tool(rng) for _ in range(rng.randint(1, 3))] if rng.random() < 0.25 else []
    begin(example, tools, random_text(rng, 60) if rng.random() < 0.2 else None)
    seen: Scene | None = None
    for _ in range(rng.choice((1, 1, 2, 3))):
        style = rng.random()
        if style < 0.12:
            turn = question_turn(rng)
            example.turn(turn.asked, answer=turn.answer, thought=turn.thought if thinks else None)
        elif style < 0.2 and tools:
            text, calls = explicit(rng, tools)
            thought = f"I use {calls[0][0]}." if thinks else None
            example.turn(text, answer=written(calls[0]), thought=thought)
            seen = make_scene(rng)
            example.say(START, "tool\n", seen.caption, END, "\n")
            example.answer(in_words(seen), "I have the result." if thinks else None)
        elif seen is not None and style < 0.4:
            question, answer = question_about(rng, seen)
            example.turn(question, answer=answer, thought=LOOK if thinks else None)
        else:
            seen = make_scene(rng)
            question, answer = question_about(rng, seen)
            gap = rng.choice(("", "", "\n", " "))
            before = rng.random() < 0.4
            asked = (question, gap, seen.caption) if before else (seen.caption, gap, question)
            example.turn(*asked, answer=answer, thought=LOOK if thinks else None)
    return example


def unseen_example(rng: random.Random) -> Example:
    """Return a question about a picture that is not there.  No picture may stand before it in a row."""
    example = Example()
    question, _ = question_about(rng, make_scene(rng))
    example.turn(question, answer=UNSEEN, thought=LOOK if rng.random() < 0.15 else None)
    return example
