"""Images of schedules: each capital letter of a prompt is an image of few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cllm.engine.media import MIN_ROWS, MediaInput
from cllm.engine.media_rows import row_ids


class Kind(NamedTuple):
    """Chunks of an image: the rows and positions of each; with one time, as with M-RoPE."""

    chunks: tuple[tuple[int, int], ...]
    is_causal: bool = True
    has_one_time: bool = False


IMAGES: Mapping[str, Kind] = {
    "A": Kind(((MIN_ROWS, MIN_ROWS),)),
    "B": Kind(((6, 6),), is_causal=False),
    "C": Kind(((7, 3),), has_one_time=True),
    "D": Kind(((5, 5), (5, 5))),  # tiles
    "E": Kind(((6, 6),), has_one_time=True),  # one row of patches
}


def media_of(letter: str) -> tuple[tuple[int, ...], MediaInput]:
    """Return the rows of an image, and what a request carries of it."""
    kind = IMAGES[letter]
    rows: list[int] = []
    for ordinal, (n_rows, n_positions) in enumerate(kind.chunks):
        rows += row_ids(
            f"{letter} {ordinal}".encode(), n_rows, n_positions, has_one_time=kind.has_one_time
        )
    pixels = np.asarray(rows, np.int32).tobytes()
    return tuple(rows), MediaInput(
        letter.encode(), pixels, (1, len(rows)), len(kind.chunks), kind.is_causal
    )


def tokens_of(prompt: str, n_most: int) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
    """Return the tokens of a prompt with at most so many rows, and its images."""
    tokens: list[int] = []
    media: list[MediaInput] = []
    for letter in prompt:
        rows, image = media_of(letter) if letter in IMAGES else (tuple(letter.encode()), None)
        if len(tokens) + len(rows) > n_most:
            break
        tokens += rows
        media += [] if image is None else [image]
    return tuple(tokens) or (ord("?"),), tuple(media)
