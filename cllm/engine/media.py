"""Images and audio in prompts: what a request carries of them."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

# Rows of one chunk.  With fewer than 5 their hash would have less than 128 bits: see `media_rows`.
MIN_ROWS, MAX_ROWS = 5, 1 << 16


# (height, width) of an image, or (n_samples,) of audio.
Shape = tuple[int, ...]
PIXEL_BYTES, SAMPLE_BYTES = 3, 4
PLURALS = {"image": "images", "audio": "audio"}


def kind_of(shape: Shape) -> str:
    """Return "image" or "audio"."""
    return "image" if len(shape) == 2 else "audio"


def n_bytes_of(shape: Shape) -> int:
    """Return the number of bytes of the pixels or samples."""
    return math.prod(shape) * (PIXEL_BYTES if kind_of(shape) == "image" else SAMPLE_BYTES)


def size_of(shape: Shape) -> str:
    """Return the size of an image or of audio in words."""
    if kind_of(shape) == "audio":
        return f"{shape[0]} samples"
    return f"{shape[1]}×{shape[0]} pixels"


def left_out(kind: str, modalities: Container[str]) -> str:
    """Return the limit of a prompt with an image or audio that the model does not take."""
    if "image" in modalities or "audio" in modalities:
        return f"left out: the projector takes no {PLURALS[kind]}"
    return "left out: the engine has no projector (mmproj)"


class MediaPiece(NamedTuple):
    """One chunk of an image or of audio, or the tokens between two, as the projector cuts them.

    Attributes
    ----------
    tokens : tuple of int
        Tokens around the chunks; empty for a chunk.
    n_rows, n_positions : int
        Rows and positions of a chunk; 0 for tokens.
    is_causal : bool
        False if each row of the chunk attends to all its rows.
    has_one_time : bool
        True if all rows of the chunk have the same position in the sequence, as with M-RoPE.
    """

    tokens: tuple[int, ...] = ()
    n_rows: int = 0
    n_positions: int = 0
    is_causal: bool = True
    has_one_time: bool = False


@dataclass(frozen=True, slots=True)
class MediaInput:
    """One image or recording of a request.

    Attributes
    ----------
    digest : bytes
        Hash of everything that its embeddings depend on, besides the projector.
    data : bytes
        Pixels: uint8, `height * width * 3`: red, green, blue.  Or samples: float32.
    shape : tuple of int
        `(height, width)` of an image, or `(n_samples,)` of audio.
    n_chunks : int
        Number of its media chunks.
    is_causal : bool
        False if each row of a chunk attends to all rows of the chunk: they are decoded at once.
    sample_rate : int
        Samples a second of audio; 0 for an image.
    """

    digest: bytes
    data: bytes
    shape: Shape
    n_chunks: int
    is_causal: bool = True
    sample_rate: int = 0

    @property
    def kind(self) -> str:
        """Modality: "image" or "audio"."""
        return kind_of(self.shape)
