"""Image: an image in a prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.engine.image_limits import check_n_bytes, check_size
from cllm.errors import InvalidArgumentError, InvalidRequestError


class Image:
    """An image for a prompt: the path of a file, the bytes of one, or pixels.

    Parameters
    ----------
    source : str, Path, bytes or ndarray
        A path or the content of a PNG, JPEG, WebP, BMP or GIF file (first frame), of at most 64 MiB; or pixels:
        uint8, shape `(height, width, 3)`, red, green, blue.  At most 16,384 pixels on a side and 33,554,432
        in all.  Pixels are copied.

    Raises
    ------
    InvalidArgumentError
        `source` has another type or shape, or is too large.  Files are read and decoded when a request with
        the image is submitted, in a process of their own: `InvalidRequestError` then names what is wrong.
        Decoding needs the extra `media`.
    """

    __slots__ = ("source",)

    def __init__(self, source: str | os.PathLike[str] | bytes | NDArray[np.uint8]) -> None:
        self.source: Path | bytes | NDArray[np.uint8]
        if isinstance(source, np.ndarray):
            _check_pixels(source)
            self.source = source.copy()
        elif isinstance(source, bytes | bytearray | memoryview):
            check_n_bytes(len(source), InvalidArgumentError)
            self.source = bytes(source)
        elif isinstance(source, str | os.PathLike) and str(source) and "\0" not in str(source):
            self.source = Path(source)
        else:
            raise InvalidArgumentError("image", source, "a path, the bytes of a file, or an array")

    def __repr__(self) -> str:
        source = self.source
        if isinstance(source, Path):
            return f"<Image {str(source)!r}>"
        if isinstance(source, bytes):
            return f"<Image {len(source)} bytes>"
        return f"<Image {source.shape[1]}×{source.shape[0]}>"


def _check_pixels(pixels: NDArray[Any]) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        kind = f"{pixels.dtype} {pixels.shape}"
        raise InvalidArgumentError("image", kind, "uint8, shape (height, width, 3)")
    try:
        check_size(*pixels.shape[:2])
    except InvalidRequestError as error:
        raise InvalidArgumentError(error.field, error.value, error.limit) from None
