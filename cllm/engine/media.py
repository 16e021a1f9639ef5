"""Images in prompts: what a request carries of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Rows of one chunk.  With fewer than 5 their hash would have less than 128 bits: see `media_rows`.
MIN_ROWS, MAX_ROWS = 5, 1 << 16


class MediaPiece(NamedTuple):
    """One chunk of an image, or the tokens between two: as the projector cuts an image of some size.

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
    """One image of a request.

    Attributes
    ----------
    digest : bytes
        Hash of everything that its embeddings depend on, besides the projector.
    pixels : bytes
        uint8, `height * width * 3`: red, green, blue.
    height, width : int
    n_chunks : int
        Number of its media chunks.
    is_causal : bool
        False if each row of a chunk attends to all rows of the chunk: they are decoded at once.
    """

    digest: bytes
    pixels: bytes
    height: int
    width: int
    n_chunks: int
    is_causal: bool = True
