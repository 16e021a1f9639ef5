"""Pictures of `cllm demo --image`, drawn by code so that the right answers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

SIDE = 128  # pixels
N_COLUMNS = 16  # width of a picture in terminal cells; its height is half of that
Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
    "white": (255, 255, 255), "black": (0, 0, 0), "orange": (255, 140, 0), "purple": (128, 0, 128),
}  # fmt: skip
Mask = NDArray[np.bool_]
# Corners of the digits' lines, from (0, 0) at the top left to (1, 1).
STROKES = {
    "4": ((0.75, 1), (0.75, 0), (0, 0.68), (1, 0.68)),
    "7": ((0, 0), (1, 0), (0.35, 1)),
}


@dataclass(frozen=True)
class Drawn:
    """One coloured thing on a plain background.

    Attributes
    ----------
    place : tuple of float
        Centre of the thing, `(x, y)`, as fractions of the side.
    radius : float
        Half the size of the thing, as a fraction of the side.
    """

    colour: str
    thing: str
    background: str
    place: tuple[float, float] = (0.5, 0.5)
    radius: float = 0.3

    def __str__(self) -> str:
        return f"{self.colour} {self.thing} on {self.background}"

    def pixels(self) -> NDArray[np.uint8]:
        """Return the picture: uint8, shape `(128, 128, 3)`."""
        y, x = np.mgrid[:SIDE, :SIDE] / SIDE
        across, down = (x - self.place[0]) / self.radius, (y - self.place[1]) / self.radius
        found = np.empty((SIDE, SIDE, 3), np.uint8)
        found[:] = COLOURS[self.background]
        found[SHAPES.get(self.thing, _digit(self.thing))(across, down)] = COLOURS[self.colour]
        return found

    def shown(self) -> Text:
        """Return the picture as lines of half blocks in colours."""
        step = SIDE // N_COLUMNS
        cells = self.pixels()[step // 2 :: step, step // 2 :: step]
        text = Text()
        for upper, lower in zip(cells[::2], cells[1::2], strict=True):
            for top, bottom in zip(upper.tolist(), lower.tolist(), strict=True):
                text.append(
                    "▀",
                    f"rgb({top[0]},{top[1]},{top[2]}) on rgb({bottom[0]},{bottom[1]},{bottom[2]})",
                )
            text.append("\n")
        text.rstrip()
        return text


def _circle(x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    return np.hypot(x, y) <= 1


def _square(x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    return np.maximum(np.abs(x), np.abs(y)) <= 0.9


def _triangle(x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    return (y <= 0.6) & (np.abs(x) * 3**0.5 <= y + 1.2)


def _cross(x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    a, b = np.abs(x), np.abs(y)
    return (np.minimum(a, b) <= 0.33) & (np.maximum(a, b) <= 1)


Shape = Callable[[NDArray[np.float64], NDArray[np.float64]], Mask]
SHAPES: dict[str, Shape] = {
    "circle": _circle, "square": _square, "triangle": _triangle, "cross": _cross,
}  # fmt: skip


def _digit(digit: str) -> Shape:
    """Return the function that draws a digit as thick lines."""

    def mask(x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
        points = [(1.2 * (px - 0.5), 1.9 * (py - 0.5)) for px, py in STROKES[digit]]
        found = np.zeros(x.shape, bool)
        for (ax, ay), (bx, by) in pairwise(points):
            dx, dy = bx - ax, by - ay
            along = np.clip(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy), 0, 1)
            found |= np.hypot(x - ax - along * dx, y - ay - along * dy) <= 0.16
        return found

    return mask


PICTURES = (
    Drawn("red", "circle", "white"),
    Drawn("yellow", "7", "black"),
    Drawn("blue", "square", "white", (0.25, 0.25), 0.18),
    Drawn("white", "4", "blue"),
    Drawn("green", "triangle", "white", (0.75, 0.75), 0.18),
    Drawn("orange", "cross", "black"),
)


def where(drawn: Drawn) -> str:
    """Return the place of a thing in words: "top left"."""
    row, column = (round(2 * part) for part in reversed(drawn.place))
    words = f"{('top', '', 'bottom')[row]} {('left', '', 'right')[column]}".strip()
    return words or "centre"


def questions_of(drawn: Drawn) -> list[tuple[str, str]]:
    """Return questions about a picture, and their answers."""
    is_digit = drawn.thing.isdigit()
    article = "an" if drawn.colour == "orange" else "a"
    return [
        ("What do you see?", f"{article} {drawn.colour} {drawn.thing}"),
        (
            "Which digit is it?" if is_digit else "Where is it?",
            drawn.thing if is_digit else where(drawn),
        ),
    ]
