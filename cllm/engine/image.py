"""Image: an image in a prompt."""

from __future__ import annotations

import binascii
import os
import struct
import zlib
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cllm.engine.media_limits import check_size
from cllm.engine.media_source import Base64Text, MediaSource
from cllm.errors import InvalidArgumentError, InvalidRequestError

# First bytes of a file of each media type.
HEADS = {"jpeg": b"\xff\xd8", "gif": b"GIF8", "webp": b"RIFF", "bmp": b"BM"}


class Image(MediaSource):
    """An image for a prompt: the path of a file, the bytes of one, or pixels.

    Parameters
    ----------
    source : str, Path, bytes or ndarray
        A path or the content of a PNG, JPEG, WebP, BMP or GIF file (first frame), of at most 64 MiB; or pixels:
        uint8, shape `(height, width, 3)`, red, green, blue.  At most 16,384 pixels on a side and 33,554,432
        in all; the images and audio of one prompt have at most 512 MiB together.  Pixels are copied.

    Raises
    ------
    InvalidArgumentError
        `source` has another type or shape, or is too large.  Files are read and decoded when a request with
        the image is submitted, in a process of their own: `InvalidRequestError` then names what is wrong.
        Decoding needs the extra `media`.
    """

    __slots__ = ()

    kind: ClassVar[str] = "image"

    def __init__(
        self, source: str | os.PathLike[str] | bytes | NDArray[np.uint8] | Base64Text
    ) -> None:
        super().__init__(source)

    @staticmethod
    def _checked(array: NDArray[Any]) -> NDArray[np.uint8]:
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            given = f"{array.dtype} {array.shape}"
            raise InvalidArgumentError("image", given, "uint8, shape (height, width, 3)")
        try:
            check_size(*array.shape[:2])
        except InvalidRequestError as error:
            raise InvalidArgumentError(error.field, error.value, error.limit) from None
        return array.copy()

    @property
    def _size(self) -> str:
        assert isinstance(self.source, np.ndarray)
        return f"{self.source.shape[1]}×{self.source.shape[0]} pixels"

    def data_url(self) -> str:
        """Return the file as a `data:` URL, pixels as a PNG file.  Any thread; reads a file.

        Raises
        ------
        InvalidRequestError
            As for `read`.
        """
        content = self.read()
        data = content if isinstance(content, bytes) else _png(content)
        kind = next((kind for kind, head in HEADS.items() if data.startswith(head)), "png")
        return f"data:image/{kind};base64,{binascii.b2a_base64(data, newline=False).decode()}"

    def part(self) -> dict[str, Any]:
        """Return the part of a message for OpenAI's API: `image_url`.  Any thread; reads a file."""
        return {"type": "image_url", "image_url": {"url": self.data_url()}}


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels as a PNG file, which a server decodes to the same pixels."""
    height, width = pixels.shape[:2]

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red, green, blue
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row after its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 1))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")
